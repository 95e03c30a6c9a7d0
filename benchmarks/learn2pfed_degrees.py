"""Learn2pFed on Table I's task: error against an oracle, whether its degrees show the pattern, and whether it diverges.

    python benchmarks/learn2pfed_degrees.py [--seeds 20]

The oracle is joint least squares that is told which coefficients are shared. A pattern is recovered if every degree of
a shared coefficient is above every degree of a personal one. A run diverges if it is abandoned for numbers that are not
finite or out of bounds; "worst" is the largest error of a seed over that of own least squares. For "holdout" a fifth of
each client's samples is for validation, and the served model is fitted to all of them again.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from math import isfinite
from statistics import mean
from typing import Any

import torch

from fedtailor import algorithms, engines
from fedtailor.algorithms._shared.learnables import SCALARS
from fedtailor.algorithms.learn2pfed import Learn2pFed
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.data import load
from fedtailor.data.configs import PolynomialConfig
from fedtailor.errors import RoundAbandoned, UserError
from fedtailor.models import build
from fedtailor.training.solver import Solver

CLIENTS, FEATURES, HELD, EPOCHS, TABLE_SEEDS = 10, 4, 5, 100, 8
METHODS: dict[str, dict[str, Any]] = {
    "loo": {},
    "holdout": {"outer": "holdout"},
    "loo, all learned": {"learned": ("lam", *SCALARS)},
    "holdout, all learned": {"outer": "holdout", "learned": ("lam", *SCALARS)},
}


@dataclass(frozen=True)
class Ending:
    """How one run ended."""

    error: float  # mean squared error against the noise-free targets, mean over clients; inf if it was abandoned
    margin: float = 0.0  # smallest degree of a shared coefficient over the largest of a personal one


def with_validation(data: FederatedData) -> FederatedData:
    """One of `HELD` samples of each client for validation."""
    parts: dict[str, list[Any]] = {"train": [], "val": []}
    for i in range(len(data.clients)):
        x, y = data.train.of(i)
        is_held = torch.arange(len(y)) % HELD == 0
        parts["train"].append((x[~is_held], y[~is_held]))
        parts["val"].append((x[is_held], y[is_held]))
    rows = {}
    for split, clients in parts.items():
        sizes = torch.tensor([0, *(len(y) for _, y in clients)])
        rows[split] = Rows(torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients]), sizes.cumsum(0))
    return replace(data, train=rows["train"], val=rows["val"])


def run(data: FederatedData, algorithm: Any, rounds: int, seed: int, setting: int) -> Ending:
    """Train, and compare the served models with the truth."""
    model = build("linear", data.shape, 1, seed=seed, options={"bias": False}, dtype=torch.float64)
    experiment = Experiment(algorithm, model, data, Solver(lr=0.1, batch_size=0), seed)
    errors: list[float] = []
    try:
        with engines.open_engine("vmap", experiment) as engine:
            fed, server = Federation(engine), algorithm.server_init(model)
            everybody = range(len(data.clients))
            for round in range(1, rounds + 1):
                server = fed.run_round(round, everybody, server)
            margin = 0.0
            if isinstance(algorithm, Learn2pFed):
                degrees = algorithm.roots_of(engine.get_states()["state"], server).flatten(1) ** -2
                shared, personal = degrees.split([FEATURES - setting, setting], dim=1)
                margin = float(shared.min() / personal.max())
            for clients, _, served in engine.evaluate(everybody, rounds, server, []):
                for row, client in enumerate(clients):
                    x, y = data.test.of(client)
                    errors.append(float((model({k: v[row] for k, v in served.items()}, x) - y).square().mean()))
    except (RoundAbandoned, UserError):
        return Ending(float("inf"))
    return Ending(mean(errors), margin)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    endings: dict[tuple[str, int], list[Ending]] = {}
    for setting in (1, 2, 3):
        for seed in range(seeds):
            data = load(PolynomialConfig(clients=CLIENTS, setting=setting), seed=seed)
            bounds = {"oracle": tuple(range(FEATURES - setting, FEATURES)), "own": tuple(range(FEATURES))}
            for title, personal in bounds.items():
                algorithm = algorithms.make("jointls", {"personal_features": personal})
                endings.setdefault((title, setting), []).append(run(data, algorithm, 1, seed, setting))
            for title, options in METHODS.items():
                used = with_validation(data) if options.get("outer") == "holdout" else data
                ending = run(used, algorithms.make("learn2pfed", options), EPOCHS, seed, setting)
                endings.setdefault((title, setting), []).append(ending)
    few = min(TABLE_SEEDS, seeds)
    print(f"{seeds} seeds, {EPOCHS} epochs; the error over the oracle's is that of the first {few} seeds.\n")
    print("| outer loss | setting | error over the oracle's | pattern recovered | smallest margin | diverged | worst |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for title in METHODS:
        for setting in (1, 2, 3):
            found, own = endings[title, setting], endings["own", setting]
            oracle = mean(e.error for e in endings["oracle", setting][:few])
            ratio = mean(e.error for e in found[:few]) / oracle
            diverged = sum(not isfinite(e.error) for e in found)
            worst = max(e.error / o.error for e, o in zip(found, own, strict=True))
            recovered, margin = sum(e.margin > 1 for e in found), min(e.margin for e in found)
            cells = (f"{ratio:.3f}", f"{recovered} of {seeds}", f"{margin:.3g}", str(diverged), f"{worst:.2f}")
            print(f"| {title} | {setting} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
