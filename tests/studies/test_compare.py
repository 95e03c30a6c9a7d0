"""Comparisons: the grid, whose folder it is, what is run again, and the figures of the table by hand."""

from __future__ import annotations

import csv
import json
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Engine
from fedtailor.engines.inprocess import InProcess
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments import runner
from fedtailor.experiments.config import CompareConfig, parse, with_settings
from fedtailor.experiments.store import LOCK, RESULTS, RunFolder, read_json, write_json
from fedtailor.studies.compare import Cost, Row, cells, local_reference, rows, run_grid
from fedtailor.studies.grid import Cell
from fedtailor.studies.result_tables import files, latex_escape, markdown, number, size, spread, terminal
from tests.made_sites import make_sites
from tests.small import DIGITS, config, records

pytestmark = pytest.mark.usefixtures("in_this_process")

GRID = DIGITS | {"rounds": 2, "compare": {"algorithms": ["local", "fedavg"], "seeds": [0, 1], "workers": 1}}


def grid_config(*settings: str) -> CompareConfig:
    made: CompareConfig = parse(with_settings(GRID, settings), CompareConfig)
    return made


def run(made: CompareConfig, folder: Path) -> tuple[list[Cell], list[tuple[str, int, int]]]:
    told: list[tuple[str, int, int]] = []
    grid = run_grid(made, folder, None, lambda *step: told.append(step))
    return grid, told


@pytest.mark.parametrize(("workers", "cores"), [(1, 2), (2, 1)])
def test_a_pool_takes_no_cores_of_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, cores: int
) -> None:
    asked = []

    def make(name: str, setting: Experiment, chunk: int, workers: int, *rest: Any) -> Engine:
        asked.append((name, workers))
        return InProcess(setting)

    monkeypatch.setattr(runner.engines, "make", make)
    monkeypatch.setattr(runner.engines, "cores", lambda: 2)
    run(grid_config("federation.engine=pool", "federation.workers=2", f"compare.workers={workers}"), tmp_path / "grid")
    assert asked == [("pool", cores)] * 4


