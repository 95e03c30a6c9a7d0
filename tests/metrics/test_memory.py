"""Peak memory, counted by tensor."""

from __future__ import annotations

import torch

from fedtailor.metrics.memory import megabytes, training_step
from fedtailor.models import build

MB = 2**20


def test_a_chain_keeps_what_its_backward_needs() -> None:
    x = torch.randn(MB // 4, requires_grad=True)  # 1 MB of floats
    one, four = (megabytes(lambda n=n: chain(x, n)) for n in (1, 4))
    assert one < four
    assert abs((four - one) - 3) < 0.1  # each further exp keeps its result


def chain(x: torch.Tensor, length: int) -> torch.Tensor:
    for _ in range(length):
        x = x.exp()
    return x


def test_an_equilibrium_does_not_pay_for_iterations() -> None:
    x = torch.randn(8, 1, 28, 28)

    def memory(iterations: int) -> float:
        options = {"max_iterations": iterations, "tolerance": 1e-30}
        return training_step(build("deq-resnet-xs", (1, 28, 28), 10, seed=0, options=options), x)

    assert memory(64) == memory(8)
    explicit = build("resnet14", (1, 28, 28), 10, seed=0, options={"norm": "group"})
    assert training_step(explicit, x) > 1.5 * memory(8)
