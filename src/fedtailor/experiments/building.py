"""Data, model and algorithm of a configuration, put together; what does not fit is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedtailor import algorithms, data
from fedtailor.aggregation.dry_run import means_taken, rehearse
from fedtailor.aggregation.robust import Robust
from fedtailor.core import task as tasks
from fedtailor.core.data import FederatedData
from fedtailor.core.experiment import Experiment
from fedtailor.core.reduce import Aggregation
from fedtailor.core.task import Task
from fedtailor.engines.attacked import IN_DATA, Attack
from fedtailor.engines.rehearsal import with_optimizer_state
from fedtailor.errors import ConfigError
from fedtailor.experiments import model_building
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.model_building import width
from fedtailor.experiments.newcomers import hold_out
from fedtailor.metrics.library import metrics_of
from fedtailor.plugins import refuse_while_importing


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
    return data.load(config.data, seed=data_seed(config), root=data_root, dtype=width(config))


def data_seed(config: RunConfig) -> int:
    """From which it follows who has which samples: with `data.seed`, of all of a comparison's runs the same."""
    return config.seed if config.data.seed is None else config.data.seed


def assemble(config: RunConfig, federated: FederatedData, unseen: FederatedData | None = None) -> Experiment:
    """Model and algorithm of a configuration for data that is there already."""
    algorithm, task = algorithms.make(config.algorithm.name, config.algorithm.options), task_of(config, federated)
    federated, unseen = federated.to(width(config)), None if unseen is None else unseen.to(width(config))
    model = model_building.model_for(
        config, federated, () if unseen is None else unseen.clients, _outputs(task, federated)
    )
    if config.model.prior == "label" and federated.task != "classification":
        raise ConfigError(f'model.prior = "label": for classification, not {federated.task}')
    if config.local.precision != "float32" and config.model.dtype != "float32":
        raise ConfigError(f'local.precision = "{config.local.precision}": with model.dtype = "float32" only')
    model_building.check(algorithm, model, task.name)
    if ":" in config.task.name:
        model_building.check_loss(task, model, federated)
    if algorithm.needs_tensor and not federated.is_plain:
        named = algorithm.title or config.algorithm.name
        raise ConfigError(f"algorithm.name: {named} computes with samples themselves; they must be one tensor each")
    solver = config.local.build(config.rounds)
    algorithm.check_solver(solver)
    if config.local.augment is not None and len(federated.shape) != 3:
        raise ConfigError(f'local.augment = "{config.local.augment}": for images, not {federated.name}')
    if config.federation.clients_per_round > len(federated.clients):
        raise ConfigError(
            f"federation.clients_per_round = {config.federation.clients_per_round}: "
            f"there are only {len(federated.clients)} clients"
        )
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
    )
    if config.early_stopping.patience and not int(federated.val.sizes.sum()) and int(federated.train.sizes.sum()):
        raise ConfigError("early_stopping: needs validation samples, and there are none; set data.val above 0")
    experiment = with_optimizer_state(experiment)
    _check_aggregation(experiment, config)
    return experiment


def robust_notes(experiment: Experiment) -> list[str]:
    """What a run says of a robust mean that has little to keep."""
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
    """Which clients lie, and how."""
    return Attack(config.attack.name, config.attack.share, config.attack.strength, config.seed)


def aggregation_of(config: RunConfig) -> Aggregation:
    """What happens to replies, slot by slot."""
    slots, robust = config.privacy.build(), config.aggregation.build()
    if robust is not None:
        if slots.hides:
            raise ConfigError(f"aggregation.mean: looks at single replies, which {slots.hides} hides")
        slots = replace(slots, reduction=robust)
    if config.attack.name != "none" and slots.reduction.is_sealed:
        raise ConfigError("attack: a simulation of clients that lie does not reach into secure sums")
    return replace(slots, server_step=config.server.build())


def _check_aggregation(experiment: Experiment, config: RunConfig) -> None:
    """Refuse before the first round what the algorithm, the engine or the machine cannot do."""
    aggregation, name = experiment.aggregation, experiment.algorithm.title or config.algorithm.name
    if aggregation.server_step is not None and not means_taken(experiment)[1]:
        raise ConfigError(
            f'server.optimizer = "{config.server.optimizer}": {name} takes no mean of models that it sent out'
        )
    aggregation.check(experiment)
    if aggregation.reduction.is_sealed and config.data.source != "sites":  # over a network nobody knows who takes part
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
    """What is learned: as configured, or what the data is for."""
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
    """How many numbers the model gives."""
    try:
        return task.outputs(federated.outputs)
    except ValueError as error:
        raise ConfigError(f"task: {error}") from None
