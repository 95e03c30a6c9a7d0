"""The installed command as a user meets it: signals, exit codes, several processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import tomli_w

from benchmarks.kill_and_resume import kill_and_resume
from fedtailor.experiments import runner
from fedtailor.experiments.store import METRICS, RunFolder
from tests.cli.conftest import Call
from tests.cli.conftest import call as call
from tests.small import DIGITS, config, records

# a shell that starts tests in the background lets them ignore SIGINT; a user's terminal does not
FEDTAILOR = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import fedtailor.cli.main as m; m.main()",
]
# the third round takes as long as it takes the test to see it
WAITING = """
import time
from fedtailor.experiments.store import RunFolder
append = RunFolder.append_metrics
def waiting(self, line):
    length = append(self, line)
    if line["round"] == 3:
        time.sleep(600)
    return length
RunFolder.append_metrics = waiting
"""
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "80"}


def fedtailor(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FEDTAILOR, *arguments], cwd=folder, env=ENVIRONMENT, check=False, capture_output=True, text=True
    )


def test_ctrl_c_prints_the_line_that_resumes(tmp_path: Path) -> None:
    rounds = 6
    (tmp_path / "task.toml").write_text(tomli_w.dumps(DIGITS | {"rounds": rounds}))
    path = tmp_path / "my run"
    waiting = [*FEDTAILOR[:2], WAITING + FEDTAILOR[2]]
    process = subprocess.Popen(
        [*waiting, "run", "task.toml", "--set", "algorithm.name=ditto", "--out", "my run"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and (not (path / METRICS).exists() or len(RunFolder(path).metrics()) < 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said == "interrupted; continue with: fedtailor resume 'my run'\n"
    assert len(RunFolder(path).metrics()) == 3
    command = shlex.split(said.split("continue with: ")[1])
    resumed = fedtailor(*command[1:], folder=tmp_path)
    assert (resumed.returncode, resumed.stderr) == (0, "")
    straight = runner.start(config("algorithm.name=ditto", f"rounds={rounds}"), tmp_path / "straight")
    assert records(RunFolder(path)) == records(straight)


def test_comparison_in_several_processes(tmp_path: Path, call: Call) -> None:
    grid = {"algorithms": ["local", "fedavg"], "name": "both", "workers": 2}
    (tmp_path / "grid.toml").write_text(tomli_w.dumps(DIGITS | {"rounds": 2, "compare": grid}))
    done = fedtailor("compare", "grid.toml", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert sorted(lines[:2]) == ["fedavg-seed0  2/2 rounds", "local-seed0  2/2 rounds"]
    assert lines[-1] == "runs and table: runs/both"
    assert max(map(len, lines)) <= 80
    shown = call("show", "runs/both").out  # in this process: no torch to import again
    assert shown == (tmp_path / "runs/both/table.md").read_text()
    table = shown.partition("\n\n")[0].splitlines()
    assert [line.split("|")[1].strip() for line in table] == ["algorithm", "---", "Local", "FedAvg"]
    alone = runner.start(config("algorithm.name=fedavg", "rounds=2"), tmp_path / "alone")
    assert records(RunFolder(tmp_path / "runs/both/fedavg-seed0")) == records(alone)


def test_killed_and_resumed_run_equals_one_never_disturbed(tmp_path: Path) -> None:
    hits = 0
    for seed in range(1, 9):  # on a busy machine a run may end before it is hit: then once more
        (tmp_path / f"{seed}").mkdir()
        report = kill_and_resume(tmp_path / f"{seed}", kills=3, seed=seed, algorithm="fedrep", rounds=30)
        assert report.reference == report.disturbed
        assert report.equal
        hits += len(report.kills)
        if hits >= 3:
            return
    raise AssertionError(f"only {hits} kills hit a run at work")
