"""Data, model (or models, where clients have different ones) and algorithm of a configuration, put together.

What does not fit is an error before the first round.
"""

from __future__ import annotations

import inspect
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedtailor import algorithms, data, models
from fedtailor.aggregation.dry_run import means_taken, rehearse
from fedtailor.aggregation.robust import Robust
from fedtailor.aggregation.secure import Secure
from fedtailor.core import task as tasks
from fedtailor.core.algorithm import Algorithm, client_functions, needs_head, reply_example
from fedtailor.core.data import FederatedData, Shape, count
from fedtailor.core.experiment import Experiment
from fedtailor.core.model import Model, mix_architectures
from fedtailor.core.module_state import buffer_changes
from fedtailor.core.random import stream, torch_stream
from fedtailor.core.reduce import Aggregation
from fedtailor.core.task import Task
from fedtailor.core.trees import Tree, schema, tree_map
from fedtailor.engines.attacked import IN_DATA, Attack
from fedtailor.engines.rehearsal import with_optimizer_state
from fedtailor.errors import ConfigError, nearest
from fedtailor.experiments import sampling
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.sections import ModelSection
from fedtailor.metrics.library import metrics_of
from fedtailor.plugins import refuse_while_importing
from fedtailor.training import optimizers


def build_experiment(
    config: RunConfig, data_root: Path | None = None, loaded: FederatedData | None = None
) -> Experiment:
    """Data, model and algorithm of a configuration, put together; `loaded` is its data if it was read before."""
    refuse_while_importing()
    federated, unseen = loaded or load(config, data_root), None
    if config.evaluation.unseen is not None:
        federated, unseen = hold_out(federated, config.evaluation.unseen, data_seed(config))
    return assemble(config, federated, unseen)


def load(config: RunConfig, data_root: Path | None = None) -> FederatedData:
    """The data of a configuration, no narrower than its model."""
    return data.load(config.data, seed=data_seed(config), root=data_root, dtype=dtype_of(config))


def data_seed(config: RunConfig) -> int:
    """Seed of the split into clients; `data.seed` makes it the same for all runs of a comparison."""
    return config.seed if config.data.seed is None else config.data.seed


def hold_out(
    everybody: FederatedData, held_out: float | Sequence[str], seed: int
) -> tuple[FederatedData, FederatedData]:
    """The clients that train, and those that take no part: a share of all, at least one, or by name."""
    clients, names = len(everybody.clients), everybody.clients
    if isinstance(held_out, float):
        few = max(1, round(held_out * clients))
        order = stream(seed, "unseen").permutation(clients).tolist()
        chosen = sorted(order[:few])
    else:
        if unknown := [name for name in held_out if name not in names]:
            raise ConfigError(f'evaluation.unseen: no client "{unknown[0]}"; {nearest(unknown[0], names)}')
        chosen = [i for i, name in enumerate(names) if name in held_out]
    if len(chosen) >= clients:
        raise ConfigError(f"evaluation.unseen = {held_out}: of {clients} clients none would be left to train with")
    trained = everybody.only([i for i in range(clients) if i not in chosen])
    note = f"{len(chosen)} of {clients} clients take no part in training; they are onboarded at the end"
    return replace(trained, notes=(*trained.notes, note)), everybody.only(chosen)


