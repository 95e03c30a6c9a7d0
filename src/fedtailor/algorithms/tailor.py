"""Tailor: what is shared, to what degree and how it is fitted, all learned by held-out loss through the federation.

A method of this project; its parts are others': starts between own and common model (FedALA, Learn2pFed), learned
steps of fine-tuning (FedL2P), the label prior (balanced softmax), a mixture of predictions (MAPPER), and for linear
models of numbers degrees in closed form (EmpiricalBayes).

Symbols: w common model; v own model; s share of w in a layer's start; eta factor of a layer's fine-tuning steps; tau
strength of the label prior; theta = (logit s, log eta, tau), common, and u what a client adds to it; m what each kind
of model counts in a mixture of predictions over all clients, and strength how many samples it is worth to a client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared import mixture
from fedtailor.algorithms._shared.layers import layers_of
from fedtailor.algorithms._shared.own_loss import beside
from fedtailor.algorithms._shared.random_coefficients import RandomCoefficients
from fedtailor.algorithms._shared.unfolding import adam, learnable
from fedtailor.core.algorithm import COUNT, MODEL, NUMBER, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, detach
from fedtailor.errors import ConfigError
from fedtailor.numerics import ridge

PARTS = ("share", "step", "prior")
BESIDE = ("alone", "common")  # models that predict beside the fitted one
ERRORS = ReplySpec("products of three models' validation errors", lambda algorithm, model: model.like.new_zeros(3, 3))
HELD_OUT = ReplySpec(
    "validation errors of mixtures", lambda algorithm, model: model.like.new_zeros(len(mixture.STRENGTHS))
)


@dataclass(frozen=True)
class Tailor(RandomCoefficients):
    """Every round starts between the common and the client's own model; how far between is learned, as is the rest."""

    epochs: int = 1
    """Local epochs per round."""
    tune_epochs: int = 1
    """Epochs of fine-tuning before a client predicts."""
    tune_step: float = 0.1
    """First factor of the steps of fine-tuning in layers of the body; that of the head is 1."""
    share: float = 0.9
    """First share of the common model, in layers of the body: 1 is the common layer, 0 the client's own, for good."""
    head_share: float = 0.1
    """The same for the head."""
    prior: float = 1.0
    """First strength of the client's label prior, which is added to the head's bias and never sent."""
    learned: tuple[str, ...] = PARTS
    """What is learned: any of share, step (of fine-tuning) and prior."""
    outer_lr: float = 0.4
    """Step size of learning (Adam)."""
    every: int = 4
    """Learn in one of so many rounds; in the others the model that never meets another is trained."""
    evidence: float = 50.0
    """Samples with which a client's own deviation from the common theta is halved in each step; 1e9 allows none."""
    mixes: bool = True
    """Predict with a mixture of the fitted model, one that the client trains alone, and the common one."""

    title: ClassVar[str] = "Tailor"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "own models, label prior, deviation of its degrees, mixture"
    onboards_fitted: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "fedavg": ({"preset": "fedavg"}, "fedavg", {}, "full-batch"),
        "local": ({"preset": "local"}, "local", {}, "full-batch"),
        "fedper": ({"preset": "fedper"}, "fedper", {}, "full-batch"),
        "fedavg+ft": ({"preset": "fedavg+ft"}, "fedavg+ft", {}, "full-batch"),
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        name: {"learned": (), "prior": 0.0, "mixes": False, "tune_step": 1.0}
        | {"tune_epochs": tune, "share": body, "head_share": head}
        for name, tune, body, head in (
            ("fedavg", 0, 1.0, 1.0),
            ("local", 0, 0.0, 0.0),
            ("fedper", 0, 1.0, 0.0),
            ("fedavg+ft", 5, 1.0, 1.0),
        )
    }

    def check(self, model: Model, task: str) -> None:
        if task not in ("classification", "regression", "segmentation"):
            raise ConfigError(f"algorithm.name: Tailor mixes predictions of classes or numbers; it is not for {task}")

    @property
    def period(self) -> int:
        return self.every

    def server_init(self, model: Model) -> Tree:
        layers = layers_of(model)
        heads = {layers[k] for k in model.head}
        count = len(set(layers.values()))
        s = model.like.new_tensor([self.head_share if i in heads else self.share for i in range(count)])
        eta = s.new_tensor([1.0 if i in heads else self.tune_step for i in range(count)])
        theta = torch.cat([s.logit(), eta.log(), s.new_tensor([self.prior])])
        server = {"w": model.params, "theta": learnable(theta)}
        if self.mixes:
            server |= {"common": model.params, "m": s.new_full((3,), 1 / 3), "strength": s.new_tensor(mixture.FIRST)}
            server |= {"errors": s.new_zeros(3, 3), "held_out": s.new_zeros(len(mixture.STRENGTHS))}
        return server | ({"spread": self.first_spread(model)} if self.may_solve(model) else {})

    def may_solve(self, model: Model) -> bool:
        """Whether the model, if it predicts numbers, has a closed form."""
        return self.mixes and ridge.is_linear(model) and not model.fixed

    def client_init(self, me: ClientContext) -> Tree:
        layers = len(set(layers_of(me.model).values()))
        state = {"v": me.model.params, "u": learnable(me.model.like.new_zeros(2 * layers + 1))}
        if not self.mixes:
            return state
        state |= {"q": me.model.like.new_zeros(mixture.FOLDS, 3, 3)}
        if self.solves(me):
            return state | {"d": ridge.statistics(me.model, me.train), "held": ridge.moments(me.model, me.val)}
        return state | {"alone": me.buffers | me.model.params}

    def solves(self, me: ClientContext) -> bool:
        return self.may_solve(me.model) and me.experiment.task.kind == "regression"

    def onboard_init(self, me: ClientContext, server: Tree) -> Tree:
        state = self.client_init(me)
        own = {"v": state["v"] | server["w"]}
        return state | own | ({"alone": state["alone"] | server["common"]} if "alone" in state else {})

    def numbers(self, me: ClientContext, theta: Tensor) -> tuple[Params, Params, Params]:
        """s and eta of every parameter, and what the label prior adds to the head's bias."""
        theta, layers = theta + me.state["u"]["x"], layers_of(me.model)
        s, eta = theta[:-1].chunk(2)
        each = {k: layers[k] for k in me.model.trainable}
        shift = {k: theta[-1] * x for k, x in mixture.label_shift(me).items()}
        return {k: s.sigmoid()[i] for k, i in each.items()}, {k: eta.exp()[i] for k, i in each.items()}, shift

    def starting_point(self, me: ClientContext, w: Params, s: Params, shift: Params) -> Params:
        """Where a client's training starts: between its own model and w."""
        start = w | {k: torch.lerp(me.state["v"][k], w[k], x) for k, x in s.items()}
        return start | {k: start[k] + x for k, x in shift.items()}

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, w: Params, theta: Tensor) -> tuple[Tree, Tree]:
        s, _, shift = self.numbers(me, theta)
        own = me.sgd(self.starting_point(me, w, s, shift), epochs=self.epochs)
        own |= {k: own[k] - x for k, x in shift.items()}  # the prior stays here
        return me.state | {"v": own}, (own, me.n)

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def together(self, me: ClientContext, common: Params) -> tuple[Tree, Tree]:
        """FedAvg's model with the label prior, which predicts beside the fitted one."""
        statistics, shift = me.buffers, self.shift(me)
        common = me.sgd(common | {k: common[k] + x for k, x in shift.items()}, epochs=self.epochs)
        me.buffers = statistics
        return me.state, (common | {k: common[k] - x for k, x in shift.items()}, me.n)

    @on_client()
    def apart(self, me: ClientContext) -> tuple[Tree, Tree]:
        """A model that never meets another predicts beside it as well."""
        statistics = me.buffers
        alone = me.sgd(me.state["alone"], epochs=self.epochs)
        me.buffers = statistics
        return me.state | {"alone": alone}, None

    def shift(self, me: ClientContext) -> Params:
        """What the label prior adds to the bias of FedAvg's model."""
        return {k: self.prior * x for k, x in mixture.label_shift(me).items()}

    def fine_tune(self, me: ClientContext, w: Params, theta: Tensor) -> Params:
        s, eta, shift = self.numbers(me, theta)
        start = self.starting_point(me, w, s, shift)
        steps = {k: x.expand_as(start[k]) for k, x in eta.items()}  # a mask scales a step
        return me.sgd(start, epochs=self.tune_epochs, mask=steps) if self.tune_epochs else start

    @on_client(sends=(NUMBER.summed(), NUMBER.summed(), ERRORS.summed()))
    def judge(self, me: ClientContext, w: Params, theta: Tensor, beside: Tree) -> tuple[Tree, Tree]:
        statistics, count, state = me.buffers, me.val.mask.sum(), me.state
        fitted = self.fine_tune(me, w, theta)
        loss = me.loss(fitted, "val")
        q = loss.new_zeros(1, 3, 3)
        if self.mixes:
            with torch.no_grad():
                q = mixture.products_of_errors(me, [detach(fitted), *self.others(me, detach(beside))])
            state = state | {"q": q}
        me.buffers = statistics  # those of training, not of this trial
        return state, (loss * count, count, q.sum(0))

    @on_client(sends=HELD_OUT.summed())
    def weigh(self, me: ClientContext, m: Tensor) -> tuple[Tree, Tree]:
        return me.state, mixture.held_out(me, me.state["q"], m)

    def others(self, me: ClientContext, beside: Tree, *, uses_all: bool = False) -> list[Params]:
        """What predicts beside the fitted model: one of the client's own, and FedAvg's with the label prior.

        The own one never met another; or, in closed form, it is drawn to the common one by the evidence of all. With
        `uses_all` that is fitted to validation samples too, as it can be once they have said what it counts.
        """
        common = beside["common"]
        if self.solves(me):
            d = {k: me.state["d"][k] + (me.state["held"][k] if uses_all else 0) for k in ("A", "b")}
            own = ridge.as_params(me.model, ridge.shrunk(d, **beside["shrinkage"]))
        else:
            own = me.state["alone"]
        return [own, common | {k: common[k] + x for k, x in self.shift(me).items()}]

    def part_for_clients(self, server: Tree) -> Tree:
        """What clients need of the server for the models beside the fitted one."""
        solved = {"shrinkage": self.shrinkage(server["spread"])} if "spread" in server else {}
        return {"common": server["common"]} | solved

    @on_client()
    def deviate(self, me: ClientContext) -> tuple[Tree, Tree]:
        u = adam(me.state["u"], self.learned_gradient(me.grad["u"]["x"]), self.outer_lr)
        return me.state | {"u": u | {"x": u["x"] * me.n / (me.n + self.evidence)}}, None

    def learned_gradient(self, slope: Tensor) -> Tensor:
        layers = (slope.shape[-1] - 1) // 2
        is_learned = [part in self.learned for part in PARTS]
        return slope * slope.new_tensor([*is_learned[:1] * layers, *is_learned[1:2] * layers, is_learned[2]])

    def round(self, fed: Federation, server: Tree) -> Tree:
        w, theta = server["w"], server["theta"]
        is_time = fed.round % self.every == 0
        new = self.beside(fed, server, is_time=is_time) if self.mixes else {}
        x = fed.tape(theta["x"]) if is_time and self.learned else theta["x"]
        w = fed.mean(*fed.map(self.local, w, x))
        if is_time and (self.learned or self.mixes):
            losses, counts, errors = fed.map(self.judge, w, x, self.part_for_clients(new) if self.mixes else {})
            loss = fed.sum(losses) / fed.sum(counts).clamp(min=1)
            errors = fed.sum(errors).detach()
            if self.learned:
                theta = adam(theta, self.learned_gradient(fed.backward(loss)), self.outer_lr)
                fed.map(self.deviate)
            fed.report(outer_loss=loss.detach(), theta=list(theta["x"]))
            new |= self.update_mixture(fed, server, errors) if self.mixes else {}
        return server | {"w": w, "theta": theta} | new

    def beside(self, fed: Federation, server: Tree, *, is_time: bool) -> Tree:
        """A round of what predicts beside the fitted model."""
        common = fed.mean(*fed.map(self.together, server["common"]))
        if fed.task == "regression" and "spread" in server:
            return {"common": common, "spread": self.em_step(fed, server["spread"])}
        if not is_time or self.every == 1:
            fed.map(self.apart)
        return {"common": common}

    def update_mixture(self, fed: Federation, server: Tree, errors: Tensor) -> Tree:
        """The mixture of all clients, and how much it is worth to one of them."""
        kept = (1 - len(fed.cohort) / fed.clients) / 2  # errors of before stand for clients who are not asked now
        errors = kept * server["errors"] + errors
        m = mixture.least(errors, server["m"], 0.0)
        held_out = kept * server["held_out"] + fed.sum(fed.map(self.weigh, m))
        strength = m.new_tensor(mixture.STRENGTHS)[held_out.argmin()] if held_out.sum() > 0 else server["strength"]
        fed.report(mixture=list(m), strength=strength)
        return {"errors": errors, "m": m, "held_out": held_out, "strength": strength}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        fitted = self.fine_tune(me, server["w"], server["theta"]["x"])
        if not self.mixes:
            return fitted
        shown = self.part_for_clients(server)
        weights = mixture.weights(me, [fitted, *self.others(me, shown)], server["m"], server["strength"])
        alone, common = (beside(name, m) for name, m in zip(BESIDE, self.others(me, shown, uses_all=True), strict=True))
        return fitted | alone | common | weights

    def predict(self, model: Model, personal: Params, x: Tensor) -> Tensor:
        return mixture.predict(model, personal, x, BESIDE) if self.mixes else model(personal, x)

    def shares(self, me: ClientContext, server: Tree) -> Params:
        s, _, _ = self.numbers(me, server["theta"]["x"])
        return {k: x.expand_as(me.model.trainable[k]) for k, x in s.items()}
