"""Kill a run at random moments with SIGKILL, resume it until it ends, and compare it with one never disturbed.

Kills are planned from the seed and spread over start-up, training, checkpoints and the final phase; all but the first
hit a process that resumes. Example: python benchmarks/kill_and_resume.py --kills 20 --seed 0 --algorithm ditto
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedtailor.experiments.store import CHECKPOINT, CONFIG, METRICS, RESULTS, RunFolder

CLIENTS = 8
TASK = """
rounds = {rounds}
[data]
source = "digits"
clients = {clients}
[model]
hidden = [64]
[algorithm]
name = "{algorithm}"
[federation]
clients_per_round = 5
[checkpoint]
seconds = 0
"""


@dataclass(frozen=True)
class Plan:
    """One kill: in which phase, from which round on, and how far into it (0 to 1)."""

    phase: str
    round: int
    share: float


@dataclass(frozen=True)
class Kill:
    """A kill that hit: planned phase, the command that died, and the rounds recorded by then."""

    phase: str
    command: str
    round: int


@dataclass
class Report:
    """What was done to the run, and whether it shows."""

    algorithm: str
    seed: int
    rounds: int
    reference: str = ""
    disturbed: str = ""
    equal: bool = False
    reference_seconds: float = 0.0
    kills: list[Kill] = field(default_factory=list)


def plans(kills: int, rounds: int, seed: int) -> list[Plan]:
    """The kills in the order of rounds; the final phase comes last."""
    rng = random.Random(seed)
    phases = [("start-up", "training", "final", "checkpoint", "training")[i % 5] for i in range(kills)]
    rng.shuffle(phases)
    at = [1 + int((i + rng.random()) / kills * (rounds - 1)) for i in range(kills)]
    made = [Plan(phase, round, rng.random()) for phase, round in zip(phases, at, strict=True)]
    return sorted(made, key=lambda p: p.phase == "final")


def start(config: Path, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Go on with the run, or begin it if there is none yet."""
    fedtailor = [sys.executable, "-m", "fedtailor"]
    begun = (folder / CONFIG).exists()
    command = ["resume", str(folder)] if begun else ["run", str(config), "--out", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*fedtailor, *command], env=environment, stdout=subprocess.DEVNULL), command[0]


def recorded(folder: Path) -> int:
    """Rounds in the metrics file."""
    path = folder / METRICS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(plan: Plan, process: subprocess.Popen[bytes], folder: Path, start_up: float, per_round: float) -> bool:
    """Until the moment of the kill; False if the process ended before."""

    def alive_until(condition: Any) -> bool:
        while process.poll() is None:
            if condition():
                return True
            time.sleep(0.0005)
        return False

    def files(pattern: str) -> int:
        return sum(1 for _ in folder.glob(pattern))

    begun, before = time.monotonic(), recorded(folder)
    if plan.phase == "start-up":
        return alive_until(lambda: time.monotonic() - begun >= plan.share * start_up or recorded(folder) > before)
    if plan.phase == "final":  # between the first and the last personal model, and the results after them
        wanted = round(plan.share * 2 * CLIENTS)
        return alive_until(lambda: files("personal/*/*.safetensors") >= wanted and recorded(folder) >= plan.round)
    if not alive_until(lambda: recorded(folder) >= max(plan.round, before + 1)):
        return False
    if plan.phase == "checkpoint":
        return alive_until(lambda: files(f"{CHECKPOINT}/*.part"))
    reached = time.monotonic()
    return alive_until(lambda: time.monotonic() - reached >= plan.share * per_round)


def comparable(folder: RunFolder) -> tuple[Any, list[Any]]:
    """Results and metrics without what is measured in seconds."""
    results = folder.results or {}
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in folder.metrics()]
    return json.dumps({k: v for k, v in results.items() if k != "seconds"}), [json.dumps(line) for line in lines]


def kill_and_resume(work: Path, kills: int, seed: int, algorithm: str, rounds: int) -> Report:
    """The whole experiment in an empty folder."""
    report = Report(algorithm, seed, rounds)
    config, reference, disturbed = work / "task.toml", work / "reference", work / "disturbed"
    config.write_text(TASK.format(rounds=rounds, clients=CLIENTS, algorithm=algorithm))
    begun = time.monotonic()
    process, _ = start(config, reference)
    while process.poll() is None and recorded(reference) == 0:
        time.sleep(0.001)
    start_up = time.monotonic() - begun
    if process.wait() != 0:
        raise SystemExit("the reference run failed")
    report.reference_seconds = time.monotonic() - begun
    per_round = (report.reference_seconds - start_up) / rounds
    for plan in plans(kills, rounds, seed):
        if (disturbed / RESULTS).exists():  # it was faster than the plan
            break
        process, command = start(config, disturbed)
        hit = wait_for(plan, process, disturbed, start_up, per_round)
        process.kill()
        process.wait()
        if hit:
            report.kills.append(Kill(plan.phase, command, recorded(disturbed)))
        elif process.returncode != 0:
            raise SystemExit(f"the run failed on its own, with code {process.returncode}")
    while not (disturbed / RESULTS).exists():
        process, _ = start(config, disturbed)
        if process.wait() != 0:
            raise SystemExit("the disturbed run could not be resumed")
    one, other = RunFolder(reference), RunFolder(disturbed)
    report.reference, report.disturbed = one.fingerprint(), other.fingerprint()
    report.equal = report.reference == report.disturbed and comparable(one) == comparable(other)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithm", default="ditto")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        report = kill_and_resume(Path(work), args.kills, args.seed, args.algorithm, args.rounds)
    for number, kill in enumerate(report.kills, 1):
        print(f"kill {number:3d}  {kill.phase:10}  during {kill.command:6}  at round {kill.round}/{report.rounds}")
    print(f"{args.algorithm}: {len(report.kills)} of {args.kills} kills, undisturbed {report.reference_seconds:.1f} s")
    print(f"undisturbed {report.reference}\nkilled      {report.disturbed}")
    print("equal" if report.equal else "DIFFERENT")
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 0 if report.equal else 1


if __name__ == "__main__":
    sys.exit(main())
