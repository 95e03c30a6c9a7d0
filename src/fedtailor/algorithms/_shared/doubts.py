"""Why no samples of a client can give the terms that it sends for a mixed model: what `doubt` of a client function is.

Sums of squares are what they are only up to rounding, and a model may have single precision: only what is far off is
doubted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtailor.core.algorithm import Doubt
from fedtailor.core.model import Model
from fedtailor.core.trees import Tree
from fedtailor.numerics import ridge

ROUNDING = 1e-3  # relative to the largest entry
GROSS = 100.0  # by how much a product may be above its bound, both being differences of large numbers


def _is_square_sum(a: Tensor) -> bool:
    """Whether matrices are symmetric and not negative, as X'WX is."""
    if not a.numel():
        return True
    if not bool(a.isfinite().all()):
        return False
    largest = a.abs().amax()
    is_symmetric = bool((a - a.mT).abs().amax() <= ROUNDING * largest)
    return is_symmetric and bool(torch.linalg.eigvalsh(a.double()).amin() >= -ROUNDING * float(largest))


def _intercepts(a: Tensor, model: Model) -> Tensor:
    """Diagonal entries of intercepts, which are sums of ones."""
    diagonal = torch.diagonal(a, dim1=-2, dim2=-1)
    return diagonal[..., -1:] if ridge.names(model)[1] is not None else diagonal[..., :0]


def of_marginal(algorithm: Any, model: Model, samples: int, reply: Tree) -> str:
    """Doubts about X'V^-1 X, X'V^-1 y, y'V^-1 y, log|V| and the numbers in y, V = I + X L L' X'."""
    a, b, c, logdet, numbers = reply
    outputs = ridge.as_vector(model, model.params).shape[1]
    if not 0 <= float(numbers) <= samples * outputs * (1 + ROUNDING):
        return f"reply counts {float(numbers):.6g} numbers; the client has {samples} samples"
    if not _is_square_sum(a):
        return "reply has normal equations that no samples give"
    if float(logdet) < -ROUNDING * samples * outputs:
        return "reply has a negative determinant"
    if (
        a.numel() and a.shape[-1] == len(ridge.as_vector(model, model.params)) and b.shape[-1] == outputs
    ):  # not of all classes at once
        if bool((_intercepts(a, model) > samples * (1 + ROUNDING)).any()):
            return f"reply counts more than the {samples} samples of the client"
        bound = GROSS * torch.diagonal(a, dim1=-2, dim2=-1).clamp(min=0)[:, None] * c.clamp(min=0)
        if bool((b.square() > bound + torch.finfo(b.dtype).eps * a.abs().amax() * (1 + c.abs())).any()):
            return "reply has normal equations that no samples give"
    return ""


def of_working_marginal(algorithm: Any, model: Model, samples: int, reply: Tree) -> str:
    """The same of a working response, whose squares lack a constant, and whose weights are not ones."""
    a, _, _, _, numbers = reply
    if not 0 <= float(numbers) <= samples * (1 + ROUNDING):
        return f"reply counts {float(numbers):.6g} numbers; the client has {samples} samples"
    return "" if _is_square_sum(a) else "reply has a curvature that no samples give"


def of_squares(algorithm: Any, model: Model, samples: int, reply: Tree) -> str:
    """Doubts about matrices that are sums of squares."""
    parts = reply if isinstance(reply, tuple) else (reply,)
    return "" if all(map(_is_square_sum, parts)) else "reply has squares that no samples give"


def of_squares_in(part: int) -> Doubt:
    """The same of one part of a reply."""
    return lambda algorithm, model, samples, reply: of_squares(algorithm, model, samples, reply[part])


def of_variation(algorithm: Any, model: Model, samples: int, reply: Tree) -> str:
    """Doubts about the squares of columns around their means, and around 0."""
    within, total = reply
    if bool((within < 0).any()) or bool((within > total * (1 + ROUNDING)).any()):
        return "reply has squares that no samples give"
    has_intercept = ridge.names(model)[1] is not None
    if has_intercept and float(total[-1]) > samples * (1 + ROUNDING):
        return f"reply counts {float(total[-1]):.6g} samples; the client has {samples}"
    return ""


def in_counts(first: int) -> Doubt:
    """Doubts about counts in a part of a reply, and about anything negative in the others."""

    def doubt(algorithm: Any, model: Model, samples: int, reply: Tree) -> str:
        is_count = 0 <= float(reply[first].sum()) <= samples * (1 + ROUNDING)
        is_sum = all(bool((part >= 0).all()) for part in reply)
        return "" if is_count and is_sum else f"reply has counts or losses that {samples} samples do not give"

    return doubt


def in_rows(algorithm: Any, model: Model, samples: int, reply: Tree) -> str:
    """Doubts about how many rows stand behind each of the moments of columns, the first row of the reply."""
    is_count = bool(((reply[0] >= 0) & (reply[0] <= samples * (1 + ROUNDING))).all())
    return "" if is_count else f"reply counts more rows than the {samples} of the client"


def in_shares(algorithm: Any, model: Model, samples: int, reply: Tree) -> str:
    """Doubts about weights that sum to 1."""
    is_share = bool((reply >= -ROUNDING).all()) and float(reply.sum()) <= 1 + ROUNDING
    return "" if is_share else "reply has weights that do not sum to 1"
