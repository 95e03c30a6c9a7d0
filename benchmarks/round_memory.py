"""Memory of one round, in models: python benchmarks/round_memory.py --engine pool --workers 2

FedAvg with many clients of a ResNet-18. What counts is the peak of the round above what was there before it (model and
data); memory that processes share counts once (PSS). A mean holds one
running sum, so the number of clients does not matter.
"""

from __future__ import annotations

import argparse
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from fedtailor import algorithms, engines
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.random import stream
from fedtailor.models import build
from fedtailor.training.solver import Solver

SAMPLES, BATCH = 4, 2


def federation(clients: int) -> FederatedData:
    """Small images, so that models are what memory goes to."""
    rng = stream("images")
    x = torch.from_numpy(rng.normal(size=(clients * SAMPLES, 3, 32, 32))).float()
    y = torch.from_numpy(rng.integers(10, size=len(x)))
    starts = torch.arange(clients + 1) * SAMPLES
    none = Rows(x[:0], y[:0], torch.zeros(clients + 1, dtype=torch.int64))
    names = tuple(f"client-{i:03d}" for i in range(clients))
    return FederatedData("images", "classification", names, Rows(x, y, starts), none, none, 10)


def held() -> int:
    """Bytes of this process and its children, what they share counted once."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    total = 0
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().split("\n")
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


@dataclass
class Peak:
    """The most that was held while it watched."""

    most: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Peak:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            self.most = max(self.most, held())
            time.sleep(0.01)


def measure(engine: engines.EngineName, clients: int, workers: int, width: int) -> float:
    """Models above what was there before the round."""
    data = federation(clients)

    def experiment(width: int) -> Experiment:
        model = build("resnet18", data.shape, 10, seed=0, options={"width": width, "norm": "group"})
        return Experiment(algorithms.make("fedavg", {}), model, data, Solver(lr=0.01, batch_size=BATCH), 0)

    small, large = experiment(8), experiment(width)
    with engines.open_engine("loop", small) as made:  # code and libraries are there from now on
        Federation(made).run_round(1, range(2), small.model.params)
    with engines.open_engine(engine, large, workers=workers) as made:
        fed, before = Federation(made), held()
        with Peak() as peak:
            fed.run_round(1, range(clients), large.model.params)
    return (peak.most - before) / sum(v.nbytes for v in large.model.params.values())


def main() -> None:
    """Print the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="loop", choices=["loop", "pool"])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="64 has 11 million parameters")
    args = parser.parse_args()
    models = measure(args.engine, args.clients, args.workers, args.width)
    each = f", {models / args.workers:.1f} per worker" if args.engine == "pool" else ""
    print(f"{args.engine}, {args.clients} clients: {models:.1f} models above model and data{each}")


if __name__ == "__main__":
    main()
