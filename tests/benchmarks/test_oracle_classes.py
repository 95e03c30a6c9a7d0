"""The drawn classifiers of benchmarks/oracle_classes.py: their best rules are the best."""

import pytest
import torch

from benchmarks import oracle_classes
from fedtailor.core.data import FederatedData


def linear_error(data: FederatedData, client: int) -> float:
    """Test error of the rule with the least squared error on the client's own test samples: no rule is far below it."""
    x, y = data.test.of(client)
    inputs = torch.cat([x, torch.ones(len(x), 1)], 1)
    fitted = torch.linalg.lstsq(inputs, 2.0 * y[:, None] - 1).solution
    return float(((inputs @ fitted)[:, 0].gt(0) != y.bool()).double().mean())


def test_clients_that_are_alike_have_the_error_of_the_normal_tail() -> None:
    for slider in oracle_classes.SLIDERS:
        _, least = oracle_classes.draw(slider, 0.0, 0)
        assert least == pytest.approx(0.1587, abs=0.01)  # P(N(0, 1) < -1): the classes are two apart


@pytest.mark.parametrize(("slider", "s"), [("concept shift", 1.2), ("feature shift", 2.0)])
def test_the_best_rule_is_that_of_each_client(slider: str, s: float) -> None:
    data, least = oracle_classes.draw(slider, s, 0)
    own = sum(linear_error(data, i) for i in range(oracle_classes.CLIENTS)) / oracle_classes.CLIENTS
    assert least == pytest.approx(own, abs=0.01)
    assert data.train.sizes.tolist() == [oracle_classes.TRAIN] * oracle_classes.CLIENTS


def test_label_skew_leaves_less_to_decide() -> None:
    assert oracle_classes.draw("label skew", 4.0, 0)[1] < 0.1
