"""What overlaps of what is own."""

import torch

from fedtailor.runs.explain import overlaps


def test_overlap_by_layer() -> None:
    shares = {
        "a.weight": torch.tensor([[[0.0, 1.0]], [[0.0, 0.0]], [[1.0, 1.0]]]),
        "a.bias": torch.tensor([[1.0], [1.0], [0.0]]),
        "b": torch.ones(3, 4),
    }
    found = overlaps(shares)
    torch.testing.assert_close(found["a"], torch.tensor([[1, 0.5, 0], [0.5, 1, 0], [0, 0, 1]]).double())
    torch.testing.assert_close(found["b"], torch.ones(3, 3).double())  # nobody has anything there
    assert overlaps(shares | {"b": torch.full((3, 4), 0.3)}) == {}