def assemble(config: RunConfig, federated: FederatedData, unseen: FederatedData | None = None) -> Experiment:
    """Model and algorithm of a configuration, for data that is loaded already."""
    algorithm, task = algorithms.make(config.algorithm.name, config.algorithm.options), task_of(config, federated)
    federated, unseen = federated.to(dtype_of(config)), None if unseen is None else unseen.to(dtype_of(config))
    model = model_of_federation(config, federated, () if unseen is None else unseen.clients, _outputs(task, federated))
    if config.model.prior == "label" and federated.task != "classification":
        raise ConfigError(f'model.prior = "label": for classification, not {federated.task}')
    if config.local.precision != "float32" and config.model.dtype != "float32":
        raise ConfigError(f'local.precision = "{config.local.precision}": with model.dtype = "float32" only')
    check_algorithm(algorithm, model, task.name)
    check_head(algorithm, model)
    if ":" in config.task.name:
        check_loss(task, model, federated)
    if algorithm.needs_tensor and not federated.is_plain:
        named = algorithm.title or config.algorithm.name
        raise ConfigError(f"algorithm.name: {named} computes with samples themselves; they must be one tensor each")
    solver = config.local.build(config.rounds)
    optimizers.check(solver)
    for part in solver.parts:
        if not optimizers.has_part(model.params, part.name):
            known = {"head", "body", *(k.rpartition(".")[0] for k in model.params)}
            raise ConfigError(f'local.parts: the model has no part "{part.name}"; {nearest(part.name, known)}')
    algorithm.check_solver(solver)
    if config.local.augment is not None and len(federated.shape) != 3:
        raise ConfigError(f'local.augment = "{config.local.augment}": for images, not {federated.name}')
    if config.federation.clients_per_round > len(federated.clients):
        raise ConfigError(
            f"federation.clients_per_round = {config.federation.clients_per_round}: "
            f"there are only {len(federated.clients)} clients"
        )
    sampling.find(config.federation.sampler)
    if config.federation.sampler != "uniform" and config.privacy.noise:
        raise ConfigError("federation.sampler: epsilon is known for uniform sampling only; not with privacy.noise")
    if config.federation.min_replies > (config.federation.clients_per_round or len(federated.clients)):
        raise ConfigError(f"federation.min_replies = {config.federation.min_replies}: more than the clients of a round")
    environment = config.environment.build(len(federated.clients), config.seed)
    if environment.missing == "stale" and not algorithm.stale:
        able = [name for name, kind in algorithms.algorithms().items() if kind.stale]
        raise ConfigError(
            f'environment.missing = "stale": {algorithm.title or config.algorithm.name} has no mean that could '
            f"count those who did not answer; able to: {', '.join(able)}"
        )
    if config.attack.name in IN_DATA:
        federated = IN_DATA[config.attack.name](federated, attack_of(config))
    experiment = Experiment(
        algorithm,
        model,
        federated,
        solver,
        config.seed,
        environment,
        unseen,
        aggregation=aggregation_of(config),
        task=task,
        metrics=metrics_of(task, config.evaluation.metrics, config.evaluation.decide),
        evaluation_batch=config.evaluation.batch_size,
        window=config.evaluation.window or (),
    )
    if config.early_stopping.patience and not int(federated.val.sizes.sum()) and int(federated.train.sizes.sum()):
        raise ConfigError("early_stopping: needs validation samples, and there are none; set data.val above 0")
    experiment = with_optimizer_state(experiment)
    _check_aggregation(experiment, config)
    return experiment


def robust_notes(experiment: Experiment) -> list[str]:
    """A warning where a robust mean changes little."""
    if (
        not isinstance(experiment.aggregation.reduction, Robust)
        or getattr(experiment.algorithm, "consensus", "") != "admm"
    ):
        return []
    return [
        f'aggregation.mean: with algorithm.consensus = "admm" {experiment.algorithm.title} stays near training alone '
        'whatever the mean; with algorithm.consensus = "average" a robust mean keeps more'
    ]


def attack_of(config: RunConfig) -> Attack:
    """Which clients are malicious, and what they do."""
    return Attack(config.attack.name, config.attack.share, config.attack.strength, config.seed)


def aggregation_of(config: RunConfig) -> Aggregation:
    """The slots of aggregation, from the sections on privacy, robust means and the server."""
    slots, robust = config.privacy.build(), config.aggregation.build()
    if robust is not None:
        if slots.hides:
            raise ConfigError(f"aggregation.mean: looks at single replies, which {slots.hides} hides")
        slots = replace(slots, reduction=robust)
    if config.attack.name != "none" and slots.reduction.is_sealed:
        raise ConfigError("attack: cannot be combined with privacy.secure_sum")
    if isinstance(slots.reduction, Secure):
        slots = replace(slots, reduction=replace(slots.reduction, max_norm=config.federation.max_norm))
    return replace(slots, server_step=config.server.build())


def _check_aggregation(experiment: Experiment, config: RunConfig) -> None:
    """Refuse before the first round what the algorithm, the engine or the machine cannot do."""
    aggregation, name = experiment.aggregation, experiment.algorithm.title or config.algorithm.name
    if aggregation.server_step is not None and not means_taken(experiment)[1]:
        raise ConfigError(
            f'server.optimizer = "{config.server.optimizer}": {name} takes no mean of models that it sent out'
        )
    aggregation.check(experiment)
    if (
        aggregation.reduction.is_sealed and config.data.source != "sites"
    ):  # in a real federation the participants are not known here
        if config.federation.engine not in ("auto", "wire"):
            raise ConfigError(
                f'privacy.secure_sum: not with federation.engine = "{config.federation.engine}", where server and '
                'clients share their memory; use "wire"'
            )
        if (config.federation.clients_per_round or len(experiment.data.clients)) < 2:
            raise ConfigError("privacy.secure_sum: a sum over one client is its reply; at least 2 are needed")
    if aggregation.hides or config.aggregation.mean != "weighted":
        rehearse(experiment)
    if config.aggregation.mean != "weighted" and not means_taken(experiment)[0]:
        raise ConfigError(f'aggregation.mean = "{config.aggregation.mean}": {name} takes no mean over its clients')


