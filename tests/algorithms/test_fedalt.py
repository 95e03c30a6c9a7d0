"""FedALT by hand, in plain torch; its first step is Local's with adapters half as strong."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from fedtailor.algorithms.fedalt import FedALT
from fedtailor.algorithms.local import Local
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import FULL_BATCH, assert_equal, federate, make_data, make_model, models, run, states

LAYERS = ("first", "second")


def outputs(model: Model, v: Params, r: Params, mixers: Params, x: Tensor) -> Tensor:
    """Of the small model of the tests, written out."""
    h = x
    for name in LAYERS:
        part = [
            linear(linear(h, t[f"{name}.lora_A.default.weight"]), t[f"{name}.lora_B.default.weight"]) for t in (v, r)
        ]
        base = linear(h, model.fixed[f"{name}.base_layer.weight"], model.fixed[f"{name}.base_layer.bias"])
        own, rest = (h @ mixers[name].T).softmax(1).unbind(1)
        h = torch.tanh(base + 1.5 * (own[:, None] * part[0] + rest[:, None] * part[1]))
    return linear(h, v["out.weight"], v["out.bias"])


def by_hand(model: Model, data: object, cohorts: list[list[int]], steps: int) -> tuple[list[Params], list[Params]]:
    """Own models and mixers after rounds with some of the clients, and every mean of the others written out."""
    adapters = [k for k in model.params if "lora" in k]
    v = [dict(model.params) for _ in range(4)]
    first = {"first": torch.zeros(2, 4), "second": torch.zeros(2, 5)}
    mixers = [{k: u.double() for k, u in first.items()} for _ in range(4)]
    sent: dict[int, Params] = {}
    for cohort in cohorts:
        now: dict[int, Params] = {}
        for i in cohort:
            others = [w for j, w in sent.items() if j != i]
            r = {k: torch.stack([w[k] for w in others] or [torch.zeros_like(v[i][k])]).mean(0) for k in adapters}
            x, y = data.train.of(i)  # type: ignore[attr-defined]
            for _ in range(steps):
                leaf = {k: u.clone().requires_grad_() for k, u in v[i].items()}
                gates = {k: u.clone().requires_grad_() for k, u in mixers[i].items()}
                cross_entropy(outputs(model, leaf, r, gates, x), y).backward()
                v[i] = {k: (u - 0.1 * u.grad).detach() for k, u in leaf.items() if u.grad is not None}
                mixers[i] = {k: (u - 0.1 * u.grad).detach() for k, u in gates.items() if u.grad is not None}
            now[i] = {k: v[i][k] for k in adapters}
        sent = now
    return v, mixers


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("adapted", data)
    cohorts = [[0, 1, 2, 3], [0, 2], [0, 1, 3], [1, 2, 3]]
    v, mixers = by_hand(model, data, cohorts, 2)
    fed = federate(FedALT(epochs=2), data, model, engine, FULL_BATCH)
    server = FedALT().server_init(model)
    for number, cohort in enumerate(cohorts):
        server = fed.run_round(number, cohort, server)
    found = states(fed)
    for i, name in enumerate(data.clients):
        assert_equal(found[name]["state"]["v"], v[i])
        assert_equal(found[name]["state"]["mixer"], mixers[i])
    assert float(mixers[0]["first"].abs().max()) > 1e-4  # learned


def test_predictions_mix_own_and_others() -> None:
    data = make_data()
    model = make_model("adapted", data)
    algorithm = FedALT()
    fed = federate(algorithm, data, model)
    server = run(fed)
    private = states(fed)
    v = {name: private[name]["state"]["v"] for name in data.clients}
    r = {k: (v["bo"][k] + v["cy"][k] + v["di"][k]) / 3 for k in server["sum"]}
    x = data.test.of(0)[0]
    wanted = outputs(model, v["ada"], r, private["ada"]["state"]["mixer"], x)
    assert_equal(algorithm.predict(model, models(fed, server)["ada"], x), wanted)


def test_the_first_step_is_locals_with_adapters_half_as_strong() -> None:
    """While B is 0, as peft begins with it, and there are no others yet, nothing moves the mixers from one half."""
    data = make_data()
    found = []
    for algorithm, strength in ((FedALT(), 1.5), (Local(), 0.75)):
        model = make_model("adapted", data)
        for layer in map(model.module.get_submodule, LAYERS):
            layer.lora_B["default"].weight.data.zero_()  # type: ignore[index, union-attr]
            layer.scaling["default"] = strength  # type: ignore[index, operator]
        model = Model(model.module, head=["out"])
        fed = federate(algorithm, data, model, solver=FULL_BATCH)
        own = models(fed, run(fed, rounds=1))
        found.append({name: {k: mine[k] for k in model.params} for name, mine in own.items()})
    assert_equal(found[0], found[1], 1e-14)
    assert float(found[0]["ada"]["second.lora_B.default.weight"].abs().max()) > 1e-4


def test_alone_it_learns_from_nobody() -> None:
    data = make_data(names=("ada",))
    fed = federate(FedALT(), data, make_model("adapted", data))
    found = models(fed, run(fed))["ada"]
    others = [u for k, u in found.items() if k.startswith("fedalt.r.")]
    assert len(others) == 4  # A and B of two layers
    assert not any(bool(u.any()) for u in others)


def test_a_model_without_adapters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.adapter: FedALT .* has none"):
        FedALT().check(make_model("mlp", make_data()), "classification")
