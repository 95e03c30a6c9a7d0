"""`me`: all that a client function may touch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedtailor.core.data import (
    FederatedData,
    Rows,
    count,
    take,
)
from fedtailor.core.environment import Environment
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.task import Loss, Task
from fedtailor.core.trees import Params, Tree, leaves, number, rebuild, to_device, tree_map

AT_ONCE = 256  # samples of a pass over a whole split


# (tensors of the model, x, y) -> one number per sample; one that has parameters named so is also given `weight`, which
# is 0 for padding of a stack, and `index`, the rows of the client's training samples
OwnLoss = Callable[..., Tensor]
AfterStep = Callable[[Params], Params]


class OwnSteps(NamedTuple):
    """What an algorithm has its clients do otherwise in their local steps."""

    loss: OwnLoss | None = None  # in place of the task's
    after_step: AfterStep | None = None


class LocalSolver(Protocol):
    """How a client takes its local steps; `training.solver.Solver` is one."""

    @property
    def lr(self) -> float: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip(self) -> float: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def is_plain(self) -> bool: ...
    @property
    def is_even(self) -> bool: ...
    @property
    def refit(self) -> int: ...
    @property
    def parts(self) -> tuple[Any, ...]: ...
    def lr_in(self, round: int) -> float: ...

    @property
    def keeps_state(self) -> bool: ...
    @property
    def optimizer_state(self) -> Tree: ...

    def train(
        self, me: ClientContext, tensors: Tree, epochs: int, nth: int, own: OwnSteps
    ) -> tuple[Params, Params, Tree]:
        """Parameters, buffers and the optimizer's memory after the last step, in the nth training of a call."""

    def steps(self, me: ClientContext, epochs: int) -> Tensor:
        """How many steps that takes."""

    def count_steps(self, setting: Setting, clients: Sequence[int], epochs: int) -> list[int]:
        """The same of several clients, from what the server knows of them."""


class Setting(Protocol):
    """What a client function may know of its run; `Experiment` is one."""

    @property
    def model(self) -> Model: ...
    @property
    def data(self) -> FederatedData: ...
    @property
    def task(self) -> Task: ...
    @property
    def loss(self) -> Loss: ...
    @property
    def solver(self) -> LocalSolver: ...
    @property
    def environment(self) -> Environment: ...
    @property
    def seed(self) -> int: ...
    @property
    def optimizer_state(self) -> Tree: ...


class View(NamedTuple):
    """The samples of a client. In a stack, shorter clients are padded with repeated samples, where `mask` is 0."""

    x: Tree  # a tensor, or named tensors
    y: Tensor
    mask: Tensor

    def parts(self, samples: int = AT_ONCE) -> list[View]:
        """The samples in batches of at most `samples`; an empty list if there are none."""
        starts = range(0, len(self.y), samples)
        return [View(*tree_map(lambda v, a=a: v[a : a + samples], tuple(self))) for a in starts]


@dataclass
class OptimizerState:
    """What a client's optimizers remember of earlier rounds, by the trainings of its functions."""

    slots: dict[str, Tree]  # "local.0" is the first training of the function `local`
    function: str = ""  # whose trainings go on; "": none do, as where a client is only evaluated


