"""Equilibrium models: the paper's sizes, warm starts, the same result on every engine, and failures with a name."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtailor import algorithms
from fedtailor.core.data import FederatedData
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError, EquilibriumError
from fedtailor.models import build
from fedtailor.models.deq import EquilibriumLayer
from fedtailor.numerics.equilibrium import Equilibrium
from fedtailor.numerics.solve_log import watched
from fedtailor.training.solver import Solver
from tests.helpers import F64, OTHERS, SOLVER, assert_equal, everything, federate, make_data, make_me, run

MLP = {"width": 6, "hidden": 4}
RESNET = {"channels": 16, "inner": 16}
TEXT = {"width": 8, "heads": 2, "layers": 2}


def count(params: Params) -> int:
    return sum(v.numel() for v in params.values())


def texts() -> FederatedData:
    """The samples of `make_data` as windows of five characters out of three."""
    data = make_data(shape=(5,))

    def coded(rows: Any) -> Any:
        return replace(rows, x=(rows.x * 2).long() % data.outputs)

    return replace(data, train=coded(data.train), val=coded(data.val), test=coded(data.test))


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "shared", "personal"),
    [
        ("deq-resnet-s", (1, 28, 28), 62, 984_896, 7_998),
        ("deq-resnet-m", (3, 32, 32), 10, 2_725_120, 1_290),
        ("deq-resnet-m", (3, 32, 32), 100, 2_725_120, 12_900),
        ("deq-resnet-xs", (1, 28, 28), 10, 51_936, 650),
        ("deq-mlp", (1, 28, 28), 62, 785 * 512 + 512 * 512 + 513 * 128, 7_998),
        ("deq-transformer", (80,), 90, 210_944, 55_962),
        ("transformer", (80,), 90, 360_768, 55_962),
    ],
)
def test_sizes(name: str, shape: tuple[int, ...], outputs: int, shared: int, personal: int) -> None:
    model = build(name, shape, outputs, seed=0)
    assert (count(model.body), count(model.head)) == (shared, personal)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 17, 12)])
def test_images_of_any_size(shape: tuple[int, ...], norm: str) -> None:
    model = build("deq-resnet-xs", shape, 7, seed=0, options={"norm": norm})
    assert model.batch_statistics == (norm == "batch")
    params = {k: v.clone() for k, v in (model.params | model.private_buffers).items()}
    for training in (True, False):
        with watched() as reports:
            out = model(params, torch.rand(3, *shape), training=training)
        assert out.shape == (3, 7)
        assert bool(torch.isfinite(out).all())
        # statistics that have seen no data yet centre nothing: then the map need not contract
        assert bool(reports[0].converged.all()) or (norm == "batch" and not training)


def test_text_is_read_in_one_direction_and_from_its_order() -> None:
    for name in ("transformer", "deq-transformer"):
        model = build(name, (5,), 3, seed=0, options=TEXT, dtype=F64)
        x = torch.tensor([[0, 1, 2, 0, 1], [1, 0, 2, 0, 1]])
        ahead, swapped = model(model.params, x)
        assert not torch.allclose(ahead, swapped)
    hidden = model.module.get_submodule("equilibrium")(model.module.get_submodule("embed")(x))
    assert not torch.allclose(hidden[0, 1], hidden[1, 1])
    changed = x.clone()
    changed[:, 3:] = 2
    again = model.module.get_submodule("equilibrium")(model.module.get_submodule("embed")(changed))
    # each position's own iterations stop with those of its sample: equal up to the tolerance of the solve
    torch.testing.assert_close(again[:, :3], hidden[:, :3], rtol=0, atol=0.02)


def test_attention_is_torchs() -> None:
    model = build("transformer", (5,), 3, seed=0, options=TEXT, dtype=F64)
    layer: Any = model.module.get_submodule("last")
    x = torch.randn(2, 5, 8, dtype=F64)
    query, key, value = (v.unflatten(-1, (2, 4)).transpose(1, 2) for v in layer.read(x).chunk(3, -1))
    wanted = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer._attention(x), wanted)


def test_the_projected_map_contracts_wherever_the_weights_are() -> None:
    model = build("deq-mlp", (4,), 3, seed=0, options=MLP | {"max_iterations": 200})
    far = model.params | {"equilibrium.cell.weight": 50 * model.params["equilibrium.cell.weight"]}
    loose = build("deq-mlp", (4,), 3, seed=0, options=MLP | {"project": False, "max_iterations": 200})
    for each, converges in ((model, True), (loose, False)):
        with watched() as reports:
            each(far, torch.ones(2, 4))
        assert bool(reports[0].converged.all()) == converges


@pytest.mark.parametrize("activation", ["softplus", "tanh", "relu"])
def test_the_gradient_is_that_of_finite_differences(activation: str) -> None:
    options = {"width": 4, "hidden": 2, "activation": activation, "gradient": "implicit", "tolerance": 1e-13}
    model = build("deq-mlp", (3,), 2, seed=0, options=options | {"max_iterations": 200}, dtype=F64)
    x = torch.randn(2, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    values = tuple(v.clone().requires_grad_() for v in model.params.values())
    assert torch.autograd.gradcheck(lambda *v: model(dict(zip(model.params, v, strict=True)), x), values)


def test_gradients_pass_through_training() -> None:
    """As for every model, when the gradient of the model is exact and its solve is."""
    data = make_data()
    options = {"width": 3, "hidden": 2, "gradient": "implicit", "tolerance": 1e-13, "max_iterations": 200}
    model = build("deq-mlp", data.shape, data.outputs, seed=0, options=options, dtype=F64)
    names = tuple(model.params)

    def trained(*values: Tensor) -> tuple[Tensor, ...]:
        after = make_me(data, model, 2).sgd(dict(zip(names, values, strict=True)), epochs=2)
        return tuple(after[k] for k in names)

    values = tuple(v.clone().requires_grad_() for v in model.params.values())
    assert torch.autograd.gradcheck(trained, values, fast_mode=True)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp-jfb": ("deq-mlp", MLP),
    "mlp-neumann": ("deq-mlp", MLP | {"gradient": "neumann-3"}),
    "mlp-implicit": ("deq-mlp", MLP | {"gradient": "implicit"}),
    "mlp-loose": ("deq-mlp", MLP | {"project": False, "activation": "tanh"}),
    "text": ("deq-transformer", TEXT),
    "explicit-text": ("transformer", TEXT),
}


@pytest.mark.parametrize("case", CASES)
def test_engines_agree(case: str) -> None:
    name, options = CASES[case]
    data = texts() if name.endswith("transformer") else make_data()
    model = build(name, data.shape, data.outputs, seed=0, options=options, dtype=F64)

    def outcome(engine: str) -> dict[str, Tensor]:
        fed = federate(algorithms.make("fedrep", {"head_epochs": 1, "body_epochs": 2}), data, model, engine)
        server = run(fed, rounds=2)
        assert fed.record.faults == []
        return everything(fed, server)

    wanted = outcome("loop")
    for engine in OTHERS:
        assert_equal(outcome(engine), wanted)


def test_engines_agree_on_images() -> None:
    data = make_data(shape=(1, 12, 12))
    model = build("deq-resnet-xs", data.shape, data.outputs, seed=0, options=RESNET, dtype=F64)

    def outcome(engine: str) -> dict[str, Tensor]:
        fed = federate(algorithms.make("fedrep", {"head_epochs": 2}), data, model, engine, replace(SOLVER, lr=0.02))
        server = run(fed, rounds=1)
        assert fed.record.faults == []
        return everything(fed, server)

    wanted = outcome("loop")
    for engine in OTHERS:
        assert_equal(outcome(engine), wanted)


def trained(data: FederatedData, model: Model, solver: Solver = SOLVER, epochs: int = 4) -> tuple[Params, list[float]]:
    """Parameters of the largest client, and the mean number of iterations of each step."""
    me = make_me(data, model, 3, solver)
    with watched() as reports:
        params = me.sgd(model.params, epochs=epochs)
    return params, [float(r.iterations.double().mean()) for r in reports]


def test_warm_starts_save_iterations_and_change_no_result() -> None:
    data = make_data()
    options = MLP | {"tolerance": 1e-9, "max_iterations": 100}
    cold, warm = (
        build("deq-mlp", data.shape, data.outputs, seed=0, options=options | {"warm_start": w}, dtype=F64)
        for w in (False, True)
    )
    solver = Solver(lr=0.001, batch_size=4)
    (wanted, before), (found, after) = (trained(data, m, solver) for m in (cold, warm))
    assert_equal(found, wanted, tolerance=1e-8)
    per_epoch = len(before) // 4
    assert before[:per_epoch] == after[:per_epoch]
    assert sum(after[per_epoch:]) < 0.7 * sum(before[per_epoch:])


def test_a_still_body_is_solved_once() -> None:
    data = make_data()
    model = build("deq-mlp", data.shape, data.outputs, seed=0, options=MLP, dtype=F64)
    me = make_me(data, model, 3)
    with watched() as reports:
        me.sgd(model.head, epochs=3, frozen=model.body)
    iterations = [r.iterations.tolist() for r in reports]
    assert len(iterations) == 3 * 4  # epochs, and batches of 13 samples
    assert all(set(v) == {1} for v in iterations[len(iterations) // 3 :])
    assert not any(1 in v for v in iterations[: len(iterations) // 3])


def test_warm_starts_belong_to_nobody_else() -> None:
    data = make_data()
    model = build("deq-mlp", data.shape, data.outputs, seed=0, options=MLP, dtype=F64)
    assert model.warm_starts == {"equilibrium.warm_start": (6,)}
    assert not any("warm_start" in k for k in (*model.params, *model.private_buffers))
    me = make_me(data, model, 3)
    me.sgd(model.params, epochs=2)
    assert me.buffers == {}
    assert len(model.module.get_buffer("equilibrium.warm_start")) == 0
    x = data.train.x[:3]
    assert torch.equal(model(model.params, x), model(model.params, x))
    assert model(model.params, x[:0]).shape == (0, 3)


def test_augmented_images_start_afresh() -> None:
    data = make_data(shape=(1, 12, 12))
    for augment, warm in ((None, True), ("crop-flip", False)):
        model = build("deq-resnet-xs", data.shape, data.outputs, seed=0, options=RESNET, dtype=F64)
        solver = Solver(lr=1e-5, batch_size=4, augment=augment)  # type: ignore[arg-type]
        iterations = trained(data, model, solver, epochs=2)[1]
        assert (sum(iterations[4:]) < 0.7 * sum(iterations[:4])) == warm


class Exploding(nn.Module):
    """Squares grow without limit where the first input is large."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.equilibrium = EquilibriumLayer(Square(), shape, Equilibrium(history=0, max_iterations=100))
        self.out = nn.Linear(shape[0], outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.equilibrium(x))


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.01))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.scale * z.square() + x


