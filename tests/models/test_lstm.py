"""The LSTM: the values and gradients of nn.LSTM, for one client and for a stack, on every engine."""

import pytest
import torch
from torch import Tensor, nn

from fedtailor import algorithms, engines
from fedtailor.core.experiment import Experiment
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from fedtailor.models import build
from tests.helpers import F64, OTHERS, SOLVER, assert_equal, everything, federate, make_data, run


def reference(model: Model, layers: int, features: int, hidden: int) -> nn.LSTM:
    """nn.LSTM with the weights of ours; its gates stand in the order take, keep, news, show."""
    theirs = nn.LSTM(features, hidden, layers, batch_first=True, dtype=F64)
    for i in range(layers):
        weight, bias = (model.params[f"layers.{i}.gates.{k}"].split(hidden) for k in ("weight", "bias"))
        order = (0, 1, 3, 2)
        values: Params = {
            "weight_ih": torch.cat([weight[j][:, :-hidden] for j in order]),
            "weight_hh": torch.cat([weight[j][:, -hidden:] for j in order]),
            "bias_ih": torch.cat([bias[j] for j in order]),
            "bias_hh": torch.zeros(4 * hidden, dtype=F64),
        }
        for name, value in values.items():
            theirs.get_parameter(f"{name}_l{i}").data = value
    return theirs


def samples(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("layers", "features", "hidden"), [(1, 1, 3), (2, 1, 12), (3, 4, 5)])
def test_values_and_input_gradients_of_torch(layers: int, features: int, hidden: int) -> None:
    shape = (7,) if features == 1 else (7, features)
    options = {"layers": layers, "hidden": hidden}
    model = build("lstm", shape, 2, seed=0, options=options, dtype=F64)
    theirs = reference(model, layers, features, hidden)
    x = samples(6, *shape).requires_grad_()
    ours = model(model.params, x)
    states, _ = theirs(x.reshape(6, 7, features))
    expected = states[:, -1] @ model.params["out.weight"].mT + model.params["out.bias"]
    assert_equal(ours, expected, tolerance=1e-12)
    assert_equal(
        torch.autograd.grad(ours.square().sum(), x)[0],
        torch.autograd.grad(expected.square().sum(), x)[0],
        tolerance=1e-12,
    )


def test_a_step_may_take_in_several_times() -> None:
    days = build("lstm", (6,), 1, seed=0, options={"per_step": 3}, dtype=F64)
    features = build("lstm", (2, 3), 1, seed=0, dtype=F64)
    x = samples(5, 6)
    assert_equal(days(days.params, x), features(features.params, x.reshape(5, 2, 3)), tolerance=0)
    with pytest.raises(ConfigError, match=r"\b7\b.*\b3\b"):
        build("lstm", (7,), 1, seed=0, options={"per_step": 3})


def test_its_graph_is_for_any_number_of_samples() -> None:
    module = build("lstm", (6,), 1, seed=0).module
    rows = torch.export.Dim("rows", min=1)
    program = torch.export.export(module, (torch.zeros(5, 6),), dynamic_shapes={"x": {0: rows}})
    x = samples(9, 6).float()
    assert_equal(program.module()(x), module(x), tolerance=1e-6)


def test_initial_values_are_in_the_range_of_torch() -> None:
    model = build("lstm", (5,), 1, seed=0, options={"hidden": 16})
    for name, value in model.body.items():
        assert 0.2 < value.abs().max() <= 0.25, name


def test_a_stack_of_clients_is_a_loop_over_them() -> None:
    models = [build("lstm", (5,), 1, seed=seed, dtype=F64) for seed in range(3)]
    stack = {k: torch.stack([m.params[k] for m in models]) for k in models[0].params}
    x, y = samples(3, 4, 5), samples(3, 4, 1)

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return (models[0](params, x, training=True) - y).square().mean()

    together = torch.func.vmap(torch.func.grad(loss))(stack, x, y)
    for i, model in enumerate(models):
        alone = torch.func.grad(loss)(model.params, x[i], y[i])
        assert_equal({k: v[i] for k, v in together.items()}, alone, tolerance=1e-12)


def test_the_gradient_has_a_gradient() -> None:
    model = build("lstm", (3,), 1, seed=0, options={"hidden": 2}, dtype=F64)
    x = samples(2, 3)

    def out(*values: Tensor) -> Tensor:
        return model(dict(zip(model.params, values, strict=True)), x)

    values = tuple(v.clone().requires_grad_() for v in model.params.values())
    assert torch.autograd.gradgradcheck(out, values)


@pytest.mark.parametrize("name", ["ditto", "fedrep", "learn2pfed-net"])
def test_engines_agree(name: str) -> None:
    data = make_data("regression", outputs=1)
    algorithm = algorithms.make(name, {})
    model = build("lstm", data.shape, 1, seed=0, options={"hidden": 3}, dtype=F64)

    def outcome(engine: str) -> dict[str, Tensor]:
        fed = federate(algorithm, data, model, engine)
        server = run(fed)
        assert fed.record.faults == []
        return everything(fed, server)

    wanted = outcome("loop")
    for engine in OTHERS:
        assert_equal(outcome(engine), wanted)


def test_several_clients_are_stacked_by_default() -> None:
    data = make_data("regression", outputs=1)
    model = build("lstm", data.shape, 1, seed=0, dtype=F64)
    assert engines.choose(Experiment(algorithms.make("fedavg", {}), model, data, SOLVER, seed=0)).name == "vmap"
