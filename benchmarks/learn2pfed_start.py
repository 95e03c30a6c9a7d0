"""Learn2pFed before anything is learned: the error of ten cells from a cold start, by the first rho and Lambda.

    python -m benchmarks.learn2pfed_start [--seeds 5] [--preset paper]

The paper gives no first numbers; its Table II has 0.0024, 0.0023 and 0.0023 with nothing learned. On the paper's layout
of the data (x sorted, seed 42), eta = gamma = theta = rho; "ratio" is the largest factor, either way, between a figure
and the paper's.
"""

from __future__ import annotations

import argparse
from statistics import mean

from benchmarks.learn2pfed_degrees import CLIENTS, run
from fedtailor import algorithms
from fedtailor.data import load
from fedtailor.data.configs import PolynomialConfig

PAPER = (0.0024, 0.0023, 0.0023)
RHO = (0.01, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
LAM = (0.0001, 0.001, 0.01, 0.1, 1.0)
SPREADS = (0.1, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--preset", default="paper")
    chosen = parser.parse_args()
    print("| start | rho | Lambda | setting 1 | setting 2 | setting 3 | ratio |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for spread in SPREADS:
        for rho in RHO:
            for lam in LAM:
                options = {"rho": rho, "theta": rho, "lam": lam, "spread": spread, "learned": ()}
                algorithm = algorithms.make("learn2pfed", {"preset": chosen.preset, **options})
                errors = [mean(untrained(algorithm, setting, s) for s in range(chosen.seeds)) for setting in (1, 2, 3)]
                ratio = max(max(e / p, p / e) for e, p in zip(errors, PAPER, strict=True))
                figures = " | ".join(f"{e:.4f}" for e in errors)
                print(f"| N(0, {spread:g}^2) | {rho:g} | {lam:g} U(0, 1) | {figures} | {ratio:.2f} |", flush=True)


def untrained(algorithm: algorithms.Algorithm, setting: int, seed: int) -> float:
    """Error of the first round's v."""
    data = load(PolynomialConfig(clients=CLIENTS, setting=setting, layout="sorted", drawn=42), seed=seed)
    return run(data, algorithm, 1, seed, setting).error


if __name__ == "__main__":
    main()
