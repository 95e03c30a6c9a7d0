"""The tasks that speed is measured on. Needs torch alone, so that other frameworks can be given the same ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SHAPE, CLASSES, LR = (1, 28, 28), 10, 0.05


@dataclass(frozen=True)
class Task:
    """Some clients with equally many images; a few of them train for one epoch per round."""

    clients: int
    cohort: int
    samples: int
    batch: int


TASKS = {"A": Task(100, 10, 600, 32), "B": Task(1000, 100, 60, 10)}
SMALL = {"A": Task(6, 2, 64, 32), "B": Task(40, 20, 20, 10)}


def title(workload: str, task: Task) -> str:
    """The task in a few words."""
    model = {"A": "CNN 582 026", "B": "MLP 784-200-10"}[workload]
    return f"{workload}: {model}, {task.cohort} of {task.clients} clients x {task.samples}, batch {task.batch}"


class ConvNet(nn.Module):
    """Two 5x5 convolutions (32, 64) with max pooling and 512 dense units: 582 026 parameters.

    To pool first gives the same numbers, and a ReLU of a fourth as many.
    """

    def __init__(self, *, pools_first: bool = False) -> None:
        super().__init__()
        self.pools_first = pools_first
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 64, 5)
        self.hidden, self.out = nn.Linear(1024, 512), nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in (self.conv1, self.conv2):
            x = convolution(x)
            x = torch.relu(F.max_pool2d(x, 2)) if self.pools_first else F.max_pool2d(torch.relu(x), 2)
        return self.out(torch.relu(self.hidden(x.flatten(1))))


def network(workload: str) -> nn.Module:
    """The model of workload A or B."""
    if workload == "A":
        return ConvNet()
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def noise(images: int) -> tuple[Tensor, Tensor]:
    """Random images and labels: the time of a step does not depend on the values."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(images, *SHAPE, generator=generator), torch.randint(CLASSES, (images,), generator=generator)


def asked() -> tuple[str, Task, int]:
    """Which task another framework shall run, and for how many rounds: "A full 6" in the environment variable TASK."""
    workload, size, rounds = os.environ["TASK"].split()[:3]
    return workload, (SMALL if size == "small" else TASKS)[workload], int(rounds)


def told(times: Sequence[float]) -> None:
    """Print the seconds between the ends of rounds, for peers.py."""
    print("seconds", *(f"{after - before:.4f}" for before, after in pairwise(times)), flush=True)
