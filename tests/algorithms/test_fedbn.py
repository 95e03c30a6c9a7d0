"""FedBN by hand, with modules of plain torch; alone it is Local; without BatchNorm there is nothing to keep."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms.fedbn import FedBN
from fedtailor.core.model import BufferPolicy, Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import (
    EVEN_SIZES,
    FULL_BATCH,
    assert_equal,
    federate,
    make_data,
    make_model,
    models,
    run,
    states,
    weighted,
)

NORM = ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var")


def trained(module: nn.Module, tensors: Params, x: Tensor, y: Tensor, steps: int) -> Params:
    """All tensors of the module after steps of torch's own SGD on the whole data, statistics included."""
    module = copy.deepcopy(module).train()
    with torch.no_grad():
        for k, v in module.state_dict().items():
            v.copy_(tensors[k])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


@pytest.mark.parametrize("buffers", ["private", "mean"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str, buffers: BufferPolicy) -> None:
    data = make_data(sizes=EVEN_SIZES)
    model = make_model("normed", data, buffers)
    own = [{k: v.clone() for k, v in model.module.state_dict().items()} for _ in range(4)]
    shared = model.params
    for _ in range(2):
        own = [trained(model.module, tensors | shared, *data.train.of(i), 2) for i, tensors in enumerate(own)]
        shared = weighted([{k: v for k, v in tensors.items() if k not in NORM} for tensors in own], [8, 8, 4, 12])
        own = [tensors | shared for tensors in own]
    fed = federate(FedBN(epochs=2), data, model, engine, FULL_BATCH)
    server = run(fed, rounds=2)
    assert_equal(server, shared)
    assert_equal(models(fed, server), dict(zip(data.clients, own, strict=True)))


def test_clients_differ_in_batch_norm_only() -> None:
    data = make_data(sizes=EVEN_SIZES)
    fed = federate(FedBN(), data, make_model("normed", data, "mean"))
    mine = models(fed, run(fed))
    for k in mine["ada"]:
        assert torch.equal(mine["ada"][k], mine["di"][k]) == (k not in NORM), k
    assert set(states(fed)["ada"]["state"]) == set(NORM)


def test_a_model_without_batch_norm_is_refused() -> None:
    for module in (nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))):
        with pytest.raises(ConfigError, match=r"model\.name.*FedBN"):
            FedBN().check(Model(module), "classification")
