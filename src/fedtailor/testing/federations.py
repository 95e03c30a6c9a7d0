"""Small federations: four unequal clients, one of them with a single sample and nothing to test on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor import engines
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.environment import Environment
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.model import BufferPolicy, Model
from fedtailor.core.random import stream, torch_stream
from fedtailor.core.reduce import Aggregation, Limits, ServerStep
from fedtailor.core.task import TargetKind
from fedtailor.core.trees import Params, Tree, items, tree_map
from fedtailor.engines.rehearsal import with_optimizer_state
from fedtailor.errors import ConfigError
from fedtailor.models import build
from fedtailor.training.solver import Solver

F64 = torch.float64
SIZES = {"ada": (9, 3, 4), "bo": (1, 0, 0), "cy": (6, 2, 5), "di": (13, 4, 1)}  # train, val, test
# in whole batches of 4: the variance of fewer is tiny
EVEN_SIZES = {"ada": (8, 3, 4), "bo": (8, 0, 0), "cy": (4, 2, 5), "di": (12, 4, 1)}
EQUAL_SIZES = dict.fromkeys(SIZES, (8, 2, 2))
NO_VALIDATION = {"ada": (9, 0, 2), "cy": (6, 0, 2)}
ENGINES: dict[str, dict[str, Any]] = {
    "loop": {"name": "loop"},
    "vmap": {"name": "vmap"},
    "vmap2": {"name": "vmap", "chunk": 2},
    "wire": {"name": "wire"},
}
OTHERS = ("vmap", "vmap2", "wire")
POOL: dict[str, Any] = {"name": "pool", "workers": 2}  # that it is loop bit for bit, tests/contract/test_pool.py shows
SOLVER = Solver(lr=0.1, batch_size=4)
FULL_BATCH = Solver(lr=0.1, batch_size=0)


def make_data(
    task: TargetKind = "classification",
    names: Sequence[str] | None = None,
    sizes: Mapping[str, tuple[int, int, int]] = SIZES,
    shape: tuple[int, ...] = (4,),
    outputs: int = 3,
) -> FederatedData:
    """A client's samples depend on its name only, so that the same clients can be put in another order."""
    names = tuple(sizes) if names is None else tuple(names)
    splits: dict[str, Rows] = {}
    for part, split in enumerate(("train", "val", "test")):
        xs, ys = [], []
        for name in names:
            rng = stream("samples", name, split)
            n = sizes[name][part]
            xs.append(torch.from_numpy(rng.normal(size=(n, *shape))))
            if task == "classification":
                ys.append(torch.from_numpy(rng.integers(outputs, size=n)))
            elif task == "count":
                ys.append(torch.from_numpy(rng.poisson(2.0, size=(n, outputs))))
            else:
                ys.append(torch.from_numpy(rng.normal(size=(n, outputs))))
        starts = torch.tensor([0, *(len(x) for x in xs)]).cumsum(0)
        splits[split] = Rows(torch.cat(xs), torch.cat(ys), starts)
    return FederatedData("made", task, names, splits["train"], splits["val"], splits["test"], outputs)


class Normed(nn.Module):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(shape[0], 5)
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.first(x))))


class LowRank(nn.Module):
    """A fixed dense layer with an adapter, under the names that peft gives."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, outputs, bias=False)})
        self.scaling = {"default": 1.5}

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x) + self.scaling["default"] * change


class Adapted(nn.Module):
    """Two fixed dense layers with adapters, and a head that is trained."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.first = LowRank(math.prod(shape), 5)
        self.second = LowRank(5, 4)
        self.out = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


