"""Workloads A and B in other frameworks, as their own documentation has it.

    python -m benchmarks.peers [--python .venv-peers/bin/python] [--workload A,B] [--rounds 6] [--small] [--json FILE]

Each framework runs in a process of its own; figures are medians of seconds per round without the first. What opens
ports (Ray, torchrun) runs in a network namespace that has nothing but a loopback device. Images are noise of MNIST's
shape.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.speed_tasks import SMALL, TASKS, title

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
OURS = "fedtailor"
PEERS: dict[str, tuple[bool, tuple[str, ...], str]] = {  # title -> needs a namespace, how Python is called, settings
    OURS: (False, ("-m", "benchmarks.peers_ours"), ""),
    "pfl-research, torchrun x 2": (True, (*TORCHRUN, "-m", "benchmarks.peers_pfl"), ""),
    "pfl-research, one process": (False, ("-m", "benchmarks.peers_pfl"), ""),
    "Flower simulation, 2 workers": (True, ("-m", "benchmarks.peers_flower"), ""),
    "Flower simulation, stock": (True, ("-m", "benchmarks.peers_flower"), "stock"),
    "FedLab": (False, ("-m", "benchmarks.peers_fedlab"), ""),
}
NAMESPACE = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")  # ends with us
ALONE = (*NAMESPACE, "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


def measured(python: str, peer: str, task: str, seconds: int) -> tuple[float | None, str]:
    """Median seconds per round, or None and why there is no figure."""
    apart, arguments, settings = PEERS[peer]
    command = [*(ALONE if apart else ()), sys.executable if peer == OURS else python, *arguments]
    environment = os.environ | QUIET | {"TASK": f"{task} {settings}", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    if "torchrun" in peer:
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return None, f"no result after {seconds} s"
    except FileNotFoundError as missing:
        return None, str(missing)
    found = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    if not found:
        return None, ((done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"])[-1]
    return statistics.median(map(float, found[-1].split()[2:])), ""  # the first round is for warming up


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=".venv-peers/bin/python", help="that of the environment of the frameworks")
    parser.add_argument("--workload", default="A,B")
    parser.add_argument("--rounds", type=int, default=6, help="of which the first does not count")
    parser.add_argument("--seconds", type=int, default=600, help="most that one measurement may take")
    parser.add_argument("--small", action="store_true", help="tiny tasks: whether it runs, not how fast it is")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    asked = parser.parse_args()
    rows = []
    for workload in asked.workload.split(","):
        print(title(workload, (SMALL if asked.small else TASKS)[workload]))
        for peer in PEERS:
            task = f"{workload} {'small' if asked.small else 'full'} {asked.rounds}"
            seconds, why = measured(asked.python, peer, task, asked.seconds)
            print(f"  {peer:32} {'-' if seconds is None else f'{seconds:.3f} s'} {why}", flush=True)
            rows.append({"workload": workload, "peer": peer, "seconds": seconds, "why": why})
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
