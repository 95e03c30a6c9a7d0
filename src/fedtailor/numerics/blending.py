"""Weights of candidates at one site, from its own rows: losses, their derivatives, and the best weights on the simplex.

Every function serves one site and, under vmap, a stack; `rows` are 1 for rows that count and 0 for others.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from fedtailor.core.task import Count

OWN_PULLS = (1000.0, 300.0, 100.0)  # rows of the federation that the common weights are worth
SURELY = 1.645  # standard errors: one-sided, 5 %
KNOWN = 1.0  # standard errors by which a site's own model must be better, so that it is known to be
HELP = 5  # rows of all sites beside a site's own, where its noise is estimated
ROUNDING = 1e-9  # of a sum of losses: ways of blending that differ by less are the same
NEWTON = 4  # quadratic steps; one is exact for squared errors
RIDGE = 1e-9  # of the mean curvature, so that candidates that say the same have one best blend


def row_losses(outputs: Tensor, y: Tensor, is_class: bool) -> Tensor:
    """Log loss, deviance of counts, or squared error of every row.

    `outputs` [..., rows, outputs] are log-probabilities, logarithms of means, or numbers.
    """
    if is_class:
        return -outputs.gather(-1, y.expand(outputs.shape[:-1])[..., None])[..., 0]
    if not y.is_floating_point():
        return Count().loss(outputs, y)
    return (outputs - y).square().mean(-1)


def blended(said: Tensor, weights: Tensor, is_class: bool) -> Tensor:
    """Outputs [rows, outputs] of candidates [candidates, rows, outputs] together; logits are normalised again."""
    mixed = torch.einsum("c,cno->no", weights, said)
    return mixed.log_softmax(1) if is_class else mixed


def quadratic(said: Tensor, y: Tensor, rows: Tensor, weights: Tensor, is_class: bool) -> tuple[Tensor, Tensor]:
    """Gradient [candidates] and Hessian [candidates, candidates] of the sum of losses, by the weights."""
    mixed = blended(said, weights, is_class)
    if is_class:
        p = mixed.exp()
        rest = p - torch.nn.functional.one_hot(y, mixed.shape[1])
        centered = said - (p * said).sum(2, keepdim=True)
        hessian = torch.einsum("n,no,cno,dno->cd", rows, p, centered, centered)
    else:
        rest = 2 * (mixed - y)
        hessian = 2 * torch.einsum("n,cno,dno->cd", rows, said, said)
    return torch.einsum("n,no,cno->c", rows, rest, said), hessian


@lru_cache(maxsize=16)
def _supports(size: int) -> Tensor:
    """Which weights may be above 0: every choice but none."""
    return torch.tensor([s for s in product((0.0, 1.0), repeat=size) if any(s)], dtype=torch.float64, device="cpu")


def on_simplex(q: Tensor, b: Tensor, allowed: Tensor | None = None) -> Tensor:
    """argmin u'Qu / 2 - b'u over u >= 0 that sum to 1, for any leading dimensions; u is 0 where `allowed` is 0.

    By trying every set of weights above 0: there are few candidates, and the best is exact.
    """
    size, supports = b.shape[-1], _supports(b.shape[-1]).to(q)
    eye, scale = (
        torch.eye(size, dtype=q.dtype, device=q.device),
        q.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-300),
    )
    q, b = q / scale[..., None, None] + RIDGE * eye, b / scale[..., None]
    inner = q[..., None, :, :] * supports[:, :, None] * supports[:, None, :] + torch.diag_embed(1 - supports)
    ones = supports.expand(*inner.shape[:-1])
    system = torch.cat(
        [
            torch.cat([inner, ones[..., None]], dim=-1),
            torch.cat([ones, torch.zeros_like(ones[..., :1])], dim=-1)[..., None, :],
        ],
        dim=-2,
    )
    right = torch.cat([b[..., None, :] * supports, torch.ones_like(ones[..., :1])], dim=-1)
    u = torch.linalg.solve(system, right[..., None])[..., :size, 0]
    form = ((u[..., None, :] @ q[..., None, :, :])[..., 0, :] * u).sum(-1) / 2 - (u * b[..., None, :]).sum(-1)
    is_out = u.amin(-1) < -1e-9
    if allowed is not None:
        is_out = is_out | (supports * (1 - allowed.to(q)) > 0).any(-1)
    form = torch.where(is_out, torch.inf, form)
    best = torch.nn.functional.one_hot(form.argmin(-1), len(supports)).to(q)
    u = torch.where(best[..., None] > 0, u, 0).sum(-2).clamp(min=0)
    return u / u.sum(-1, keepdim=True)
