"""The hot path: a round of local training against plain torch doing the same steps, interleaved in one run.

    python benchmarks/local_step.py [--json FILE]

Prints seconds of ours, of plain torch, and the ratio, as medians of several repetitions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.federation import Federation
from fedtailor.core.me import Setting
from fedtailor.data.federated import FederatedData, Rows
from fedtailor.engines import EngineName, make
from fedtailor.local.training import Solver
from fedtailor.models import build

BATCH = 32


def data(shape: tuple[int, ...], clients: int, samples: int) -> FederatedData:
    """Noise of the right shape: the time of a step does not depend on the values."""
    generator = torch.Generator().manual_seed(0)

    def rows(each: int) -> Rows:
        x = torch.randn((clients * each, *shape), generator=generator)
        y = torch.randint(10, (clients * each,), generator=generator)
        return Rows(x, y, torch.arange(clients + 1) * each)

    names = tuple(f"c{i}" for i in range(clients))
    return FederatedData("noise", "classification", names, rows(samples), rows(1), rows(1), 10)


def plain(setting: Setting) -> Callable[[], None]:
    """One round of the same steps with torch.optim on one module, no federation around it."""
    module = setting.model.module.train()
    start = {k: v.clone() for k, v in module.state_dict().items()}

    def round() -> None:
        for client in range(len(setting.data.clients)):
            x, y = setting.data.train.of(client)
            module.load_state_dict(start)
            optimizer = torch.optim.SGD(module.parameters(), lr=setting.solver.lr)
            for rows in torch.randperm(len(x)).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(module(x[rows]), y[rows]).backward()
                optimizer.step()

    return round


def ours(setting: Setting, engine: EngineName) -> Callable[[], None]:
    """One round of FedAvg."""
    place = make(engine, setting)
    place.start()
    federation = Federation(place)
    server = setting.algorithm.server_init(setting.model)
    return lambda: federation.run_round(1, range(len(setting.data.clients)), server)


WORKLOADS: list[tuple[str, str, tuple[int, ...], int, int, EngineName]] = [
    ("fmnist-cnn, 10 clients x 640", "fmnist-cnn", (1, 28, 28), 10, 640, "loop"),
    ("lenet5, 10 clients x 640", "lenet5", (3, 32, 32), 10, 640, "loop"),
    ("mlp, 100 clients x 64, loop", "mlp", (1, 28, 28), 100, 64, "loop"),
    ("mlp, 100 clients x 64, vmap", "mlp", (1, 28, 28), 100, 64, "vmap"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    figures = []
    print(f"{'workload':32} {'ours':>8} {'plain':>8} {'ratio':>6}   (seconds per round, torch {torch.__version__})")
    for name, model, shape, clients, samples, engine in WORKLOADS:
        setting = Setting(
            FedAvg(), build(model, shape, 10, seed=0), data(shape, clients, samples), Solver(batch_size=BATCH), 0
        )
        rivals = {"ours": ours(setting, engine), "plain": plain(setting)}
        times: dict[str, list[float]] = {k: [] for k in rivals}
        for repetition in range(arguments.repeat + 1):
            for k, run in rivals.items():
                begun = time.perf_counter()
                run()
                if repetition:  # the first is for warming up
                    times[k].append(time.perf_counter() - begun)
        mine, limit = (statistics.median(times[k]) for k in ("ours", "plain"))
        figures.append({"workload": name, "ours_s": mine, "limit_s": limit, "ratio": mine / limit})
        print(f"{name:32} {mine:8.3f} {limit:8.3f} {mine / limit:6.2f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
