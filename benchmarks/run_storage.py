"""Disk and memory of a whole run with a ResNet-18: python -m benchmarks.run_storage fedavg fedselect --clients 2 4

Two rounds on small images, four for each client, in which one model is selected and another one is the last. Disk is
the run's folder in models of 45 MB; memory is the peak of all processes, what they share counted once (PSS).
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.round_memory import Peak, federation
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse

MODEL = 11_173_962 * 4  # bytes


def measure(algorithm: str, clients: int, engine: str, norm: str) -> tuple[float, float]:
    """Models on disk, and gigabytes of memory."""
    data = federation(clients)
    data = replace(data, val=data.train, test=data.train)
    tables: dict[str, Any] = {
        "rounds": 2,
        "data": {"source": "cifar10", "clients": clients},
        "model": {"name": "resnet18", "norm": norm},
        "algorithm": {"name": algorithm},
        "local": {"lr": 0.01, "batch_size": 4},
        "federation": {"engine": engine},
    }
    with tempfile.TemporaryDirectory() as folder, Peak() as peak:
        done = runner.start(parse(tables), Path(folder) / "run", loaded=data)
        size = sum(file.stat().st_size for file in done.path.rglob("*") if file.is_file())
    return size / MODEL, peak.most / 1e9


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="+")
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--engine", default="auto", choices=["auto", "loop", "vmap", "pool"])
    parser.add_argument("--norm", default="batch", choices=["batch", "group"], help="batch has private buffers")
    args = parser.parse_args()
    for algorithm in args.algorithms:
        for clients in args.clients:
            models, memory = measure(algorithm, clients, args.engine, args.norm)
            print(f"{algorithm}, {clients} clients: {models:.2f} models on disk, {memory:.2f} GB of memory", flush=True)


if __name__ == "__main__":
    main()
