"""What the steps of a local training depend on, fixed before the first of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from fedtailor.core.context import AfterStep, OwnLoss
from fedtailor.core.data import Rows, take
from fedtailor.core.model import Model
from fedtailor.core.task import Loss
from fedtailor.core.trees import Tree
from fedtailor.training.augmentation import augment, augment_target
from fedtailor.training.batches import Batch, send_samples
from fedtailor.training.solver_options import SolverOptions


@dataclass(frozen=True)
class Training:
    """What is fixed before the first step. The tensors that a gradient may flow to travel beside it, as a tree:

    params, buffers, frozen: the parts of the model; only params are trained.
    center, mu: adds the gradient mu (params - center) of a proximal term, for the entries of center; or both None.
    mask: 0 where a parameter must stay as it is; None without one.
    lr: step size, possibly one per client.
    memory: what the optimizer remembers of earlier rounds, and of how many steps; None where it begins anew.
    """

    model: Model
    loss: Loss
    solver: SolverOptions
    data: Rows
    draw: Callable[[bool], Sequence[Batch]]  # the batches of one client (False) or of the stack (True)
    key: tuple[str | int, ...]  # of the stream for models that draw random numbers
    own_loss: OwnLoss | None = None  # in place of model and loss
    after_step: AfterStep | None = None  # such as a projection
    structure: Tree = None  # shaped as the tree of tensors
    is_stacked: bool = False

    @property
    def is_own(self) -> bool:
        """Whether steps are not those of the task's loss alone."""
        return self.own_loss is not None or self.after_step is not None

    def samples(self, batch: Batch) -> tuple[Tree, Tensor]:
        x, y = send_samples((take(self.data.x, batch.rows), take(self.data.y, batch.rows)), self.model.device)
        if batch.drawn is None:
            return x, y
        offsets, flips = batch.drawn[..., :2], batch.drawn[..., 2]
        return augment(x, offsets, flips), augment_target(y, x, offsets, flips)


@lru_cache(maxsize=64)
def wants(loss: OwnLoss) -> tuple[str, ...]:
    """What a loss of the caller's asks for by name, beside tensors, x and y: "weight", "index" or both."""
    names = inspect.signature(loss).parameters
    return tuple(name for name in ("weight", "index") if name in names)