def test_cells_of_a_grid(tmp_path: Path) -> None:
    entries = '"local", {name="ditto", lam=0.5}, {name="ditto", lam=2.0}, {name="fedavg+ft", label="My/FT"}'
    grid = cells(grid_config(f"compare.algorithms=[{entries}]"), tmp_path)
    assert [(c.label, c.seed, c.folder.name) for c in grid] == [
        (label, seed, f"{name}-seed{seed}")
        for label, name in (
            ("Local", "local"),
            ("Ditto, lam 0.5", "ditto__lam_0.5"),
            ("Ditto, lam 2.0", "ditto__lam_2.0"),
            ("My/FT", "my_ft"),
        )
        for seed in (0, 1)
    ]
    assert [c.config.algorithm.options for c in grid[2::2]] == [{"lam": 0.5}, {"lam": 2.0}, {}]
    assert [c.config.seed for c in grid] == [0, 1] * 4
    assert len({c.config.task_id for c in grid}) == 2  # one per seed
    (untitled, _) = cells(grid_config('compare.algorithms=["fedtailor.core.algorithm:Algorithm"]'), tmp_path)
    assert (untitled.label, untitled.folder.name) == ("Algorithm", "algorithm-seed0")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('compare.algorithms=["ditto", "ditto"]', 'two entries are the same; give one of them a "label"'),
        ('compare.algorithms=["ditto", {name="fedavg", label="Ditto"}]', 'give one of them a "label"'),
        ("compare.seeds=[1, 1]", r"compare.seeds = \[1, 1\]: a seed stands there twice"),
        ('compare.algorithms=["dito"]', 'no algorithm "dito"; did you mean "ditto"'),
        ('compare.algorithms=[{name="ditto", lamb=1}]', 'has no option "lamb"; did you mean "lam"'),
        ("compare.algorithms=[{lam=1}]", 'no algorithm ""'),
    ],
)
def test_grid_is_checked_before_anything_runs(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(grid_config(setting), tmp_path / "grid")
    assert not (tmp_path / "grid").exists()


def test_only_what_is_missing_runs_again(tmp_path: Path) -> None:
    grid, told = run(grid_config(), tmp_path)
    names = [c.folder.name for c in grid]
    assert told == [(name, r, 2) for name in names for r in (1, 2)]
    before = {c.folder.name: records(RunFolder(c.folder)) for c in grid}
    (grid[2].folder / RESULTS).unlink()  # interrupted in its final phase
    shutil.rmtree(grid[3].folder)
    times = {c.folder.name: (c.folder / RESULTS).stat().st_mtime_ns for c in grid[:2]}
    _, told = run(grid_config(), tmp_path)
    assert told == [(names[0], 2, 2), (names[1], 2, 2), (names[3], 1, 2), (names[3], 2, 2)]
    assert {c.folder.name: records(RunFolder(c.folder)) for c in grid} == before
    assert {c.folder.name: (c.folder / RESULTS).stat().st_mtime_ns for c in grid[:2]} == times


def test_cell_equals_a_run_of_its_own(tmp_path: Path) -> None:
    grid, _ = run(grid_config("compare.algorithms=['fedper']", "compare.seeds=[3]"), tmp_path / "grid")
    alone = runner.start(config("algorithm.name=fedper", "seed=3", "rounds=2"), tmp_path / "alone")
    assert records(RunFolder(grid[0].folder)) == records(alone)


def test_grid_may_grow(tmp_path: Path) -> None:
    run(grid_config("compare.seeds=[0]"), tmp_path)
    _, told = run(grid_config("compare.seeds=[0]", "compare.algorithms=['local', 'fedavg', 'fedper']"), tmp_path)
    assert told == [("local-seed0", 2, 2), ("fedavg-seed0", 2, 2), ("fedper-seed0", 1, 2), ("fedper-seed0", 2, 2)]


def test_folder_of_another_task_is_refused(tmp_path: Path) -> None:
    run(grid_config("compare.seeds=[0]"), tmp_path)
    kept = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != LOCK}
    for setting in ("local.lr=0.2", "data.clients=3", "rounds=3"):
        with pytest.raises(RunError, match=r"another task.* --fresh"):
            run(grid_config("compare.seeds=[0]", setting), tmp_path)
    with pytest.raises(RunError, match="local-seed0"):
        run(grid_config("compare.seeds=[0]", "federation.clients_per_round=2"), tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != LOCK} == kept


def test_finished_cell_with_other_hyper_parameters_is_not_taken_for_this_one(tmp_path: Path) -> None:
    run(grid_config("compare.seeds=[0]", "compare.algorithms=[{name='ditto', lam=0.1}]"), tmp_path)
    with pytest.raises(RunError, match="ditto-seed0"):
        run(grid_config("compare.seeds=[0]", "compare.algorithms=[{name='ditto', lam=0.5}]"), tmp_path)


def test_failing_cell_is_named_after_the_others_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = runner.start

    def start(made: Any, path: Path, *rest: Any, **more: Any) -> RunFolder:
        if path.name == "local-seed1":
            raise RunError("the disk is on fire")
        return original(made, path, *rest, **more)

    monkeypatch.setattr(runner, "start", start)
    with pytest.raises(RunError, match=r"1 of 4 .*local-seed1: the disk"):
        run(grid_config(), tmp_path)
    assert sorted(p.parent.name for p in tmp_path.glob(f"*/{RESULTS}")) == [
        "fedavg-seed0",
        "fedavg-seed1",
        "local-seed0",
    ]


def result(values: list[float], selected: list[float], up: int, seconds: float) -> dict[str, Any]:
    def part(round: int, v: list[float]) -> dict[str, Any]:
        summary = {"mean": statistics.fmean(v), "std": statistics.pstdev(v), "worst_tenth": min(v), "clients": len(v)}
        return {"round": round, "test": {"accuracy": summary}, "clients": {"accuracy": v}}

    return {
        "metric": "accuracy",
        "higher_is_better": True,
        "last": part(2, values),
        "selected": part(1, selected),
        "traffic": {"up": up, "down": 2 * up, "trips": 4},
        "seconds": seconds,
        "faults": 0,
        "abandoned": 0,
    }


