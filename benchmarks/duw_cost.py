"""What learning weights costs: outer iterations of DUW-FedAvg (first-order) against as many rounds of FedAvg.

    python benchmarks/duw_cost.py [--json FILE]

Both on the same engine, interleaved, medians. Memory: the most that a process needs which does nothing else, with one
and with eight local epochs per round.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fedtailor.algorithms.duw_fedavg import DUWFedAvg
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.engines import make
from fedtailor.models import build
from fedtailor.training.solver import Solver

ROUNDS, EPOCHS, REPEATS = 10, 2, 5
SIZES = (1713, 1713, 1713, 1713, 1716)  # the clients of DUW's environments III and IV


def data() -> FederatedData:
    """Noise of MNIST's shape."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((sum(SIZES), 784), generator=generator)
    y = torch.randint(10, (sum(SIZES),), generator=generator)
    rows = Rows(x, y, torch.tensor([0, *SIZES]).cumsum(0))
    empty = Rows(x[:0], y[:0], torch.zeros(len(SIZES) + 1, dtype=torch.int64))
    names = tuple(f"c{i}" for i in range(len(SIZES)))
    return FederatedData("noise", "classification", names, rows, empty, empty, 10)


def runner(algorithm: Algorithm, engine: Any) -> Callable[[int], None]:
    """Something that runs the round of a number."""
    task = data()
    model = build("mlp", task.shape, 10, seed=0, options={"hidden": [128, 128]})
    made = make(engine, Experiment(algorithm, model, task, Solver(lr=0.01, batch_size=50), 0), 64)
    made.start()
    federation, server = Federation(made), algorithm.server_init(model)

    def one(round: int) -> None:
        nonlocal server
        server = federation.run_round(round, range(len(SIZES)), server)

    return one


def duw(epochs: int) -> DUWFedAvg:
    return DUWFedAvg(epochs=epochs, horizon=ROUNDS, outer_iterations=1000)


def timed(one: Callable[[int], None], rounds: range) -> float:
    begun = time.perf_counter()
    for round in rounds:
        one(round)
    return time.perf_counter() - begun


def cost(engine: str) -> dict[str, float | str]:
    """One outer iteration against the rounds of FedAvg in it."""
    learn, plain = runner(duw(EPOCHS), engine), runner(FedAvg(epochs=EPOCHS), engine)
    learn(-999)
    plain(1)
    pairs = [(timed(learn, range(-900 + i, -899 + i)), timed(plain, range(2, 2 + ROUNDS))) for i in range(REPEATS)]
    ours, limit = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {"workload": f"outer iteration, {engine}", "ours_s": ours, "limit_s": limit, "ratio": ours / limit}


def peak(epochs: int) -> float:
    """Gigabytes at the most."""
    torch.set_num_threads(1)
    runner(duw(epochs), "loop")(-999)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)  # a process of its own, for its memory
    arguments = parser.parse_args()
    if arguments.peak:
        print(peak(arguments.peak))
        return
    torch.set_num_threads(1)
    found = [cost(engine) for engine in ("loop", "vmap")]
    for f in found:
        print(f"{f['workload']:24} {f['ours_s']:7.3f} s, FedAvg {f['limit_s']:7.3f} s, ratio {f['ratio']:.3f}")
    memory = {}
    for epochs in (1, 8):
        told = subprocess.run([sys.executable, __file__, "--peak", str(epochs)], check=True, capture_output=True)
        memory[epochs] = float(told.stdout)
        print(f"peak memory with {epochs} local epochs: {memory[epochs]:.3f} GB")
    found.append(
        {
            "workload": "memory, 8 local epochs",
            "ours_s": memory[8],
            "limit_s": memory[1],
            "ratio": memory[8] / memory[1],
        }
    )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
