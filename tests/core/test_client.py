"""Evaluation by hand, on splits of several parts and on empty ones; what a client function must be."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedtailor.core.algorithm import MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.task import HIGHER_IS_BETTER, METRICS
from fedtailor.core.trees import Params, Tree
from tests.helpers import EVERYWHERE, F64, SIZES, assert_equal, evaluate, federate, make_data, make_model

MANY = {"ada": (3, 2, 300), "bo": (1, 0, 0), "cy": (2, 513, 256), "di": (5, 1, 1)}


@dataclass(frozen=True)
class Own(Algorithm):
    """Everybody predicts with the initial model moved by the size of its data."""

    def client_init(self, me: ClientContext) -> Tree:
        return {"n": me.n}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return {k: v + 0.1 * me.state["n"] + server for k, v in me.model.params.items()}


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("engine", EVERYWHERE)
def test_evaluation_by_hand(engine: str, task: Any) -> None:
    data = make_data(task, sizes=MANY)
    model = make_model("mlp", data)
    fed = federate(Own(), data, model, engine)
    models, metrics = evaluate(fed, torch.tensor(0.05, dtype=F64))
    for i, name in enumerate(data.clients):
        personal = {k: v + 0.1 * MANY[name][0] + 0.05 for k, v in model.params.items()}
        assert_equal(models[name], personal)
        for split in ("train", "val", "test"):
            x, y = getattr(data, split).of(i)
            output = model(personal, x)
            if task == "classification":
                loss = torch.nn.functional.cross_entropy(output, y)  # not a number where there is nothing
                wanted = {"loss": loss, "accuracy": (output.argmax(1) == y).double().mean()}
            else:
                mse = torch.nn.functional.mse_loss(output, y)
                wanted = {"mse": mse, "rmse": mse.sqrt()}
            assert_equal({m: metrics[name][f"{split}/{m}"] for m in METRICS[task]}, wanted)
    assert torch.isnan(metrics["bo"][f"test/{METRICS[task][0]}"])
    assert len(metrics["ada"]) == 6


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_a_split_that_nobody_has(engine: str) -> None:
    data = make_data(sizes={"ada": (3, 0, 2), "cy": (2, 0, 1)})
    fed = federate(Own(), data, make_model("mlp", data), engine)
    _, metrics = evaluate(fed, torch.tensor(0.0, dtype=F64))
    assert all(torch.isnan(metrics[c][f"val/{m}"]) for c in ("ada", "cy") for m in ("accuracy", "loss"))
    assert all(torch.isfinite(metrics[c]["test/loss"]) for c in ("ada", "cy"))


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("engine", EVERYWHERE)
def test_what_is_not_a_number_is_wrong(engine: str, task: Any) -> None:
    data = make_data(task, sizes=MANY)
    _, metrics = evaluate(federate(Own(), data, make_model("mlp", data), engine), torch.tensor(torch.nan, dtype=F64))
    worst = {"accuracy": 0.0, "loss": torch.inf, "mse": torch.inf, "rmse": torch.inf}
    assert all(metrics["cy"][f"{s}/{m}"] == worst[m] for s in ("train", "val", "test") for m in METRICS[task])
    assert all(torch.isnan(metrics["bo"][f"test/{m}"]) for m in METRICS[task])  # it has none


@dataclass(frozen=True)
class Opposite(Algorithm):
    """Predicts in its own way."""

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return me.model.params

    def predict(self, model: Model, personal: Params, x: torch.Tensor) -> torch.Tensor:
        return -model(personal, x)


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_an_algorithm_predicts_in_its_own_way(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    _, metrics = evaluate(federate(Opposite(), data, model, engine), {})
    x, y = data.test.of(2)
    wanted = torch.nn.functional.cross_entropy(-model(model.params, x), y)
    assert_equal(metrics["cy"]["test/loss"], wanted)


def test_every_metric_says_what_is_better() -> None:
    assert {m for names in METRICS.values() for m in names} == set(HIGHER_IS_BETTER)
    assert METRICS["classification"][0] == "accuracy"
    assert METRICS["regression"][0] == "rmse"


@dataclass(frozen=True)
class Twice(Algorithm):
    """Trains the same initial model again and again; only the order of the batches can make a difference."""

    def client_init(self, me: ClientContext) -> Tree:
        return {"w": me.model.params}

    @on_client(sends=MODEL)
    def local(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, me.sgd(me.state["w"])

    def round(self, fed: Federation, server: Tree) -> Tree:
        return [fed.gather(fed.map(self.local), "models")["out.weight"] for _ in range(2)]


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_batches_differ_from_round_to_round_and_call_to_call(engine: str) -> None:
    data = make_data(sizes=SIZES | {"ada": (30, 3, 4), "di": (33, 4, 1)})  # too many for the same batches by chance
    fed = federate(Twice(), data, make_model("mlp", data), engine)
    made = [out for round in range(2) for out in fed.run_round(round, [0, 3], {})]
    for i in range(4):
        for j in range(i):
            assert (made[i] - made[j]).abs().amax((1, 2)).min() > 1e-6, (i, j)
    again = federate(Twice(), data, make_model("mlp", data), engine)
    assert_equal(again.run_round(1, [0, 3], {}), made[2:], tolerance=0)  # whatever ran before
