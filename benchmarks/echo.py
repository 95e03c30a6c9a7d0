"""An algorithm that only sends numbers back and forth, to time a trip. It is named as a user's own would be."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from fedtailor.core.algorithm import Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree

TRIPS = 30


@dataclass(frozen=True)
class Echo(Algorithm):
    """Every client sends back what it gets."""

    title = "Echo"
    floats: int = 256
    """Numbers in a message."""

    @on_client(sends=ReplySpec("echo", lambda algorithm, model: torch.zeros(algorithm.floats)))
    def echo(self, me: ClientContext, message: Tree) -> tuple[Tree, Tree]:
        return me.state, message

    def server_init(self, model: Model) -> Tree:
        return model.params

    def round(self, fed: Federation, server: Tree) -> Tree:
        times = []
        message = torch.zeros(self.floats)
        for _ in range(TRIPS):
            begun = time.perf_counter()
            fed.map(self.echo, message)
            times.append(1000 * (time.perf_counter() - begun))
        fed.report(median_ms=torch.tensor(median(times)))
        return server

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return server
