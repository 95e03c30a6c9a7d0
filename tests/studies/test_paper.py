"""What a paper needs of a comparison: rows with settings, tests, a narrow table, figures, a search by Optuna."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from scipy import stats  # type: ignore[import-untyped]

from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments.building import build_experiment
from fedtailor.experiments.config import CompareConfig, parse, with_settings
from fedtailor.experiments.store import read_json
from fedtailor.report import paper
from fedtailor.report.paper import Paper
from fedtailor.studies import significance
from fedtailor.studies.compare import cells, rows, run_grid
from fedtailor.studies.search import FOUND, notes
from fedtailor.studies.significance import Blocks
from tests.small import DIGITS, config

pytestmark = pytest.mark.usefixtures("in_this_process")

GRID = DIGITS | {
    "rounds": 2,
    "data": {"source": "digits", "clients": 4, "max_samples": 60, "val": 0.3, "seed": 7},
    "compare": {"algorithms": ["local", "fedavg", "ditto"], "seeds": [0, 1], "workers": 1},
}


def grid_config(*settings: str) -> CompareConfig:
    made: CompareConfig = parse(with_settings(GRID, settings), CompareConfig)
    return made


def quiet(*step: Any) -> None:
    """Nobody is told."""


def blocks(*values: list[float], labels: str = "abcdefg") -> Blocks:
    return Blocks(tuple(labels[: len(values)]), np.array(values), (0,), False)


def by_all_signs(differences: list[float]) -> float:
    """Wilcoxon's exact p, by counting: how many of all signs give a sum of ranks as far from the middle, or further."""
    ranks = stats.rankdata(np.abs(differences))
    middle = ranks.sum() / 2
    seen = abs(sum(r for r, d in zip(ranks, differences, strict=True) if d > 0) - middle)
    sums = [
        sum(r for r, s in zip(ranks, signs, strict=True) if s) for signs in itertools.product([0, 1], repeat=len(ranks))
    ]
    return float(np.mean([abs(total - middle) >= seen - 1e-9 for total in sums]))


def test_signed_ranks_by_counting() -> None:
    differences = [0.31, -0.02, 0.11, 0.07, 0.23, 0.19, -0.05, 0.4]
    assert significance.signed_ranks(np.array(differences)) == pytest.approx(by_all_signs(differences))
    assert significance.signed_ranks(np.zeros(5)) == 1.0


def test_holm_by_hand() -> None:
    # sorted .01, .02, .03, .04 times 4, 3, 2, 1; the third would fall below the second
    assert significance.holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert significance.holm([0.9, 0.8]) == [1.0, 1.0]


def test_ranks_by_hand() -> None:
    found = significance.ranks(blocks([0.9, 0.8, 0.9, 0.7], [0.5, 0.8, 0.5, 0.6], [0.1, 0.2, 0.3, 0.4]))
    assert found is not None
    assert found.by_label == {"a": 1.125, "b": 1.875, "c": 3.0}
    assert found.critical == pytest.approx(2.343 * (3 * 4 / (6 * 4)) ** 0.5, abs=1e-3)  # q of Demsar's table 5a
    assert significance.groups(found) == [("a", "b"), ("b", "c")]
    assert significance.ranks(blocks([1.0, 2.0], [2.0, 1.0])) is None


