"""Learn2pFed before anything is learned: the error of ten cells from a cold start, by the first rho and Lambda.

    python -m benchmarks.learn2pfed_start [--seeds 5] [--preset paper]

The paper gives no first numbers; its Table II has 0.0024, 0.0023 and 0.0023 with nothing learned. On the paper's layout
of the data (x sorted, seed 42), for the 10 clients of its text and the 5 of its Figure 3 and of the released demo;
eta = gamma = theta = rho. "ratio" is the largest factor, either way, between a figure and the paper's.
"""

from __future__ import annotations

import argparse
from statistics import mean
from typing import Any

from benchmarks.learn2pfed_degrees import run
from fedtailor import algorithms
from fedtailor.data import load
from fedtailor.data.configs import PolynomialConfig

PAPER = (0.0024, 0.0023, 0.0023)
RHO = (0.01, 0.05, 0.1, 0.15, 0.2, 0.5, 1.0)
LAM = (0.001, 0.05, 0.1, 0.2, 0.3, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--preset", default="paper")
    chosen = parser.parse_args()
    print("| clients | rho | Lambda | setting 1 | setting 2 | setting 3 | ratio |")
    print("|---:|---:|---|---:|---:|---:|---:|")
    for clients in (5, 10):
        for rho in RHO:
            for lam in LAM:
                options = {"rho": rho, "theta": rho, "lam": lam, "learned": ()}
                algorithm = algorithms.make("learn2pfed", {"preset": chosen.preset, **options})
                errors = [
                    mean(untrained(algorithm, clients, setting, seed) for seed in range(chosen.seeds))
                    for setting in (1, 2, 3)
                ]
                ratio = max(max(e / p, p / e) for e, p in zip(errors, PAPER, strict=True))
                figures = " | ".join(f"{e:.4f}" for e in errors)
                print(f"| {clients} | {rho:g} | {lam:g} U(0, 1) | {figures} | {ratio:.2f} |", flush=True)


def untrained(algorithm: Any, clients: int, setting: Any, seed: int) -> float:
    """Error of the first round's v."""
    data = load(PolynomialConfig(clients=clients, setting=setting, layout="sorted", drawn=42), seed=seed)
    return run(data, algorithm, 1, seed, setting).error


if __name__ == "__main__":
    main()