class ClientContext:
    """A client during one call: its data, its private state and the run's read-only settings.

    Under `vmap` its tensors stand for a whole stack of clients. Algorithms receive one; they do not create it.
    """

    def __init__(
        self,
        experiment: Setting,
        members: Sequence[int],
        key: tuple[str | int, ...],
        round: int,
        n: Tensor,
        state: Tree,
        buffers: Params,
        grad: Tree,
    ) -> None:
        self.experiment = experiment
        self.members = members
        self.key = key  # names the call; the streams of this call begin with it
        self._counts: Counter[str] = Counter()
        self.round = round
        self.n = n
        """Number of training samples."""
        self.state = state
        """Private state, as this client's last call returned it."""
        self.buffers = buffers
        self.grad = grad
        """After `fed.backward`: the derivative of the federation's loss with respect to `state` at `fed.tape`."""
        self.optimizers: OptimizerState | None = None

    @property
    def model(self) -> Model:
        return self.experiment.model

    @property
    def solver(self) -> LocalSolver:
        """How local steps are taken."""
        return self.experiment.solver

    @property
    def lr(self) -> float:
        """The step size of this round."""
        return self.solver.lr_in(self.round)

    @property
    def train(self) -> View:
        """Training samples."""
        return self._view(self.experiment.data.train)

    @property
    def val(self) -> View:
        """Validation samples; may be none."""
        return self._view(self.experiment.data.val)

    def sgd(
        self,
        params: Params,
        *,
        epochs: int = 1,
        frozen: Params | None = None,
        prox: tuple[Params, float | Tensor] | None = None,
        mask: Params | None = None,
        lr: float | Tensor | None = None,
        loss: OwnLoss | None = None,
        after_step: AfterStep | None = None,
    ) -> Params:
        """Train `params` on this client's data, with the run's optimizer and batches.

        Exact gradients flow through all steps to params, frozen, center, mu and lr when a tape is running.

        Args:
            params: What is trained. A parameter of the model that is not in it must be in `frozen`.
            epochs: Passes over the training samples.
            frozen: Tensors of the model, or others that `loss` uses, which stay as they are.
            prox: (center, mu) adds mu/2 |params - center|^2 to the loss, over the entries that center has.
            mask: Entries of `params` where it is 0 stay as they are.
            lr: The step size; default: that of this round.
            loss: Loss per sample, from the tensors of the model (and others that are given or frozen), x and y;
                default: the task's. If it has a parameter `weight`, it gets 1 per sample and 0 for the padding of a
                stack; if it has `index`, the positions of the samples among this client's training samples.
            after_step: New parameters from those after each step, such as their projection.

        Returns:
            The trained parameters, with the keys of `params`.
        """
        frozen = dict(frozen or {})
        center, mu = prox if prox is not None else (None, None)
        self._refuse_unknown(params, frozen, center or {}, mask or {}, has_own_loss=loss is not None)
        nth, like = self._counts["trainings"], self.n
        self._counts["trainings"] += 1
        statistics = (self.model.params.keys() | self.model.private_buffers.keys()) - self.model.trainable.keys()
        trained = {k: v for k, v in params.items() if k not in statistics}
        if mask is not None and (without := trained.keys() - mask.keys()):
            raise ValueError(f'me.sgd: mask has no entry for "{min(without)}"')
        beside = {k: v for k, v in self.buffers.items() if k not in params and k not in frozen}
        slot = self._slot(nth, trained)
        tensors = {
            "params": trained,
            "buffers": {k: v for k, v in params.items() if k in statistics} | beside,
            "frozen": frozen,
            "center": None if center is None else {k: v for k, v in center.items() if k in trained},
            "mu": None if mu is None else number(mu, like),
            "mask": None if mask is None else {k: mask[k] for k in trained},
            "lr": number(self.lr if lr is None else lr, like),
            "memory": None if slot is None else slot[1],
            "anchor": like,  # always one per client, so that vmap's rule applies even to messages common to all
        }
        trained, buffers, memory = self.solver.train(self, tensors, epochs, nth, OwnSteps(loss, after_step))
        if slot is not None and self.optimizers is not None:
            self.optimizers.slots = self.optimizers.slots | {slot[0]: memory}
        self.buffers = {k: buffers.get(k, v) for k, v in self.buffers.items()}
        return {k: trained[k] if k in trained else buffers[k] for k in params}

    def _slot(self, nth: int, trained: Params) -> tuple[str, Tree] | None:
        """Where the optimizer of a training goes on, and what it remembers; None if it begins anew."""
        if self.optimizers is None or not self.optimizers.function:
            return None
        name = f"{self.optimizers.function}.{nth}"
        if not self.experiment.optimizer_state:  # a rehearsal finds out what there will be
            return None
        memory = self.optimizers.slots.get(name)
        if memory is None or memory["memory"].keys() != trained.keys():
            raise ValueError(
                f"local.keep_state: {self.optimizers.function} trains something that it did not train in the first "
                f"rounds (training {nth + 1} of a call); set local.keep_state = false"
            )
        return name, memory

    def _refuse_unknown(
        self, params: Params, frozen: Params, center: Params, mask: Params, *, has_own_loss: bool
    ) -> None:
        """What is neither trained nor used would be a mistake that nobody sees."""
        model = self.model
        if both := params.keys() & frozen.keys():
            raise ValueError(f'me.sgd: "{min(both)}" is both trained and frozen')
        if fixed := params.keys() & model.fixed.keys():
            raise ValueError(f'me.sgd: "{min(fixed)}" has requires_grad=False and cannot be trained')
        known = model.params.keys() | model.private_buffers.keys() | model.fixed.keys()
        if not has_own_loss:
            if unknown := (params.keys() | frozen.keys()) - known:
                raise ValueError(f'me.sgd: the model has no parameter "{min(unknown)}"; a loss of your own may use it')
            if missing := model.trainable.keys() - params.keys() - frozen.keys():
                raise ValueError(f'me.sgd: "{min(missing)}" of the model is neither trained nor frozen')
        if unknown := (center.keys() | mask.keys()) - known - params.keys():
            raise ValueError(f'me.sgd: prox or mask has "{min(unknown)}", which is not trained')

    def steps(self, epochs: int = 1) -> Tensor:
        """The number of steps that `sgd(epochs=epochs)` takes on this client's data.

        Args:
            epochs: Passes over the training samples.

        Returns:
            A scalar tensor.
        """
        return self.solver.steps(self, epochs)

    def loss(self, params: Params, split: str = "train") -> Tensor:
        """The mean loss over all samples of a split, without changing any statistics.

        Args:
            params: Parameters of the whole model.
            split: "train" or "val".

        Returns:
            A scalar tensor; 0 if the split is empty.
        """
        view = self.train if split == "train" else self.val
        # statistics are no function of the parameters: no gradient flows to them
        buffers = {k: v.detach() for k, v in (self.buffers | params).items() if k not in self.model.trainable}
        total = view.mask.new_zeros(())
        for x, y, mask in view.parts():
            losses = self.experiment.loss(self.model(params | buffers, x), y)
            total = total + torch.where(mask > 0, losses, 0).sum()
        return total / view.mask.sum().clamp(min=1)

    def features(self, params: Params, of: str | Tree = "train") -> Tensor:
        """What comes to the head, [samples, features], with every part of the model in evaluation mode.

        Args:
            params: Parameters of the whole model; other tensors among them are left aside.
            of: "train" or "val", the samples in order; or a batch of samples. In a stack the splits are padded with
                repeated samples: use `me.train.mask`.

        Returns:
            One row per sample, differentiable by params.
        """
        if not isinstance(of, str):
            return self.model.features(self.buffers | params, of)
        view = self.train if of == "train" else self.val
        rows = [self.model.features(self.buffers | params, part.x) for part in view.parts()]
        if rows:
            return torch.cat(rows)
        nothing = tree_map(lambda v: v.new_zeros(1, *v.shape[1:]), view.x)  # how wide they would be
        return self.model.features(self.buffers | params, nothing)[:0]

    def uniform(self, size: int) -> Tensor:
        """Random numbers between 0 and 1, from a stream of this call and client; different in each use.

        Args:
            size: How many.

        Returns:
            A vector of that length.
        """
        nth, clients = self._counts["draws"], self.experiment.data.clients
        self._counts["draws"] += 1

        def drawn(client: int) -> Tensor:
            numbers = stream(*self.key, clients[client], "uniform", nth).random(size)
            return torch.from_numpy(numbers).to(self.model.device, self.n.dtype)

        def make(is_stacked: bool) -> tuple[Tensor, ...]:
            return (torch.stack([drawn(i) for i in self.members]) if is_stacked else drawn(self.members[0]),)

        return self.constants(make)[0]

    def constants(self, make: Callable[[bool], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Tensors that differ between clients and have no derivative.

        Args:
            make: `make(False)` returns them for one client, `make(True)` stacked for all of the call.

        Returns:
            The tensors, of this client as far as the caller sees.
        """
        values: tuple[Tensor, ...] = _AtClients.apply(make, self.n)
        return values

    def _view(self, rows: Rows) -> View:
        form = (rows.first(0) if rows.in_memory else rows.first(1), rows.y, self.n)
        values = self.constants(lambda is_stacked: tuple(leaves(self._samples(rows, is_stacked))))
        return View(*rebuild(form, iter(values)))

    def _samples(self, rows: Rows, is_stacked: bool) -> tuple[Tree, Tensor, Tensor]:
        if not is_stacked:
            x, y = to_device(rows.of(self.members[0]), self.model.device)
            return x, y, self.n.new_ones(count(x))
        at, mask = rows.padded(self.members)
        x, y = to_device((take(rows.x, at), take(rows.y, at)), self.model.device)
        return x, y, mask.to(self.model.device, self.n.dtype)


class _AtClients(torch.autograd.Function):
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