def test_rows_are_paired_by_client(tmp_path: Path) -> None:
    made = grid_config()
    grid = run_grid(made, tmp_path, None, quiet)
    found = significance.blocks_of(grid)
    assert found is not None
    assert (found.labels, found.seeds, found.is_pooled) == (("Local", "FedAvg", "Ditto"), (0, 1), False)
    by_seed = [read_json(tmp_path / f"fedavg-seed{s}" / "results.json")["last"]["clients"]["accuracy"] for s in (0, 1)]
    assert found.values[1].tolist() == pytest.approx(np.mean(by_seed, axis=0).tolist())
    lines = significance.words(found, "FedAvg")
    assert lines[1].startswith(
        "FedAvg against each other row: Wilcoxon's signed ranks over 4 clients, each with its mean"
    )
    assert [line.split("|")[1].strip() for line in lines[6:8]] == ["Local", "Ditto"]

    wanted = Paper(tmp_path / "t.tex", ("test", "worst", "p"), tmp_path / "c.pdf", tmp_path / "r.png")
    wanted.check()
    wanted.write(grid, rows(grid), "")
    text = (tmp_path / "t.tex").read_text()
    table = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert table[0] == r"method & test accuracy \% & worst tenth & $p$ \\"
    means = {row.label: row.last[0] for row in rows(grid)}
    for line in table[1:]:
        label, test, *_, p = line.removesuffix(r" \\").split(" & ")
        assert test.startswith(r"\textbf{") == (means[label] == max(means.values()))
        assert (p == "--") == (label == "Local")
    widest = [
        max(
            len(re.sub(r"\\textbf|\\pm|[${}\\]", "", cell.replace("downarrow", ".").replace("uparrow", ".")))
            for cell in column
        )
        for column in zip(*(line.removesuffix(r" \\").split(" & ") for line in table), strict=True)
    ]
    assert sum(widest) + 2 * len(widest) <= 52  # characters of a column of 84 mm in small type
    assert (tmp_path / "c.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    first = (tmp_path / "c.pdf").read_bytes()
    paper.draw_curves(grid, tmp_path / "c.pdf")
    assert (tmp_path / "c.pdf").read_bytes() == first

    again: list[str] = []
    run_grid(made, tmp_path, None, lambda cell, round, of: again.append(cell) if round == 1 else None, ["FedAvg"])
    assert again == ["fedavg-seed0", "fedavg-seed1"]
    with pytest.raises(ConfigError, match=r'"Fedavg".*"FedAvg"'):
        run_grid(made, tmp_path, None, quiet, ["Fedavg"])


@pytest.mark.parametrize("count", [3, 11, 20])
def test_figures_of_few_and_many_rows(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(paper, "_save", lambda figure, path: drawn.append(figure))
    names = [f"Method{i}" for i in range(count)]
    ranks = significance.Ranks({name: 1 + i * 0.97 for i, name in enumerate(names)}, 0.01, 2.0)
    paper.draw_ranks(ranks, tmp_path / "r.png")
    (axes,) = drawn[0].axes
    renderer = FigureCanvasAgg(drawn[0]).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axes.texts if "(" in text.get_text()]
    assert len(boxes) == count
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= drawn[0].bbox.x1 for box in boxes)
    heights = [text.get_position()[1] for text in axes.texts if "(" in text.get_text()]
    assert len(set(heights)) == len(heights) if count % 2 == 0 else len(set(heights)) == (count + 1) // 2

    grid: list[Any] = [SimpleNamespace(label=name) for name in names]
    monkeypatch.setattr(paper, "_curves_of", lambda cells: ([{1: 0.5, 2: 0.6}, {1: 0.4, 2: 0.5}], "accuracy"))
    paper.draw_curves(grid, tmp_path / "c.png")
    (axes,) = drawn[1].axes
    assert len(axes.lines) == count
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == count
    assert len(axes.collections) == (count if count <= 8 else 0)


def test_what_cannot_be_written_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match='no column "wurst"'):
        Paper(columns=("wurst",)).check()
    with pytest.raises(ConfigError, match=r"curves\.jpg"):
        Paper(figure=Path("curves.jpg")).check()
    monkeypatch.setattr(paper, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"fedtailor\[figures\]"):
        Paper(ranks=Path("ranks.pdf")).check()


