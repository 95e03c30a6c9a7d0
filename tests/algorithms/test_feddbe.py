"""FedDBE by hand; its first round is FedAvg's."""

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.feddbe import Z_P, FedDBE
from fedtailor.core.client import onboard
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import (
    ENGINES,
    FULL_BATCH,
    assert_equal,
    descend,
    evaluate,
    federate,
    make_data,
    make_model,
    models,
    run,
    states,
    weighted,
)

COUNTS = [9, 1, 6, 13]


def features(w: Params, x: Tensor) -> Tensor:
    return torch.relu(x @ w["hidden.0.weight"].T + w["hidden.0.bias"])


def outputs(w: Params, z: Tensor, x: Tensor) -> Tensor:
    return (features(w, x) + z) @ w["out.weight"].T + w["out.bias"]


def step(w: Params, z: Tensor, x: Tensor, y: Tensor, mean: Tensor, kappa: float) -> tuple[Params, Tensor]:
    leaf = {k: v.clone().requires_grad_() for k, v in w.items()}
    own = z.clone().requires_grad_()
    loss = nn.functional.cross_entropy(outputs(leaf, own, x), y)
    loss = loss + kappa * (0.5 * (features(leaf, x).mean(0) - mean) ** 2).mean()
    loss.backward()
    assert own.grad is not None
    return {k: (v - 0.1 * v.grad).detach() for k, v in leaf.items() if v.grad is not None}, z - 0.1 * own.grad


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    first = [descend(model, model.params, *data.train.of(i), steps=2) for i in range(4)]
    means = [{"mean": features(w, data.train.of(i)[0]).mean(0)} for i, w in enumerate(first)]
    w, mean = weighted(first, COUNTS), weighted(means, COUNTS)["mean"]
    z = [torch.zeros_like(mean)] * 4
    for _ in range(2):
        trained = []
        for i in range(4):
            own = w
            for _ in range(2):
                own, z[i] = step(own, z[i], *data.train.of(i), mean, 0.8)
            trained.append(own)
        w = weighted(trained, COUNTS)
    fed = federate(FedDBE(epochs=2, kappa=0.8), data, model, engine, FULL_BATCH)
    server = run(fed, rounds=3)
    assert_equal(server, {"w": w, "z_bar": mean, "is_known": torch.tensor(True)})
    personal, metrics = evaluate(fed, server)
    assert_equal(personal, {name: w | {Z_P: z[i]} for i, name in enumerate(data.clients)})
    for i, name in enumerate(data.clients):
        x, y = data.train.of(i)
        assert_equal(metrics[name]["train/loss"], nn.functional.cross_entropy(outputs(w, z[i], x), y))
    assert min(float(part.abs().max()) for part in z) > 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_round_is_fedavg(engine: str) -> None:
    data = make_data("regression")
    ours = federate(FedDBE(), data, make_model("mlp", data), engine, FULL_BATCH)
    plain = federate(FedAvg(), data, make_model("mlp", data), engine, FULL_BATCH)
    found, wanted = run(ours, rounds=1), run(plain, rounds=1)
    assert_equal(found["w"], wanted)
    assert_equal(evaluate(ours, found)[1], evaluate(plain, wanted)[1])


def test_a_stronger_pull_holds_mean_features_nearer() -> None:
    data = make_data(names=("di",))
    x, _ = data.train.of(0)
    moved = []
    for kappa in (0.0, 3.0, 10.0):
        fed = federate(FedDBE(kappa=kappa, epochs=3), data, make_model("mlp", data), solver=FULL_BATCH)
        server = run(fed, rounds=8)
        moved.append(float((features(server["w"], x).mean(0) - server["z_bar"]).norm()))
    assert moved[0] > 1.2 * moved[1] > 1.4 * moved[2]


def test_few_samples_stand_for_all() -> None:
    data = make_data()
    found = []
    for samples in (2, 9, 13, 40):
        fed = federate(FedDBE(kappa=2.0, samples=samples), data, make_model("mlp", data), solver=FULL_BATCH)
        found.append(run(fed, rounds=2)["w"])
    assert_equal(found[2], found[3])
    for few in found[:2]:
        with pytest.raises(AssertionError):
            assert_equal(few, found[3], 1e-6)


def test_a_newcomer_trains_its_own_part_only() -> None:
    data = make_data()
    fed = federate(FedDBE(), data, make_model("mlp", data), solver=FULL_BATCH)
    server = run(fed, cohort=[0, 1, 2])
    z = torch.zeros_like(server["z_bar"])
    x, y = data.train.of(3)
    for _ in range(4):
        _, z = step(server["w"], z, x, y, server["z_bar"], 0.0)
    assert_equal(onboard(fed.engine.experiment, 3, server, 4), server["w"] | {Z_P: z})


def test_the_own_part_stays() -> None:
    data = make_data()
    fed = federate(FedDBE(), data, make_model("mlp", data))
    mine = models(fed, run(fed))
    assert not torch.equal(mine["ada"][Z_P], mine["di"][Z_P])
    assert torch.equal(mine["ada"]["out.weight"], mine["di"]["out.weight"])
    assert set(states(fed)["ada"]["state"]) == {"z_p"}
    with pytest.raises(ConfigError, match=r"model\.head.*FedDBE"):
        FedDBE().check(Model(nn.Linear(4, 3)), "classification")
