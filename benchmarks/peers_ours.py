"""FedAvg in fedtailor, measured as the others are. See peers.py."""

from __future__ import annotations

import time

from benchmarks.speed_core import Ours, setting
from benchmarks.speed_tasks import asked, told
from fedtailor import algorithms


def main() -> None:
    workload, task, rounds = asked()
    run = Ours(setting(workload, task, algorithms.make("fedavg", {})), "auto", task.cohort)
    times = [time.perf_counter()]
    for _ in range(rounds):
        run()
        times.append(time.perf_counter())
    run.close()
    told(times)


if __name__ == "__main__":
    main()
