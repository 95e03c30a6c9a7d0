"""Learn2pFed for networks: rounds by hand, its limits, what it sends, newcomers."""

import pytest
import torch

from fedtailor.algorithms import make
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.learn2pfed_net import Learn2pFedNet
from fedtailor.core.client import initial, personal
from tests.helpers import FULL_BATCH, assert_equal, descend, federate, make_data, make_model, models, run, weighted


def test_a_round_of_the_network_by_hand() -> None:
    """Full batch, one epoch: v - lr (F' + rho (v - (w + z + a))) from v = w, z = a = 0."""
    data = make_data(names=("ada", "di"))
    model = make_model("mlp", data)
    algorithm = Learn2pFedNet(epochs=1, outer_lr=0.0, share=0.75)
    fed = federate(algorithm, data, model, solver=FULL_BATCH)
    server = run(fed, rounds=1)
    v, total = [], 0.0
    for i in range(2):
        x, y = data.train.of(i)
        leaves = {k: p.clone().requires_grad_() for k, p in model.params.items()}
        loss = torch.nn.functional.cross_entropy(torch.func.functional_call(model.module, leaves, (x,)), y)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        v.append({k: (p - 0.1 * g).detach() for (k, p), g in zip(leaves.items(), gradients, strict=True)})
        total += len(x)
    weights = [len(data.train.of(i)[0]) / total for i in range(2)]
    z = [{k: 0.25 * (v[i][k] - w) for k, w in model.params.items()} for i in range(2)]
    wanted = {k: sum(weights[i] * (v[i][k] - z[i][k]) for i in range(2)) for k in model.params}
    assert_equal(server["w"], wanted)
    personal = {c: {k: wanted[k] + z[i][k] for k in wanted} for i, c in enumerate(data.clients)}
    assert_equal(models(fed, server), personal)


def test_only_the_head_is_sent_by_the_papers_network() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(Learn2pFedNet(scope="head"), data, model)
    server = run(fed, rounds=2)
    assert set(server["w"]) == set(model.head)
    bodies = [tuple(m["hidden.0.weight"].flatten().tolist()) for m in models(fed, server).values()]
    assert len(set(bodies)) == 4  # each its own


def test_averaging_without_shrinking_back_is_fedavg() -> None:
    data = make_data()
    model = make_model("mlp", data)
    ours = federate(Learn2pFedNet(consensus="average", epochs=2, outer_lr=0.0), data, model, solver=FULL_BATCH)
    plain = federate(FedAvg(epochs=2), data, model, solver=FULL_BATCH)
    assert_equal(run(ours)["w"], run(plain), 1e-14)


def test_two_rounds_without_the_dual_by_hand() -> None:
    data = make_data("regression", names=("ada", "di"))
    model = make_model("mlp", data)
    algorithm = Learn2pFedNet(consensus="primal", epochs=2, outer_lr=0.0, share=0.75, rho=0.3)
    fed = federate(algorithm, data, model, solver=FULL_BATCH)
    w, z = model.params, [{k: 0 * v for k, v in model.params.items()} for _ in range(2)]
    for _ in range(2):
        sent = []
        for i in range(2):
            center = {k: w[k] + z[i][k] for k in w}
            v = descend(model, center, *data.train.of(i), steps=2, center=center, mu=0.3)
            z[i] = {k: 0.25 * (v[k] - w[k]) for k in w}
            sent.append({k: v[k] - z[i][k] for k in w})
        w = weighted(sent, [9, 13])
    server = run(fed, rounds=2)
    assert_equal(server["w"], w)
    assert_equal(models(fed, server), {c: {k: w[k] + z[i][k] for k in w} for i, c in enumerate(data.clients)})


def test_degrees_stay_at_home_when_nobody_is_pulled_to_their_mean() -> None:
    data = make_data()
    model = make_model("mlp", data)
    sizes = {}
    for pull in (0.0, 0.5):
        fed = federate(Learn2pFedNet(scope="head", grain="parameter", pull=pull), data, model)
        server = run(fed, rounds=1)
        assert set(server["degrees"]) == (set(model.head) if pull else set())
        sizes[pull] = fed.traffic.up
    head = 4 * 8 * sum(v.numel() for v in model.head.values())  # four clients, eight bytes
    assert sizes[0.5] - sizes[0.0] >= head


@pytest.mark.parametrize("preset", ["primal", "average", None])
def test_a_new_client_starts_from_the_common_model_and_degrees(preset: str | None) -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(make("learn2pfed-net", {"preset": preset} if preset else {}), data, model)
    server = run(fed, cohort=[0, 1, 2])
    setting = fed.engine.experiment
    state, buffers = initial(setting, [3], server, is_stacked=False)
    newcomer = personal(setting, [3], 3, state, buffers, server, is_stacked=False)
    x, y = data.train.of(3)

    def loss(params: dict[str, torch.Tensor]) -> float:
        return float(torch.nn.functional.cross_entropy(model(params, x), y))

    assert loss(newcomer) < loss(server["w"]) < 1.3 * loss(model.params)


def test_preset_head_serves_the_own_model() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(make("learn2pfed-net", {"preset": "head"}), data, model)
    server = run(fed)
    rows = fed.engine.get_states()["state"]["v"]
    for i, mine in enumerate(models(fed, server).values()):
        assert_equal(mine, {k: v[i] for k, v in rows.items()}, 0.0)


def test_common_degrees_take_one_step_on_the_summed_gradient() -> None:
    """The first step of that Adam is lr * 0.5 / sqrt(0.1) times the sign."""
    data = make_data()
    model = make_model("mlp", data)
    own = federate(Learn2pFedNet(pull=0.0, outer_lr=0.3), data, model)
    first = {k: float(v[0]) for k, v in own.engine.get_states()["state"]["degrees"].items()}
    run(own, rounds=1)
    sums = {k: float(2 * v.sum()) for k, v in own.engine.get_states()["state"]["first"].items()}  # 0.5 of a gradient
    fed = federate(Learn2pFedNet(pull=0.5, outer_lr=0.3), data, model)
    server = run(fed, rounds=1)
    for k, x in server["degrees"].items():
        wanted = first[k] - 0.3 * 0.5 / 0.1**0.5 * (1 if sums[k] > 0 else -1)
        assert float(x) == pytest.approx(wanted, abs=1e-5)
