"""Products in lower precision: near the full one, the same on the device, and float16 with scaled losses."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms import make
from fedtailor.core.data import FederatedData
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import torch_stream
from fedtailor.engines.inprocess import InProcess
from fedtailor.errors import ConfigError
from fedtailor.experiments.building import build_experiment
from fedtailor.models import build
from fedtailor.training.arithmetic import SCALE, Arithmetic, LossScale
from fedtailor.training.solver import Solver
from tests.devices.federations import play
from tests.helpers import assert_equal, make_data
from tests.small import config


def trained(
    precision: str, device: str = "cpu", chunk: int = 0, model: Model | None = None, lr: float = 0.1
) -> dict[str, Tensor]:
    """FedAvg's model after a round."""
    data: FederatedData = make_data().to(torch.float32)
    model = model or build("mlp", data.shape, data.outputs, seed=1, options={"hidden": (16,)})
    solver = Solver(lr=lr, batch_size=4, arithmetic=Arithmetic(precision=precision))  # type: ignore[arg-type]
    setting = Experiment(make("fedavg", {"epochs": 2}), model, data, solver, 3).on(torch.device(device))
    engine = InProcess(setting, range(4), chunk=chunk)
    engine.start()
    return {k: v.cpu() for k, v in play(Federation(engine)).items()}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize(("device", "chunk"), [("cpu", 0), ("cpu", 2), ("sim:0", 2)])
def test_near_the_full_precision_but_not_it(precision: str, device: str, chunk: int) -> None:
    full, lower = trained("float32"), trained(precision, device, chunk)
    apart = max(float((full[k] - v).abs().max()) for k, v in lower.items())
    eps = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[precision]
    assert 1e-6 < apart < 4 * eps
    assert all(v.dtype == torch.float32 for v in lower.values())


def test_stacked_and_alone_are_near_each_other() -> None:
    assert_equal(trained("bfloat16"), trained("bfloat16", chunk=2), tolerance=2.0**-8)


class Small(nn.Module):
    """Its gradients are too small for float16 unless the loss is scaled."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * self.factor


def small(factor: float) -> Model:
    with torch_stream("small"):
        return Model(Small(factor), head=["out"])


def test_small_gradients_are_not_lost() -> None:
    factor = 2.0**-14  # half of what float16 has near 0 is lost without a scale
    start = small(factor).params["out.weight"]
    full, lower = (trained(p, model=small(factor), lr=1e4)["out.weight"] - start for p in ("float32", "float16"))
    assert float((full - lower).abs().max()) < 0.01 * float(full.abs().max())


def test_a_step_that_overflows_is_left_out_and_the_scale_halved() -> None:
    scaling = LossScale(torch.tensor([SCALE, SCALE]), torch.zeros(2))
    gradients = [torch.tensor([[1.0, 2.0], [torch.inf, 0.0]]), torch.tensor([[4.0], [1.0]])]
    own, counts = scaling.unscale(gradients)
    assert counts.tolist() == [True, False]
    assert own[0].tolist() == [[1 / SCALE, 2 / SCALE], [0.0, 0.0]]
    assert own[1].tolist() == [[4 / SCALE], [0.0]]
    assert scaling.scale.tolist() == [SCALE, SCALE / 2]
    steady = replace(scaling, steady=torch.tensor([199.0, 5.0]))
    steady.unscale([torch.ones(2, 3)])
    assert steady.scale.tolist() == [2 * SCALE, SCALE / 2]


def test_overflow_in_training_leaves_finite_parameters() -> None:
    lower = trained("float16", model=small(2.0**12))
    assert all(bool(torch.isfinite(v).all()) for v in lower.values())


def test_with_float64_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'local\.precision.*"bfloat16".*model\.dtype.*"float32"'):
        build_experiment(config("local.precision=bfloat16", "model.dtype=float64"))
