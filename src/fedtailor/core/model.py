"""A model as a pure function of named tensors, with a declared body and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless

from fedtailor.core.module_state import WARM_START, BufferChanges, plain_outputs
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError, nearest

BufferPolicy = Literal["private", "mean"]


PRIOR = "label_prior"


def add_label_prior(module: nn.Module, classes: int) -> None:
    """Add a client's own log label frequencies to the logits, in training and prediction; they are never sent.

    Balanced softmax (Ren et al., NeurIPS 2020), in federated learning FedRoD (Chen, Chao, ICLR 2022).
    """
    module.register_buffer(PRIOR, next(module.parameters()).new_zeros(classes))
    module.register_forward_hook(_with_prior)


def _with_prior(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + module.get_buffer(PRIOR)


def is_under(name: str, part: str) -> bool:
    """Whether a parameter or module is `part` or belongs to it; "*" in a part stands for anything, dots too."""
    return name == part or name.startswith(part + ".") or fnmatchcase(name, part) or fnmatchcase(name, part + ".*")


def label_prior(labels: Tensor, like: Tensor) -> Tensor:
    """Log frequencies of a client's training labels, each label counted half a time more."""
    counts = torch.bincount(labels, minlength=len(like)).to(like.dtype) + 0.5
    return (counts / counts.sum()).log()


def call_module(module: nn.Module, x: Tree) -> Tree:
    """The outputs of a module; named tensors are its keywords."""
    return plain_outputs(module(**x) if isinstance(x, dict) else module(x))


class Architectures(NamedTuple):
    """The models of a federation whose clients differ in them."""

    models: Mapping[str, Model]  # by the name of the architecture
    of: Callable[[str], str]  # the name of a client's architecture


