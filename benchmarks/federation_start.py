"""Where the seconds and megabytes of a federation on one machine go: `python -m benchmarks.federation_start`.

Runs a command of `fedtailor federation`, looks at all its processes ten times a second, and reads FLARE's logs. On a
busy machine the wall time says little: the processor seconds, and the waits between the stages, are what remains.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from datetime import datetime
from pathlib import Path

import psutil

STAGES = {  # what in which log ends a stage
    "server listens": ("server", "Server started"),
    "sites registered": ("*", "Successfully registered client"),
    "job submitted": ("server", "Got the job"),
    "job processes begin": ("server", "Runner_process started"),
    "job connected": ("server", "scheduled task sync"),
    "job set up": ("server", "task setup exit"),
    "run ended": ("server", "Workflow: controller finalizing"),
}


def kind(command: list[str]) -> str:
    text = " ".join(command)
    if "provision" in text:
        return "provisioning"
    if "runner_process" in text:
        return "server, job"
    if "worker_process" in text:
        return "site, job"
    if "server_train" in text:
        return "server"
    return "site" if "client_train" in text else ""


def watch(process: subprocess.Popen[bytes]) -> tuple[dict[int, float], dict[int, float], dict[int, str]]:
    """Processor seconds, the largest proportional set size (MB) and the kind of every process."""
    seconds: dict[int, float] = {}
    size: dict[int, float] = defaultdict(float)
    names: dict[int, str] = {}
    root = psutil.Process(process.pid)
    while process.poll() is None:
        for one in [root, *root.children(recursive=True)]:
            try:
                if not (name := "the command" if one.pid == root.pid else kind(one.cmdline())):
                    continue
                names[one.pid], times = name, one.cpu_times()
                seconds[one.pid] = times.user + times.system
                size[one.pid] = max(size[one.pid], one.memory_full_info().pss / 2**20)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        time.sleep(0.1)
    return seconds, size, names


def stage_times(folder: Path) -> dict[str, float]:
    """When each stage ended, at the last participant that it concerns."""
    found: dict[str, float] = {}
    for stage, (where, text) in STAGES.items():
        for log in folder.glob(f"{where}/log.txt"):
            for line in log.read_text().splitlines():
                if text in line and (stamp := re.match(r"[\d-]+ [\d:,]+", line)):
                    at = datetime.strptime(stamp[0], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                    found[stage] = max(found.get(stage, 0.0), at)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="+", help="such as: local 3 config.toml")
    parser.add_argument("--out", type=Path, default=Path("federation-start"))
    options, more = parser.parse_known_args()
    shutil.rmtree(options.out, ignore_errors=True)
    command = [sys.executable, "-m", "fedtailor.cli.main", "federation", *options.words, *more]
    begun = time.time()
    with subprocess.Popen([*command, "--out", str(options.out)], stdout=subprocess.DEVNULL) as process:
        seconds, size, names = watch(process)
    ended = time.time()
    print(f"exit code {process.returncode}, {ended - begun:.1f} s; by the end of")
    last = begun
    for stage, at in sorted(stage_times(options.out).items(), key=lambda pair: pair[1]):
        print(f"  {stage:20s} {at - begun:5.1f} s  (+{at - last:.1f})")
        last = at
    print(f"  {'the command':20s} {ended - begun:5.1f} s  (+{ended - last:.1f})")
    print("processor seconds and largest memory (proportional set size) of each")
    for name in sorted(set(names.values())):
        pids = [pid for pid in names if names[pid] == name]
        each = ", ".join(f"{seconds[pid]:.1f} s {size[pid]:.0f} MB" for pid in pids)
        print(f"  {name:12s} {each}")
    print(f"  in all       {sum(seconds.values()):.1f} s on {psutil.cpu_count()} cores")


if __name__ == "__main__":
    main()
