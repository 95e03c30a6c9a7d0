"""What `me` offers beside training: a loss of the algorithm's own, and random numbers that do not depend on engines."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fedtailor.core.algorithm import Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Params, Tree
from tests.helpers import ENGINES, F64, FULL_BATCH, SOLVER, assert_equal, federate, make_data, make_me, make_model


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_tasks_loss_given_as_an_own_one_changes_nothing(task: str) -> None:
    data = make_data(task)  # type: ignore[arg-type]
    model = make_model("mlp", data)

    def loss(tensors: Params, x: Tensor, y: Tensor) -> Tensor:
        output = model(tensors, x, training=True)
        if task == "regression":
            return (output - y).square().mean(1)
        return torch.nn.functional.cross_entropy(output, y, reduction="none")

    solver = replace(SOLVER, momentum=0.5)  # without it dense layers are trained by hand, which rounds otherwise
    found = make_me(data, model, 3, solver).sgd(model.params, epochs=3, loss=loss)
    assert_equal(found, make_me(data, model, 3, solver).sgd(model.params, epochs=3), 0)


def test_an_own_loss_by_hand() -> None:
    """A pull of the outputs to a constant that is given among the frozen."""
    data = make_data()
    model = make_model("linear", data)
    goal = torch.tensor([1.0, -1.0, 0.5], dtype=F64)

    def loss(tensors: Params, x: Tensor, y: Tensor) -> Tensor:
        output = x @ tensors["out.weight"].T + tensors["out.bias"]
        return (output - tensors["goal"]).square().sum(1)

    found = make_me(data, model, 0, FULL_BATCH).sgd(model.params, frozen={"goal": goal}, loss=loss)
    x, _ = data.train.of(0)
    off = x @ model.params["out.weight"].T + model.params["out.bias"] - goal
    assert_equal(found["out.bias"], model.params["out.bias"] - 0.1 * 2 * off.mean(0))
    assert_equal(found["out.weight"], model.params["out.weight"] - 0.1 * 2 * off.T @ x / len(x))


@dataclass(frozen=True)
class Drawing(Algorithm):
    """Sends random numbers."""

    @on_client(sends=ReplySpec("numbers", lambda algorithm, model: torch.zeros(1000, dtype=F64)))
    def draw(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, me.uniform(1000)

    def round(self, fed: Federation, server: Tree) -> Tree:
        return [fed.gather(fed.map(self.draw), "numbers") for _ in range(2)]


def test_random_numbers_belong_to_round_call_and_client() -> None:
    data = make_data()
    found = {}
    for engine in ENGINES:
        fed = federate(Drawing(), data, make_model("linear", data), engine)
        found[engine] = torch.stack([*fed.run_round(0, range(4), None), *fed.run_round(1, range(4), None)])
    assert all(torch.equal(v, found["loop"]) for v in found.values())
    rows = found["loop"].flatten(0, 1)
    assert len({tuple(row.tolist()) for row in rows}) == 16
    assert float(rows.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(rows.min()) >= 0
    assert float(rows.max()) < 1
