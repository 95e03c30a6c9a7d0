"""Two checkouts beside each other: is a round of ours as fast as before?

    python -m benchmarks.speed_commits ../before [--workload A,B,C,D,E] [--turns 5] [--cpu]

Each checkout has a process of its own with the workload of its `benchmarks.speed`; they take turns, a round at a time,
so that whatever else the machine does meets both. Figures are medians over the turns, the first does not count; a turn
takes at least a second. With --cpu the figures are seconds of processors, of all processes of a checkout together: what
others do on the machine hardly changes them (Linux only).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
SERVE = '''
import os, sys, time
from pathlib import Path
from benchmarks import speed, speed_core, speed_growth

def processors():
    """Seconds that this process and its workers have computed."""
    workers = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    spent = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in ["self", *workers]]
    return sum(int(ticks) for each in spent for ticks in each) / os.sysconf("SC_CLK_TCK")

clock = processors if sys.argv[2] == "cpu" else time.perf_counter

def served(rivals, repeats):
    run = rivals.get("ours") or next(iter(rivals.values()))
    run()
    for line in sys.stdin:
        begun, rounds = clock(), 0
        while rounds < 1 or clock() - begun < 1:
            run()
            rounds += 1
        print("seconds", (clock() - begun) / rounds, file=sys.__stdout__, flush=True)
    sys.__stdout__.flush()
    os._exit(0)

for module in (speed, speed_core, speed_growth):
    module.in_turns = served
sys.argv = ["speed", "--workload", sys.argv[1]]
speed.main()
'''


def server(checkout: Path, workload: str, clock: str) -> subprocess.Popen[str]:
    """A process that runs a round of ours for each line it gets, and tells how long it took."""
    paths = os.pathsep.join([str(checkout / "src"), str(checkout)])
    return subprocess.Popen(
        [sys.executable, "-c", SERVE, workload, clock],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def turn(process: subprocess.Popen[str]) -> float:
    """Seconds of a round."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("again\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("seconds "):
            return float(line.split()[1])
    raise RuntimeError("the process has ended")


def main() -> None:
    """Print seconds before and now, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("--workload", default="A,B,C,D,E")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="seconds of processors, not of the clock")
    args = parser.parse_args()
    print(f"{'workload':10}{'before':>12}{'now':>12}{'ratio':>8}   turn by turn")
    for workload in args.workload.split(","):
        both = [server(path, workload, "cpu" if args.cpu else "wall") for path in (args.before.resolve(), HERE)]
        try:
            times = [[turn(p) for p in both] for _ in range(args.turns + 1)][1:]
        finally:
            for process in both:
                process.kill()
                process.wait()
        before, now = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = [b / a for a, b in times]
        each = " ".join(f"{r:.2f}" for r in ratios)
        print(f"{workload:10}{before:10.4f} s{now:10.4f} s{statistics.median(ratios):8.3f}   {each}", flush=True)


if __name__ == "__main__":
    main()