def test_rows_by_hand(tmp_path: Path) -> None:
    grid = cells(grid_config(), tmp_path)
    written = [
        result([0.5, 0.7], [0.6, 0.6], 0, 1.0),  # local, seeds 0 and 1
        result([0.6, 0.8], [0.6, 0.6], 0, 2.0),
        result([0.4, 0.7], [0.5, 0.9], 1000, 3.0),  # fedavg
        result([0.7, 0.9], [0.7, 0.7], 3000, 5.0),
    ]
    for cell, content in zip(grid, written, strict=True):
        write_json(cell.folder / RESULTS, content)
    local, fedavg = rows(grid)
    assert (local.label, fedavg.label, fedavg.metric) == ("Local", "FedAvg", "accuracy")
    assert fedavg.means == pytest.approx({0: 0.55, 1: 0.8})
    assert local.hurt == 0
    assert fedavg.hurt == pytest.approx(0.25)  # half of the clients with seed 0, none with seed 1; equal is not hurt
    assert fedavg.last == pytest.approx((0.675, statistics.stdev([0.55, 0.8])))
    assert fedavg.selected == pytest.approx((0.7, 0.0))
    assert fedavg.client_std == pytest.approx((0.15 + 0.1) / 2)
    assert fedavg.worst_tenth == pytest.approx((0.4 + 0.7) / 2)
    assert fedavg.cost == Cost(2000, 4000, 4, 4)
    assert markdown([local, fedavg]).splitlines() == [
        "| algorithm | test accuracy % | selected | client std | worst tenth | hurt | up | down | trips | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| Local | 65.00 ± 7.07 | 60.00 ± 0.00 | 10.00 | 55.00 | 0 % | 0 B | 0 B | 4 | 1.5 |",
        "| FedAvg | 67.50 ± 17.68 | 70.00 ± 0.00 | 12.50 | 55.00 | 25 % | 2.0 kB | 4.0 kB | 4 | 4.0 |",
    ]
    (only,) = rows(grid[2:3])  # one seed, and no Local to be compared with
    assert math.isnan(only.last[1])
    assert math.isnan(only.hurt)
    assert markdown([only]).splitlines()[2].startswith("| FedAvg | 55.00 | 70.00 | 15.00 | 40.00 | - | 1.0 kB |")
    assert rows(cells(grid_config(), tmp_path / "nothing")) == []


def test_table_in_every_format() -> None:
    local = Row(
        "Local", "accuracy", (0.6, 0.07), (0.6, math.nan), 0.1, 0.55, 0.0, Cost(0, 0, 4, 1.5), {0: 0.55, 1: 0.65}
    )
    mine = replace(local, label='My_FT, "a & b"', hurt=math.nan, last=(math.nan, math.nan), means={0: math.nan})
    made = files([local, mine], ["", "Found by search: 100 % of it", "", "- Local: nothing to search"])
    assert sorted(made) == ["table.csv", "table.json", "table.md", "table.tex"]
    assert made["table.md"] == markdown([local, mine]) + (
        "\nFound by search: 100 % of it\n\n- Local: nothing to search\n"
    )

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    first, second = json.loads(made["table.json"], parse_constant=refuse)
    assert first == {
        "others": {},
        "algorithm": "Local",
        "metric": "accuracy",
        "seeds": 2,
        "mean": 0.6,
        "spread": 0.07,
        "selected_mean": 0.6,
        "selected_spread": None,
        "client_std": 0.1,
        "worst_tenth": 0.55,
        "hurt": 0.0,
        "up_bytes": 0,
        "down_bytes": 0,
        "trips": 4,
        "seconds": 1.5,
        "means": {"0": 0.55, "1": 0.65},
    }
    assert (second["mean"], second["hurt"], second["means"]) == (None, None, {"0": None})

    read = list(csv.DictReader(made["table.csv"].splitlines()))
    assert [list(row) for row in read] == [[k for k in first if k not in ("means", "others")]] * 2
    assert [row["algorithm"] for row in read] == ["Local", 'My_FT, "a & b"']
    assert (read[0]["mean"], read[0]["selected_spread"], read[1]["hurt"]) == ("0.6", "", "")

    assert made["table.tex"].splitlines() == [
        "% Found by search: 100 % of it",
        "% - Local: nothing to search",
        r"\begin{tabular}{lrrrrrrrrr}",
        r"\toprule",
        r"algorithm & test accuracy \% & selected & client std & worst tenth & hurt & up & down & trips & seconds \\",
        r"\midrule",
        r"Local & 60.00 $\pm$ 7.00 & 60.00 & 10.00 & 55.00 & 0 \% & 0 B & 0 B & 4 & 1.5 \\",
        r'My\_FT, "a \& b" & - & 60.00 & 10.00 & 55.00 & - & 0 B & 0 B & 4 & 1.5 \\',
        r"\bottomrule",
        r"\end{tabular}",
    ]
    assert latex_escape("#1 {$x^2$} ~\\") == r"\#1 \{\$x\textasciicircum{}2\$\} \textasciitilde{}\textbackslash{}"


