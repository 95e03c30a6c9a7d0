"""Linear mixed models from cross products: random effects are integrated out column by column of X'X.

Bates, Maechler, Bolker, Walker, J. Stat. Softw. 67, 2015, section 3. Every function serves one site and, under vmap, a
stack; none has a step that depends on a number, so all have derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedtailor.numerics import forward_mode


def lower_entries(blocks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Rows and columns of the free entries of a factor with independent blocks."""
    entries, start = [], 0
    for size in blocks:
        entries += [(start + i, start + j) for i in range(size) for j in range(i + 1)]
        start += size
    return entries


def factor_of(theta: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """The lower triangular factor with these entries."""
    size, entries = sum(blocks), lower_entries(blocks)
    places = torch.zeros((size * size, len(entries)), dtype=theta.dtype, device=theta.device)
    for k, (i, j) in enumerate(entries):
        places[i * size + j, k] = 1
    return (places @ theta).reshape(size, size)


def integrate_out(cross: Tensor, first: int, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Cross products without columns `first` to `first + len(factor)`, whose effects are normal; and log|V|."""
    stop = first + factor.shape[0]
    rows = torch.cat([cross[first:stop, :first], cross[first:stop, stop:]], dim=1)
    rest = torch.cat([cross[:first], cross[stop:]])
    rest = torch.cat([rest[:, :first], rest[:, stop:]], dim=1)
    if not factor.shape[0]:
        return rest, cross.new_zeros(())
    half, logdet = whiten(cross[first:stop, first:stop], rows, factor)
    return rest - half.mT @ half, logdet


def whiten(square: Tensor, rows: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """R^-1 L' rows with R R' = I + L' square L, and log|R R'|; for one group or a stack of them."""
    inner = factor.mT @ square @ factor
    inner = inner + torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    root = torch.linalg.cholesky(inner)
    half = torch.linalg.solve_triangular(root, factor.mT @ rows, upper=False)
    return half, 2 * torch.diagonal(root, dim1=-2, dim2=-1).log().sum(-1)


def group_sums(values: Tensor, group: Tensor) -> Tensor:
    """Sums of rows by group; as many groups as there are rows, the last ones empty."""
    flat = values.flatten(1)
    at = group.to(torch.int64)[:, None].expand(-1, flat.shape[1])
    return torch.zeros_like(flat).scatter_add(0, at, flat).reshape(values.shape)


def derivatives(terms: Callable[[Tensor], Tensor], theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The terms [m], their first derivatives [m, t] and their second ones [m, t, t]."""
    if not len(theta):
        value = terms(theta)
        return value, value.new_zeros((len(value), 0)), value.new_zeros((len(value), 0, 0))
    first = forward_mode.jacobian(terms)
    return terms(theta), first(theta), forward_mode.jacobian(first)(theta)
