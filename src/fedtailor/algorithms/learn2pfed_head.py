"""Learn2pFed-Head: Learn2pFed on the last layers of a network, over a local body. Lv et al., 2024, sections IV-D and V.

Cells 1 to L in every round, as for linear models, with (14) in place of (10): one gradient step on
h = F + rho/2 |v - (w + z + a)|^2, where F is the client's mean loss. Symbols: w common head; v own head; z = v - w;
a scaled dual; lam degree of collaboration (Lambda); p, gamma weights of (12); theta, rho, eta steps of (9), (14), (11).
A head is one column here, so that the numbers of a cell are those of a linear model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.algorithms._shared import learnables
from fedtailor.algorithms._shared.unrolled_cells import UnrolledCells
from fedtailor.algorithms.learn2pfed import DESCENT, TRAINING_LOSS, Learn2pFed
from fedtailor.core.algorithm import NUMBER, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, flat, tree_map, unflat
from fedtailor.errors import ConfigError
from fedtailor.training.optimizers import adam_direction

VECTOR = ReplySpec("head", lambda algorithm, model: column(head_of(model)))


@dataclass(frozen=True)
class Learn2pFedHead(UnrolledCells, Algorithm):  # type: ignore[override]  # counts_all
    """Unrolled ADMM with gradient steps on the head; the degrees, weights and steps of its cells are learned."""

    outer: Literal["holdout", "train"] = "holdout"
    """Loss that the numbers of the cells are learned from: validation or training loss (paper). Where no client has
    validation samples, nothing is learned from them."""
    serve: Literal["shrunk", "own"] = "shrunk"
    """Predict with the shrunk head w + z, or with v (paper). The outer loss is that of what is served."""
    v_lr: float = 0.01
    """Step size of (14); with long features, as those of a convolutional network, steps of 0.1 diverge."""
    body: Literal["epochs", "joint"] = "epochs"
    """Train the body for local epochs under the head v before the cells; or by one step of Adam, with the run's
    learning rate, along the gradient of the outer loss through all cells (paper)."""
    epochs: int = 2
    """Local epochs of the body."""

    title: ClassVar[str] = "Learn2pFed-Head"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "body, own head, dual, degrees, steps"
    at_once: ClassVar[bool] = True
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": TRAINING_LOSS
        | {"serve": "own", "body": "joint", "positive": "relu", "weights": "samples", "per_cell": True}
        | {"start": "fixed", "spread": 0.1, "sum_loss": True, "lam": 0.1, "rho": 0.1, "theta": 0.1}
        | DESCENT
    }
    citation: ClassVar[str] = Learn2pFed.citation

    def check(self, model: Model, task: str) -> None:
        self.check_options()
        if not model.head:
            raise ConfigError("model.head: Learn2pFed-Head needs a head, the layers that its cells compute")
        if self.body == "joint" and self.outer != "train":
            raise ConfigError('algorithm.body = "joint" would train on validation data; set algorithm.outer = "train"')
        if self.body == "joint" and model.batch_statistics:
            raise ConfigError(
                'algorithm.body = "joint" takes no statistics of BatchNorm; set algorithm.body = "epochs"'
            )

    def server_init(self, model: Model) -> Tree:
        w = column(head_of(model))
        return {"w": w, "common": self.first_numbers(w)}

    def client_init(self, me: ClientContext) -> Tree:
        head = head_of(me.model)
        body = me.model.without(head)
        state = self.first_state(me, column(head)) | {"body": body}
        zero = tree_map(torch.zeros_like, body)
        return state | ({"first": zero, "second": zero} if self.body == "joint" else {})

    def onboard_init(self, me: ClientContext, server: Tree) -> Tree:
        s = self.client_init(me)
        common = learnables.degrees(server["common"]["raw"])
        s["learned"]["raw"] = learnables.pull_degrees(s["learned"]["raw"], common, 1.0)
        return s | {"v": server["w"]}

    def round(self, fed: Federation, server: Tree) -> Tree:
        if self.body == "epochs":
            fed.map(self.train_body)
        server = self.begin_epoch(fed, server)
        fed.tape()
        *_, w = self.run_cells(fed, server["w"])
        common = self.learn_from(fed, server, self.mean_outer_loss(fed, w, may_be_empty=True))
        return server | {"w": w, "common": common}

    @on_client()
    def train_body(self, me: ClientContext) -> tuple[Tree, Tree]:
        s = me.state
        return s | {"body": me.sgd(s["body"], epochs=self.epochs, frozen=as_head(s["v"], me.model))}, None

    @on_client(sends=(VECTOR.summed(), NUMBER.summed()))
    def cell(self, me: ClientContext, w: Tensor, cell: Tensor) -> tuple[Tree, Tree]:
        s = me.state
        x = self.numbers(s, w, cell)
        a = s["a"] + x["theta"] * (s["z"] - s["v"] + w)  # (9)
        slope = torch.func.grad(lambda v: me.loss(self.body_of(s) | as_head(v, me.model)))(s["v"])
        v = s["v"] - self.v_lr * (slope + x["rho"] * (s["v"] - (w + s["z"] + a)))  # (14)
        z = x["eta"] / (x["lam"] + x["eta"]) * (v - w - a)  # (11)
        c = x["p"] * x["gamma"]
        return s | {"v": v, "z": z, "a": a}, (c * (v - z - a), c.squeeze())

    def body_of(self, state: Tree) -> Params:
        """The body as the cells see it: what is trained by local epochs is no function of them."""
        return state["body"] if self.body == "joint" else tree_map(torch.detach, state["body"])

    @on_client(sends=(NUMBER.summed(), NUMBER.summed()))
    def outer_loss(self, me: ClientContext, w: Tensor) -> tuple[Tree, Tree]:
        split = "val" if self.outer == "holdout" else "train"
        count = (me.val if self.outer == "holdout" else me.train).mask.sum()
        loss = me.loss(self.body_of(me.state) | as_head(self.served(me.state, w), me.model), split)
        return me.state, (loss if self.sum_loss else loss * count, count)  # (13) has the F of (14), a mean

    def served(self, state: Tree, w: Tensor) -> Tensor:
        """The head that predicts, as a column."""
        return w + state["z"] if self.serve == "shrunk" else state["v"]

    def beside(self, me: ClientContext) -> dict[str, Any]:
        if self.body == "epochs":
            return {}
        s, first, second, body = me.state, {}, {}, {}
        number = s["learned"]["steps"] + 1
        for k, v in s["body"].items():
            direction, first[k], second[k] = adam_direction(
                me.grad["body"][k], s["first"][k], s["second"][k], number, beside=1e-8
            )
            body[k] = v - me.lr * direction
        return {"body": body, "first": first, "second": second}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return me.state["body"] | as_head(self.served(me.state, server["w"]), me.model)

    def shares(self, me: ClientContext, server: Tree) -> Params:
        x = self.numbers(me.state, server["w"], -1)
        own = {k: torch.zeros_like(v) for k, v in me.state["body"].items()}
        return own | as_head(x["lam"] / (x["lam"] + x["eta"]), me.model)

    def effective_degrees(self, me: ClientContext, server: Tree) -> Params:
        x = self.numbers(me.state, server["w"], -1)
        return as_head(x["rho"] / x["eta"] * x["lam"], me.model)


def head_of(model: Model) -> Params:
    """What the cells compute: the trained parameters of the head."""
    return {k: v for k, v in model.head.items() if k in model.trainable}


def column(head: Params) -> Tensor:
    """A head as one column."""
    return flat(head)[:, None]


def as_head(v: Tensor, model: Model) -> Params:
    """The inverse of `column`."""
    head: Params = unflat(v[:, 0], head_of(model))
    return head
