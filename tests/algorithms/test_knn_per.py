"""kNN-Per by hand; without votes it is FedAvg; the datastore is a client's own and of fixed size."""

import pytest
import torch
from torch import Tensor

from fedtailor.algorithms.knn_per import KNNPer
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import (
    ENGINES,
    F64,
    FULL_BATCH,
    assert_equal,
    descend,
    evaluate,
    federate,
    make_data,
    make_model,
    models,
    run,
    weighted,
)

LAMS = (0.0, 0.25, 0.5, 1.0)


def blended(w: Params, own: tuple[Tensor, Tensor], x: Tensor, k: int, lam: float, scale: float = 1.0) -> Tensor:
    """Probabilities of one sample after the other, with plain loops over neighbours."""

    def hidden(x: Tensor) -> Tensor:
        return torch.relu(x @ w["hidden.0.weight"].T + w["hidden.0.bias"])

    out = []
    for f in hidden(x):
        distances = ((hidden(own[0]) - f) ** 2).sum(1) / (5 * scale)
        votes = torch.zeros(3, dtype=x.dtype)
        for i in distances.argsort()[:k].tolist():
            votes[own[1][i]] += torch.exp(-distances[i])
        net = torch.softmax(w["out.weight"] @ f + w["out.bias"], 0)
        out.append(lam * votes / votes.sum() + (1 - lam) * net)
    return torch.stack(out) if out else x.new_zeros(0, 3)


def log_likelihood(p: Tensor, y: Tensor) -> float:
    return float(p.gather(1, y[:, None]).clamp(min=torch.finfo(p.dtype).tiny).log().sum())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("k", "scale"), [(1, 1.0), (4, 0.3), (50, 1.0)])
def test_a_round_by_hand(k: int, scale: float, engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    w = weighted([descend(model, model.params, *data.train.of(i), steps=2) for i in range(4)], [9, 1, 6, 13])
    fed = federate(KNNPer(epochs=2, k=k, scale=scale, lams=LAMS, capacity=60), data, model, engine, FULL_BATCH)
    server = run(fed, rounds=1)
    assert_equal(server, w)
    personal, metrics = evaluate(fed, server)
    for i, name in enumerate(data.clients):
        own, (x, y) = data.train.of(i), data.val.of(i)
        lam = 0.5
        if len(x):
            lam = max(LAMS, key=lambda lam: log_likelihood(blended(w, own, x, k, lam, scale), y))
        assert float(personal[name]["knn.share"]) == lam
        x, y = data.test.of(i)
        if len(x):
            p = blended(w, own, x, k, lam, scale)
            assert_equal(metrics[name]["test/loss"], torch.tensor(-log_likelihood(p, y) / len(x), dtype=F64))
            assert_equal(metrics[name]["test/accuracy"], (p.argmax(1) == y).double().mean())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_nearest_sample_is_itself(engine: str) -> None:
    data = make_data()
    fed = federate(KNNPer(k=1, lams=(1.0,), default_lam=1.0), data, make_model("linear", data), engine)
    metrics = evaluate(fed, run(fed))[1]
    assert [float(m["train/accuracy"]) for m in metrics.values()] == [1.0] * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_datastore_keeps_evenly_spaced_samples(engine: str) -> None:
    data = make_data()
    fed = federate(KNNPer(capacity=4), data, make_model("linear", data), engine)  # features are the samples themselves
    found = models(fed, run(fed, 1))
    kept = {"ada": [0, 2, 4, 6], "bo": [0], "cy": [0, 1, 3, 4], "di": [0, 3, 6, 9]}
    for i, (name, rows) in enumerate(kept.items()):
        x, y = data.train.of(i)
        empty = 4 - len(rows)
        assert_equal(found[name]["knn.features"], torch.cat([x[rows], x.new_zeros(empty, 4)]))
        assert found[name]["knn.labels"].tolist() == y[rows].tolist() + [-1] * empty


def test_what_it_does_not_serve() -> None:
    data = make_data()
    model = make_model("mlp", data)
    KNNPer().check(model, "classification")
    with pytest.raises(ConfigError, match="classification, not regression"):
        KNNPer().check(model, "regression")
    with pytest.raises(ConfigError, match=r"model\.head: .* the model has none"):
        KNNPer().check(Model(model.module), "classification")
    for wrong in (KNNPer(k=0), KNNPer(capacity=0), KNNPer(lams=()), KNNPer(scale=0.0)):
        with pytest.raises(ConfigError, match="above 0, and at least one of lams"):
            wrong.check(model, "classification")
