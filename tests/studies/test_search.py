"""Searches: what is tried, what wins, what is recorded, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedtailor.errors import ClientError, ConfigError, RunError
from fedtailor.experiments import runner
from fedtailor.experiments.config import CompareConfig, parse, with_settings
from fedtailor.experiments.sections import SearchSection
from fedtailor.experiments.store import RESULTS, RunFolder, read_json, round_line, write_json
from fedtailor.studies import reproduce
from fedtailor.studies.compare import run_grid
from fedtailor.studies.grid import Cell
from fedtailor.studies.search import FOUND, Subject, drawn, notes
from tests.small import DIGITS

pytestmark = pytest.mark.usefixtures("in_this_process")

GRID = DIGITS | {
    "rounds": 4,
    "data": {"source": "digits", "clients": 4, "max_samples": 60, "val": 0.3},
    "compare": {"algorithms": ["fedavg", "ditto"], "workers": 1},
    "search": {"trials": 3, "space": {"local.lr": [1e-6, 0.2]}, "algorithms": {"ditto": {"lam": [0.1, 1.0]}}},
}


def run(folder: Path, *settings: str) -> tuple[list[Cell], list[str]]:
    """The cells of the comparison, and the names of all runs that were told of, search runs first."""
    config: CompareConfig = parse(with_settings(GRID, settings), CompareConfig)
    told: list[tuple[str, int, int]] = []
    grid = run_grid(config, folder, None, lambda *step: told.append(step))
    return grid, [name for name, round, _ in told if round == 1]


def found(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = read_json(folder / FOUND)["found"]
    return record


def test_best_on_validation_data_is_compared(tmp_path: Path) -> None:
    grid, ran = run(tmp_path)
    assert [c.config.local.lr for c in grid] == [0.2, 0.2]
    assert ran[:2] == ["search/fedavg_local.lr_1e-06-seed1000", "search/fedavg_local.lr_0.2-seed1000"]
    assert ran[-2:] == ["fedavg-seed0", "ditto-seed0"]
    record = found(tmp_path)
    assert [len(entry["tried"]) for entry in record.values()] == [2, 3]  # FedAvg has no more
    assert record["Ditto"]["settings"] == {
        "local.lr": grid[1].config.local.lr,
        "algorithm.lam": grid[1].config.algorithm.options["lam"],
    }
    for tried in record["FedAvg"]["tried"]:
        folder = RunFolder(tmp_path / tried["run"])
        means = [sum(line["val"]["accuracy"]) / 4 for line in folder.metrics()]
        assert means[tried["round"] - 1] == pytest.approx(tried["val"]) == max(means)
        assert (folder.config.seed, folder.config.local.lr) == (1000, tried["settings"]["local.lr"])
    lines = notes(tmp_path)
    assert lines[1].startswith("Settings were found by search on validation data: 3 trials each, seed 1000")
    assert lines[3] == "- FedAvg: local.lr 0.2 (tried 2 of 3)"
    assert lines[4] == f"- Ditto: local.lr 0.2, lam {record['Ditto']['settings']['algorithm.lam']}"

    for tried in (*record["FedAvg"]["tried"], *record["Ditto"]["tried"]):
        path = tmp_path / tried["run"] / RESULTS
        write_json(path, {"lines": read_json(path)["lines"]})  # without any figures
    assert run(tmp_path) == (grid, [])  # nothing runs again, and only validation figures choose
    assert found(tmp_path) == record


def test_settings_are_drawn_by_seed_and_name() -> None:
    space: dict[str, list[Any]] = {"local.lr": [1, 2, 3, 4], "algorithm.lam": ["a", "b", "c"]}

    def draw(trials: int, label: str = "Ditto", seed: int = 1) -> list[dict[str, Any]]:
        return drawn(SearchSection(trials=trials, seed=seed), Subject(label, {}, dict(space)))

    everything = [{"local.lr": lr, "algorithm.lam": lam} for lr in space["local.lr"] for lam in space["algorithm.lam"]]
    assert draw(12) == draw(99) == everything
    some = draw(5)
    assert len(some) == 5
    assert [s for s in everything if s in some] == some  # without repetition
    assert draw(5) == some
    assert some not in (draw(5, seed=2), draw(5, label="FedAvg"))
    assert drawn(SearchSection(), Subject("Local", {}, {})) == []


def test_only_what_is_new_runs_when_the_space_grows(tmp_path: Path) -> None:
    few = ("compare.algorithms=['local', 'fedavg']", "search.algorithms={}")
    run(tmp_path, *few)
    assert run(tmp_path, *few, "search.space.local.lr=[1e-6, 0.2, 1e-5]")[1] == [
        "search/local_local.lr_1e-05-seed1000",
        "search/fedavg_local.lr_1e-05-seed1000",
    ]
    with pytest.raises(RunError, match="local-seed0"):
        run(tmp_path, *few, "search.space.local.lr=[1e-6, 1e-5]")  # another one wins
    with pytest.raises(RunError, match=r"local.lr_1e-06-seed1000"):
        run(tmp_path, *few, "search.rounds=1")


def test_failed_settings_are_recorded_and_lose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, broken = runner.start, {"0.2": RunError("10 rounds in a row"), "0.3": ClientError("no such luck")}

    def start(made: Any, path: Path, *rest: Any, **more: Any) -> RunFolder:
        for name, error in broken.items():
            if f"fedavg_local.lr_{name}-" in path.name:
                raise error
        return original(made, path, *rest, **more)

    monkeypatch.setattr(runner, "start", start)
    alone = ("compare.algorithms=['fedavg', 'local']", "search.algorithms={fedavg={'local.lr'=[1e-6, 0.2, 0.3]}}")
    grid, _ = run(tmp_path, *alone, "search.space={}")
    assert [c.config.local.lr for c in grid] == [1e-6, 0.1]
    assert [t.get("failed") for t in found(tmp_path)["FedAvg"]["tried"]] == [None, "10 rounds in a row", "no such luck"]
    assert notes(tmp_path)[3:] == ["- FedAvg: local.lr 1e-06 (2 failed)", "- Local: nothing to search"]

    broken["1e-06"] = RunError("too slow")
    with pytest.raises(RunError, match=r"FedAvg failed.* too slow"):
        run(tmp_path / "all", *alone, "search.space={}")
    assert found(tmp_path / "all")["FedAvg"]["settings"] is None
    monkeypatch.setitem(broken, "0.2", OSError("the disk is full"))  # says nothing of a setting
    with pytest.raises(RunError, match=r"1 of 3 .*: the disk is full"):
        run(tmp_path / "disk", *alone, "search.space={}")


def test_figures_that_are_not_finite_lose(tmp_path: Path) -> None:
    only = ("compare.algorithms=['fedavg']", "search.algorithms={}", "search.space.local.lr=[0.1, 0.2, 0.3]")
    run(tmp_path, *only)
    tried = found(tmp_path)["FedAvg"]["tried"]
    values = ([0.5] * 4, [float("nan"), 0.9, 0.9, 0.9], [float("nan")] * 4)  # fine; one client lost; all lost
    for entry, accuracies in zip(tried, values, strict=True):
        line = round_line({"round": 1, "val": {"accuracy": accuracies}})
        (tmp_path / entry["run"] / "metrics.jsonl").write_bytes(line)
        write_json(tmp_path / entry["run"] / RESULTS, {"lines": 1})
    shutil.rmtree(tmp_path / "fedavg-seed0")  # it may have had another setting
    run(tmp_path, *only)
    record = found(tmp_path)["FedAvg"]
    assert record["settings"] == {"local.lr": 0.1}
    assert [(t.get("val"), t.get("clients")) for t in record["tried"]] == [
        (0.5, 4),
        (pytest.approx(0.9), 3),
        (None,) * 2,
    ]
    assert record["tried"][2]["failed"] == "accuracy on validation data is not finite in any round"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("search.trails=3", 'unknown key "search.trails"; did you mean "trials"'),
        ("search.space.local.lr=0.1", "search.space.local.lr = 0.1: Input should be a valid list"),
        ("search.space.local.lr=[]", "search.space.local.lr = .*at least 1 item"),
        ("search.space.local.lr=[0.1, 0.1]", r"search: local.lr = \[0.1, 0.1\]: two of them are the same"),
        ("search.space.local.lrr=[0.1]", 'search, FedAvg: unknown key "local.lrr"; did you mean "lr"'),
        ("search.space.local.lr=[-1]", r"search, FedAvg: local.lr = -1: Input should be greater than 0"),
        ("search.space.data.alpha=[1]", 'search: "data.alpha" cannot be searched; keys of algorithm, local, model'),
        ("search.space.algorithm.lam=[1]", 'FedAvg has no option "lam"'),
        ("search.algorithms.dito.lam=[1]", 'search.algorithms: no algorithm "dito" here; did you mean "ditto"'),
        ("search={}", "search.space: nothing to try; list values"),
        ("search.seed=0", "search.seed = 0: is one of the seeds that are compared"),
        ("data.val=0", "a search needs validation samples, and digits has none; set data.val above 0"),
        (
            "data={source='polynomial'}",
            "a search needs validation samples, and polynomial has none; use another source",
        ),
    ],
)
def test_search_is_checked_before_anything_runs(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "grid", setting)
    assert not (tmp_path / "grid").exists()


TABLE = """
title = "A table"
metric = "accuracy"
columns = [{ name = "few", set = { "data.clients" = 3 } }, { name = "many" }, { name = "kB", metric = "up" }]

