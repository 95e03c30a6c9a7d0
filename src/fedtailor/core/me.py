"""`me`: all that a client function may touch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.environment import Environment
from fedtailor.core.model import LOSSES, Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree, number
from fedtailor.local.augment import draw
from fedtailor.local.batches import Batch, cut, single, stacked, whole, with_draws
from fedtailor.local.training import Solver, Training, train

if TYPE_CHECKING:
    from fedtailor.core.algorithm import Algorithm
    from fedtailor.data.federated import FederatedData, Rows


@dataclass(frozen=True)
class Setting:
    """What all clients of a run have in common, and the data each of them finds beside itself."""

    algorithm: Algorithm
    model: Model
    data: FederatedData
    solver: Solver
    seed: int
    environment: Environment = field(default_factory=Environment)
    unseen: FederatedData | None = None  # clients that take no part; they come when everything is learned
    clip: float = 0.0  # largest norm of a reply's change against the message; 0 is no limit
    is_sealed: bool = False  # replies leave a client as terms of secure sums only

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return LOSSES[self.data.task]


class View(NamedTuple):
    """A client's samples. In a stack of clients the shorter ones are padded with zeros where `mask` is 0."""

    x: Tensor
    y: Tensor
    mask: Tensor


class Me:
    """One client during one call. Under `vmap` its tensors stand for a whole stack of clients."""

    def __init__(
        self,
        setting: Setting,
        members: Sequence[int],
        key: tuple[str | int, ...],
        round: int,
        n: Tensor,
        state: Tree,
        buffers: Params,
        grad: Tree,
    ) -> None:
        self._setting = setting
        self._members = members
        self._key = key  # names the call; the streams of this call begin with it
        self._trainings = 0
        self.round = round
        self.n = n
        """Number of training samples."""
        self.state = state
        """Private state, as this client's last call returned it."""
        self.buffers = buffers
        self.grad = grad
        """After `fed.backward`: the derivative of the federation's loss with respect to `state` at `fed.tape`."""

    @property
    def model(self) -> Model:
        return self._setting.model

    @property
    def solver(self) -> Solver:
        """How local steps are taken."""
        return self._setting.solver

    @property
    def train(self) -> View:
        """Training samples."""
        return self._view(self._setting.data.train)

    @property
    def val(self) -> View:
        """Validation samples; may be none."""
        return self._view(self._setting.data.val)

    def sgd(
        self,
        params: Params,
        *,
        epochs: int = 1,
        frozen: Params | None = None,
        prox: tuple[Params, float | Tensor] | None = None,
        mask: Params | None = None,
        lr: float | Tensor | None = None,
        loss: Callable[[Params, Tensor, Tensor], Tensor] | None = None,
    ) -> Params:
        """Train `params` on this client's data and return them; the rest of the model is `frozen`.

        prox: (center, mu) adds mu/2 |params - center|^2 to the loss, over the entries that center has.
        mask: entries at 0 stay as they are.
        loss: of every sample, from the tensors of the model (and others in `frozen`, held constant), x and y; the
        task's if None.
        Exact gradients flow through all steps to params, frozen, center, mu and lr when a tape is running.
        """
        setting, nth = self._setting, self._trainings
        self._trainings += 1
        like = self.n
        trained = {k: v for k, v in params.items() if k in self.model.trainable}
        center, mu = prox if prox is not None else (None, None)
        tensors = {
            "params": trained,
            "buffers": {k: v for k, v in params.items() if k not in trained} | self._buffers_beside(params, frozen),
            "frozen": dict(frozen or {}),
            "center": None if center is None else {k: v for k, v in center.items() if k in trained},
            "mu": None if mu is None else number(mu, like),
            "mask": None if mask is None else {k: mask[k] for k in trained},
            "lr": number(setting.solver.lr if lr is None else lr, like),
            "anchor": like,  # always one per client, so that vmap's rule applies even to messages common to all
        }
        rows = setting.data.train
        trained, buffers = train(
            Training(
                self.model,
                setting.loss,
                setting.solver,
                rows.x,
                rows.y,
                lambda is_stacked: self._batches(rows, epochs, nth, is_stacked),
                None,
                own_loss=loss,
            ),
            tensors,
        )
        self.buffers = {k: buffers.get(k, v) for k, v in self.buffers.items()}
        return {k: trained[k] if k in trained else buffers[k] for k in params}

    def steps(self, epochs: int = 1) -> Tensor:
        """How many steps `sgd(epochs=epochs)` takes on this client's data."""
        (steps,) = _AtClients.apply(lambda is_stacked: (self._steps(epochs, is_stacked),), self.n)
        return steps

    def _steps(self, epochs: int, is_stacked: bool) -> Tensor:
        setting = self._setting
        least = 2 if self.model.batch_statistics else 1
        counts = [
            setting.environment.passes(i, epochs) * len(cut(np.arange(n), setting.solver.batch_size or n, least))
            for i, n in zip(self._members, setting.data.train.bounds(self._members)[1], strict=True)
        ]
        made = torch.tensor(counts, dtype=self.n.dtype)
        return made if is_stacked else made[0]

    def loss(self, params: Params, split: str = "train") -> Tensor:
        """Mean loss over all training ("train") or validation ("val") samples, without changing any statistics."""
        x, y, mask = self.train if split == "train" else self.val
        # statistics are no function of the parameters: no gradient flows to them
        buffers = {k: v.detach() for k, v in (self.buffers | params).items() if k not in self.model.trainable}
        losses = self._setting.loss(self.model(params | buffers, x), y)
        return (losses * mask).sum() / mask.sum().clamp(min=1)

    def uniform(self, size: int) -> Tensor:
        """Numbers between 0 and 1, from a stream of this call and client."""
        clients = self._setting.data.clients

        def drawn(client: int) -> Tensor:
            return torch.from_numpy(stream(*self._key, clients[client], "uniform").random(size)).to(self.n.dtype)

        def make(is_stacked: bool) -> tuple[Tensor, ...]:
            return (torch.stack([drawn(i) for i in self._members]) if is_stacked else drawn(self._members[0]),)

        return _AtClients.apply(make, self.n)[0]

    def _buffers_beside(self, params: Params, frozen: Params | None) -> Params:
        return {k: v for k, v in self.buffers.items() if k not in params and k not in (frozen or {})}

    def _batches(self, rows: Rows, epochs: int, nth: int, is_stacked: bool) -> list[Batch]:
        clients = self._setting.data.clients
        starts, sizes = rows.bounds(self._members)
        size = self._setting.solver.batch_size or max(sizes)
        least = 2 if self.model.batch_statistics else 1  # a single sample has no variance
        orders = []
        for i, n in zip(self._members, sizes, strict=True):
            rng = stream(*self._key, clients[i], "batches", nth)
            orders.append([rng.permutation(n) for _ in range(self._setting.environment.passes(i, epochs))])
        if is_stacked:
            batches = stacked(starts, orders, size, self.n.dtype, least)
        else:
            batches = single(starts[0], orders[0], size, least)
        if self._setting.solver.augment is None:
            return batches
        draws = []
        for i, passes in zip(self._members, orders, strict=True):
            rng = stream(*self._key, clients[i], "augment", nth)
            draws.append([draw(rng, len(order)) for order in passes])
        return with_draws(batches, draws, size, least)

    def _view(self, rows: Rows) -> View:
        return View(*_AtClients.apply(lambda is_stacked: self._samples(rows, is_stacked), self.n))

    def _samples(self, rows: Rows, is_stacked: bool) -> tuple[Tensor, Tensor, Tensor]:
        if not is_stacked:
            x, y = rows.of(self._members[0])
            return x, y, torch.ones(len(x), dtype=self.n.dtype)
        starts, sizes = rows.bounds(self._members)
        longest = max(sizes)
        if longest == 0:

            def nothing(v: Tensor) -> Tensor:
                return v.new_zeros((len(starts), 0, *v.shape[1:]))

            return nothing(rows.x), nothing(rows.y), torch.zeros((len(starts), 0), dtype=self.n.dtype)
        (batch,) = whole(starts, sizes, longest, self.n.dtype)
        if batch.weight is None:
            return rows.x[batch.rows], rows.y[batch.rows], torch.ones(batch.rows.shape, dtype=self.n.dtype)
        keep = batch.weight.bool()
        at = batch.rows.clamp(max=max(len(rows.x) - 1, 0))

        def padded(v: Tensor) -> Tensor:
            return v[at] * keep.reshape(keep.shape + (1,) * (v.dim() - 1)).to(v.dtype)

        return padded(rows.x), padded(rows.y), batch.weight


class _AtClients(torch.autograd.Function):
    """Constants that differ from client to client: `make(False)` for one, `make(True)` stacked for all."""

    @staticmethod
    def forward(make: Callable[[bool], tuple[Tensor, ...]], anchor: Tensor) -> tuple[Tensor, ...]:
        return make(False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, make: Callable[[bool], tuple[Tensor, ...]], anchor: Tensor) -> Any:
        out = make(True)
        return out, tuple(0 for _ in out)