class Model:
    """Any nn.Module as a pure function of named tensors.

    Floating-point buffers, such as the statistics of BatchNorm, follow `buffers`:

    - `"private"`: they belong to the client, are never sent and never averaged;
    - `"mean"`: they are entries of `params` like any other and are averaged with them.

    Args:
        module: `params` are its initial values, from which every client and the server start; parameters with
            requires_grad=False are not among them and stay as the module has them.
        head: The modules (or single parameters, or globs such as "*.lora_B.*") of the personal part of the network,
            most often its end; the rest is the body.
        buffers: "private" or "mean".
        make: Makes the module again, with initial values that depend on a key of random numbers, for `redraw`.
    """

    def __init__(
        self,
        module: nn.Module,
        head: Sequence[str] = (),
        buffers: BufferPolicy = "private",
        make: Callable[..., nn.Module] | None = None,
    ) -> None:
        for name, part in module.named_modules():
            if getattr(part, "num_batches_tracked", None) is not None:
                if getattr(part, "momentum", None) is None:
                    raise ConfigError(
                        f'"{name}" of the model averages over all batches it has seen, of any client (momentum=None); '
                        "give it a momentum, such as 0.1"
                    )
                part.register_buffer("num_batches_tracked", None)  # an integer that only those averages need
        self.module = module
        self.buffer_names = frozenset(k for k, _ in module.named_buffers())
        parameters = {k: v for k, v in module.named_parameters() if v.requires_grad}
        if not parameters:
            raise ConfigError("the model has no parameter to train, none with requires_grad=True")
        self.trainable: Params = {k: v.detach().clone() for k, v in parameters.items()}
        self.fixed: Params = {k: v.detach() for k, v in module.named_parameters() if k not in parameters}
        buffers_of = {k: v for k, v in module.named_buffers() if v.is_floating_point()}
        self.warm_starts = {k: v.shape[1:] for k, v in buffers_of.items() if k.rpartition(".")[2] == WARM_START}
        all_buffers = {k: v.detach().clone() for k, v in buffers_of.items() if k not in self.warm_starts}
        self.private_buffers: Params = {k: v for k, v in all_buffers.items() if buffers == "private" or k == PRIOR}
        self.params: Params = self.trainable | {k: v for k, v in all_buffers.items() if k not in self.private_buffers}
        self._head = frozenset(self._names_under(head))
        # parts in evaluation mode, such as a frozen BatchNorm, stay so; if all are, nobody has chosen
        self._always_evaluating = [m for m in module.modules() if not m.training] if module.training else []
        self.rebound = frozenset[str]()  # buffers that a forward pass replaces by new tensors
        self._watched = tuple(all_buffers)  # those that it may replace: all, until `remember` tells
        self.differing = frozenset[str]()  # parameters that not all clients have, by name and shape
        self.architectures: Architectures | None = None  # of clients that differ; this one is the server's
        self._make = make

    def _names_under(self, prefixes: Sequence[str]) -> list[str]:
        names: list[str] = []
        for prefix in prefixes:
            matching = [k for k in self.params if is_under(k, prefix)]
            if not matching:
                known = {k for name in self.params for k in (name, name.rpartition(".")[0]) if k}
                raise ConfigError(f'the model has no part "{prefix}" for its head; {nearest(prefix, known)}')
            names += matching
        return names

    @cached_property
    def _needed(self) -> set[str]:
        return self.params.keys() | self.private_buffers.keys()

    def redraw(self, *key: str | int) -> Params:
        """Initial values drawn anew.

        Args:
            key: Equal keys give equal values.

        Returns:
            As `params`.

        Raises:
            ConfigError: It is not known how the module is made.
        """
        if self._make is None:
            raise ConfigError("initial values cannot be drawn anew for a module that is given; name a model in [model]")
        fresh = self._make(*key)
        values = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
        return {k: values[k].detach().to(v) for k, v in self.params.items()}

    def remember(self, changes: BufferChanges) -> Model:
        """The same model, which also keeps the buffers that are not floating point but change in training, as private.

        Args:
            changes: What a forward pass in training changes.

        Returns:
            A copy.
        """
        kept = {k: v.detach().clone() for k, v in self.module.named_buffers() if k in changes.counted}
        model = copy(self)
        for cached in ("_needed", "constants"):
            vars(model).pop(cached, None)
        model.private_buffers, model.rebound = self.private_buffers | kept, changes.rebound
        model._watched = tuple(changes.rebound)
        return model

    def common(self, part: Params) -> Params:
        """The entries of a part that all clients have; all of them, unless architectures differ.

        Args:
            part: Such as `body`.

        Returns:
            Some of its entries.
        """
        return {k: v for k, v in part.items() if k not in self.differing}

    def without(self, part: Params) -> Params:
        """Initial values of the model without a part.

        Args:
            part: Such as `head`.

        Returns:
            The other entries of `params`.
        """
        return {k: v for k, v in self.params.items() if k not in part}

    @property
    def head(self) -> Params:
        """Initial values of the personal end."""
        return {k: v for k, v in self.params.items() if k in self._head}

    @property
    def body(self) -> Params:
        """Initial values of all that is not head."""
        return {k: v for k, v in self.params.items() if k not in self._head}

    @property
    def last_layer(self) -> str:
        """The name of the module with the last parameter that is trained, or of the parameter if it is in none."""
        name = list(self.trainable)[-1]
        return name.rpartition(".")[0] or name

    @cached_property
    def constants(self) -> Params:
        """Buffers that belong to nobody, as they stay what they are: not floating point, and not among the private."""
        buffers = dict(self.module.named_buffers())
        return {k: v for k, v in buffers.items() if not v.is_floating_point() and k not in self.private_buffers}

    @cached_property
    def batch_statistics(self) -> bool:
        """Whether it has BatchNorm."""
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.module.modules())

    @cached_property
    def likes_channels_last(self) -> bool:
        """Convolutions are faster with the channels last; a solver works on the values in their order."""
        kinds = (nn.Conv2d, nn.Conv3d)
        return any(type(m) in kinds for m in self.module.modules()) and not self.warm_starts

    @property
    def has_common_statistics(self) -> bool:
        """Whether some of `params` are not trained but counted, as BatchNorm's variances are."""
        return self.params.keys() != self.trainable.keys()

    @cached_property
    def nbytes(self) -> int:
        """Size of `params` in memory."""
        return sum(v.nbytes for v in self.params.values())

    @property
    def like(self) -> Tensor:
        """One of its tensors: what is to have its type and to lie beside it is made of it, as `like.new_zeros(3)`."""
        return next(iter(self.params.values()))

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.like.device

    def to(self, device: torch.device) -> Model:
        """The same model on another device; this one is unchanged.

        Args:
            device: Where its tensors shall be.

        Returns:
            A copy, or this model if it is there already.
        """
        if device == self.device:
            return self
        if self.architectures is not None:
            return mix_architectures(
                {k: m.to(device) for k, m in self.architectures.models.items()}, self.architectures.of
            )
        memo: dict[int, Any] = {id(v): nn.Parameter(v.to(device), v.requires_grad) for v in self.module.parameters()}
        beside = (*self.module.buffers(), *self.params.values(), *self.private_buffers.values(), *self.fixed.values())
        memo |= {id(v): v.detach().to(device) for v in beside if id(v) not in memo}
        return deepcopy(self, memo)

    def __call__(self, params: Params, x: Tree, *, training: bool = False) -> Tensor:
        """Outputs for a batch.

        In training, BatchNorm writes its statistics into `params`; so does an equilibrium layer its end point, if it
        was given where to start (`warm_starts`).

        Args:
            params: All tensors of the model.
            x: A batch; named tensors are keywords of the module.
            training: Whether the module is in training mode.

        Returns:
            Outputs, one row per sample.
        """
        self.prepare(params, training=training)
        return self.forward(params, x)

    def forward(self, params: Params, x: Tree) -> Tensor:
        """As `__call__`, in the mode of the last `prepare`.

        Args:
            params: All tensors of the model.
            x: A batch.

        Returns:
            Outputs, one row per sample.
        """
        args, named = ((), x) if isinstance(x, dict) else ((x,), {})
        if not self._watched:
            return plain_outputs(torch.func.functional_call(self.module, params, args, named))
        # a copy, as the backward pass may need what the forward pass replaces
        held = params | {k: params[k].clone() for k in self.rebound if k in params}
        outputs = torch.func.functional_call(self.module, held, args, named)
        self._write_back(params, held)
        return plain_outputs(outputs)

    def _write_back(self, tensors: Params, held: Params) -> None:
        """A forward pass may have put new tensors in the place of buffers: the caller's have their values then."""
        for name in self._watched:
            if (new := held.get(name)) is not None and new is not tensors[name]:
                if new.shape != tensors[name].shape:
                    raise ValueError(f'forward changes the shape of the buffer "{name}" to {list(new.shape)}')
                tensors[name].copy_(new.detach())

    def features(self, params: Params, x: Tree) -> Tensor:
        """What comes to the first module of the head that runs, with every part in evaluation mode.

        Args:
            params: The model's tensors; others among them are left aside.
            x: A batch.

        Returns:
            A tensor [samples, features].
        """
        return self.features_and_outputs(params, x)[0]

    def features_and_outputs(
        self,
        params: Params,
        x: Tree,
        *,
        training: bool = False,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What comes to the first module of the head that runs, and the outputs when `change` of it enters.

        Args:
            params: The model's tensors; others among them are left aside.
            x: A batch.
            training: Whether parts such as dropout are in training mode.
            change: New features from those that came, of the same shape [samples, features].

        Returns:
            The features [samples, features] as they came, and the outputs.
        """
        entered: list[Tensor] = []

        def enter(part: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor | None:
            entered.append(inputs[0].flatten(1))
            return None if change is None or len(entered) > 1 else change(entered[0]).reshape(inputs[0].shape)

        if not self.head:
            raise ConfigError("model.head: features are what comes to the head, but the model has none")
        parts = [self.module.get_submodule(name) for name in {k.rpartition(".")[0] for k in self.head}]
        hooks = [part.register_forward_pre_hook(enter) for part in parts]
        try:
            known = {k: v for k, v in params.items() if k in self.params or k in self.private_buffers}
            outputs = self(known, x, training=training)
        finally:
            for hook in hooks:
                hook.remove()
        return entered[0], outputs

    @contextmanager
    def holding(self, tensors: Params) -> Iterator[nn.Module]:
        """The module in training with these tensors for its own, for many calls: what `__call__` does for each."""
        self.prepare(tensors, training=True)
        held = dict(tensors)
        with stateless._reparametrize_module(self.module, held, tie_weights=True):
            yield self.module
        self._write_back(tensors, held)

    def prepare(self, tensors: Params, *, training: bool) -> None:
        """Set the mode. A parameter that is missing would silently be the module's initial value."""
        if not self._needed <= tensors.keys():
            missing = sorted(self._needed - tensors.keys())
            raise ValueError(f'the model needs "{missing[0]}", which is neither given nor frozen')
        if self.module.training is not training:
            self.module.train(training)
            for part in self._always_evaluating:
                part.eval()


def mix_architectures(models: Mapping[str, Model], of: Callable[[str], str]) -> Model:
    """The model of a federation in which `of` names the architecture of each client; the server has the first."""
    names = {k for model in models.values() for k in model.params}

    def form(model: Model, name: str) -> tuple[torch.Size, torch.dtype] | None:
        return (model.params[name].shape, model.params[name].dtype) if name in model.params else None

    differing = frozenset(k for k in names if len({form(model, k) for model in models.values()}) > 1)
    each = {k: copy(model) for k, model in models.items()}
    for model in each.values():
        model.differing = differing
    server = copy(next(iter(each.values())))
    server.architectures = Architectures(each, of)
    return server