def test_a_row_may_set_any_key(tmp_path: Path) -> None:
    entries = '{name="fedavg", set={"local.lr"=0.3, "server.optimizer"="adam"}, label="Adam"}'
    entries += ', {name="fedavg", set={local={lr=0.2}}}'
    grid = cells(grid_config(f'compare.algorithms=["fedavg", {entries}]'), tmp_path)
    assert [(c.label, c.config.local.lr, c.config.server.optimizer) for c in grid[::2]] == [
        ("FedAvg", 0.1, "none"),
        ("Adam", 0.3, "adam"),
        ("FedAvg, local.lr 0.2", 0.2, "none"),
    ]
    for key in ("data.alpha", "seed", "algorithm.name"):
        with pytest.raises(ConfigError, match="data and seeds"):
            cells(grid_config(f'compare.algorithms=[{{name="fedavg", set={{"{key}"=1}}}}]'), tmp_path)
    run_grid(grid_config(f"compare.algorithms=[{entries}]", "compare.seeds=[0]"), tmp_path, None, quiet)
    other = entries.replace('"server.optimizer"="adam"', '"server.optimizer"="yogi"')
    with pytest.raises(RunError, match=r"other settings .*Adam"):
        run_grid(grid_config(f"compare.algorithms=[{other}]", "compare.seeds=[0]"), tmp_path, None, quiet)


def test_partition_and_training_have_seeds_of_their_own() -> None:
    apart = [build_experiment(config("data.seed=5", f"seed={seed}")) for seed in (0, 1)]
    assert apart[0].data.train.x.equal(apart[1].data.train.x)
    assert not next(iter(apart[0].model.params.values())).equal(next(iter(apart[1].model.params.values())))
    together = build_experiment(config("seed=5"))
    assert together.data.train.x.equal(apart[0].data.train.x)
    assert not together.data.train.x.equal(build_experiment(config("seed=0")).data.train.x)


RANGES = {
    "trials": 4,
    "sampler": "optuna",
    "seeds": [100, 101],
    "space": {"local.lr": {"low": 1e-4, "high": 0.5, "log": True}},
    "algorithms": {"ditto": {"lam": [0.1, 1.0], "personal_epochs": {"low": 1, "high": 3}}},
}


def test_ranges_are_searched_by_optuna_with_several_seeds(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    made: CompareConfig = parse(
        GRID | {"search": RANGES, "compare": {"algorithms": ["local", "ditto"], "workers": 1}}, CompareConfig
    )
    grid = run_grid(made, tmp_path, None, quiet)
    record = read_json(tmp_path / FOUND)["found"]
    for label, cell in (("Local", grid[0]), ("Ditto", grid[1])):
        tried = record[label]["tried"]
        assert len(tried) == 4
        assert all(
            1e-4 <= one["settings"]["local.lr"] <= 0.5 and one["by_seed"].keys() == {"100", "101"} for one in tried
        )
        assert all(one["val"] == pytest.approx(np.mean(list(one["by_seed"].values()))) for one in tried)
        best = max(tried, key=lambda one: one["val"])
        assert record[label]["settings"] == best["settings"]
        assert cell.config.local.lr == best["settings"]["local.lr"]
    assert {type(one["settings"]["algorithm.personal_epochs"]) for one in record["Ditto"]["tried"]} == {int}
    assert re.search(r"\b4\b.*TPE.*\b100\b.*\b101\b", notes(tmp_path)[1])
    ran: list[str] = []
    run_grid(made, tmp_path, None, lambda cell, round, of: ran.append(cell) if round == 1 else None)
    assert (ran, read_json(tmp_path / FOUND)["found"]) == ([], record)  # asked again, it suggests the same
    run_grid(made, tmp_path, None, lambda cell, round, of: ran.append(cell) if round == 1 else None, ["Local"])
    assert len(ran) == 9
    assert all(name.startswith(("search/local_", "local-")) for name in ran)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampler": "grid"}, 'local.lr: a range of numbers needs search.sampler = "optuna"'),
        ({"space": {"local.lr": {"low": 1.0, "high": 0.1}}}, "low must be below high"),
        ({"space": {"local.lr": 0.1}}, r"search\.space\.local\.lr = 0\.1: Input should be a valid list"),
        ({"seeds": [0]}, r"search\.seed = 0: is one of the seeds that are compared"),
    ],
)
def test_searches_that_cannot_be_are_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        run_grid(parse(GRID | {"search": RANGES | settings}, CompareConfig), tmp_path, None, quiet)
