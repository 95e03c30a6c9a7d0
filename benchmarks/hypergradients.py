"""Derivatives of a federated ridge regression by what it is trained with: three ways, beside the known answer.

    python benchmarks/hypergradients.py

Inner problem: w = argmin sum p_i f_i(w) + lam/2 |w|^2, p = softmax(x), f_i the mean squared error of client i. Outer:
the mean squared error of w on all validation samples, by z = (log lam, x). A round is one gradient step of w. Every way
is a program over the operations of a federation; trips and bytes are those that it reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtailor.core.algorithm import MODEL, NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.engines import make
from fedtailor.models import build
from fedtailor.training.solver import Solver

CLIENTS, FEATURES, SAMPLES, HELD_OUT = 6, 8, 12, 8
STEP, WEIGHT = 0.1, "out.weight"
START = torch.tensor([-1.0, 0.3, -0.2, 0.1, 0.0, 0.4, -0.5], dtype=torch.float64)  # z: where derivatives are taken


@dataclass(frozen=True)
class Ridge(Algorithm):
    """`rounds` gradient steps of w, then the derivative of the outer loss by z in one of three ways."""

    way: str = "unrolled"
    rounds: int = 100
    terms: int = 10  # steps of the solver of "cg", terms of the series of "neumann" and "own"

    title: ClassVar[str] = "Ridge"

    @on_client(sends=MODEL)
    def slope(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, torch.func.grad(me.loss)(w)

    @on_client(sends=NUMBER)
    def judge(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, me.val.mask.sum() * me.loss(w, "val")

    @on_client(sends=MODEL)
    def judged_slope(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, torch.func.grad(lambda w: me.val.mask.sum() * me.loss(w, "val"))(w)

    @on_client(sends=MODEL)
    def curve(self, me: ClientContext, w: Params, q: Params) -> tuple[Tree, Tree]:
        return me.state, torch.func.grad(lambda w: along(me, w, q))(w)  # Hessian times q

    @on_client(sends=MODEL)
    def own_series(self, me: ClientContext, w: Params, b: Params, lam: Tensor) -> tuple[Tree, Tree]:
        def times_h(q: Params) -> Params:
            h = torch.func.grad(lambda w: along(me, w, q))(w)
            return {k: h[k] + lam * v for k, v in q.items()}

        return me.state, series(times_h, b, self.terms)

    @on_client(sends=NUMBER)
    def along(self, me: ClientContext, w: Params, q: Params) -> tuple[Tree, Tree]:
        return me.state, along(me, w, q)

    def round(self, fed: Federation, server: Tree) -> Tree:
        z = server["z"]
        return server | (self.unrolled(fed, z) if self.way == "unrolled" else self.implicit(fed, z))

    def unrolled(self, fed: Federation, z: Tensor) -> Tree:
        """Back through every round."""
        z = fed.tape(z)
        loss = fed.sum(fed.map(self.judge, self.trained(fed, z))) / (CLIENTS * HELD_OUT)
        return {"gradient": fed.backward(loss), "loss": loss.detach()}

    def implicit(self, fed: Federation, z: Tensor) -> Tree:
        """At the minimum: - <d/dz grad F(w), q> with H q = the outer gradient, H the Hessian of F."""
        w = self.trained(fed, z)
        outer = tree_map(lambda v: v / (CLIENTS * HELD_OUT), fed.sum(fed.map(self.judged_slope, w)))
        q = self.solved(fed, w, z, outer)
        along = fed.gather(fed.map(self.along, w, q), "derivatives along q")
        by_share = -(along - z[1:].softmax(0) @ along) * z[1:].softmax(0)
        by_log = -z[0].exp() * (w[WEIGHT] * q[WEIGHT]).sum()
        return {"gradient": torch.cat([by_log[None], by_share])}

    def trained(self, fed: Federation, z: Tensor) -> Params:
        w = tree_map(torch.zeros_like, fed.model.params)
        for _ in range(self.rounds):
            mean = fed.mean(fed.map(self.slope, w), fed.scatter(z[1:].exp()))
            w = {k: v - STEP * (mean[k] + z[0].exp() * v) for k, v in w.items()}
        return w

    def solved(self, fed: Federation, w: Params, z: Tensor, b: Params) -> Params:
        """H^-1 b, a trip for each product with H; "own": with each client's own H, one trip; "first-order": STEP b."""

        def times_h(q: Params) -> Params:
            mean = fed.mean(fed.map(self.curve, w, q), fed.scatter(z[1:].exp()))
            return {k: mean[k] + z[0].exp() * v for k, v in q.items()}

        if self.way == "first-order":
            return tree_map(lambda v: STEP * v, b)
        if self.way == "cg":
            return conjugate_gradient(times_h, b, self.terms)
        if self.way == "own":
            return fed.mean(fed.map(self.own_series, w, b, z[0].exp()), fed.scatter(z[1:].exp()))
        return series(times_h, b, self.terms)

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return me.model.params


