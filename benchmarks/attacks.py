"""Clients that lie: methods x attacks x means. python benchmarks/attacks.py [--methods NAMES] [--alpha 1.0] [--json F]

Digits dealt equally to 20 clients (at most 24 training samples each), an MLP of 32, 60 rounds; a fifth of the
clients lie in every round. Test accuracy of the honest ones in the last round, mean over clients and seeds. "alone" is
Local. A mean keeps so much of the gain: (with lies - alone) / (without lies, weighted mean - alone).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from fedtailor.experiments import runner
from fedtailor.experiments.building import attack_of
from fedtailor.experiments.config import RunConfig, parse

METHODS = ("fedavg", "ditto", "fedrep", "learn2pfed-net")
ATTACKS = ("none", "sign-flip", "scaling", "noise", "label-flip")
MEANS = ("weighted", "median", "trimmed", "krum", "clipped")
TASK: dict[str, Any] = {
    "rounds": 60,
    "data": {"source": "digits", "clients": 20, "partition": "iid", "max_train": 24},
    "model": {"name": "mlp", "hidden": [32]},
    "local": {"lr": 0.1, "batch_size": 8},
    "evaluation": {"every": 60},
    "checkpoint": {"every": 1000},
}


def config(method: str, attack: str, means: str, seed: int) -> RunConfig:
    """One run."""
    tables = {"seed": seed, "algorithm": {"name": method}, "attack": {"name": attack}, "aggregation": {"mean": means}}
    made: RunConfig = parse(TASK | tables)
    return made


def accuracy(method: str, attack: str, means: str, seed: int) -> float:
    """Of those clients that are honest in every attack of this seed, in percent."""
    made = config(method, attack, means, seed)
    liars = attack_of(config(method, "sign-flip", means, seed)).clients(made.data.clients)  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder:
        results = runner.start(made, Path(folder, "run")).results
    assert results is not None
    each = results["last"]["clients"]["accuracy"]
    return 100 * mean(v for i, v in enumerate(each) if i not in liars and v == v)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--alpha", type=float, help="digits dealt by Dirichlet with this alpha, not equally")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    TASK["rounds"] = TASK["evaluation"]["every"] = given.rounds
    if given.alpha is not None:
        TASK["data"] |= {"partition": "dirichlet", "alpha": given.alpha}
    found: dict[str, Any] = {}
    alone = mean(accuracy("local", "none", "weighted", seed) for seed in given.seeds)
    print(
        f"alone: {alone:.1f}\n\n| method | attack | {' | '.join(MEANS)} |\n|---|---|{'---|' * len(MEANS)}", flush=True
    )
    for method in given.methods:
        clean = 0.0
        for attack in ATTACKS:
            cells = []
            for means in MEANS:
                value = mean(accuracy(method, attack, means, seed) for seed in given.seeds)
                clean = value if (attack, means) == ("none", "weighted") else clean
                kept = 100 * (value - alone) / (clean - alone)
                found[f"{method}/{attack}/{means}"] = {"accuracy": value, "kept": kept}
                cells.append(f"{value:.1f} ({kept:.0f} %)")
            print(f"| {method} | {attack} | {' | '.join(cells)} |", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"alone": alone, "seeds": given.seeds, "cells": found}, indent=1))


if __name__ == "__main__":
    main()
