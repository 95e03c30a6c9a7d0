"""The discrepancy by its definition, pair by pair."""

from math import exp

import torch

from fedtailor.core.random import stream
from fedtailor.numerics.discrepancy import discrepancy
from tests.helpers import F64


def test_by_definition() -> None:
    rng = stream("discrepancy")
    a, b = (torch.from_numpy(rng.normal(size=(4, 3))) for _ in range(2))
    widths = (0.5, 2.0)

    def mean(x: torch.Tensor, y: torch.Tensor) -> float:
        pairs = [(u - v).square().sum().item() for u in x for v in y]
        return sum(exp(-d / (2 * w)) for d in pairs for w in widths) / len(pairs)

    wanted = mean(a, a) + mean(b, b) - 2 * mean(a, b)
    assert abs(float(discrepancy(a, b, torch.ones(4, dtype=F64), widths)) - wanted) < 1e-14


def test_rows_without_weight_do_not_count() -> None:
    rng = stream("weights")
    a, b = (torch.from_numpy(rng.normal(size=(5, 2))) for _ in range(2))
    some = torch.tensor([1, 0, 1, 1, 0], dtype=F64)
    kept = discrepancy(a[[0, 2, 3]], b[[0, 2, 3]], torch.ones(3, dtype=F64), (1.0,))
    torch.testing.assert_close(discrepancy(a, b, some, (1.0,)), kept, rtol=0, atol=1e-14)


def test_of_a_sample_with_itself_it_is_0() -> None:
    a = torch.from_numpy(stream("same").normal(size=(6, 2)))
    ones = torch.ones(6, dtype=F64)
    assert abs(float(discrepancy(a, a, ones, (1.0, 10.0)))) < 1e-15
    assert float(discrepancy(a, a + 1, ones, (1.0, 10.0))) > 0.1
