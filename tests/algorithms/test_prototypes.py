"""FedProto and FedTGP by hand: prototypes, predictions by the nearest, and the server's training of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms._shared.prototypes import IS_KNOWN, PROTOTYPES
from fedtailor.algorithms.fedproto import FedProto
from fedtailor.algorithms.fedtgp import FedTGP, outputs, spread
from fedtailor.core.client import onboard
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import F64, FULL_BATCH, assert_equal, evaluate, federate, make_data, make_model, models, run, states

LAM = 0.7


def features(w: Params, x: Tensor) -> Tensor:
    return torch.relu(x @ w["hidden.0.weight"].T + w["hidden.0.bias"])


def pulled(w: Params, x: Tensor, y: Tensor, known: dict[int, Tensor], lam: float, steps: int) -> Params:
    """Gradient descent on cross-entropy and, for samples of known classes, the mean squared way to the prototype."""
    for _ in range(steps):
        leaf = {k: v.detach().clone().requires_grad_() for k, v in w.items()}
        f = features(leaf, x)
        loss = nn.functional.cross_entropy(f @ leaf["out.weight"].T + leaf["out.bias"], y)
        for row, label in zip(f, y.tolist(), strict=True):
            if label in known:
                loss = loss + lam * (row - known[label]).square().mean() / len(y)
        loss.backward()
        w = {k: (v - 0.1 * v.grad).detach() for k, v in leaf.items() if v.grad is not None}
    return w


def by_class(w: Params, x: Tensor, y: Tensor) -> dict[int, Tensor]:
    """The features of each class."""
    return {label: features(w, x)[y == label] for label in sorted(set(y.tolist()))}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_of_fedproto_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    own, known = [model.params] * 4, dict[int, Tensor]()
    for _ in range(2):
        own = [pulled(w, *data.train.of(i), known, LAM, 2) for i, w in enumerate(own)]
        rows: dict[int, list[Tensor]] = {}
        for i, w in enumerate(own):
            for label, f in by_class(w, *data.train.of(i)).items():
                rows.setdefault(label, []).append(f)
        known = known | {label: torch.cat(each).mean(0) for label, each in rows.items()}
    fed = federate(FedProto(epochs=2, lam=LAM), data, model, engine, FULL_BATCH)
    server = run(fed, rounds=2)
    assert len(known) == 3
    assert_equal(server[PROTOTYPES], torch.stack([known[label] for label in range(3)]))
    for i, mine in enumerate(states(fed).values()):
        assert_equal(mine["state"], own[i])
    _, metrics = evaluate(fed, server)
    for i, name in enumerate(data.clients):
        x, y = data.test.of(i)
        if not len(y):
            continue
        away = [[float((f - known[c]).norm()) for c in range(3)] for f in features(own[i], x)]
        right = sum(row.index(min(row)) == b for row, b in zip(away, y.tolist(), strict=True)) / len(y)
        assert float(metrics[name]["test/accuracy"]) == pytest.approx(right)


def test_before_there_are_prototypes_the_head_predicts() -> None:
    data = make_data()
    model = make_model("mlp", data)
    algorithm = FedProto()
    x = data.train.of(0)[0]
    assert_equal(algorithm.predict(model, model.params | algorithm.server_init(model), x), model(model.params, x))
    seen = {PROTOTYPES: torch.randn(3, 5, dtype=F64), IS_KNOWN: torch.tensor([1.0, 0.0, 1.0], dtype=F64)}
    assert set(algorithm.predict(model, model.params | seen, x).argmax(1).tolist()) <= {0, 2}


def test_a_class_that_nobody_has_keeps_its_prototype() -> None:
    data = make_data(names=("ada", "bo"))
    algorithm = FedProto()
    fed = federate(algorithm, data, make_model("mlp", data))
    server = run(fed, rounds=1)
    only = set(data.train.of(1)[1].tolist())
    after = fed.run_round(1, [1], server)
    for label in range(3):
        assert torch.equal(after[PROTOTYPES][label], server[PROTOTYPES][label]) is (label not in only)


def test_newcomers_train_towards_the_prototypes() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(FedProto(lam=LAM), data, model, solver=FULL_BATCH)
    server = run(fed, rounds=1, cohort=[0, 1, 2])
    known = {c: server[PROTOTYPES][c] for c in range(3) if server[IS_KNOWN][c]}
    wanted = pulled(model.params, *data.train.of(3), known, LAM, 3)
    found = onboard(fed.engine.experiment, 3, server, 3)
    assert_equal({k: found[k] for k in wanted}, wanted)


def test_the_server_of_fedtgp_by_hand() -> None:
    algorithm = FedTGP(server_epochs=3, server_lr=0.2, margin=0.5)
    data = make_data()
    model = make_model("mlp", data)
    F = algorithm.server_init(model)["F"]
    generator = torch.Generator().manual_seed(1)
    means = torch.randn(2, 3, 5, generator=generator, dtype=F64)
    has = torch.tensor([[True, True, False], [True, False, True]])
    wanted = {k: v.clone().requires_grad_() for k, v in F.items()}
    points = [(means[0, 0], 0), (means[0, 1], 1), (means[1, 0], 0), (means[1, 2], 2)]
    for _ in range(3):
        losses = []
        for point, label in points:
            away = torch.stack([(point - one).square().sum().sqrt() for one in outputs(wanted)])
            away = away + torch.tensor([0.5 * (c == label) for c in range(3)], dtype=F64)
            losses.append(-(-away).log_softmax(0)[label])
        slopes = torch.autograd.grad(torch.stack(losses).mean(), list(wanted.values()))
        wanted = {k: (v - 0.2 * g).detach().requires_grad_() for (k, v), g in zip(wanted.items(), slopes, strict=True)}
    assert_equal(algorithm.trained(F, means, has, ("a", 1), 0), {k: v.detach() for k, v in wanted.items()})


def test_the_margin_grows_with_the_distance_of_the_classes() -> None:
    means = torch.zeros(2, 3, 2, dtype=F64)
    means[0, 1], means[1, 1], means[0, 2] = torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0]), torch.tensor([3.0, 2.0])
    has = torch.tensor([[True, True, True], [True, True, False]])
    # centers (0, 0), (3, 0), (3, 2): nearest at 3, 2 and 2
    assert spread(means, has) == pytest.approx(3.0)
    assert spread(means, torch.tensor([[True, False, False]] * 2)) == 0.0


def test_clients_of_fedtgp_train_as_those_of_fedproto() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(FedTGP(lam=LAM, server_epochs=2), data, model, solver=FULL_BATCH)
    server = run(fed, rounds=2)
    first = run(federate(FedTGP(lam=LAM, server_epochs=2), data, model, solver=FULL_BATCH), rounds=1)
    known = {c: first[PROTOTYPES][c] for c in range(3)}
    for i, mine in enumerate(states(fed).values()):
        w = pulled(model.params, *data.train.of(i), {}, LAM, 1)
        assert_equal(mine["state"], pulled(w, *data.train.of(i), known, LAM, 1))
    assert set(models(fed, server)["ada"]) == {*model.params, PROTOTYPES, IS_KNOWN}


@pytest.mark.parametrize("kind", [FedProto, FedTGP])
def test_mistakes(kind: type[FedProto] | type[FedTGP]) -> None:
    with pytest.raises(ConfigError, match="not regression"):
        kind().check(make_model("mlp", make_data("regression")), "regression")
    with pytest.raises(ConfigError, match="one dense layer"):
        kind().check(make_model("headless", make_data()), "classification")
