"""An algorithm with private states and a tape, that ends one rank on demand."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import torch

from fedtailor.core.algorithm import COUNT, MODEL, NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class Mortal(Algorithm):
    """Clients learn their step sizes. In round 3 the rank that MORTAL names is killed, as by a power failure."""

    def server_init(self, model: Model) -> Tree:
        return model.params

    def client_init(self, me: ClientContext) -> Tree:
        return {"log_lr": torch.full_like(me.n, -3.0)}

    @on_client(sends=(MODEL, COUNT))
    def train(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        if me.round == 3 and "MORTAL" in os.environ and os.environ["MORTAL"] == os.environ.get("RANK"):
            os.kill(os.getpid(), signal.SIGKILL)
        return me.state, (me.sgd(w, lr=me.state["log_lr"].exp()), me.n)

    @on_client(sends=NUMBER)
    def judge(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, me.loss(w, "val")

    @on_client()
    def learn(self, me: ClientContext) -> tuple[Tree, Tree]:
        return {"log_lr": me.state["log_lr"] - me.grad["log_lr"]}, None

    def round(self, fed: Federation, w: Params) -> Tree:
        fed.tape()
        w = fed.mean(*fed.map(self.train, w))
        fed.backward(fed.sum(fed.map(self.judge, w)))
        fed.map(self.learn)
        return w

    def personal(self, me: ClientContext, w: Params) -> Params:
        return {k: v * (2 + 0.1 * me.state["log_lr"]) for k, v in w.items()}
