"""FedSA-LoRA by hand, with modules of plain torch; alone it is Local; FedPer with B for its head is the same."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms.fedper import FedPer
from fedtailor.algorithms.fedsa_lora import FedSALoRA
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import FULL_BATCH, assert_equal, federate, make_data, make_model, models, run, weighted

COUNTS = [9, 1, 6, 13]


def trained(module: nn.Module, tensors: Params, x: Tensor, y: Tensor, steps: int) -> Params:
    """What is trained of the module, after steps of torch's own SGD on the whole data."""
    module = copy.deepcopy(module)
    own = {k: v for k, v in module.named_parameters() if v.requires_grad}
    with torch.no_grad():
        for k, v in own.items():
            v.copy_(tensors[k])
    optimizer = torch.optim.SGD(own.values(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return {k: v.detach().clone() for k, v in own.items()}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("adapted", data)
    common, own = model.params, [model.params] * 4
    for _ in range(3):
        own = [trained(model.module, w | common, *data.train.of(i), 2) for i, w in enumerate(own)]
        common = weighted([{k: v for k, v in w.items() if "lora_A" in k} for w in own], COUNTS)
    fed = federate(FedSALoRA(epochs=2), data, model, engine, FULL_BATCH)
    server = run(fed, rounds=3)
    assert_equal(server, common)
    assert set(server) == {"first.lora_A.default.weight", "second.lora_A.default.weight"}
    assert_equal(models(fed, server), {name: w | common for name, w in zip(data.clients, own, strict=True)})
    start = model.params["first.lora_A.default.weight"]
    assert float((server["first.lora_A.default.weight"] - start).abs().max()) > 1e-3


def test_the_weights_under_adapters_stay_and_are_not_sent() -> None:
    data = make_data()
    model = make_model("adapted", data)
    before = copy.deepcopy(model.module.state_dict())
    fed = federate(FedSALoRA(), data, model, "wire")
    run(fed)
    assert set(model.fixed) == {f"{n}.base_layer.{p}" for n in ("first", "second") for p in ("weight", "bias")}
    after = model.module.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in model.fixed)
    assert not set(model.fixed) & set(model.params)


def test_fedper_with_a_glob_for_its_head_is_the_same() -> None:
    data = make_data()
    module = make_model("adapted", data).module
    module.get_submodule("out").requires_grad_(False)
    ours = federate(FedSALoRA(), data, Model(module))
    per = federate(FedPer(), data, Model(module, head=["*.lora_B.*"]))
    assert_equal(models(ours, run(ours)), models(per, run(per)), 1e-14)


def test_a_model_without_adapters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.adapter.*FedSA-LoRA"):
        FedSALoRA().check(make_model("mlp", make_data()), "classification")
