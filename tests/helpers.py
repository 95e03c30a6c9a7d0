"""What tests share: small federations, of which most are those of `fedtailor.testing`, and references by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor import algorithms
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.context import ClientContext
from fedtailor.core.data import FederatedData
from fedtailor.core.experiment import Experiment
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, items
from fedtailor.testing.federations import ENGINES as ENGINES
from fedtailor.testing.federations import EVEN_SIZES as EVEN_SIZES
from fedtailor.testing.federations import F64 as F64
from fedtailor.testing.federations import FULL_BATCH as FULL_BATCH
from fedtailor.testing.federations import OTHERS as OTHERS
from fedtailor.testing.federations import POOL as POOL
from fedtailor.testing.federations import SIZES as SIZES
from fedtailor.testing.federations import SOLVER as SOLVER
from fedtailor.testing.federations import Normed as Normed
from fedtailor.testing.federations import SmallConv as SmallConv
from fedtailor.testing.federations import evaluate as evaluate
from fedtailor.testing.federations import everything as everything
from fedtailor.testing.federations import federate as federate
from fedtailor.testing.federations import make_data as make_data
from fedtailor.testing.federations import make_model as make_model
from fedtailor.testing.federations import models as models
from fedtailor.testing.federations import run as run
from fedtailor.testing.federations import states as states
from fedtailor.testing.federations import suits as suits
from fedtailor.testing.federations import usual as usual
from fedtailor.training.solver import Solver

EVERYWHERE = ("pool", *ENGINES)


@cache
def variants() -> dict[str, Algorithm]:
    """Every registered algorithm with its defaults and with each of its presets."""
    found: dict[str, Algorithm] = {}
    for name, kind in algorithms.algorithms().items():
        found[name] = algorithms.make(name, {})
        found |= {f"{name}:{preset}": algorithms.make(name, {"preset": preset}) for preset in kind.presets}
    return found


def brief(algorithm: Algorithm, epochs: int = 2) -> Algorithm:
    """The same method with at most two of all that it repeats within a round, where more of the same shows nothing.

    An epoch is of several batches: where two epochs show no more than two batches, one is enough.
    """
    most = dict.fromkeys(("epochs", "steps", "local_rounds"), epochs)
    most |= dict.fromkeys(("cells", "horizon", "outer_iterations"), 2)
    counts = {f.name: getattr(algorithm, f.name) for f in fields(algorithm)}
    limits = {name: next((n for end, n in most.items() if name.endswith(end)), None) for name in counts}
    fewer: dict[str, Any] = {k: n for k, n in limits.items() if n and isinstance(counts[k], int) and counts[k] > n}
    if getattr(algorithm, "effects", "") == "auto":  # one structure in place of a choice among four
        fewer["effects"] = "diagonal"
    return replace(algorithm, **fewer)


def assert_equal(found: Tree, wanted: Tree, tolerance: float = 1e-10) -> None:
    """The same paths with the same values; what is not a number must be so on both sides."""
    torch.testing.assert_close(dict(items(found)), dict(items(wanted)), rtol=0, atol=tolerance, equal_nan=True)


def make_me(
    data: FederatedData, model: Model, client: int = 0, solver: Solver = SOLVER, algorithm: Algorithm | None = None
) -> ClientContext:
    """A client outside of any federation."""
    setting = Experiment(algorithm or Algorithm(), model, data, solver, seed=3)
    n = torch.tensor(float(data.train.sizes[client]), dtype=F64)
    return ClientContext(setting, [client], ("alone",), 0, n, {}, model.private_buffers, None)


def descend(
    model: Model,
    params: Params,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    lr: float = 0.1,
    center: Params | None = None,
    mu: float = 0.0,
    frozen: Params | None = None,
) -> Params:
    """Plain gradient descent on all samples, written without the library's training: the reference by hand."""
    for _ in range(steps):
        leaf = {k: v.detach().clone().requires_grad_() for k, v in params.items()}
        output = torch.func.functional_call(model.module, leaf | (frozen or {}), (x,))
        loss = nn.functional.mse_loss(output, y) if y.is_floating_point() else nn.functional.cross_entropy(output, y)
        if center is not None:
            loss = loss + mu / 2 * sum(((leaf[k] - center[k]) ** 2).sum() for k in leaf)
        loss.backward()
        params = {k: (v - lr * v.grad).detach() for k, v in leaf.items() if v.grad is not None}
    return params


def weighted(models: Sequence[Params], counts: Sequence[int]) -> Params:
    """The mean of models by sample count, by hand."""
    total = sum(counts)
    return {k: sum(m[k] * (n / total) for m, n in zip(models, counts, strict=True)) for k in models[0]}  # type: ignore[misc]
