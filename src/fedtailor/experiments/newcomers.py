"""Clients that come to a federation already trained: held out of a run to measure how it serves them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from fedtailor.core.client import onboard
from fedtailor.core.data import FederatedData
from fedtailor.core.environment import Environment
from fedtailor.core.experiment import Experiment
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError
from fedtailor.metrics.evaluation import evaluate

EPOCHS = 3
"""Default epochs for a newcomer to fine-tune its private parameters."""


def hold_out(data: FederatedData, share: float, seed: int) -> tuple[FederatedData, FederatedData]:
    """The clients that train, and a share of all, at least one, that takes no part."""
    clients = len(data.clients)
    count = max(1, round(share * clients))
    if count >= clients:
        raise ConfigError(f"evaluation.unseen = {share:g}: of {clients} clients none would be left to train with")
    order = stream(seed, "unseen").permutation(clients).tolist()
    trained = data.only(sorted(order[count:]))
    note = f"{count} of {clients} clients take no part in training; they are onboarded at the end"
    return replace(trained, notes=(*trained.notes, note)), data.only(sorted(order[:count]))


def onboarded(
    experiment: Experiment, newcomers: FederatedData, server: Tree, epochs: int
) -> Iterator[tuple[Params, dict[str, dict[str, Tensor]]]]:
    """The personal model of each newcomer, and its metrics by split; nobody else is touched."""
    own = replace(experiment, data=newcomers, unseen=None, environment=Environment())
    for i in range(len(newcomers.clients)):
        model = onboard(own, i, server, epochs)
        yield model, evaluate(own, [i], model, ("val", "test"), is_stacked=False)
