"""A model of your own: any nn.Module made from the shape of a sample and the outputs; `head` names what is personal.

python examples/own_model.py [ROUNDS]
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import new_path


class Net(nn.Module):
    """Strokes of 3x3 pixels, then one layer."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int, filters: int = 8) -> None:
        super().__init__()
        channels, height, width = shape
        self.strokes = nn.Conv2d(channels, filters, 3, padding=1)
        self.out = nn.Linear(filters * (height // 2) * (width // 2), outputs)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.max_pool2d(torch.relu(self.strokes(x)), 2)
        return self.out(features.flatten(1))


if __name__ == "__main__":
    config = parse(
        {
            "rounds": int(sys.argv[1]) if len(sys.argv) > 1 else 10,
            "data": {"source": "digits", "clients": 5, "alpha": 0.3},
            "model": {"name": "own_model:Net", "filters": 4},  # of this file, which is imported by its name
            "local": {"lr": 0.1},
            "algorithm": {"name": "fedper"},
        }
    )
    run = runner.start(config, new_path(Path("runs"), "own-model"))
    first, second = (run.personal(client) for client in run.about["clients"][:2])
    for name in first:
        print(f"{name:15} {'common' if torch.equal(first[name], second[name]) else 'personal'}")
    print(f"accuracy {run.results['last']['test']['accuracy']['mean']:.3f}")
