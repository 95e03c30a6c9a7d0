"""Candidates that are solved without a part of the rows, each by an algorithm of its own, in one program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.algorithm import Algorithm, ReplySpec, client_functions, on_client
from fedtailor.core.context import ClientContext, View
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.reduce import PerClient
from fedtailor.core.trees import Tree

NEVER = -1  # the fold of rows that are always trained on


def folds_of_rows(rows: int, seed: int, site: str, folds: int) -> NDArray[np.int64]:
    """The fold of each of a site's training rows; a single row is always trained on."""
    if rows < 2:
        return np.full(rows, NEVER)
    rng, out = stream(seed, site, "folds"), np.empty(rows, dtype=np.int64)
    order = rng.permutation(rows)
    out[order] = (np.arange(rows) + rng.integers(folds)) % folds
    return out


def folds_at(me: ClientContext, folds: int) -> Tensor:
    """The folds of a client's rows, or of a stack of clients with `NEVER` for padding."""
    experiment = me.experiment
    sizes = experiment.data.train.bounds(me.members)[1]

    def make(is_stacked: bool) -> tuple[Tensor, ...]:
        each = [
            folds_of_rows(n, experiment.seed, experiment.data.clients[c], folds)
            for c, n in zip(me.members, sizes, strict=True)
        ]
        longest = max(sizes)
        padded = np.stack([np.pad(own, (0, longest - len(own)), constant_values=NEVER) for own in each])
        out = torch.from_numpy(padded).to(me.model.device)
        return (out if is_stacked else out[0],)

    return me.constants(make)[0]


class FoldContext(ClientContext):
    """A client without the rows of one fold, standardised as all clients agreed; `fold` None: with all rows."""

    def __init__(
        self, me: ClientContext, state: Tree, fold: int | None, folds: int, center: Tensor, spread: Tensor
    ) -> None:
        super().__init__(me.experiment, me.members, me.key, me.round, me.n, state, me.buffers, None)
        self.center, self.spread = center, spread
        self._fold, self._folds = fold, folds
        if fold is not None:
            self.n = me.n - (folds_at(me, folds) == fold).sum().to(me.n.dtype)

    @property
    def train(self) -> View:
        return standardise(super().train, self.center, self.spread)

    def _samples(self, rows: Any, is_stacked: bool) -> tuple[Tree, Tensor, Tensor]:
        """Without the fold: in a stack, where all must have as many rows, it counts 0."""
        x, y, mask = super()._samples(rows, is_stacked)
        if self._fold is None:
            return x, y, mask
        names, sizes = self.experiment.data.clients, rows.bounds(self.members)[1]
        each = [
            folds_of_rows(n, self.experiment.seed, names[c], self._folds)
            for c, n in zip(self.members, sizes, strict=True)
        ]
        if not is_stacked:
            at = torch.from_numpy(np.flatnonzero(each[0] != self._fold)).to(y.device)
            return x[at], y[at], mask.new_ones(len(at))
        keep = torch.zeros_like(mask)
        for row, own in enumerate(each):
            keep[row, : len(own)] = torch.from_numpy(own != self._fold).to(keep)
        return x, y, mask * keep


def standardise(view: View, center: Tensor, spread: Tensor) -> View:
    """Features, and numbers to predict, minus `center` and divided by `spread` [features + numbers]."""
    x = view.x.flatten(1)
    features = x.shape[1]
    y = view.y
    if y.is_floating_point():
        y = (y - center[features:]) / spread[features:]
    return View((x - center[:features]) / spread[:features], y, view.mask)


class CandidateFederation:
    """A federation as the algorithm of a candidate sees it: its client functions are those of the program."""

    def __init__(self, fed: Federation, program: Algorithm, prefix: str) -> None:
        self._fed, self._program, self._prefix = fed, program, prefix

    def map(self, fn: Callable[..., Any], *message: Tree) -> PerClient:
        return self._fed.map(getattr(self._program, f"{self._prefix}_{fn.__name__}"), *message)

    def sum(self, x: PerClient) -> Tree:
        return self._fed.sum(x)

    def report(self, **values: Any) -> None:
        """Of single candidates nothing is recorded."""

    @property
    def cohort(self) -> tuple[int, ...]:
        return self._fed.cohort

    @property
    def model(self) -> Model:
        return self._fed.model


def delegate(kind: type[Algorithm], prefix: str, name: str) -> Callable[..., Any]:
    """A client function of a candidate's algorithm as one of the program, with what it declares to send."""
    declared = client_functions(kind)[name].sends  # type: ignore[attr-defined]
    doubt = client_functions(kind)[name].doubt  # type: ignore[attr-defined]

    def of_candidate(spec: ReplySpec) -> ReplySpec:
        return replace(spec, example=lambda program, model: spec.example(kind(), model))

    sends = tuple(map(of_candidate, declared)) if isinstance(declared, tuple) else declared and of_candidate(declared)

    @on_client(sends=sends, doubt=doubt)
    def passed(self: Any, me: ClientContext, *message: Tree) -> tuple[Tree, Tree]:
        algorithm, part = self.at_work(me)
        state, reply = getattr(algorithm, name)(part, *message)
        return me.state | {"inner": state}, reply

    passed.__name__ = f"{prefix}_{name}"
    return passed
