"""Learn2pFed, Figure 3: the diagonal of Lambda before and after learning, five clients, setting 1.

    python -m benchmarks.learn2pfed_figure3 [--epochs 500] [--preset paper] [--mean]

The paper's preset on the paper's layout of the data, seed 0; all clients begin with the same Lambda. With numbers for
each cell, the mean over cells is shown. "effective" is rho / eta Lambda, which decides where the cells would end. The
paper reports that the entries of x^2 and x^3 go to 0 at all clients.
"""

from __future__ import annotations

import argparse

import torch

from fedtailor import algorithms, engines
from fedtailor.algorithms._shared.learnables import positive_numbers
from fedtailor.algorithms.learn2pfed import Learn2pFed
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.data import load
from fedtailor.data.configs import PolynomialConfig
from fedtailor.models import build
from fedtailor.training.solver import Solver

CLIENTS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--mean", action="store_true", help="learn from the mean loss, not from the sum")
    chosen = parser.parse_args()
    data = load(PolynomialConfig(clients=CLIENTS, layout="sorted", drawn=42), seed=0)
    algorithm = algorithms.make("learn2pfed", {"preset": chosen.preset} | ({"sum_loss": False} if chosen.mean else {}))
    assert isinstance(algorithm, Learn2pFed)
    model = build("linear", data.shape, 1, seed=0, options={"bias": False}, dtype=torch.float64)
    experiment = Experiment(algorithm, model, data, Solver(lr=0.1, batch_size=0), 0)
    print("| client | Lambda | 1 | x | x^2 | x^3 |")
    print("|---|---|---:|---:|---:|---:|")
    with engines.open_engine("vmap", experiment) as engine:
        fed, server = Federation(engine), algorithm.server_init(model)
        show("all", "first", algorithm, engine.get_states()["state"]["learned"]["raw"][0])
        for epoch in range(1, chosen.epochs + 1):
            server = fed.run_round(epoch, range(CLIENTS), server)
        for name, raw in zip(data.clients, engine.get_states()["state"]["learned"]["raw"], strict=True):
            show(name, "learned", algorithm, raw)


def show(client: str, when: str, algorithm: Learn2pFed, raw: torch.Tensor) -> None:
    """A row of degrees, and one of effective degrees."""
    x = [positive_numbers(row, torch.Size((4, 1)), algorithm.positive) for row in torch.atleast_2d(raw)]
    each = {
        when: torch.stack([one["lam"] for one in x]).mean(0),
        f"{when}, effective": torch.stack([one["rho"] / one["eta"] * one["lam"] for one in x]).mean(0),
    }
    for label, lam in each.items():
        print(f"| {client} | {label} | " + " | ".join(f"{v:.4f}" for v in lam.flatten().tolist()) + " |")


if __name__ == "__main__":
    main()
