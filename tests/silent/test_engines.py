"""Models and machines on which engines, fast paths or threads gave other numbers, without a word."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor import algorithms, engines
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream, torch_stream
from fedtailor.core.trees import items
from fedtailor.models.networks import CNN, MLP, Linear
from fedtailor.training.arithmetic import Arithmetic
from fedtailor.training.kernels.structure import dense_layers, head_layer
from fedtailor.training.solver import Solver
from tests.helpers import F64, assert_equal, brief, everything, federate, make_data, run, usual, variants


class Tanh(MLP):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.out(x)


class Doubled(CNN):
    """A subclass with another forward pass around the same features."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def made(kind: Callable[..., nn.Module], shape: tuple[int, ...] = (4,), **options: Any) -> Model:
    with torch_stream("initial values"):
        return Model(kind(shape, 3, **options).to(F64), head=["out"])


def test_a_subclass_is_not_taken_for_its_parent() -> None:
    assert dense_layers(made(MLP, hidden=(5,)))
    assert not dense_layers(made(Tanh, hidden=(5,)))
    assert head_layer(made(CNN, (1, 28, 28))) is not None
    assert head_layer(made(Doubled, (1, 28, 28))) is None


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_subclass_is_trained_as_it_is_evaluated(engine: str) -> None:
    data = make_data()
    fast = federate(algorithms.make("fedavg", {}), data, made(Tanh, hidden=(5,)), engine)
    slow = federate(
        algorithms.make("fedavg", {}),
        data,
        made(Tanh, hidden=(5,)),
        engine,
        Solver(lr=0.1, batch_size=4, arithmetic=Arithmetic(kernels="off")),
    )
    assert_equal(run(fast, 2), run(slow, 2))


def test_a_module_that_somebody_hooked_into_takes_the_general_path() -> None:
    model = made(Linear)
    assert dense_layers(model)
    model.module.register_forward_hook(lambda module, inputs, output: output * 2)
    assert not dense_layers(model)


class Logs(nn.Module):
    """Not finite at zero: the logarithm of the length of a sample."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(shape[0], 5)
        self.out = nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        length = x.square().sum(1, keepdim=True)
        return self.out(torch.tanh(self.first(x / length.sqrt() + length.log())))


class BatchMean(nn.Module):
    """What it says of a sample depends on the others in the batch."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(shape[0], 5)
        self.out = nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x - x.mean(0, keepdim=True))))


MODELS = {"log": Logs, "batch mean": BatchMean}
NAMES = [name for name, algorithm in variants().items() if usual(algorithm) == {}]  # those for classification


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("algorithm", [name for name in NAMES if ":" not in name])
def test_models_that_padding_would_disturb(algorithm: str, model: str) -> None:
    data, subject = make_data(), brief(variants()[algorithm], epochs=1)

    def ran(engine: str) -> dict[str, Any]:
        fed = federate(subject, data, made(MODELS[model]), engine)
        return everything(fed, run(fed, 2))

    wanted = ran("loop")
    served = [v for k, v in wanted.items() if k.startswith("models")]
    assert served
    assert all(v.isfinite().all() for v in served)
    stacks = ["vmap", "vmap2"] if subject.at_once else ["vmap2"]  # two stacks are padded as one is
    for engine in (*stacks, "wire", "pool"):
        assert_equal(ran(engine), wanted)


def images(sizes: tuple[int, ...] = (8, 8, 5)) -> FederatedData:
    rows = {}
    for split in ("train", "val", "test"):
        rng = stream("images", split)
        count = sum(sizes)
        x = torch.from_numpy(rng.normal(size=(count, 1, 28, 28))).float()
        starts = torch.tensor([0, *sizes]).cumsum(0)
        rows[split] = Rows(x, torch.from_numpy(rng.integers(3, size=count)), starts)
    return FederatedData("images", "classification", ("a", "b", "c"), rows["train"], rows["val"], rows["test"], 3)


def sha256(tree: Any) -> str:
    digest = hashlib.sha256()
    for path, leaf in items(tree):
        digest.update(path.encode())
        digest.update(leaf.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def fingerprint(algorithm: str, engine: engines.EngineName, *, workers: int = 0, threads: int = 1) -> str:
    """Of everything that a run has made, of a convolutional network or, where that cannot be, a linear model."""
    is_linear = algorithm not in NAMES
    task = usual(variants()[algorithm]).get("task", "classification")
    data = make_data(task).to(torch.float32) if is_linear else images()
    with torch_stream("initial values"):
        model = Model((Linear if is_linear else CNN)(data.shape, 3), head=["out"])
    subject = brief(variants()[algorithm], epochs=1)
    experiment = Experiment(subject, model, data, Solver(lr=0.05, batch_size=8), 3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with engines.open_engine(engine, experiment, workers=workers) as made:
            fed = Federation(made)
            return sha256(everything(fed, run(fed, 2)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("algorithm", [name for name in variants() if ":" not in name])
def test_threads_and_workers_do_not_change_a_bit(algorithm: str) -> None:
    wanted = fingerprint(algorithm, "loop")
    assert fingerprint(algorithm, "loop", threads=2) == wanted
    assert fingerprint(algorithm, "pool", workers=4) == wanted  # two: tests/contract/test_pool.py


def test_a_frozen_batchnorm_stays_frozen() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(x))

    module = Frozen().to(F64)
    module.norm.eval()
    data = make_data()
    fed = federate(algorithms.make("local", {}), data, Model(module, head=["out"]))
    run(fed, 2)
    buffers = fed.engine.get_states()["buffers"]
    assert torch.equal(buffers["norm.running_mean"], torch.zeros(4, 4, dtype=F64))
    assert not module.norm.training


def test_convolutions_called_with_keywords_are_counted() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 1, 3, 3))
            self.out = nn.Linear(2 * 26 * 26, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.conv2d(input=x, weight=self.weight).flatten(1))

    data = images((24, 24, 12))
    experiment = Experiment(algorithms.make("fedavg", {}), Model(Keywords(), head=["out"]), data, Solver(), 0)
    assert engines.operations(experiment) == 3 * 60 * 2 * (2 * 26 * 26 * 9 + 3 * 2 * 26 * 26)


def test_a_loss_over_many_samples_takes_some_at_a_time() -> None:
    """The activations of a whole split at once would be 60 MB here."""
    seen: list[int] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return self.out(torch.tanh(self.first(x)))

    sizes = {"ada": (2000, 1500, 4), "bo": (700, 300, 4)}
    data = make_data(sizes=sizes)
    with torch_stream("initial values"):
        model = Model(Watching().to(F64), head=["out"])
    for name in ("dr-fedavg", "knn-per", "fedpac", "fedfa"):
        fed = federate(variants()[name], data, model, solver=Solver(lr=0.1, batch_size=16))
        server = run(fed, 1)
        list(fed.engine.evaluate(range(2), 1, server, ["val"]))
    assert max(seen) <= 256
