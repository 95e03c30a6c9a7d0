"""Published tables: cells, figures over seeds, what is refused; and what a run says of sharing."""

import json
import re
import shlex
from pathlib import Path

import pytest

from fedtailor.errors import ConfigError
from fedtailor.experiments.store import RESULTS, RunFolder, read_json
from fedtailor.studies import grid, reproduce
from fedtailor.studies.explain import explain
from tests.cli.conftest import Call
from tests.small import interrupt_after_a_run, one_after_the_other

TABLE = """
title = "A table"
metric = "mse"
seeds = 2
scale = { paper = { rounds = 3 } }
columns = [{ name = "one", set = { "data.setting" = 1 } }, { name = "two", set = { "data.setting" = 2 } }]

[common]
rounds = 2
data = { source = "polynomial", clients = 4, samples = 80 }
model = { name = "linear", bias = false }

[[rows]]
name = "oracle"
set = { "algorithm.name" = "jointls" }
by_column = [{ "algorithm.personal_features" = [3] }, { "algorithm.personal_features" = [2, 3] }]

[[rows]]
name = "ours"
set = { "algorithm.name" = "learn2pfed", rounds = 40 }
paper = ["0.1 ± 0.2", "0.3"]
"""


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    (tmp_path / "configs" / "paper").mkdir(parents=True)
    (tmp_path / "configs" / "paper" / "table9.toml").write_text(TABLE)
    (tmp_path / "configs" / "paper" / "other.toml").write_text("rounds = 3")
    return tmp_path / "configs"


def test_cells_carry_the_settings_of_row_column_and_scale(configs: Path) -> None:
    assert reproduce.available(configs) == ["paper/table9"]
    table = reproduce.load(configs, "paper/table9")
    cells = reproduce.grid(table, configs, "paper", 2, [])
    assert [(k, [c.seed for c in v]) for k, v in cells.items()] == [
        ((row, column), [0, 1]) for row in ("oracle", "ours") for column in ("one", "two")
    ]
    two = cells["oracle", "two"][1].config
    assert (two.rounds, two.seed, two.algorithm.options) == (3, 1, {"personal_features": [2, 3]})
    assert two.data.model_dump()["setting"] == 2
    assert list(reproduce.grid(table, configs, "cpu", 1, ["ours"])) == [("ours", "one"), ("ours", "two")]


SCALES = """
title = "Two scales"
metric = "accuracy"
search_at = { paper = false }
search = { space = { "local.lr" = [0.1, 0.2] } }
scale = { paper = { rounds = 9, "model.name" = "linear" } }

[common]
data = { source = "digits", clients = 3, max_samples = 60 }

[[columns]]
name = "small"

[[columns]]
name = "large"
scale = { paper = { "data.clients" = 5 } }

[[rows]]
name = "FedAvg"
set = { "algorithm.name" = "fedavg", "algorithm.epochs" = 2 }
search = { "algorithm.epochs" = [1, 2] }
scale = { paper = { "algorithm.epochs" = 7 } }

[[rows]]
name = "FedProx"
set = { "algorithm.name" = "fedprox", "model.name" = "mlp" }
by_column = [{ "algorithm.mu" = 1.0 }, { "algorithm.mu" = 2.0 }]
by_column_at = { paper = [{ "algorithm.mu" = 3.0 }, { "algorithm.mu" = 4.0 }] }

[[rows]]
name = "Local"
only = "paper"
set = { "algorithm.name" = "local" }
"""


def test_what_a_scale_changes(configs: Path) -> None:
    """Most particular last: the table's, the column's, the row's, those of row and column."""
    (configs / "paper" / "scales.toml").write_text(SCALES)
    table = reproduce.load(configs, "paper/scales")
    small, large = (reproduce.grid(table, configs, scale, 1, []) for scale in ("cpu", "paper"))
    assert list({row for row, _ in small} ^ {row for row, _ in large}) == ["Local"]
    configurations = {key: group[0].config for key, group in (small | large).items()}
    cpu = {key: group[0].config for key, group in small.items()}
    assert cpu["FedAvg", "large"].algorithm.options == {"epochs": 2}
    assert [cpu["FedProx", c].algorithm.options["mu"] for c in ("small", "large")] == [1.0, 2.0]
    assert {c.rounds for c in configurations.values()} == {9}
    assert configurations["FedAvg", "small"].algorithm.options == {"epochs": 7}
    assert [configurations["FedProx", c].algorithm.options["mu"] for c in ("small", "large")] == [3.0, 4.0]
    assert [configurations["FedAvg", c].data.model_dump()["clients"] for c in ("small", "large")] == [3, 5]
    assert [configurations[row, "small"].model.name for row in ("FedAvg", "FedProx")] == ["linear", "mlp"]


