"""FedCAC by hand: critical entries, overlaps, the rising threshold, and what a client begins with."""

import numpy as np
import pytest
import torch

from fedtailor.algorithms.fedcac import FedCAC, alike, critical
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


def test_critical_entries() -> None:
    change = torch.tensor([[0.1, -0.2, 0.0], [0.3, 0.2, 1e-18]], dtype=F64)
    value = torch.tensor([[1.0, 2.0, 3.0], [1.0, -1.0, 9.0]], dtype=F64)
    assert critical(change, value, 0.5).tolist() == [[0, 1, 0], [1, 1, 0]]
    assert critical(change, value, 1.0).tolist() == [[1, 1, 0], [1, 1, 0]]  # what has not moved never is
    assert critical(change, value, 0.1).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert critical(torch.zeros(4), torch.ones(4), 0.5).tolist() == [0, 0, 0, 0]


def test_overlaps_and_the_threshold() -> None:
    masks = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]], dtype=F64)
    # overlaps: 1-2: 1/2, 2-3: 1/2, 1-3: 0; mean 1/3, most 1/2
    now, late, over = (alike(masks, torch.tensor(t)).tolist() for t in (0.0, 1.0, 1.01))
    assert now == late == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    assert over == torch.eye(3).tolist()
    assert alike(masks[:1], torch.tensor(0.5)).tolist() == [[1]]


def largest(c: np.ndarray, tau: float) -> np.ndarray:
    order = np.sort(np.abs(c).ravel())[::-1]
    count = int(tau * c.size)
    return (np.abs(c) >= order[count - 1]) & (c != 0) if count else np.zeros_like(c, bool)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    names = list(model.params)
    w, u = model.params, [model.params] * 4
    masks: list[Params] = [{k: torch.zeros_like(v) for k, v in model.params.items()}] * 4
    near = []
    for number in (1, 2, 3):
        start = [{k: torch.where(masks[i][k] > 0, u[i][k], w[k]) for k in names} for i in range(4)]
        new = [descend(model, start[i], *data.train.of(i), steps=2) for i in range(4)]
        masks = [
            {k: torch.from_numpy(largest(((new[i][k] - start[i][k]) * new[i][k]).numpy(), 0.4)).to(F64) for k in names}
            for i in range(4)
        ]
        vectors = [np.concatenate([m[k].numpy().ravel() for k in names]) for m in masks]
        overlap = {
            (i, j): 1 - np.abs(vectors[i] - vectors[j]).sum() / (2 * vectors[i].sum())
            for i in range(4)
            for j in range(4)
            if i != j
        }
        mean, most = np.mean(list(overlap.values())), max(overlap.values())
        threshold = mean + number / 5 * (most - mean)
        groups = [[i, *(j for j in range(4) if j != i and overlap[i, j] >= threshold)] for i in range(4)]
        near.append(sorted(map(len, groups)))
        u = [{k: torch.stack([new[j][k] for j in group]).mean(0) for k in names} for group in groups]
        w = weighted(new, [9, 1, 6, 13])
    assert near[0][-1] > 1  # some are alike
    fed = federate(FedCAC(epochs=2, tau=0.4, beta=5), data, model, engine, FULL_BATCH)
    server = run(fed, rounds=3)
    assert_equal(server["w"], w)
    wanted = {n: {k: torch.where(masks[i][k] > 0, u[i][k], w[k]) for k in names} for i, n in enumerate(data.clients)}
    assert_equal(models(fed, server), wanted)
    assert_equal(states(fed)["ada"]["state"], {"u": u[0], "m": masks[0]})


def test_mistakes() -> None:
    for wrong in (FedCAC(tau=1.2), FedCAC(beta=0)):
        with pytest.raises(ConfigError, match="FedCAC needs tau"):
            wrong.check(make_model("mlp", make_data()), "classification")
