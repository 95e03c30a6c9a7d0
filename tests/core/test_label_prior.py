"""A client's own label frequencies as an offset of the logits: private, constant, the same on every engine."""

import pytest
import torch

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.data import FederatedData
from fedtailor.core.model import PRIOR, BufferPolicy, Model
from fedtailor.models import build
from tests.helpers import EVERYWHERE, F64, assert_equal, everything, federate, make_data, models, run


def with_prior(data: FederatedData, buffers: BufferPolicy = "private") -> Model:
    options = {"hidden": (5,)}
    return build("mlp", data.shape, 3, seed=1, options=options, dtype=F64, prior=True, buffers=buffers)


@pytest.mark.parametrize("buffers", ["private", "mean"])
@pytest.mark.parametrize("engine", EVERYWHERE)
def test_engines_agree_and_the_prior_is_never_sent(engine: str, buffers: BufferPolicy) -> None:
    data = make_data()
    fed = federate(FedAvg(), data, with_prior(data, buffers), engine)
    reference = federate(FedAvg(), data, with_prior(data), "loop")
    server = run(fed)
    assert PRIOR not in server
    assert_equal(everything(fed, server), everything(reference, run(reference)))


def test_it_is_the_log_frequency_and_is_added_to_the_logits() -> None:
    data = make_data()
    model = with_prior(data)
    fed = federate(FedAvg(), data, model)
    for i, (client, personal) in enumerate(models(fed, run(fed)).items()):
        labels = data.train.of(i)[1]
        counts = torch.tensor([float((labels == c).sum()) + 0.5 for c in range(3)], dtype=F64)
        torch.testing.assert_close(personal[PRIOR], (counts / counts.sum()).log(), msg=client)
    x = data.test.of(0)[0]
    flat = model(personal | {PRIOR: torch.zeros(3, dtype=F64)}, x)
    torch.testing.assert_close(model(personal, x), flat + personal[PRIOR])


def test_it_changes_what_is_learned() -> None:
    data = make_data()
    plain = federate(FedAvg(), data, build("mlp", data.shape, 3, seed=1, options={"hidden": (5,)}, dtype=F64))
    fed = federate(FedAvg(), data, with_prior(data))
    assert not torch.allclose(run(fed)["out.bias"], run(plain)["out.bias"])