def test_terminal_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    row = Row(
        "Ditto, lam 0.5",
        "accuracy",
        (0.98765, 0.0123),
        (0.9876, 0.0123),
        0.1,
        0.5,
        0.25,
        Cost(2e9, 2e9, 100, 1234.5),
        {0: 0.9},
    )
    long = replace(row, label="Learn2pFed-Net, preset paper, scope head, grain parameter")
    Console(width=80).print(terminal([long, row], "digits"))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert not any("…" in line for line in lines)
    assert any("98.77 ± 1.23" in line and "2.00 GB" in line and "1234.5" in line and "…" not in line for line in lines)


def test_figures_for_people() -> None:
    assert [size(b) for b in (0, 999, 1000, 123_456, 19_970_110, 3.2e9)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "123.5 kB",
        "20.0 MB",
        "3.20 GB",
    ]
    assert number("accuracy", 0.98765) == "98.77"
    assert number("rmse", 0.0123456) == "0.01235"
    assert number("rmse", math.nan) == "-"
    assert spread("accuracy", 0.5, math.nan) == "50.00"
    assert spread("rmse", 0.5, 0.25) == "0.5 ± 0.25"


def test_local_run_beside_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = "rounds=1"
    mine = runner.start(config(small, "algorithm.name=fedavg"), tmp_path / "mine")
    assert local_reference(mine) is None
    runner.start(config(small, "algorithm.name=local", "seed=1"), tmp_path / "another-task")
    assert local_reference(mine) is None
    local = runner.start(config(small, "algorithm.name=local"), tmp_path / "z-local")
    broken = tmp_path / "a-broken"
    shutil.copytree(tmp_path / "z-local", broken)
    (broken / "run.json").write_text("{")
    assert local_reference(mine) == local.results
    monkeypatch.chdir(tmp_path / "mine")
    assert local_reference(RunFolder(Path())) == read_json(tmp_path / "z-local" / RESULTS)


def test_other_data_is_not_mixed_into_a_comparison(tmp_path: Path) -> None:
    sites = make_sites(tmp_path / "sites", sites=2, rows=20)
    source = {"source": "folder", "path": str(sites), "target": "outcome"}
    task = {"rounds": 1, "data": source, "model": {"name": "linear"}}
    made: CompareConfig = parse(task | {"compare": {"algorithms": ["local"], "seeds": [0]}}, CompareConfig)
    run(made, tmp_path / "grid")
    run(made, tmp_path / "grid")
    (sites / "s0.csv").write_text((sites / "s1.csv").read_text())
    with pytest.raises(RunError, match=r"grid: .*--fresh"):
        run(made, tmp_path / "grid")
    shutil.rmtree(sites)
    run(made, tmp_path / "grid")  # finished: the table needs no data
