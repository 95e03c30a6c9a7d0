"""MOON by hand: two rounds of the contrast between the common model and the last one."""

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms.moon import MOON
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import FULL_BATCH, assert_equal, federate, make_data, make_model, run, states, weighted


def features(w: Params, x: Tensor) -> Tensor:
    return torch.relu(x @ w["hidden.0.weight"].T + w["hidden.0.bias"])


def contrasted(w: Params, glob: Params, prev: Params, x: Tensor, y: Tensor, steps: int) -> Params:
    """As the paper writes the loss: -log of exp(near) over exp(near) + exp(far)."""
    for _ in range(steps):
        leaf = {k: v.detach().clone().requires_grad_() for k, v in w.items()}
        z = features(leaf, x)
        near, far = (torch.cosine_similarity(z, features(other, x)) / 0.5 for other in (glob, prev))
        contrast = -torch.log(near.exp() / (near.exp() + far.exp()))
        loss = nn.functional.cross_entropy(z @ leaf["out.weight"].T + leaf["out.bias"], y) + 0.8 * contrast.mean()
        loss.backward()
        w = {k: (v - 0.1 * v.grad).detach() for k, v in leaf.items() if v.grad is not None}
    return w


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    w, last = model.params, [model.params] * 4
    for _ in range(2):
        last = [contrasted(w, w, last[i], *data.train.of(i), steps=2) for i in range(4)]
        w = weighted(last, [9, 1, 6, 13])
    fed = federate(MOON(epochs=2, mu=0.8), data, model, engine, FULL_BATCH)
    assert_equal(run(fed, rounds=2), w)
    for i, mine in enumerate(states(fed).values()):
        assert_equal(mine["state"], last[i])


def test_mistakes() -> None:
    for name in ("headless", "linear"):
        with pytest.raises(ConfigError, match="MOON compares the features"):
            MOON().check(make_model(name, make_data()), "classification")
    with pytest.raises(ConfigError, match="temperature"):
        MOON(tau=0.0).check(make_model("mlp", make_data()), "classification")
