"""The Bayes risk of benchmarks/oracle.py, by conditioning one large Gaussian, and what the methods cannot beat."""

import pytest
import torch

from benchmarks import oracle

F64 = torch.float64


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_the_risk_is_that_of_one_large_gaussian(spread: float) -> None:
    """(w, v_1, ..., v_m) and all targets, jointly; the flat prior of w as one of a huge variance."""
    data, _ = oracle.draw(spread, 10, 0)
    k, m = oracle.FEATURES, oracle.CLIENTS
    eye = torch.eye(k, dtype=F64)
    prior = torch.kron(torch.ones(m, m, dtype=F64), 1e6 * eye) + torch.kron(torch.eye(m, dtype=F64), spread / k * eye)
    x = torch.block_diag(*(data.train.of(i)[0] for i in range(m)))
    cover = x @ prior @ x.mT + torch.eye(len(x), dtype=F64)
    posterior = prior - prior @ x.mT @ torch.linalg.solve(cover, x @ prior)
    wanted = float(torch.trace(posterior)) / m
    assert oracle.bayes_risk(data, spread) == pytest.approx(wanted, rel=1e-3)


def test_empirical_bayes_is_near_the_risk_and_the_ends_are_not() -> None:
    errors = {}
    data, truth = oracle.draw(1.0, 50, 0)
    for title in ("EmpiricalBayes", "FedAvg"):
        errors[title] = oracle.squared_error(title, data, truth, 0)
    assert errors["EmpiricalBayes"] < 1.5 * oracle.bayes_risk(data, 1.0) < errors["FedAvg"]
