"""Seconds per round on a device beside those on the CPU, for whoever has one.

    python -m benchmarks.gpu [--device auto] [--workload A,B,C,Q] [--rounds 5] [--small] [--json FILE]

A: a convolutional network. B: a dense network at many small clients. C: FedRep, Ditto and FedSelect at 20 clients.
Q: the quick start of PFLlib (FedAvg, CNN, MNIST at 20 clients by Dirichlet 0.1, batch 10). Medians over rounds; the
first does not count. Where there is no device, the CPU's figures alone. With FEDTAILOR_DATA set the images are MNIST,
otherwise noise of the same shape.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.speed_core import Ours, dealt, images, in_turns, setting
from benchmarks.speed_tasks import CLASSES, LR, SHAPE, SMALL, TASKS, title
from fedtailor import algorithms
from fedtailor.core.experiment import Experiment
from fedtailor.data.partitions import dirichlet
from fedtailor.engines import devices
from fedtailor.errors import UserError
from fedtailor.models import build
from fedtailor.training.solver import Solver


def tasks(wanted: str, small: bool) -> Iterator[tuple[str, Experiment, int]]:
    """Each with its name and the clients of a round."""
    sizes = SMALL if small else TASKS
    for workload in ("A", "B"):
        if workload in wanted:
            task = sizes[workload]
            yield title(workload, task), setting(workload, task, algorithms.make("fedavg", {})), task.cohort
    if "C" in wanted:
        for method, own in (("FedRep", {"head_epochs": 1}), ("Ditto", {}), ("FedSelect", {})):
            yield f"C: {method}, 20 clients", unequal(method.lower(), own, 40 if small else 10_500, LR), 0
    if "Q" in wanted:
        yield "Q: FedAvg, 20 clients, as PFLlib's quick start", unequal("fedavg", {}, 60 if small else 60_000, 0.005), 0


def unequal(algorithm: str, options: dict[str, int], samples: int, lr: float) -> Experiment:
    """Twenty clients with few labels each."""
    x, y = images(samples)
    parts = dirichlet(y.numpy(), 20 if samples > 1000 else 3, 0, 0.1, min_samples=10)
    model = build("cnn", SHAPE, CLASSES, seed=0)
    return Experiment(algorithms.make(algorithm, options), model, dealt(parts, x, y), Solver(lr=lr, batch_size=10), 0)


class OnDevice(Ours):
    """Rounds that are over when the device is."""

    def __call__(self) -> None:
        super().__call__()
        device = self.engine.experiment.device
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workload", default="A,B,C,Q")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="tiny tasks: whether it runs, not how fast it is")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    asked = parser.parse_args()
    try:
        device, why = devices.find(asked.device)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if device.type == "cpu":
        print(f"the CPU's figures alone: {why}", file=sys.stderr)
    print(f"{'seconds per round, torch ' + torch.__version__:52} {device!s:>10} {'cpu':>10} {'faster':>8}  engines")
    figures = []
    for name, made, cohort in tasks(asked.workload, asked.small):
        rivals = {"cpu": OnDevice(made, "auto", cohort)}
        if device.type != "cpu":
            rivals = {"device": OnDevice(devices.place(made, device), "auto", cohort)} | rivals
        found = in_turns(rivals, asked.rounds)
        chosen = ", ".join(rival.engine_name for rival in rivals.values())
        there, faster = "-", "-"
        if "device" in found:
            there, faster = f"{found['device']:.4f}", f"{found['cpu'] / found['device']:.2f}"
        print(f"{name:52} {there:>10} {found['cpu']:10.4f} {faster:>8}  {chosen}")
        figures.append({"task": name, "device": str(device), "engines": chosen, **found})
        for rival in rivals.values():
            rival.close()
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
