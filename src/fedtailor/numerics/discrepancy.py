"""Maximum mean discrepancy (Gretton et al., JMLR 2012) of two samples, with Gaussian kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def discrepancy(a: Tensor, b: Tensor, weight: Tensor, widths: Sequence[float]) -> Tensor:
    """The squared discrepancy of the rows of a and b, which count by their weights.

    The kernel is the sum over widths of exp(-|x - y|^2 / (2 width)); pairs of a row with itself count, as in the biased
    estimate.
    """
    share = weight / weight.sum()

    def mean(a: Tensor, b: Tensor) -> Tensor:
        squares = (a[:, None] - b[None]).square().sum(-1)
        kernel = (-squares[..., None] / (2 * squares.new_tensor(widths))).exp().sum(-1)
        return share @ kernel @ share

    return mean(a, a) + mean(b, b) - 2 * mean(a, b)
