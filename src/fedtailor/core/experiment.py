"""What all clients of a run share, the data that each of them holds, and how unequal they are otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.algorithm import Algorithm, client_functions, reply_example
from fedtailor.core.context import LocalSolver
from fedtailor.core.data import FederatedData, count
from fedtailor.core.environment import Environment
from fedtailor.core.model import Model
from fedtailor.core.random import seeded
from fedtailor.core.reduce import Aggregation
from fedtailor.core.task import Loss, Metric, Task, default_task, usual_metrics
from fedtailor.core.trees import Params, Tree, leaves, to_device, tree_map
from fedtailor.core.windows import predict_in_windows


class Mixing(NamedTuple):
    """Whether what a model says of a sample depends on the other samples of the batch."""

    in_training: bool
    in_prediction: bool


@dataclass(frozen=True)
class Experiment:
    """One algorithm, one model, one federation's data, one seed."""

    algorithm: Algorithm
    model: Model
    data: FederatedData
    solver: LocalSolver
    seed: int
    environment: Environment = field(default_factory=Environment)
    unseen: FederatedData | None = None  # clients that take no part; they come when everything is learned
    aggregation: Aggregation = field(default_factory=Aggregation)
    task: Task = field(default=None)  # type: ignore[assignment]  # that of the data, if it is not given
    metrics: tuple[Metric, ...] = ()  # the first decides; those of the task, if none are given
    evaluation_batch: int = 0  # samples of a pass in evaluation; 0: as many as need little memory
    window: tuple[int, ...] = ()  # in which images are evaluated; none: whole

    def __post_init__(self) -> None:
        if self.task is None:
            object.__setattr__(self, "task", default_task(self.data.task))
        if not self.metrics:
            object.__setattr__(self, "metrics", usual_metrics(self.task))

    def at(self, client: int) -> Experiment:
        """As a client sees it: with its own architecture, where they differ."""
        name = self.architecture(client)
        return self if name is None else self.by_architecture[name]

    def architecture(self, client: int) -> str | None:
        """The name of a client's architecture; None where all have the same."""
        known = self.model.architectures
        return None if known is None else known.of(self.data.clients[client])

    @cached_property
    def by_architecture(self) -> dict[str, Experiment]:
        """The same for clients of one architecture, by its name; nothing where all have the same."""
        known = self.model.architectures
        return {} if known is None else {name: replace(self, model=model) for name, model in known.models.items()}

    @property
    def optimizer_state(self) -> Tree:
        """What a client's optimizers remember before the first round; None: they begin anew in every one."""
        return self.solver.optimizer_state

    @property
    def device(self) -> torch.device:
        """Where clients compute: that of the model."""
        return self.model.device

    def on(self, device: torch.device) -> Experiment:
        """The same experiment on another device, its data included."""
        if device == self.device:
            return self
        unseen = None if self.unseen is None else self.unseen.on(device)
        return replace(self, model=self.model.to(device), data=self.data.on(device), unseen=unseen)

    @property
    def loss(self) -> Loss:
        return self.task.loss

    def predict(self, model: Params, x: Tree) -> Tree:
        """What a client's model says of samples, of large images window by window."""

        def whole(x: Tree) -> Tree:
            return self.algorithm.predict(self.model, model, x)

        return predict_in_windows(whole, x, self.window) if self.window else whole(x)

    @cached_property
    def reply_sizes(self) -> dict[str, int]:
        """Bytes of a reply to each client function, without its header."""
        functions = client_functions(self.algorithm)
        return {name: codec.tree_size(reply_example(self.algorithm, name, self.model)) for name in functions}

    @cached_property
    def output_size(self) -> int:
        """Bytes of what the model gives for a sample; 0 if it gives nothing for a sample alone."""
        tensors, x = self.model.params | self.model.private_buffers, self.data.train.first(1)
        try:
            with torch.no_grad(), seeded("output size", device=self.device):
                return sum(v.nbytes for v in leaves(self.model(tensors, to_device(x, self.device))))
        except Exception:  # what is wrong will be said where it happens
            return 0

    @cached_property
    def mixing(self) -> Mixing:
        """Found by trial: the first sample, once among others and once among copies of itself.

        Buffers that change in training change with all samples of the batch, padding too.
        """
        x = to_device(self.data.train.first(8), self.device)
        return Mixing(self.task.mixes or self._mixes(x, training=True), self._mixes(x, training=False))

    def _mixes(self, x: Tree, *, training: bool) -> bool:
        if count(x) < 2:
            return training and (self.model.batch_statistics or bool(self.model.rebound))
        model, changed = self.model, False

        def first(batch: Tree) -> list[Tensor]:
            nonlocal changed
            tensors = {k: v.clone() for k, v in (model.params | model.private_buffers).items()}
            before = {k: tensors[k].clone() for k in tensors.keys() - model.trainable.keys()}
            with torch.no_grad(), seeded("mixing", device=model.device):
                rows = [v[0] for v in leaves(model(tensors, batch, training=training))]
            changed = changed or any(not torch.equal(tensors[k], v) for k, v in before.items())
            return rows

        among_others, alone = first(x), first(tree_map(lambda v: v[:1].expand_as(v), x))
        if changed and training:
            return True
        pairs = zip(among_others, alone, strict=True)
        return not all(torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in pairs)
