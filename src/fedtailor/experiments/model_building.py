"""The model of a configuration, or the models where clients have different ones."""

from __future__ import annotations

import inspect
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedtailor import models
from fedtailor.core.algorithm import Algorithm, client_functions, reply_example
from fedtailor.core.data import FederatedData, Shape, count
from fedtailor.core.experiment import Experiment
from fedtailor.core.model import Model, mix_architectures
from fedtailor.core.random import torch_stream
from fedtailor.core.task import Task
from fedtailor.core.trees import Tree, schema
from fedtailor.errors import ConfigError
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.model_section import ModelSection


def width(config: RunConfig) -> torch.dtype:
    """Type of the floating-point numbers of a configuration."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    return dtype


def model_of(config: RunConfig, shape: Shape, outputs: int) -> Model:
    """The model of a configuration for samples of a shape."""
    return models.build(
        config.model.name,
        shape,
        outputs,
        seed=config.seed,
        head=config.model.head,
        options=config.model.options,
        buffers=config.model.buffers,
        prior=config.model.prior == "label",
        dtype=width(config),
        adapter=config.model.adapter,
        checkpoint=config.model.checkpoint or (),
    )


def at_client(config: RunConfig, client: str) -> RunConfig:
    """The configuration with the model of one client."""
    return config if config.model.by_client is None else config.model_copy(update={"model": config.model.at(client)})


def model_for(config: RunConfig, federated: FederatedData, newcomers: Sequence[str], outputs: int) -> Model:
    """The model of a federation; that of the server, which knows those of its clients, where they differ."""
    if not config.model.by_client:
        model = model_of(config, federated.shape, outputs)
        _reads(model, config, federated, outputs)
        return model
    _refuse(config)
    config.model.check_clients([*federated.clients, *newcomers])
    sections = _distinct(config.model, federated.clients)

    @cache
    def of(client: str) -> str:
        own = config.model.at(client)
        if own not in sections:
            raise ConfigError(f'model.by_client: no client that trains has the model of "{client}"')
        return str(sections.index(own))

    for client in newcomers:
        of(client)
    each = {}
    for i, section in enumerate(sections):
        own = config.model_copy(update={"model": section})
        model = model_of(own, federated.shape, outputs)
        _reads(model, own, federated, outputs)
        each[str(i)] = model
    return mix_architectures(each, of) if len(each) > 1 else each["0"]


def _distinct(section: ModelSection, clients: Iterable[str]) -> list[ModelSection]:
    """The models that clients have; the usual one comes first, if some have it."""
    distinct: list[ModelSection] = []
    for client in clients:
        if (own := section.at(client)) not in distinct:
            distinct.append(own)
    usual = ModelSection(**section.model_dump(exclude={"by_client"}, exclude_none=True))
    return sorted(distinct, key=lambda own: own != usual)


def _refuse(config: RunConfig) -> None:
    """What does not go together with different models."""
    if config.data.source == "sites":
        raise ConfigError("model.by_client: in a simulation only; all sites of a real federation have one model")
    if config.local.keep_state:
        raise ConfigError("model.by_client: not with local.keep_state; set it to false")


def check(algorithm: Algorithm, model: Model, task: str) -> None:
    """Fail if the algorithm cannot serve a model, or shares parameters that not all of its clients have."""
    if model.architectures is None:
        algorithm.check(model, task)
        return
    each = list(model.architectures.models.values())
    for own in each:
        algorithm.check(own, task)
    name, first = algorithm.title or type(algorithm).__name__, _sent(algorithm, each[0])
    forms = [schema(_sent(algorithm, own)) for own in each]
    if any(form != forms[0] for form in forms):
        shared = {path.rpartition("/")[2] for form in forms for path in form}
        names = sorted(model.differing & shared) or sorted(model.differing)
        some = ", ".join(f'"{k}"' for k in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ConfigError(
            f"model.by_client: {name} shares {some}, which not all clients have in the same shape; FedPer, LG-FedAvg "
            "and kNN-Per share what all have, methods with private heads the body if only heads differ"
        )
    if _is_empty(first):
        raise ConfigError(f"model.by_client: {name} would share nothing: models have none of it in common")


def _sent(algorithm: Algorithm, model: Model) -> Tree:
    """What the server has of a model, and what clients send."""
    replies = {f: reply_example(algorithm, f, model) for f in client_functions(algorithm)}
    return {"server": algorithm.server_init(model), "replies": replies}


def _is_empty(tree: Tree) -> bool:
    """Whether a part that is meant to be sent has nothing in it."""
    return any(part == {} for reply in tree["replies"].values() for part in (reply if isinstance(reply, tuple) else ()))


def check_loss(task: Task, model: Model, federated: FederatedData) -> None:
    """Fail if the loss of one's own is not one number per sample: a mean would count the padding of a stack."""
    x, y = federated.train.first(2), federated.train.y[:2]
    try:
        with torch.no_grad():
            shape = list(task.loss(model(model.params | model.private_buffers, x), y).shape)
    except Exception:
        return  # what else is wrong will be said where it happens
    if len(y) == 2 and shape != [2]:
        raise ConfigError(
            f"task.name: the loss of {task.name} must give one number per sample; of 2 it gave shape {shape}"
        )


def notes(experiment: Experiment, engine: str) -> list[str]:
    """What a run says of clients with different models."""
    if not experiment.by_architecture:
        return []
    having = Counter(experiment.architecture(c) for c in range(len(experiment.data.clients)))
    sizes = {
        name: sum(v.numel() for v in own.model.trainable.values()) for name, own in experiment.by_architecture.items()
    }
    each = ", ".join(f"{having[name]} with {size:,} parameters" for name, size in sizes.items())
    stacks = "; vmap stacks clients of one architecture" if engine == "vmap" else ""
    return [f"clients have {len(sizes)} architectures: {each}{stacks}"]


def _reads(model: Model, config: RunConfig, federated: FederatedData, outputs: int) -> None:
    """A model that cannot read the samples, or gives something else than outputs, is better told before round 1."""
    x, name = federated.train.first(2), config.model.name
    has_form = ":" in name and ":" not in config.task.name and federated.task not in ("tokens", "own")
    is_usual = isinstance(x, Tensor) and x.is_floating_point()
    if (is_usual and ":" not in name) or not federated.train.is_here or not count(x):
        return  # models that come with fedtailor are made for the shape
    samples = (
        f"samples of {', '.join(x)}" if isinstance(x, dict) else f"of shape {list(x.shape[1:])}" if is_usual else "text"
    )
    try:
        tensors, mode = model.params | model.private_buffers, model.module.training
        with torch_stream("reads"), torch.no_grad():
            y = model(tensors, x)
        model.prepare(tensors, training=mode)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"model.name: {name} does not read {federated.name}, which is {samples}: {reason}{_place(error, model)}"
        ) from None
    rows = count(x)
    if has_form and not (isinstance(y, Tensor) and _fits(y, rows, outputs, federated.task)):
        form = f"shape {list(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise ConfigError(
            f"model.name: {name} must give a tensor [rows, {outputs}] for this task; of {rows} rows it gave {form}"
        )


def _fits(y: Tensor, rows: int, outputs: int, task: str) -> bool:
    spare = task == "classification"  # classes that never occur do no harm
    return y.dim() == 2 and len(y) == rows and (y.shape[1] >= outputs if spare else y.shape[1] == outputs)


def _place(error: BaseException, model: Model) -> str:
    """The line of the model's own file at which it failed."""
    file = inspect.getsourcefile(type(model.module))
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" ({Path(str(file)).name}, line {lines[-1]})" if lines else ""