def test_a_search_of_one_scale_only(configs: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    one_after_the_other(monkeypatch)
    (configs / "paper" / "scales.toml").write_text(SCALES.replace("rounds = 9", "rounds = 1"))
    arguments = ("--configs", configs, "--out", "out", "--seeds", "1", "--rows", "FedAvg", "--scale", "paper")
    assert call("reproduce", "paper/scales", *arguments).code == 0
    assert not Path("out/search.json").exists()
    assert "local.lr" not in Path("out/table.md").read_text()


def test_own_models_are_measured_off_the_same_run(configs: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    one_after_the_other(monkeypatch)
    (configs / "paper" / "own.toml").write_text("""
title = "Before and after"
metric = "accuracy"
seeds = 1
columns = [{ name = "after" }, { name = "before", metric = "own.accuracy" }]
common = { rounds = 2, data = { source = "digits", clients = 4, max_samples = 60 }, local = { lr = 0.2 } }
rows = [
  { name = "FedSelect", set = { "algorithm.name" = "fedselect" } },
  { name = "before", set = { "algorithm.name" = "fedselect", "algorithm.serve" = "own" } },
  { name = "FedAvg", set = { "algorithm.name" = "fedavg" } },
]
""")
    assert call("reproduce", "paper/own", "--configs", configs, "--out", "out", "--json", "f.json").code == 0
    found = {(f["row"], f["column"]): f["mean"] for f in json.loads(Path("f.json").read_text())}
    assert found["FedSelect", "before"] == pytest.approx(found["before", "after"])
    assert found["FedSelect", "after"] != found["FedSelect", "before"]
    assert len(list(Path("out").glob(f"*/{RESULTS}"))) == 3
    assert re.search(r"\| FedAvg \| \S+ \| - \|", Path("out/table.md").read_text())


def test_rows_may_have_commas_in_their_names(configs: Path) -> None:
    (configs / "paper" / "table9.toml").write_text(TABLE.replace('name = "ours"', 'name = "ours, again"'))
    table = reproduce.load(configs, "paper/table9")
    assert reproduce.rows_named(table, "ours, again,oracle") == ["ours, again", "oracle"]
    assert reproduce.rows_named(table, "ours") == ["ours"]  # refused later, by name
    assert reproduce.rows_named(table, "") == []


def test_mistakes_are_named(configs: Path) -> None:
    with pytest.raises(ConfigError, match=r'"paper/table8".*"paper/table9"'):
        reproduce.load(configs, "paper/table8")
    with pytest.raises(ConfigError, match=r'--rows.*"our".*"ours"'):
        reproduce.grid(reproduce.load(configs, "paper/table9"), configs, "cpu", 1, ["our"])
    (configs / "paper" / "table9.toml").write_text(TABLE.replace("metric", "metrik"))
    with pytest.raises(ConfigError, match=r"table9\.toml"):
        reproduce.load(configs, "paper/table9")


def test_command_prints_ours_beside_the_papers(
    call: Call, configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_after_the_other(monkeypatch)
    arguments = ("reproduce", "paper/table9", "--configs", configs, "--out", "out", "--json", "figures.json")
    code, out, _ = call(*arguments)
    assert code == 0
    figures = {(f["row"], f["column"]): f for f in json.loads(Path("figures.json").read_text())}
    ours = figures["ours", "one"]
    values = [read_json(Path("out") / f"ours_one-seed{s}" / RESULTS)["last"]["test"]["mse"]["mean"] for s in (0, 1)]
    assert ours["mean"] == pytest.approx(sum(values) / 2)
    assert ours["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert (ours["n"], ours["paper"], figures["oracle", "two"]["paper"]) == (2, "0.1 ± 0.2", None)
    assert f"| ours | {ours['mean']:.3g} ± {ours['std']:.3g} (0.1 ± 0.2) |" in out
    written = (Path("out") / "ours_one-seed0" / RESULTS).stat().st_mtime_ns
    assert call(*arguments).code == 0
    assert (Path("out") / "ours_one-seed0" / RESULTS).stat().st_mtime_ns == written

    names, shares, degrees = explain(tmp_path / "out" / "ours_two-seed0")
    assert names == ["1", "x", "x^2", "x^3"]
    assert all(0 <= v <= 1 for row in shares.values() for v in row.values())
    assert all(row["1"] > row["x^3"] for row in shares.values())
    assert all(row["1"] > 10 * row["x^3"] > 0 for row in degrees.values())
    code, out, _ = call("explain", tmp_path / "out" / "ours_two-seed0")
    assert code == 0
    assert f"{shares['client-00']['x']:.2f}" in out
    saved = read_json(tmp_path / "out" / "ours_two-seed0" / "shares.json")
    assert saved["clients"] == shares
    assert "effective degree Lambda" in out
    assert f"{degrees['client-00']['x^3']:.3g}" in out
    assert RunFolder(tmp_path / "out" / "ours_two-seed0").results is not None
    refused = call("explain", tmp_path / "out" / "oracle_one-seed0")
    assert (refused.code, refused.out) == (2, "")
    assert "JointLS" in refused.err


def test_interrupt_says_how_to_go_on(call: Call, configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_after_the_other(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(grid, "_pause", interrupt_after_a_run)
        code, _, err = call("reproduce", "paper/table9", "--configs", configs, "--rows", "ours", "--json", "f.json")
    assert code == 130
    again = shlex.split(err.removeprefix("interrupted; continue with: "))
    assert again[:3] == ["fedtailor", "reproduce", "paper/table9"]
    assert not Path("f.json").exists()
    assert list(Path("runs/paper-table9-cpu").glob(f"*/{RESULTS}"))
    assert call(*again[1:]).code == 0
    assert {figure["row"] for figure in json.loads(Path("f.json").read_text())} == {"ours"}


def test_columns_may_read_different_figures_off_the_same_run(
    call: Call, configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_after_the_other(monkeypatch)
    columns = 'columns = [{ name = "error" }, { name = "kB", metric = "up", unit = "kB" }]'
    (configs / "paper" / "table9.toml").write_text(
        TABLE.replace(TABLE[TABLE.index("columns =") : TABLE.index("\n\n[common]")], columns).replace(
            "by_column = [{", "# ["
        )
    )
    code, _, _ = call(
        "reproduce", "paper/table9", "--configs", configs, "--out", "out", "--rows", "ours", "--json", "f.json"
    )
    assert code == 0
    assert [p.name for p in sorted(Path("out").glob("ours*"))] == ["ours_error-seed0", "ours_error-seed1"]
    traffic = read_json(Path("out/ours_error-seed0") / RESULTS)["traffic"]
    found = {f["column"]: f for f in json.loads(Path("f.json").read_text())}
    assert found["kB"]["mean"] == pytest.approx(traffic["up"] / 1000 / (4 * 40))
    assert (found["kB"]["unit"], found["error"]["unit"]) == ("kB", "")


def test_command_says_which_settings_were_found(
    call: Call, configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_after_the_other(monkeypatch)
    (configs / "paper" / "searched.toml").write_text("""
title = "A table"
metric = "accuracy"
columns = [{ name = "one" }]
rows = [{ name = "ours", set = { "algorithm.name" = "local" } }]
common = { rounds = 2, data = { source = "digits", clients = 4, max_samples = 60, val = 0.3 } }
search = { space = { "local.lr" = [1e-6, 0.2] } }
""")
    code, out, _ = call("reproduce", "paper/searched", "--configs", configs, "--out", "out", "--seeds", "1")
    assert code == 0
    assert out.startswith("search/ours_one_local.lr_1e-06-seed1000  2/2 rounds\n")
    assert "\n- ours one: local.lr 0.2 (tried 2 of 6)\n" in out
    assert RunFolder(tmp_path / "out" / "ours_one-seed0").config.local.lr == 0.2
    assert "data: 6" in Path("out/table.md").read_text()


LEARNED = """
title = "Learned once"
metric = "accuracy"
seeds = 2
columns = [{ name = "digits" }]

[common]
rounds = 2
data = { source = "digits", clients = 3, max_samples = 60 }
model = { name = "mlp", hidden = [4] }

[[rows]]
name = "DUW"
set = { "algorithm.name" = "duw-fedavg", "algorithm.outer_iterations" = 2, "algorithm.horizon" = 2 }
learned_once = true
learned_with = { "data.max_train" = 10 }
"""


def test_what_is_learned_once_drives_every_seed(configs: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    one_after_the_other(monkeypatch)
    (configs / "paper" / "once.toml").write_text(LEARNED)
    out = configs.parent / "runs"
    assert call("reproduce", "paper/once", "--configs", str(configs), "--out", str(out)).code == 0
    learner = RunFolder(out / "learned" / "duw_digits-seed1000")
    report = learner.metrics()[1]["report"]
    assert learner.config.data.model_dump()["max_train"] == 10  # weights may be learned on a part of the data
    assert RunFolder(out / "duw_digits-seed0").config.data.model_dump()["max_train"] is None
    for seed in (0, 1):
        run = RunFolder(out / f"duw_digits-seed{seed}")
        assert list(run.config.algorithm.options["theta"]) == report["theta"]
        assert [line["round"] for line in run.metrics()] == [1, 2]  # nothing is learned again
    told = call("explain", str(out / "duw_digits-seed0"))
    assert "weight of each client" in told.out
    rows = (out / "duw_digits-seed0" / "weights.csv").read_text().splitlines()
    assert rows[0] == "round,client,weight"
    assert len(rows) == 1 + 2 * 3


DIVERGING = """
title = "Steps"
metric = "mse"
seeds = 1
columns = [{ name = "small" }, { name = "large", set = { "local.lr" = 1e30 } }]

[common]
rounds = 12  # as many without a usable reply end a run
data = { source = "polynomial", clients = 4, samples = 80 }
model = { name = "linear" }

[[rows]]
name = "FedAvg"
set = { "algorithm.name" = "fedavg" }
"""


def test_a_run_that_diverges_is_told_in_its_cell(
    call: Call, configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_after_the_other(monkeypatch)
    path = configs / "paper" / "steps.toml"
    path.write_text(DIVERGING)
    command = ("reproduce", "paper/steps", "--configs", configs, "--out", tmp_path / "out")
    refused = call(*command)
    assert refused.code == 2
    assert re.search(r"1 of 2 .*fedavg_large-seed0", refused.err)
    path.write_text("may_fail = true\n" + DIVERGING)
    code, out, _ = call(*command)
    assert code == 0
    assert "| failed |" in out
    assert "- FedAvg large: " in out


def test_dry_run_says_with_which_settings_each_row_runs(call: Call, configs: Path) -> None:
    command = ("reproduce", "paper/table9", "--configs", configs, "--scale", "paper", "--dry-run")
    code, out, _ = call(*command)
    assert code == 0
    assert not Path("runs").exists()
    first, second, *_ = out.split("\n\n")[1:]
    assert first.splitlines()[0] == "oracle: one"
    lines = {line.split()[0]: line.split()[1:] for line in second.splitlines()[1:]}
    assert (lines["rounds"], lines["clients"][0], lines["method"][0]) == (["3"], "4,", "jointls,")
    assert lines["data"] == ["polynomial,", "clients", "4,", "samples", "80,", "setting", "2"]
    entries = {(e["row"], *e["columns"]): e for e in json.loads(call(*command, "--json", "-").out)}
    ours = entries["ours", "two"]["settings"]
    assert (ours["rounds"], ours["local.lr"], ours["algorithm.cells"]) == (40, 0.05, 10)
    assert json.loads(call(*command[:4], "--dry-run", "--json", "-").out)[0]["settings"]["rounds"] == 2
