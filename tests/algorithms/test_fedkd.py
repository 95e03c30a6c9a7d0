"""FedKD by hand: models learn from outputs and features of each other; updates lose small singular values."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.fedkd import W_H, FedKD, largest
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import FULL_BATCH, assert_equal, federate, make_data, make_me, make_model, models, run, weighted


def entropies(output: Tensor, y: Tensor) -> Tensor:
    return -torch.stack([row[label] - row.exp().sum().log() for row, label in zip(output, y, strict=True)])


def step(model: Model, mentor: Params, mentee: Params, w_h: Tensor, x: Tensor, y: Tensor) -> list[Params]:
    """A step of each model on its own loss, and of the map on both."""
    made, of_map = [], []
    for mine, other, is_mentor in ((mentor, mentee, True), (mentee, mentor, False)):
        leaf = {k: v.detach().clone().requires_grad_() for k, v in mine.items()}
        w = w_h.detach().clone().requires_grad_()
        with torch.no_grad():
            f_other, output_other = model.features(other, x), model(other, x)
        f, output = model.features(leaf, x), model(leaf, x)
        p, q = output_other.softmax(1), output.log_softmax(1)
        mapped = f - f_other @ w.T if is_mentor else f_other - f @ w.T
        from_other = (p * (p.log() - q)).sum(1) + (mapped**2).mean(1)
        own, others = entropies(output, y), entropies(output_other, y)
        (own + from_other / (own + others)).mean().backward()
        made.append({k: v.detach() - 0.1 * v.grad for k, v in leaf.items() if v.grad is not None})
        of_map.append(w.grad)
    return [*made, {W_H: w_h - 0.1 * sum(g for g in of_map if g is not None)}]


def by_energy(update: Tensor, energy: float) -> Tensor:
    u, sigma, v = np.linalg.svd(update.numpy(), full_matrices=False)
    r = next((r for r in range(len(sigma)) if (sigma[:r] ** 2).sum() > energy * (sigma**2).sum()), len(sigma))
    return torch.from_numpy(u[:, :r] @ np.diag(sigma[:r]) @ v[:r])


def shrunken(old: Params, new: Params, energy: float) -> Params:
    return {k: old[k] + by_energy(v - old[k], energy) if v.dim() == 2 else v for k, v in new.items()}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    algorithm = FedKD(epochs=2, energy_start=0.5, energy_end=0.9, horizon=2)
    first = algorithm.client_init(make_me(data, model))[W_H]
    mentee, mentors, maps = model.params, [model.params] * 4, [first] * 4
    for energy in (0.5, 0.7):
        trained = []
        for i in range(4):
            w = mentee
            for _ in range(2):
                mentors[i], w, new = step(model, mentors[i], w, maps[i], *data.train.of(i))
                maps[i] = new[W_H]
            trained.append(shrunken(mentee, w, energy))
        mentee = shrunken(mentee, weighted(trained, [9, 1, 6, 13]), energy)
    fed = federate(algorithm, data, model, engine, FULL_BATCH)
    server = run(fed, rounds=2)
    assert_equal(server, mentee)
    assert_equal(models(fed, server), dict(zip(data.clients, mentors, strict=True)))


def test_without_distillation_and_loss_of_energy_the_mentee_is_fedavg() -> None:
    data = make_data()
    model = make_model("mlp", data)
    none = FedKD(distil=0, energy_start=1, energy_end=1)
    assert_equal(*(run(federate(a, data, model, "loop", FULL_BATCH)) for a in (none, FedAvg())))


def test_largest_singular_values() -> None:
    update = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))  # squares 9, 4, 1 of 14
    assert_equal(largest(update, 0.6), torch.diag(update.diag() * torch.tensor([1.0, 0, 0])))  # 9 > 8.4
    assert_equal(largest(update, 0.9), torch.diag(update.diag() * torch.tensor([1.0, 1, 0])))  # 13 > 12.6
    assert_equal(largest(update, 0.95), update)
    kernel = torch.zeros(2, 3, 2, 2, dtype=torch.float64)
    kernel[0, 1, 1, 0], kernel[1, 2, 0, 1] = 5.0, 1.0
    kept = kernel.clone()
    kept[1] = 0
    assert_equal(largest(kernel, 0.9), kept)
    assert_equal(largest(torch.zeros(2, 3), 0.5), torch.zeros(2, 3))


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="not serve regression"):
        FedKD().check(make_model("mlp", make_data("regression")), "regression")
    with pytest.raises(ConfigError, match="energy_start"):
        FedKD(energy_start=0.99).check(make_model("mlp", make_data()), "classification")
