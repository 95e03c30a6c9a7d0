"""Squared error in place of the likelihood: by hand, and the same on every engine."""

import pytest
import torch

from fedtailor import engines
from fedtailor.algorithms import make
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.task import Classification
from fedtailor.core.task import make as make_task
from fedtailor.errors import ConfigError
from tests.helpers import ENGINES, F64, FULL_BATCH, assert_equal, make_data, make_model, run


def test_squared_error_by_hand() -> None:
    """Mean over outputs of their squared distance from 0, and from 1 at the label."""
    outputs = torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=F64)
    labels = torch.tensor([0, 1])
    plain = make_task("classification", {"error": "squared"})
    torch.testing.assert_close(plain.loss(outputs, labels), torch.tensor([0.625, 2.28125], dtype=F64))
    weighted = Classification(weights=(2.0, 0.5), smoothing=0.2, error="squared")
    # labels are 0.9 and 0.1
    wanted = [2.0 * (0.4**2 + 1.1**2) / 2, 0.5 * (1.9**2 + 0.65**2) / 2]
    torch.testing.assert_close(weighted.loss(outputs, labels), torch.tensor(wanted, dtype=F64))
    assert {t.name for t in (plain, weighted)} == {"squared classification"}
    with pytest.raises(ValueError, match="entropy or squared"):
        Classification(error="mse").outputs(2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no option"):
        make_task("classification", {"eror": "squared"})


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_on_squared_error(engine: str) -> None:
    data = make_data()
    model = make_model("linear", data)
    setting = Experiment(make("fedavg", {}), model, data, FULL_BATCH, 3, task=Classification(error="squared"))
    running = engines.make(experiment=setting, **ENGINES[engine])
    running.start()
    found = run(Federation(running), rounds=1)
    w, b = (v.clone() for v in (model.params["out.weight"], model.params["out.bias"]))
    new_w, new_b = torch.zeros_like(w), torch.zeros_like(b)
    for i, n in enumerate((9, 1, 6, 13)):
        x, y = data.train.of(i)
        apart = x @ w.T + b - torch.eye(3, dtype=F64)[y]
        new_w += n / 29 * (w - 0.1 * 2 / 3 / n * apart.T @ x)
        new_b += n / 29 * (b - 0.1 * 2 / 3 / n * apart.sum(0))
    assert_equal(found, {"out.weight": new_w, "out.bias": new_b})
