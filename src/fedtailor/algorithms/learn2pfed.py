"""Learn2pFed: learn to what degree each parameter of each client collaborates. Lv et al., 2024, Algorithm 1.

For linear models, with the v-step in closed form. Symbols: w common model; v own model; z = v - w; a scaled dual; lam
degree of collaboration (Lambda); p, gamma weights of (12); theta, rho, eta steps of (9), (10), (11). The penalty is
rho |.|^2, for which (10) and (11) are exact; the fixed point has Lambda_eff = rho / eta * lam, and that is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.algorithms.empirical_bayes import VECTOR, EmpiricalBayes
from fedtailor.core.algorithm import NUMBER, Algorithm, Sent, on_client
from fedtailor.core.federation import Federation
from fedtailor.core.me import Me
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError
from fedtailor.local import learnables, ridge, unrolled

DEGREES = Sent("degrees", lambda algorithm, model: algorithm.server_init(model)["degrees"])


@dataclass(frozen=True)
class Learn2pFed(Algorithm):
    """Unrolled ADMM with learned degrees; by default they are the most probable ones given everybody's data (eb)."""

    outer: Literal["eb", "loo", "holdout", "train"] = "eb"
    """What degrees are learned by: empirical Bayes, leave-one-out, validation error, or training error (paper)."""
    pull: float = 1.0
    """Degrees of a client: 0 its own, 1 common to all, between them a common part and a deviation of its own."""
    cells: int = 10
    """Exchanges with the server per round: cells, or steps of eb."""
    gradient: Literal["exact", "local"] = "exact"
    """Through the whole federation, or with the common model taken as constant."""
    positive: learnables.Positive = "exp"
    """How learned numbers are kept positive."""
    learned: tuple[str, ...] = ("lam", *learnables.SCALARS)
    """What is learned."""
    lam: float = 1.0
    """First degree."""
    rho: float = 1.0
    """First rho, eta and gamma."""
    theta: float = 1.0
    """First step of the dual: 1 as in ADMM, whose dual is scaled, or rho as in the paper."""
    per_cell: bool = False
    """Learn other numbers for every cell."""
    outer_lr: float = 0.05
    """Step size of learning."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """How learned numbers take their step; sgd has its gradient clipped at norm 1 (paper)."""
    serve: Literal["solved", "unrolled"] = "solved"
    """Predict with the exact v for the learned degrees, or with v of the last cell (paper)."""

    diagnostics: bool = False
    """Report the augmented Lagrangian and residuals of every cell, and gradient norms; costs two more trips a cell."""

    title: ClassVar[str] = "Learn2pFed"
    private: ClassVar[str] = "model, degrees, steps"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"outer": "train", "pull": 0.0, "positive": "relu", "lam": 5e-4, "rho": 0.01, "theta": 0.01}
        | {"optimizer": "sgd", "outer_lr": 0.01, "serve": "unrolled"}
    }
    citation: ClassVar[str] = """@article{lv2024learn,
  title={Learn What You Need in Personalized Federated Learning},
  author={Lv, Kexin and Ye, Rui and Huang, Xiaolin and Yang, Jie and Chen, Siheng},
  year={2024}
}"""

    def check(self, model: Model, task: str) -> None:
        ridge.check(model, task)

    def server_init(self, model: Model) -> Tree:
        degrees = learnables.degrees(self.first_numbers(model)["raw"])
        return EmpiricalBayes().server_init(model) | {"degrees": degrees}

    def first_numbers(self, model: Model) -> Tree:
        scalars = {"p": 1.0, "rho": self.rho, "eta": self.rho, "gamma": self.rho, "theta": self.theta}
        lam = torch.full_like(ridge.as_vector(model, model.params), self.lam)
        return learnables.start(lam, scalars, self.positive, self.cells if self.per_cell else 0)

    def client_init(self, me: Me) -> Tree:
        v, learned = ridge.as_vector(me.model, me.model.params), self.first_numbers(me.model)
        data = {"d": ridge.statistics(me.model, me.train)}
        data |= {"held": ridge.statistics(me.model, me.val)} if self.outer == "holdout" else {}
        return data | {"v": v, "z": v - v, "a": v - v, "learned": learned}

    def join(self, me: Me, server: Tree) -> Tree:
        s = self.client_init(me)
        s["learned"]["raw"] = learnables.pulled(s["learned"]["raw"], server["degrees"], 1.0)  # a prior: others' mean
        v = ridge.shrunk(s["d"], self.roots_of(s, server), server["w"])
        return s | {"v": v, "z": v - server["w"]}

    alone: ClassVar[Any] = EmpiricalBayes.alone
    posterior: ClassVar[Any] = EmpiricalBayes.posterior
    bayes: ClassVar[Any] = EmpiricalBayes.round

    def round(self, fed: Federation, server: Tree) -> Tree:
        if self.outer == "eb":
            return server | self.bayes(fed, server)
        return fed.at_once(self.together, server) or self.epoch(fed, server)

    def epoch(self, fed: Federation, server: Tree) -> Tree:
        """One outer epoch: the cells forward, the gradient of the outer loss back, a step of the learned numbers."""
        fed.tape()
        w, told = server["w"], []
        for cell in range(self.cells):
            before = w
            top, bottom = fed.map(self.cell, w, torch.tensor(cell))
            w = fed.sum(top) / fed.sum(bottom)  # (12)
            w = w if self.gradient == "exact" else w.detach()
            told += [fed.sum(fed.aside(self.diagnose, w, before, torch.tensor(cell)))] if self.diagnostics else []
        wrong, count = fed.map(self.outer_loss, w)
        if fed.sum(count) == 0:
            raise ConfigError('algorithm.outer = "holdout": no client has validation samples; raise data.val')
        loss = fed.sum(wrong) / fed.sum(count)
        fed.backward(loss)
        if self.diagnostics:
            lagrangian, primal, dual = ([t[i] for t in told] for i in range(3))
            fed.report(augmented_lagrangian=lagrangian, primal_residual=[p.sqrt() for p in primal])
            fed.report(dual_residual=[d.sqrt() for d in dual], outer_loss=loss.detach())
            fed.report(gradient_norm=fed.sum(fed.map(self.slope)).sqrt())
        degrees = fed.mean(fed.map(self.learn))
        if self.pull:
            fed.map(self.agree, degrees)
        return server | {"w": w, "degrees": degrees}

    @on_client(sends=(VECTOR, NUMBER))
    def cell(self, me: Me, w: Tensor, cell: Tensor) -> tuple[Tree, Tree]:
        s = me.state
        x = self.numbers(s, w, cell)
        a = s["a"] + x["theta"] * (s["z"] - s["v"] + w)  # (9)
        v = ridge.ridge(s["d"], x["rho"], w + s["z"] + a)  # (10)
        z = x["eta"] / (x["lam"] + x["eta"]) * (v - w - a)  # (11)
        c = x["p"] * x["gamma"]
        return s | {"v": v, "z": z, "a": a}, (c * (v - z - a), c.squeeze())

    @on_client(sends=(NUMBER, NUMBER))
    def outer_loss(self, me: Me, w: Tensor) -> tuple[Tree, Tree]:
        s = me.state
        if self.outer == "loo":
            return s, (ridge.left_out_error(me.model, me.train, s["d"], self.roots_of(s, {"w": w}), w), me.n)
        data = s["held"] if self.outer == "holdout" else s["d"]
        return s, (ridge.squared_error(data, s["v"]), data["n"])

    diagnose: ClassVar[Any] = unrolled.diagnose
    slope: ClassVar[Any] = unrolled.slope

    @on_client(sends=DEGREES)
    def learn(self, me: Me) -> tuple[Tree, Tree]:
        learned = self.step(me.state["learned"], me.grad["learned"]["raw"])
        return me.state | {"learned": learned}, learnables.degrees(learned["raw"])

    @on_client()
    def agree(self, me: Me, mean: Tensor) -> tuple[Tree, Tree]:
        learned = me.state["learned"]
        return me.state | {"learned": learned | {"raw": learnables.pulled(learned["raw"], mean, self.pull)}}, None

    def together(self, states: Tree, server: Tree) -> Any:
        """`epoch` for all clients at once; leave-one-out has no closed-form adjoint."""
        return None if self.outer == "loo" or self.diagnostics else unrolled.at_once(self, states, server)

    def step(self, learned: Tree, gradient: Tensor) -> Tree:
        take = learnables.adam if self.optimizer == "adam" else learnables.descend
        return take(learned, gradient, self.outer_lr, self.learned)

    def numbers(self, state: Tree, w: Tensor, cell: Tensor | int) -> Params:
        """The learned numbers of a cell."""
        raw = state["learned"]["raw"]
        return learnables.read(raw[cell] if self.per_cell else raw, w.shape, self.positive)

    def roots_of(self, state: Tree, server: Tree) -> Tensor:
        """Lambda_eff^(-1/2) of each parameter: 0 is the common one, infinity the client's own."""
        if self.outer == "eb":
            return EmpiricalBayes.roots(server)
        x = self.numbers(state, server["w"], -1)
        return (x["eta"] / (x["rho"] * x["lam"]).clamp(min=1e-12)).sqrt()

    def personal(self, me: Me, server: Tree) -> Params:
        if self.serve == "unrolled" and self.outer != "eb":
            return ridge.as_params(me.model, me.state["v"])
        return ridge.as_params(me.model, ridge.shrunk(me.state["d"], self.roots_of(me.state, server), server["w"]))

    def shares(self, me: Me, server: Tree) -> Params:
        return ridge.as_params(me.model, ridge.share(me.state["d"], self.roots_of(me.state, server)))

    def effective_degrees(self, me: Me, server: Tree) -> Params:
        return ridge.as_params(me.model, self.roots_of(me.state, server) ** -2)
