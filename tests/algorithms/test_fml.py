"""FML by hand: both models learn from the labels and from each other."""

import pytest
from torch import Tensor, nn

from fedtailor.algorithms.fml import FML
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import FULL_BATCH, assert_equal, federate, make_data, make_model, models, run, weighted


def step(model: Model, pupil: Params, teacher: Params, x: Tensor, y: Tensor, weight: float) -> Params:
    leaf = {k: v.detach().clone().requires_grad_() for k, v in pupil.items()}
    output, fixed = model(leaf, x), model(teacher, x).softmax(1)
    apart = (fixed * (fixed.log() - output.log_softmax(1))).sum(1).mean()
    (weight * nn.functional.cross_entropy(output, y) + (1 - weight) * apart).backward()
    return {k: (v - 0.1 * v.grad).detach() for k, v in leaf.items() if v.grad is not None}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    meme, own = model.params, [model.params] * 4
    for _ in range(2):
        trained = []
        for i in range(4):
            w = meme
            for _ in range(2):
                args = data.train.of(i)
                own[i], w = step(model, own[i], w, *args, 0.3), step(model, w, own[i], *args, 0.6)
            trained.append(w)
        meme = weighted(trained, [9, 1, 6, 13])
    fed = federate(FML(epochs=2, alpha=0.3, beta=0.6), data, model, engine, FULL_BATCH)
    server = run(fed, rounds=2)
    assert_equal(server, meme)
    assert_equal(models(fed, server), dict(zip(data.clients, own, strict=True)))


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="not serve regression"):
        FML().check(make_model("mlp", make_data("regression")), "regression")
    with pytest.raises(ConfigError, match="alpha and beta"):
        FML(alpha=1.5).check(make_model("mlp", make_data()), "classification")