class SmallConv(nn.Module):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 2, 3)
        self.out = nn.Linear(2 * ((shape[1] - 2) // 2) * ((shape[2] - 2) // 2), outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.max_pool2d(torch.relu(self.conv(x)), 2).flatten(1))


def suits(algorithm: Algorithm, case: dict[str, Any]) -> bool:
    """Whether an algorithm can serve the model and task of a case."""
    task = case.get("task", "classification")
    try:
        algorithm.check(_untrained(case.get("model", "mlp"), task, case.get("shape", (4,))), task)
        algorithm.check_solver(case.get("solver", SOLVER))
    except ConfigError:
        return False
    return True


@cache
def _untrained(model: str, task: TargetKind, shape: tuple[int, ...]) -> Model:
    return make_model(model, make_data(task, shape=shape))


def usual(algorithm: Algorithm) -> dict[str, Any]:
    """The first case that an algorithm can serve."""
    linear, normed = {"model": "linear", "task": "regression"}, {"model": "normed", "sizes": EVEN_SIZES}
    counts = {"model": "linear", "task": "count"}
    cases: tuple[dict[str, Any], ...] = ({}, linear, {"model": "linear"}, counts, normed, {"model": "adapted"})
    return dict(next(case for case in cases if suits(algorithm, case)))


def make_model(name: str, data: FederatedData, buffers: BufferPolicy = "private") -> Model:
    """In float64: "mlp", "linear", "normed", "adapted" or "conv", the head is the last layer; "headless" is an mlp."""
    if name == "headless":
        return Model(make_model("mlp", data, buffers).module)
    if name in ("mlp", "linear"):
        options = {"hidden": (5,)} if name == "mlp" else {}
        return build(name, data.shape, data.outputs, seed=1, options=options, dtype=F64)
    with torch_stream("initial values"):
        kinds: dict[str, type[nn.Module]] = {"normed": Normed, "adapted": Adapted, "conv": SmallConv}
        module = kinds[name](data.shape, data.outputs).to(F64)
    return Model(module, head=["out"], buffers=buffers)


def federate(
    algorithm: Algorithm,
    data: FederatedData,
    model: Model,
    engine: str = "loop",
    solver: Solver = SOLVER,
    limits: Limits | None = None,
    environment: Environment | None = None,
    server_step: ServerStep | None = None,
) -> Federation:
    """A federation whose clients have their first state."""
    setting = Experiment(
        algorithm,
        model,
        data,
        solver,
        3,
        environment or Environment(),
        aggregation=Aggregation(server_step=server_step),
    )
    setting = with_optimizer_state(setting)
    running = engines.make(experiment=setting, **(POOL if engine == "pool" else ENGINES[engine]))
    running.start()
    return Federation(running, limits or Limits())


def run(fed: Federation, rounds: int = 3, cohort: Sequence[int] | None = None) -> Tree:
    setting = fed.engine.experiment
    server = setting.algorithm.server_init(setting.model)
    for round in range(rounds):
        server = fed.run_round(round, range(len(setting.data.clients)) if cohort is None else cohort, server)
    return server


def states(fed: Federation) -> dict[str, Tree]:
    """Copies of everything private, by name of the client."""
    rows = fed.engine.get_states()
    return {c: tree_map(lambda v, i=i: v[i].clone(), rows) for i, c in enumerate(fed.engine.experiment.data.clients)}


def evaluate(fed: Federation, server: Tree, round: int = 3) -> tuple[dict[str, Params], dict[str, dict[str, Tensor]]]:
    """Personal models and metrics, such as `metrics["ada"]["test/accuracy"]`, by name of the client."""
    clients = fed.engine.experiment.data.clients
    models, metrics = {}, {}
    for group, measured, stack in fed.engine.evaluate(range(len(clients)), round, server, ("train", "val", "test")):
        for row, client in enumerate(group):
            models[clients[client]] = {k: v[row].clone() for k, v in stack.items()}
            metrics[clients[client]] = {path: v[row].clone() for path, v in items(measured)}
    return models, metrics


def models(fed: Federation, server: Tree) -> dict[str, Params]:
    return evaluate(fed, server)[0]


def everything(fed: Federation, server: Tree) -> dict[str, Any]:
    """All that a run has made, per client by name: what must not depend on where it ran."""
    models, metrics = evaluate(fed, server)
    algorithm, clients = fed.engine.experiment.algorithm, fed.engine.experiment.data.clients

    def named(v: Tensor, dims: int) -> Tree:
        """A table of the server by name of the client."""
        if not dims or v.dim() < dims or v.shape[-1] != len(clients):
            return v
        return {c: named(v[..., i], dims - 1) for i, c in enumerate(clients)}

    if isinstance(server, dict):
        dims = dict.fromkeys(algorithm.by_client, 1) | dict.fromkeys(algorithm.by_pair, 2)
        server = {k: tree_map(partial(named, dims=dims.get(k, 0)), v) for k, v in server.items()}
    return dict(items({"server": server, "states": states(fed), "models": models, "metrics": metrics}))
