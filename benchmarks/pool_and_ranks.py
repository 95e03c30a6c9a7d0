"""Two ways to use two processes: the workers of `pool`, and ranks as torchrun starts them.

    python -m benchmarks.pool_and_ranks [--workload A,B,C] [--turns 9] [--small]

Both run rounds of workloads A, B and C (FedRep) of `benchmarks.speed`, each in processes of its own that take turns, a
round at a time; figures are medians over the turns, the first does not count. Processor seconds and memory are those of
all processes of a side. Then one worker and one rank are killed in the middle of a round. Linux only.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.speed_tasks import CLASSES, LR, SHAPE, SMALL, TASKS

SIDES = {"pool": 1, "ranks": 2}  # processes that are started; the pool starts its own
UNCOUNTED = 1  # turns


class Side:
    """The processes of one engine, which run a round for each line that they get."""

    def __init__(self, name: str, workload: str, *, small: bool) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        count = SIDES[name]
        command = [sys.executable, "-m", "benchmarks.pool_and_ranks", "--serve", name, "--workload", workload]
        self.processes = [
            subprocess.Popen(
                command + (["--small"] if small else []),
                env=os.environ
                | ({} if count == 1 else {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)})
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_WAIT_POLICY": "PASSIVE"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        for process in self.processes:
            read(process)

    def send(self) -> None:
        """Ask for a round."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("again\n")
            process.stdin.flush()

    def pids(self) -> list[int]:
        """All processes, with those that they have started."""
        own = [process.pid for process in self.processes if process.poll() is None]
        return own + [int(pid) for p in own for pid in Path(f"/proc/{p}/task/{p}/children").read_text().split()]

    def processor_seconds(self) -> float:
        spent = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in self.pids()]
        return sum(int(ticks) for each in spent for ticks in each) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """Megabytes; what processes share counts once."""
        lines = [line for pid in self.pids() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024

    def turn(self) -> tuple[float, float]:
        """Clock and processor seconds of a round."""
        before, begun = self.processor_seconds(), time.perf_counter()
        self.send()
        for process in self.processes:
            read(process)
        return time.perf_counter() - begun, self.processor_seconds() - before

    def kill_one(self, after: float) -> str:
        """What comes of a round in which a worker or a rank is killed after so many seconds."""
        begun = time.perf_counter()
        self.send()
        time.sleep(after)
        os.kill(self.pids()[-1], signal.SIGKILL)
        said = read(self.processes[0])
        return f"after {time.perf_counter() - begun:.2f} s: {said}"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def read(process: subprocess.Popen[str]) -> str:
    """The next line that is meant for us."""
    assert process.stdout is not None
    return next((line.removeprefix("> ").strip() for line in process.stdout if line.startswith("> ")), "ended")


def serve(name: str, workload: str, *, small: bool) -> None:
    """Run a round for each line."""
    from benchmarks.speed_core import dealt, images, setting
    from fedtailor import algorithms, engines
    from fedtailor.core.engine import Engine
    from fedtailor.core.experiment import Experiment
    from fedtailor.core.federation import Federation
    from fedtailor.core.process_group import SINGLE_PROCESS
    from fedtailor.core.random import stream
    from fedtailor.core.reduce import Limits
    from fedtailor.data.partitions import dirichlet
    from fedtailor.engines import machine
    from fedtailor.engines.ranks import Sharded, join
    from fedtailor.errors import RankLost
    from fedtailor.models import build
    from fedtailor.training.solver import Solver

    ranks, cohort = SINGLE_PROCESS if name == "pool" else join(600), 0
    if workload == "C":
        x, y = images(40 if small else 10_500)
        data = dealt(dirichlet(y.numpy(), 3 if small else 20, 0, 0.1, min_samples=10), x, y)
        model = build("cnn", SHAPE, CLASSES, seed=0)
        fedrep = algorithms.make("fedrep", {"head_epochs": 1})
        made = Experiment(fedrep, model, data, Solver(lr=LR, batch_size=10), 0)
    else:
        task = (SMALL if small else TASKS)[workload]
        made, cohort = setting(workload, task, algorithms.make("fedavg", {})), task.cohort
    is_stacked = engines.choose(made, cohort, 2).name == "vmap"
    with machine.training_settings():
        engine: Engine
        if name == "pool":
            engine = engines.make("vmap" if is_stacked else "pool", made, workers=2, cohort=cohort)
        else:
            engine = Sharded(made, "vmap" if is_stacked else "loop", 0, ranks)
        engine.start()
        fed, server = Federation(engine, Limits(), ranks), made.algorithm.server_init(made.model)
        everybody = len(made.data.clients)
        print("> ready", flush=True)
        for number, _ in enumerate(sys.stdin, 1):
            drawn = stream(0, number, "cohort").choice(everybody, size=cohort or everybody, replace=False)
            try:
                server = fed.run_round(number, sorted(drawn.tolist()), server)
            except RankLost as error:
                print(f"> RankLost: {error}", flush=True)
                return
            print(f"> done, {len(fed.present)} clients", flush=True)
        engine.close()


def main() -> None:
    """Print the table, and what became of a killed process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="A,B,C")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="a few clients, to see that it runs")
    parser.add_argument("--serve", choices=list(SIDES), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve, asked.workload, small=asked.small)
        return
    print("| workload | | clock s | processor s | memory MB |\n|---|---|---:|---:|---:|")
    ends = []
    for workload in asked.workload.split(","):
        sides = {name: Side(name, workload, small=asked.small) for name in SIDES}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(asked.turns + UNCOUNTED):
            for name, side in sides.items():
                times[name].append(side.turn())
        medians = {n: [statistics.median(each) for each in zip(*t[UNCOUNTED:], strict=True)] for n, t in times.items()}
        for name, side in sides.items():
            clock, processors = medians[name]
            print(f"| {workload} | {name} | {clock:.3f} | {processors:.3f} | {side.memory():.0f} |", flush=True)
        clock, processors = (b / a for a, b in zip(medians["pool"], medians["ranks"], strict=True))
        print(f"| {workload} | ranks / pool | {clock:.2f} | {processors:.2f} | |", flush=True)
        for name, side in sides.items():
            usual = min(clock for clock, _ in times[name])
            ends.append(f"{workload}, {name}: killed in a round of {usual:.2f} s; {side.kill_one(usual / 2)}")
            side.close()
    print("", *ends, sep="\n")


if __name__ == "__main__":
    main()