@pytest.mark.parametrize("engine", ["loop", "vmap", "wire"])
def test_a_client_whose_equilibrium_explodes_is_named_and_the_run_goes_on(engine: str) -> None:
    data = make_data()
    data.train.of(2)[0][1] += 1000.0
    model = build(f"{__name__}:Exploding", data.shape, data.outputs, seed=0, dtype=F64)
    fed = federate(algorithms.make("fedrep", {}), data, model, engine)
    server = run(fed, rounds=2)
    assert [(f.client, f.round) for f in fed.record.faults] == [("cy", 0), ("cy", 1)]
    assert re.search(r"EquilibriumError.*\b1\b", fed.record.faults[0].reason)
    assert all(bool(torch.isfinite(v).all()) for v in server.values())
    found = everything(fed, server)  # evaluation says so by its values
    assert bool(torch.isposinf(found["metrics/cy/train/loss"]))
    assert bool(torch.isfinite(found["metrics/di/train/loss"]))


def test_a_value_that_is_not_in_the_data_is_named() -> None:
    data = make_data()
    data.train.x[0] = torch.nan
    model = build("deq-mlp", data.shape, data.outputs, seed=0, options=MLP, dtype=F64)
    with pytest.raises(EquilibriumError, match="not in the data"):
        make_me(data, model, 0).sgd(model.params)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("deq-mlp", {"activation": "tnh"}, r'model\.activation = "tnh": did you mean "tanh"\?'),
        ("deq-mlp", {"contraction": 1.0}, r"model\.contraction = 1\.0: must be between 0 and 1"),
        ("deq-mlp", {"gradient": "exact"}, r'gradient = "exact": must be "jfb", "neumann-k"'),
        ("deq-mlp", {"max_iteration": 3}, r'has no option "max_iteration"; did you mean "max_iterations"\?'),
        ("deq-resnet-xs", {"norm": "layer"}, r'model\.norm = "layer": no such norm; known: batch, group'),
        ("deq-resnet-xs", {"channels": 12}, r"model\.channels = 12: must be a multiple of 8"),
        ("deq-resnet-xs", {"inner": 12}, r"model\.inner = 12: must be a multiple of 8"),
        ("deq-transformer", {"heads": 3}, r"model\.width = 64: must be a multiple of model\.heads = 3"),
        ("deq-transformer", {"layers": 0}, r"model\.layers = 0: an equilibrium needs at least 1"),
        ("transformer", {"layers": 0}, r"model\.layers = 0: a transformer needs at least 1"),
    ],
)
def test_mistakes(name: str, options: dict[str, Any], words: str) -> None:
    shape = (80,) if "transformer" in name else (1, 28, 28)
    with pytest.raises(ConfigError, match=words):
        build(name, shape, 10, seed=0, options=options)


def test_no_iterations_at_all() -> None:
    with pytest.raises(EquilibriumError, match=r"max_iterations.*\b0\b.*\b1\b"):
        build("deq-mlp", (4,), 3, seed=0, options={"max_iterations": 0})


def test_samples_that_do_not_fit() -> None:
    for name in ("deq-resnet-s", "deq-transformer"):
        with pytest.raises(ConfigError, match=rf"model\.name: {name} does not fit samples of shape \[4, 4\]"):
            build(name, (4, 4), 10, seed=0)
