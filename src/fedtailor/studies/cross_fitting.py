"""Out-of-fold predictions: every training row is predicted by models that have not seen it.

Folds are cut inside each site. All sites train on all but their own part of a fold, together, and predict it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import engines
from fedtailor.algorithms._shared.parts import folds_of_rows
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.federation import Federation
from fedtailor.core.reduce import PerClient
from fedtailor.core.trees import Params, Tree
from fedtailor.experiments.building import assemble
from fedtailor.experiments.config import RunConfig

FOLDS = 5


def all_in_training(data: FederatedData) -> FederatedData:
    """Validation rows are training rows: folds take their place."""
    if not len(data.val.x):
        return data
    parts = [[torch.cat(pair) for pair in zip(data.train.of(i), data.val.of(i), strict=True)] for i in _sites(data)]
    sizes = [len(x) for x, _ in parts]
    train = Rows(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), _starts(sizes))
    empty = Rows(train.x[:0], train.y[:0], _starts([0] * len(sizes)))
    return replace(data, train=train, val=empty)


def folds_of(data: FederatedData, seed: int, folds: int = FOLDS) -> NDArray[np.int64]:
    """The fold of every training row, and no site ever without a row.

    Not by class: with the shares of the classes the same in every fold, models that know the site's share would be
    flattered, since in the rows that they have not seen it is what it is in those that they have.
    """
    sizes = data.train.sizes.tolist()
    each = [folds_of_rows(rows, seed, site, folds) for rows, site in zip(sizes, data.clients, strict=True)]
    return np.concatenate(each)


def only_rows(data: FederatedData, keep: NDArray[np.bool_]) -> FederatedData:
    """The same sites with some of their training rows."""
    starts = data.train.starts.tolist()
    sizes = [int(keep[a:b].sum()) for a, b in pairwise(starts)]
    at = torch.from_numpy(np.flatnonzero(keep))
    return replace(data, train=Rows(data.train.x[at], data.train.y[at], _starts(sizes)))


def site_of_rows(rows: Rows) -> NDArray[np.int64]:
    """Which site each row belongs to."""
    return np.repeat(np.arange(len(rows.sizes)), rows.sizes.numpy())


class Watched(Federation):
    """Calls a function before every exchange; it may end the training by an exception."""

    check: Callable[[], None]

    def map(self, fn: Callable[..., Any], *message: Tree | PerClient) -> PerClient:
        self.check()
        return super().map(fn, *message)


def trained(
    config: RunConfig, data: FederatedData, start: Tree = None, check: Callable[[], None] = lambda: None
) -> tuple[Tree, list[Params]]:
    """The server's state and every site's model after the rounds of a configuration, in this process."""
    experiment = assemble(config, data)
    with engines.open_engine(config.federation.engine, experiment) as engine:
        fed = Watched(engine, config.federation.limits)
        fed.check = check
        server = experiment.algorithm.server_init(experiment.model) if start is None else start
        everybody = range(len(data.clients))
        for round in range(1, config.rounds + 1):
            server = fed.run_round(round, everybody, server)
        models: dict[int, Params] = {}
        for group, _, stack in engine.evaluate(everybody, config.rounds, server, ()):
            for row, client in enumerate(group):
                models[client] = {name: value[row].clone() for name, value in stack.items()}
    return server, [models[i] for i in everybody]


def outputs_of(config: RunConfig, data: FederatedData, models: list[Params], rows: Rows) -> Tensor:
    """What every site's model says of its rows: log-probabilities of classes, or numbers."""
    experiment = assemble(config, replace(data, train=rows if len(rows.x) else data.train))
    out = torch.zeros((len(rows.x), data.outputs), dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for i, params in enumerate(models):
            a, b = int(rows.starts[i]), int(rows.starts[i + 1])
            if b > a:
                x = rows.x[a:b].to(experiment.model.dtype)
                out[a:b] = experiment.algorithm.predict(experiment.model, params, x).double()
    return out.log_softmax(1) if data.task == "classification" else out


def out_of_fold(
    config: RunConfig,
    data: FederatedData,
    folds: NDArray[np.int64],
    start: Tree = None,
    fold_done: Callable[[int], None] = lambda fold: None,
    check: Callable[[], None] = lambda: None,
) -> Tensor:
    """What is said of each training row by models that were trained without its fold; NaN where there is no fold.

    Every fold begins at `start`; without one, at what the first fold has come to.
    """
    out = torch.full((len(data.train.x), data.outputs), torch.nan, dtype=torch.float64, device="cpu")
    for fold in range(int(folds.max()) + 1):
        held = folds == fold
        if held.any():
            server, models = trained(config, only_rows(data, ~held), start, check)
            start = start or server
            out[torch.from_numpy(held)] = outputs_of(config, data, models, only_rows(data, held).train)
            fold_done(fold + 1)
    return out


def _sites(data: FederatedData) -> range:
    return range(len(data.clients))


def _starts(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(sizes).tolist()], dtype=torch.int64, device="cpu")
