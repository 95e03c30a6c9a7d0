"""A module as a function of named tensors: body, head, and the statistics of BatchNorm."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.data import SPLITS
from fedtailor.core.model import Model
from fedtailor.core.task import classification_loss, regression_loss
from fedtailor.errors import ConfigError
from tests.helpers import F64, Normed, assert_equal, federate, make_data, make_model, run


def test_body_and_head_part_the_parameters() -> None:
    model = make_model("mlp", make_data())
    assert set(model.head) == {"out.weight", "out.bias"}
    assert set(model.body) == {"hidden.0.weight", "hidden.0.bias"}
    assert model.body | model.head == model.params
    assert list(model.params) == [k for k, _ in model.module.named_parameters()]
    assert model.dtype == F64


def test_a_head_of_several_parts() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    assert set(Model(net, head=["1", "2.bias"]).head) == {"1.weight", "1.bias", "2.bias"}
    assert Model(net).head == {}
    assert Model(net, head=["0", "1", "2"]).body == {}


def test_a_prefix_is_a_whole_name() -> None:
    net = nn.ModuleDict({"fc": nn.Linear(2, 2), "fc1": nn.Linear(2, 2)})
    assert set(Model(net, head=["fc"]).head) == {"fc.weight", "fc.bias"}


def test_unknown_head() -> None:
    with pytest.raises(ConfigError, match=r'"outt".*"out"'):
        Model(Normed((4,), 3), head=["outt"])


def test_private_buffers_are_no_parameters() -> None:
    model = make_model("normed", make_data())
    assert set(model.private_buffers) == {"norm.running_mean", "norm.running_var"}
    assert not set(model.params) & set(model.private_buffers)
    assert model.batch_statistics


def test_mean_buffers_are_parameters_that_are_not_trained() -> None:
    model = make_model("normed", make_data(), "mean")
    assert model.private_buffers == {}
    assert set(model.params) - set(model.trainable) == {"norm.running_mean", "norm.running_var"}
    assert "norm.running_mean" in model.body


def test_the_count_of_batches_is_dropped_or_refused() -> None:
    model = make_model("normed", make_data())
    assert "norm.num_batches_tracked" not in dict(model.module.named_buffers())
    with pytest.raises(ConfigError, match=r'"1".*momentum=None'):
        Model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)))


def test_initial_values_are_copies() -> None:
    net = nn.Linear(2, 2)
    model = Model(net)
    before = {k: v.clone() for k, v in model.params.items()}
    with torch.no_grad():
        net.weight.zero_()
    assert_equal(model.params, before, tolerance=0)
    assert not any(v.requires_grad for v in model.params.values())


def test_it_is_a_function_of_the_tensors_given() -> None:
    model = make_model("mlp", make_data())
    x = make_data().train.x
    zeros = {k: torch.zeros_like(v) for k, v in model.params.items()}
    assert model(zeros, x).abs().max() == 0
    reference = model.module(x)
    assert_equal(model(model.params, x), reference.detach(), tolerance=0)


def test_statistics_change_in_training_only() -> None:
    model = make_model("normed", make_data())
    x = make_data().train.x

    def given() -> dict[str, Tensor]:
        return {k: v.clone() for k, v in (model.params | model.private_buffers).items()}

    still, moved = given(), given()
    model(still, x)
    assert_equal(still, given(), tolerance=0)
    model(moved, x, training=True)
    hidden = x @ moved["first.weight"].T + moved["first.bias"]
    assert_equal(moved["norm.running_mean"], 0.1 * hidden.mean(0))
    assert_equal(moved["norm.running_var"], 0.9 + 0.1 * hidden.var(0))
    assert_equal(dict(model.module.named_buffers())["norm.running_mean"], torch.zeros(5, dtype=F64), tolerance=0)


@pytest.mark.parametrize("engine", ["loop", "vmap", "wire"])
def test_what_is_fixed_stays_and_is_not_sent(engine: str) -> None:
    data = make_data()
    first, last = nn.Linear(4, 8).to(F64), nn.Linear(8, 3).to(F64)
    before = first.requires_grad_(False).weight.clone()
    model = Model(nn.Sequential(first, nn.Tanh(), last))
    assert set(model.params) == {"2.weight", "2.bias"}
    assert set(model.fixed) == {"0.weight", "0.bias"}
    trained = run(federate(FedAvg(), data, model, engine=engine), 2)
    seen = {split: replace(rows := getattr(data, split), x=torch.tanh(first(rows.x))) for split in SPLITS}
    features = replace(data, **seen)
    wanted = run(federate(FedAvg(), features, Model(last), engine=engine), 2)
    assert_equal({k.removeprefix("2."): v for k, v in trained.items()}, wanted)
    assert torch.equal(first.weight, before)


def test_nothing_to_train() -> None:
    with pytest.raises(ConfigError, match="no parameter to train"):
        Model(nn.Linear(2, 2).requires_grad_(False))


def test_losses_are_per_sample() -> None:
    output = torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=F64)
    assert_equal(classification_loss(output, torch.tensor([1, 0])), -output.log_softmax(1)[[0, 1], [1, 0]])
    assert regression_loss(output, torch.zeros(2, 2, dtype=F64)).tolist() == [2.5, 0]
