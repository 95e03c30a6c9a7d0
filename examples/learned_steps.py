"""Every client learns its own step size, by the derivative of the whole federation's loss through a round.

python examples/learned_steps.py [ROUNDS]
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedtailor import engines
from fedtailor.core.algorithm import COUNT, MODEL, NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Params, Tree
from fedtailor.experiments.building import build_experiment
from fedtailor.experiments.config import parse


@dataclass(frozen=True)
class LearnedSteps(Algorithm):
    title: ClassVar[str] = "LearnedSteps"

    def client_init(self, me: ClientContext) -> Tree:
        return {"log_lr": torch.full_like(me.n, -3.0)}

    @on_client(sends=(MODEL, COUNT))
    def train(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, (me.sgd(w, lr=me.state["log_lr"].exp()), me.n)

    @on_client(sends=NUMBER)
    def judge(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, me.loss(w, "val")

    @on_client()  # sends nothing: the derivative is used where it is
    def learn(self, me: ClientContext) -> tuple[Tree, Tree]:
        return {"log_lr": me.state["log_lr"] - me.grad["log_lr"].clamp(-0.5, 0.5)}, None

    def round(self, fed: Federation, w: Params) -> Params:
        fed.tape()
        w = fed.mean(*fed.map(self.train, w))
        fed.backward(fed.sum(fed.map(self.judge, w)))
        fed.map(self.learn)
        return w


made = build_experiment(parse({"data": {"source": "digits", "clients": 6, "alpha": 0.3}, "model": {"hidden": [16]}}))
engine = engines.make("auto", Experiment(LearnedSteps(), made.model, made.data, made.solver, seed=0))
engine.start()
fed, w = Federation(engine), made.model.params
for round in range(1, (int(sys.argv[1]) if len(sys.argv) > 1 else 10) + 1):
    w = fed.run_round(round, range(6), w)
    steps = engine.get_states()["state"]["log_lr"].exp()
    print(f"round {round:2}  step sizes", " ".join(f"{step:.3f}" for step in steps.tolist()))
