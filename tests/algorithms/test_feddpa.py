"""FedDPA by hand, in plain torch; without own adapters in its predictions it is FedAvg."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, linear

from fedtailor.algorithms.feddpa import REFERENCE, FedDPA
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import (
    F64,
    FULL_BATCH,
    assert_equal,
    descend,
    federate,
    make_data,
    make_model,
    models,
    run,
    states,
    weighted,
)


def outputs(model: Model, w: Params, v: Params, share: float | Tensor, x: Tensor) -> Tensor:
    """Of the small model of the tests, written out."""
    h = x
    for name in ("first", "second"):
        part = [
            linear(linear(h, t[f"{name}.lora_A.default.weight"]), t[f"{name}.lora_B.default.weight"]) for t in (w, v)
        ]
        base = linear(h, model.fixed[f"{name}.base_layer.weight"], model.fixed[f"{name}.base_layer.bias"])
        h = torch.tanh(base + 1.5 * ((1 - share) * part[0] + share * part[1]))
    return linear(h, w["out.weight"], w["out.bias"])


def adapters(w: Params) -> Params:
    return {k: v for k, v in w.items() if "lora" in k}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("adapted", data)
    w, own = model.params, [adapters(model.params)] * 4
    for _ in range(3):
        for i in range(4):
            x, y = data.train.of(i)
            for _ in range(2):
                leaf = {k: v.clone().requires_grad_() for k, v in own[i].items()}
                cross_entropy(outputs(model, w, leaf, 0.3, x), y).backward()
                own[i] = {k: (v - 0.1 * v.grad).detach() for k, v in leaf.items() if v.grad is not None}
        w = weighted([descend(model, w, *data.train.of(i), steps=1) for i in range(4)], [9, 1, 6, 13])
    fed = federate(FedDPA(own_epochs=2, share=0.3), data, model, engine, FULL_BATCH)
    server = run(fed, rounds=3)
    assert_equal(server, w)
    assert_equal({name: s["state"] for name, s in states(fed).items()}, dict(zip(data.clients, own, strict=True)))


def test_each_sample_has_its_share() -> None:
    data = make_data()
    model = make_model("adapted", data)
    algorithm = FedDPA(own_epochs=20, samples=99, scale=0.8)
    fed = federate(algorithm, data, model)
    w = run(fed)
    found = models(fed, w)["ada"]
    v = states(fed)["ada"]["state"]
    x = data.train.of(0)[0]
    with torch.no_grad():
        known = outputs(model, w, v, 1.0, x)
        cosines = torch.stack([cosine_similarity(outputs(model, w, v, 1.0, x), row[None]) for row in known])
        alpha = 0.8 * cosines.mean(0)
        wanted = outputs(model, w, v, alpha[:, None], x)
    assert_equal(algorithm.predict(model, found, x), wanted)
    assert float(alpha.max() - alpha.min()) > 0.01


def test_a_client_without_samples_is_served_the_common_adapters() -> None:
    data = make_data(sizes={"ada": (9, 3, 4), "bo": (0, 0, 3)})
    fed = federate(FedDPA(), data, make_model("adapted", data))
    assert torch.equal(models(fed, run(fed))["bo"][REFERENCE], torch.zeros(3, dtype=F64))


def test_what_it_cannot_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.adapter: FedDPA .* has none"):
        FedDPA().check(make_model("mlp", make_data()), "classification")
    module = make_model("adapted", make_data()).module
    module.get_submodule("first").base_layer = nn.Conv1d(1, 1, 1).requires_grad_(False)
    with pytest.raises(ConfigError, match='"first" is another'):
        FedDPA().check(Model(module), "classification")
