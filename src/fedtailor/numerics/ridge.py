"""Linear models in closed form: a client's data as A = X'X, b = X'Y, and shrinkage towards a common model w.

Every function serves one client and, under vmap, a stack. Degrees enter by their inverse roots r = Lambda^(-1/2), so
that Lambda -> infinity (the common model) is an ordinary number and a singular A is no problem.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtailor.core.context import View
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from fedtailor.numerics.eigen import eigen


def check(model: Model, task: str) -> None:
    """Refuse what has no closed form."""
    names(model)
    if task != "regression":
        raise ConfigError(f"algorithm.name: this algorithm is for regression, not {task}")


def is_linear(model: Model) -> bool:
    """Whether it is one layer of weights, with or without a bias."""
    return sorted(v.dim() for v in model.trainable.values()) in ([2], [1, 2])


def names(model: Model) -> tuple[str, str | None]:
    """The weight and the bias of a linear model; other models are refused."""
    weight = [k for k, v in model.trainable.items() if v.dim() == 2]
    bias = [k for k, v in model.trainable.items() if v.dim() == 1]
    if not is_linear(model):
        raise ConfigError('model.name: this algorithm solves linear models in closed form; set model.name = "linear"')
    return weight[0], bias[0] if bias else None


def design(data: View, features: int) -> Tensor:
    """The samples as rows of features, with a column of ones where one more is asked for (a bias); padding is 0."""
    x = data.x.flatten(1) * data.mask[:, None]
    return x if x.shape[1] == features else torch.cat([x, data.mask[:, None]], dim=1)


def design_of(model: Model, data: View) -> Tensor:
    """The same, as a linear model needs it."""
    return design(data, as_vector(model, model.params).shape[0])


def as_vector(model: Model, params: Params) -> Tensor:
    """Parameters as a matrix [features (+ 1), outputs]."""
    weight, bias = names(model)
    v = params[weight].mT
    return v if bias is None else torch.cat([v, params[bias][None]])


def as_params(model: Model, v: Tensor) -> Params:
    """The inverse of `as_vector`."""
    weight, bias = names(model)
    return {weight: v.mT} if bias is None else {weight: v[:-1].mT, bias: v[-1]}


def moments(model: Model, data: View) -> Params:
    """All that a linear model needs to know of the data: A = X'X, b = X'Y, |Y|^2 and n."""
    x, y = design_of(model, data), data.y * data.mask[:, None]
    return {"A": x.mT @ x, "b": x.mT @ y, "yy": y.square().sum(), "n": data.mask.sum()}


def statistics(model: Model, data: View) -> Params:
    """The moments, and the eigenvectors q and eigenvalues s of A."""
    d = moments(model, data)
    s, q = eigen(d["A"])
    return d | {"q": q, "s": s.clamp(min=0)}


def ridge(d: Params, rho: Tensor, center: Tensor) -> Tensor:
    """argmin |Xv - Y|^2 + rho |v - center|^2."""
    return d["q"] @ ((d["q"].mT @ (rho * center + d["b"])) / (d["s"][:, None] + rho))


def least_squares(d: Params) -> Tensor:
    """The solution of smallest norm; directions that the data does not show are left at 0."""
    seen = d["s"] > d["s"].max() * d["s"].shape[-1] * torch.finfo(d["s"].dtype).eps
    inverse = torch.where(seen, 1 / torch.where(seen, d["s"], torch.ones_like(d["s"])), torch.zeros_like(d["s"]))
    return d["q"] @ (inverse[:, None] * (d["q"].mT @ d["b"]))


def squared_error(d: Params, v: Tensor) -> Tensor:
    """|Xv - Y|^2 from the statistics."""
    return (d["yy"] - 2 * (v * d["b"]).sum() + (v * (d["A"] @ v)).sum()).clamp(min=0)


def residual_freedom(d: Params) -> Tensor:
    """Samples beyond those that least squares needs: n - rank(A), times outputs."""
    rank = (d["s"] > d["s"].max() * d["s"].shape[-1] * torch.finfo(d["s"].dtype).eps).sum()
    return (d["n"] - rank).clamp(min=0) * d["b"].shape[-1]


def covariance(d: Params, r: Tensor) -> Tensor:
    """(A + Lambda)^(-1) for every output [outputs, k, k], with r = Lambda^(-1/2) of shape [k, outputs]."""
    return r.mT[:, :, None] * torch.linalg.solve(_inner(d, r), torch.diag_embed(r.mT))


def determined(d: Params, r: Tensor) -> Tensor:
    """How much of each parameter's prior variance the data remove: 0 where they say nothing, 1 where they say all."""
    return torch.diagonal(torch.linalg.solve(_inner(d, r), _weighed(d, r)), dim1=-2, dim2=-1).mT


def _inner(d: Params, r: Tensor) -> Tensor:
    """Lambda^(-1/2) A Lambda^(-1/2) + I, which is never singular."""
    return _weighed(d, r) + torch.eye(r.shape[-2], dtype=r.dtype, device=r.device)


def _weighed(d: Params, r: Tensor) -> Tensor:
    return r.mT[:, :, None] * d["A"][None] * r.mT[:, None, :]


def shrunk(d: Params, r: Tensor, w: Tensor) -> Tensor:
    """argmin |Xv - Y|^2 + (v - w)' Lambda (v - w)."""
    return w + (covariance(d, r) @ (d["b"] - d["A"] @ w).mT[:, :, None])[:, :, 0].mT


def share(d: Params, r: Tensor) -> Tensor:
    """For each parameter how much of it is the common one, dv/dw: 0 is the client's own, 1 the common one."""
    own = (covariance(d, r) * d["A"].mT[None]).sum(-1).mT
    return (1 - own).clamp(0, 1)


def left_out_error(data: View, d: Params, r: Tensor, w: Tensor) -> Tensor:
    """Sum of squared errors, each sample predicted by the others: residual / (1 - leverage), with w held fixed."""
    x = design(data, w.shape[0])
    leverage = ((x[None] @ covariance(d, r)) * x[None]).sum(-1).mT  # [samples, outputs]
    residual = data.y - x @ shrunk(d, r, w)
    return (data.mask[:, None] * (residual / (1 - leverage).clamp(min=1e-6)).square()).sum()
