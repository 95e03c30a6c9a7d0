"""A federation on several ranks is the federation of one process, tapes included; a lost rank is no lost run."""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from fedtailor.core.trees import items
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import RunFolder
from tests.helpers import assert_equal

ROOT = Path(__file__).parents[2]
TASK: dict[str, Any] = {
    "rounds": 5,
    "data": {"source": "polynomial", "clients": 5, "samples": 80},
    "model": {"name": "mlp", "hidden": [8], "dtype": "float64"},
    "algorithm": {"name": "tests.engines.mortal:Mortal"},
    "local": {"batch_size": 8},
    "evaluation": {"unseen": 0.2},
    "checkpoint": {"seconds": 0},
}


def torchrun(ranks: int, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    where = ["--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", port]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *where, "-m", *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )


def test_every_algorithm_on_two_ranks() -> None:
    done = torchrun(2, "tests.engines.ranks", "loop", "algorithms", "tapes", "faults", "few")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " cases on 2 ranks, 0 wrong" in done.stdout


def numbers(folder: RunFolder) -> dict[str, Any]:
    """All that a finished run has, as tensors by path, without times."""
    status, trees = folder.load_checkpoint() or ({}, {})
    results = folder.results or {}
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in folder.metrics()]
    clients = folder.about["clients"]
    models = {k: {c: folder.personal(c, k) for c in clients} for k in ("last", "selected")}
    plain = {"lines": lines, "traffic": status["traffic"], "best": status["best_round"]}
    plain |= {k: v for k, v in results.items() if k != "seconds"}
    return dict(items({"trees": trees, "models": models})) | {k: torch.tensor(v) for k, v in _flat(plain, "results")}


def _flat(value: Any, path: str) -> list[tuple[str, float]]:
    if isinstance(value, dict):
        return [pair for k, v in value.items() for pair in _flat(v, f"{path}/{k}")]
    if isinstance(value, list):
        return [pair for i, v in enumerate(value) for pair in _flat(v, f"{path}/{i}")]
    if isinstance(value, str):
        return [(f"{path}={value}", 0.0)]
    return [(path, math.nan if value is None else float(value))]


def test_a_lost_rank_and_other_numbers_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text(tomli_w.dumps(TASK))
    lost, again = tmp_path / "lost", tmp_path / "again"
    command = ("fedtailor", "run", str(tmp_path / "task.toml"), "--out", str(lost))
    done = torchrun(2, *command, MORTAL="1")
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if "rank was lost" in line]
    assert len(told) == 1
    assert told[0].endswith(
        f"continue with: torchrun --nproc-per-node 2 -m fedtailor resume {lost} (with any number of ranks)"
    )
    folder = RunFolder(lost)
    assert folder.results is None
    assert len(folder.metrics()) == 2
    assert folder.about["ranks"] == 2
    shutil.copytree(lost, again)

    straight = numbers(runner.start(parse(TASK), tmp_path / "straight"))
    assert_equal(numbers(runner.resume(lost)), straight)
    # on four ranks with four clients, and in the same start some algorithms on stacks
    done = torchrun(4, "tests.engines.ranks", "vmap", str(again), "algorithms", "tapes", "few")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " cases on 4 ranks, 0 wrong" in done.stdout
    assert_equal(numbers(RunFolder(again)), straight)


def test_a_comparison_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fedtailor.cli.main import main

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for command in (["compare", "grid.toml"], ["reproduce", "learn2pfed/table1"]):
        monkeypatch.setattr(sys, "argv", ["fedtailor", *command])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(f"error: fedtailor {command[0]}: ")
