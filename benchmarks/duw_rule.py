"""A weighting rule learned in DUW's environment II (5 clients), used on 10 others with a label skew of their own.

    FEDTAILOR_DATA=... python benchmarks/duw_rule.py

Resumable: finished runs are kept under runs/duw-rule. Prints test accuracy of the common model, mean over clients.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import CONFIG, RunFolder

RUNS = Path("runs/duw-rule")
COMMON: dict[str, Any] = {
    "rounds": 10,
    "model": {"name": "mlp", "hidden": [128, 128]},
    "local": {"lr": 0.01, "batch_size": 50},
    "evaluation": {"every": 10},
    "checkpoint": {"seconds": 60},
}
LEARNER = {"name": "duw-fedavg", "epochs": 2, "weights": "rule", "outer_iterations": 15, "outer_lr": 0.05}
OTHERS = {"source": "mnist", "clients": 10, "partition": "dirichlet", "alpha": 0.1, "max_samples": 2000, "val": 0.0}
DRAWS = range(100, 105)


def finished(name: str, tables: dict[str, Any]) -> RunFolder:
    path = RUNS / name
    root = Path(os.environ["FEDTAILOR_DATA"])
    return runner.resume(path, root) if (path / CONFIG).exists() else runner.start(parse(COMMON | tables), path, root)


def accuracy(run: RunFolder) -> float:
    assert run.results is not None
    return 100 * float(run.results["last"]["test"]["accuracy"]["mean"])


def main() -> None:
    learned = finished("learned-II", {"data": {"source": "duw-mnist", "environment": "II"}, "algorithm": LEARNER})
    rule = [line["report"]["theta"] for line in learned.metrics() if "theta" in line.get("report", {})][-1]
    print(f"Learned on environment II, where it reaches {accuracy(learned):.2f} %. New draws of 10 clients:\n")
    print("| draw | FedAvg's weights | learned rule | gain |\n|---|---:|---:|---:|")
    gains = []
    for seed in DRAWS:
        data = {"data": OTHERS, "seed": seed}
        plain = finished(f"fedavg-{seed}", data | {"algorithm": {"name": "fedavg", "epochs": 2}})
        used = LEARNER | {"outer_iterations": 0, "theta": rule}
        ruled = finished(f"rule-{seed}", data | {"algorithm": used})
        gains.append(accuracy(ruled) - accuracy(plain))
        print(f"| {seed} | {accuracy(plain):.2f} | {accuracy(ruled):.2f} | {gains[-1]:+.2f} |")
    print(f"\nMean gain {mean(gains):+.2f} points, spread {stdev(gains):.2f}.")


if __name__ == "__main__":
    main()