def task_of(config: RunConfig, federated: FederatedData) -> Task:
    name, options = config.task.name, config.task.options
    if name == "auto":
        if federated.task not in tasks.TASKS:
            raise ConfigError(f'task.name: {federated.name} has targets of its own; name your "package.module:Class"')
        name = federated.task
    task = tasks.make(name, options)
    if task.kind != federated.task:
        raise ConfigError(f"task.name: {name} is for targets of {task.kind}, and {federated.name} has {federated.task}")
    return task


def _outputs(task: Task, federated: FederatedData) -> int:
    try:
        return task.outputs(federated.outputs)
    except ValueError as error:
        raise ConfigError(f"task: {error}") from None


def dtype_of(config: RunConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    return dtype


def model_of(config: RunConfig, shape: Shape, outputs: int) -> Model:
    return models.build(
        config.model.name,
        shape,
        outputs,
        seed=config.seed,
        head=config.model.head,
        options=config.model.options,
        buffers=config.model.buffers,
        prior=config.model.prior == "label",
        dtype=dtype_of(config),
        adapter=config.model.adapter,
        checkpoint=config.model.checkpoint or (),
    )


def at_client(config: RunConfig, client: str) -> RunConfig:
    return config if config.model.by_client is None else config.model_copy(update={"model": config.model.at(client)})


def model_of_federation(config: RunConfig, federated: FederatedData, newcomers: Sequence[str], outputs: int) -> Model:
    """The server's model; where clients have different ones, it knows which client has which."""
    if not config.model.by_client:
        return _check_forward(model_of(config, federated.shape, outputs), config, federated, outputs)
    _refuse_architectures(config)
    config.model.check_clients([*federated.clients, *newcomers])
    sections = _distinct_sections(config.model, federated.clients)

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
        each[str(i)] = _check_forward(model_of(own, federated.shape, outputs), own, federated, outputs)
    return mix_architectures(each, of) if len(each) > 1 else each["0"]


def _distinct_sections(section: ModelSection, clients: Iterable[str]) -> list[ModelSection]:
    """The sections of all architectures; that of `[model]` itself comes first, if some client has it."""
    distinct: list[ModelSection] = []
    for client in clients:
        if (own := section.at(client)) not in distinct:
            distinct.append(own)
    usual = ModelSection(**section.model_dump(exclude={"by_client"}, exclude_none=True))
    return sorted(distinct, key=lambda own: own != usual)


def _refuse_architectures(config: RunConfig) -> None:
    """Options that cannot be combined with different models."""
    if config.data.source == "sites":
        raise ConfigError("model.by_client: in a simulation only; all sites of a real federation have one model")
    if config.local.keep_state:
        raise ConfigError("model.by_client: not with local.keep_state; set it to false")


def check_algorithm(algorithm: Algorithm, model: Model, task: str) -> None:
    """Fail if the algorithm does not support a model, or shares parameters that some clients do not have."""
    if model.architectures is None:
        algorithm.check(model, task)
        return
    each = list(model.architectures.models.values())
    for own in each:
        algorithm.check(own, task)
    name, first = algorithm.title or type(algorithm).__name__, _exchanged(algorithm, each[0])
    forms = [schema(_exchanged(algorithm, own)) for own in each]
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


def check_head(algorithm: Algorithm, model: Model) -> None:
    """Fail if the method divides a model into head and body, and a model has no head."""
    if not needs_head(algorithm):
        return
    for own in [model] if model.architectures is None else model.architectures.models.values():
        if not own.head:
            raise ConfigError(
                f"model.head: {algorithm.title or type(algorithm).__name__} needs a head, and the model has none; set "
                f'model.head = ["{own.last_layer}"], its last layer'
            )


def head_notes(experiment: Experiment, config: RunConfig) -> list[str]:
    """That a model of the user's has no head, where the method needs none."""
    model = experiment.model
    if model.head or not models.is_own(config.model.name):
        return []
    return [f'model.head: the model has no head; methods with private heads would need ["{model.last_layer}"] or more']


def _exchanged(algorithm: Algorithm, model: Model) -> Tree:
    replies = {f: reply_example(algorithm, f, model) for f in client_functions(algorithm)}
    return {"server": algorithm.server_init(model), "replies": replies}


def _is_empty(tree: Tree) -> bool:
    """Whether a part of a reply has no tensors."""
    return any(part == {} for reply in tree["replies"].values() for part in (reply if isinstance(reply, tuple) else ()))


def check_loss(task: Task, model: Model, federated: FederatedData) -> None:
    """Fail if a custom loss is not one number per sample: a mean would count the padding of a stack."""
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


def architecture_notes(experiment: Experiment, engine: str) -> list[str]:
    """Which architectures clients have, for the notes of a run."""
    if not experiment.by_architecture:
        return []
    having = Counter(experiment.architecture(c) for c in range(len(experiment.data.clients)))
    sizes = {
        name: sum(v.numel() for v in own.model.trainable.values()) for name, own in experiment.by_architecture.items()
    }
    each = ", ".join(f"{having[name]} with {size:,} parameters" for name, size in sizes.items())
    stacks = "; vmap stacks clients of one architecture" if engine == "vmap" else ""
    return [f"clients have {len(sizes)} architectures: {each}{stacks}"]


def _check_forward(model: Model, config: RunConfig, federated: FederatedData, outputs: int) -> Model:
    """The model, with the buffers that a forward pass changes.

    Fails if a custom model cannot read the samples, its output has another shape than the task needs, or it keeps
    something from one pass to the next that clients could not keep apart.
    """
    x, name = federated.train.first(2), config.model.name
    is_own = models.is_own(name)
    has_form = is_own and ":" not in config.task.name and federated.task not in ("tokens", "own")
    is_usual = isinstance(x, Tensor) and x.is_floating_point()
    if (is_usual and not is_own) or not federated.train.is_here or not count(x):
        return model  # models that come with fedtailor are made for the shape
    samples = (
        f"samples of {', '.join(x)}" if isinstance(x, dict) else f"of shape {list(x.shape[1:])}" if is_usual else "text"
    )
    try:
        tensors, mode = model.params | model.private_buffers, model.module.training
        with torch_stream("reads"), torch.no_grad():
            y = model(tensors, x)
        model.prepare(tensors, training=mode)
        if is_own:
            twice = x if count(x) > 1 else tree_map(lambda v: torch.cat([v, v]), x)
            model = model.remember(buffer_changes(model.module, twice, model.buffer_names))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"model.name: {name} does not read {federated.name}, which is {samples}: {reason}{_line_in(model, error)}"
        ) from None
    rows = count(x)
    if federated.task == "segmentation" and has_form:
        _check_outputs_of_masks(y, federated.train.y[:rows], outputs, name)
    elif has_form and not (isinstance(y, Tensor) and _has_form(y, rows, outputs, federated.task)):
        form = f"shape {list(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise ConfigError(
            f"model.name: {name} must give a tensor [rows, {outputs}] for this task; of {rows} rows it gave {form}"
        )
    return model


def _has_form(y: Tensor, rows: int, outputs: int, task: str) -> bool:
    spare = task == "classification"  # classes that never occur do no harm
    return y.dim() == 2 and len(y) == rows and (y.shape[1] >= outputs if spare else y.shape[1] == outputs)


def _check_outputs_of_masks(y: Tree, masks: Tensor, outputs: int, name: str) -> None:
    space, rows = list(masks.shape[1:]), len(masks)
    least = 1 if outputs == 2 else outputs  # one output is enough for two classes; classes that never occur do no harm
    form = list(y.shape) if isinstance(y, Tensor) else [type(y).__name__]
    if len(form) != masks.dim() + 1 or form[0] != rows or form[1] < least or form[2:] != space:
        raise ConfigError(
            f"model.name: {name} must give a tensor [rows, {outputs}, {', '.join(map(str, space))}] for masks of "
            f"{outputs} classes; of {rows} rows it gave {form}"
        )


def _line_in(model: Model, error: BaseException) -> str:
    """The line in the model's source file at which it failed."""
    file = inspect.getsourcefile(type(model.module))
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" ({Path(str(file)).name}, line {lines[-1]})" if lines else ""