def along(me: ClientContext, w: Params, q: Params) -> Tensor:
    """The derivative of a client's loss at w in direction q."""
    return (torch.func.grad(me.loss)(w)[WEIGHT] * q[WEIGHT]).sum()


def series(times: Callable[[Params], Params], b: Params, terms: int) -> Params:
    """H^-1 b = STEP * sum of (1 - STEP H)^k b, the first terms of it."""
    q = total = tree_map(lambda v: STEP * v, b)
    for _ in range(terms - 1):
        h = times(q)
        q = {k: v - STEP * h[k] for k, v in q.items()}
        total = {k: v + q[k] for k, v in total.items()}
    return total


def conjugate_gradient(times: Callable[[Params], Params], b: Params, steps: int) -> Params:
    """Solve for q in times(q) = b."""
    q, r, p = tree_map(torch.zeros_like, b), b, b
    for _ in range(steps):
        hp, before = times(p), r[WEIGHT].square().sum()
        a = before / (p[WEIGHT] * hp[WEIGHT]).sum()
        q, r = {k: v + a * p[k] for k, v in q.items()}, {k: v - a * hp[k] for k, v in r.items()}
        p = {k: v + r[WEIGHT].square().sum() / before * p[k] for k, v in r.items()}
    return q


def problem() -> FederatedData:
    """Clients whose true weights lie around a common one."""
    common = torch.from_numpy(stream("ridge").normal(size=FEATURES))

    def rows(what: str, n: int) -> Rows:
        x = torch.from_numpy(stream("ridge", what).normal(size=(CLIENTS, n, FEATURES)))
        own = common + 0.5 * torch.from_numpy(stream("ridge", "own").normal(size=(CLIENTS, 1, FEATURES)))
        noise = torch.from_numpy(stream("ridge", "noise", what).normal(size=(CLIENTS, n, 1)))
        y = (x * own).sum(-1, keepdim=True) + noise
        return Rows(x.flatten(0, 1), y.flatten(0, 1), n * torch.arange(CLIENTS + 1))

    train, held_out = rows("train", SAMPLES), rows("held out", HELD_OUT)
    names = tuple(f"c{i}" for i in range(CLIENTS))
    return FederatedData("ridge", "regression", names, train, held_out, held_out, 1)


def run(way: str, rounds: int, terms: int = 0, z: Tensor = START, engine: str = "vmap") -> tuple[Tree, Federation]:
    """What one way finds, and what it took."""
    data = problem()
    model = build("linear", data.shape, 1, seed=0, options={"bias": False}, dtype=torch.float64)
    made = make(engine, Experiment(Ridge(way, rounds, terms), model, data, Solver(), 0))  # type: ignore[arg-type]
    made.start()
    fed = Federation(made)
    return fed.run_round(1, range(CLIENTS), {"z": z}), fed


def answer(z: Tensor = START) -> Tensor:
    """The derivative at the exact minimum, by torch through the closed form."""
    data, z = problem(), z.detach().requires_grad_()
    p, x, y = z[1:].softmax(0), data.train.x.reshape(CLIENTS, SAMPLES, -1), data.train.y.reshape(CLIENTS, SAMPLES, 1)
    a = 2 / SAMPLES * torch.einsum("i,inj,ink->jk", p, x, x) + z[0].exp() * torch.eye(FEATURES, dtype=z.dtype)
    w = torch.linalg.solve(a, 2 / SAMPLES * torch.einsum("i,inj,ink->jk", p, x, y))
    return torch.autograd.grad((data.val.x @ w - data.val.y).square().mean(), z)[0]


def error(gradient: Tensor, wanted: Tensor) -> float:
    """Relative, in norm."""
    return float((gradient - wanted).norm() / wanted.norm())


def table() -> list[tuple[str, int, int, float, int, float, float]]:
    """Way, rounds, terms, error, trips, and kB per client up and down."""
    ways = [("unrolled", t, 0) for t in (5, 20, 80)] + [("first-order", 80, 0)]
    ways += (
        [("neumann", 80, k) for k in (3, 5, 20, 80)]
        + [("own", 80, k) for k in (3, 80)]
        + [("cg", 80, k) for k in (2, 4, 8)]
        + [("cg", 20, 8), ("cg", 5, 8)]
    )
    made = []
    for way, rounds, terms in ways:
        found, fed = run(way, rounds, terms)
        cost = (fed.traffic.up / CLIENTS / 1000, fed.traffic.down / CLIENTS / 1000)
        made.append((way, rounds, terms, error(found["gradient"], answer()), fed.traffic.trips, *cost))
    return made


def main() -> None:
    print("| method | rounds | terms | relative error | trips | up, kB per client | down, kB per client |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for way, rounds, terms, off, trips, up, down in table():
        print(f"| {way} | {rounds} | {terms or '-'} | {off:.1e} | {trips} | {up:.1f} | {down:.1f} |")


if __name__ == "__main__":
    main()
