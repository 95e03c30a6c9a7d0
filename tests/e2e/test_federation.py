"""A real federation on 127.0.0.1: a server and three sites as processes; equal to the loop engine."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from fedtailor.cli.federation_commands import fit_config
from fedtailor.experiments import runner
from fedtailor.experiments.store import RunFolder
from fedtailor.tables.serve import personal
from tests.flare.sites import on_loop, tensors
from tests.helpers import assert_equal
from tests.small import config
from tests.tables.test_table_fit import table

needs_flare = pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs NVIDIA FLARE")


@needs_flare
def test_three_sites_equal_the_loop_engine(tmp_path: Path) -> None:
    task = config("algorithm.name=fedrep", "data.clients=3", "federation.engine=loop")
    (tmp_path / "task.toml").write_text(tomli_w.dumps(task.plain()))
    command = [sys.executable, "-m", "fedtailor.cli.main", "federation", "local", "3", "task.toml"]
    done = subprocess.run(
        [*command, "--out", "federation", "--run", "first"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    logs = "".join(p.read_text()[-3000:] for p in tmp_path.glob("federation/*/log.txt") if done.returncode)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{logs}"
    assert "first: submitted to client-00, client-01, client-02\n" in done.stdout
    assert re.search(r"^greeting sites", done.stdout, re.MULTILINE)
    assert [line for line in done.stdout.splitlines() if "took part" in line] == [
        f"client-0{i}: took part in all {task.rounds} rounds" for i in range(3)
    ]
    path = tmp_path / "federation/server/runs/first"
    assert_equal(tensors(path, tmp_path / "federation"), on_loop(task), 1e-6)
    straight = runner.start(task, tmp_path / "loop")
    assert RunFolder(path).results is not None
    assert straight.results is not None
    for kind in ("last", "selected", "traffic"):
        assert RunFolder(path).results[kind] == straight.results[kind]  # type: ignore[index]
    told = subprocess.run(
        [*command[:4], "personal", "federation/client-01"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert [Path(line.rpartition(": ")[2]).is_file() for line in told.stdout.splitlines()] == [True, True]


@needs_flare
def test_a_fit_of_tables_equals_the_loop_engine(tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    for (name,), part in table(6, [30, 24, 20]).group_by("site", maintain_order=True):
        part.drop("site").write_csv(tmp_path / "sites" / f"{name}.csv")
    small = "algorithm.effects=['intercept']"
    command = [sys.executable, "-m", "fedtailor.cli.main", "federation"]

    def call(*arguments: str) -> str:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        everything = [*command, *arguments]
        done = subprocess.run(everything, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800)
        logs = "".join(p.read_text()[-3000:] for p in tmp_path.glob("federation/*/log.txt") if done.returncode)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{logs}"
        return done.stdout

    told = call("fit", "sites", "--target", "y", "--out", "federation", "--run", "fit", "--set", small)
    assert "fit: submitted to s0, s1, s2\n" in told
    source = {"source": "folder", "path": str(tmp_path / "sites"), "target": "y", "val": 0.0}
    path = tmp_path / "federation/server/runs/fit"
    found, wanted = tensors(path, tmp_path / "federation"), on_loop(fit_config(source, 0, [small]))
    assert_equal(found, wanted, 1e-8)
    shown = call("results", "federation/s1")
    assert "served by" in shown
    folder = Path(shown.partition("models     ")[2].partition("\n")[0])
    model = found["model of s1/out.weight"].flatten()
    assert personal(folder, "s1").params["out.weight"].flatten().tolist() == pytest.approx(model.tolist())