[common]
rounds = 1
data = { source = "digits", clients = 4, max_samples = 40 }
model = { name = "mlp", hidden = [8] }

[search]
trials = 2
space = { "local.lr" = [1e-6, 0.2] }

[[rows]]
name = "ours"
set = { "algorithm.name" = "ditto", "local.lr" = 0.1 }
search = { "algorithm.lam" = [0.1, 1.0] }
"""


def test_search_for_each_cell_of_a_published_table(tmp_path: Path) -> None:
    path = tmp_path / "paper" / "table1.toml"
    path.parent.mkdir()
    path.write_text(TABLE)
    table = reproduce.load(tmp_path, "paper/table1")
    told: list[str] = []

    def figures() -> list[reproduce.Figure]:
        best = reproduce.searched(table, tmp_path, "cpu", 2, [], None, lambda name, *_: told.append(name))
        cells = reproduce.grid(table, tmp_path, "cpu", 2, [], best)
        assert list(best) == ["ours few", "ours many"]  # a column that reads another figure is not searched again
        for column, label in (("few", "ours few"), ("many", "ours many"), ("kB", "ours many")):
            for cell in cells["ours", column]:
                options = cell.config.algorithm.options
                assert {"local.lr": cell.config.local.lr, "algorithm.lam": options["lam"]} == best[label]
        return reproduce.run(table, cells, None, lambda name, *_: told.append(name))

    first = figures()
    assert len({name for name in told if name.startswith("search/")}) == 2 * 2
    assert [len(entry["tried"]) for entry in found(tmp_path).values()] == [2, 2]
    text = reproduce.markdown(table, first, notes(tmp_path))
    assert "\n\nSettings were found by search on validation data: 2 trials each, seed 1000" in text
    times = {p: p.stat().st_mtime_ns for p in tmp_path.rglob(RESULTS)}
    assert figures() == first
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob(RESULTS)} == times

    path.write_text(TABLE.replace('[search]\ntrials = 2\nspace = { "local.lr" = [1e-6, 0.2] }', ""))
    with pytest.raises(ConfigError, match='"ours"'):
        reproduce.load(tmp_path, "paper/table1")
