"""One run: rounds, validation, checkpoints, and at the end one look at the test data."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedtailor import algorithms, data, engines, models
from fedtailor.core.client import HIGHER_IS_BETTER, METRICS
from fedtailor.core.federation import Engine, Federation, Traffic
from fedtailor.core.me import Setting
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.data.federated import FederatedData
from fedtailor.errors import ConfigError, RoundAbandoned, RunError
from fedtailor.metrics.summary import summarise
from fedtailor.runs.config import RunConfig
from fedtailor.runs.newcomers import EPOCHS, hold_out, onboarded
from fedtailor.runs.store import CONFIG, RESULTS, RunFolder, write_json

ABANDONED_IN_A_ROW = 10


@dataclass(frozen=True)
class Progress:
    """What is told after a round."""

    round: int
    rounds: int
    metric: str
    value: float  # mean over clients, on validation data; not a number in rounds without evaluation
    clients: int
    faults: int
    news: tuple[str, ...] = ()  # replies rejected in this round, or why it was abandoned


Listener = Callable[[Progress], None]


def setting_of(config: RunConfig, data_root: Path | None = None) -> Setting:
    """Data, model and algorithm of a configuration, put together."""
    federated, unseen = data.load(config.data, seed=config.seed, root=data_root), None
    if config.evaluation.unseen is not None:
        federated, unseen = hold_out(federated, config.evaluation.unseen, config.seed)
    return put_together(config, federated, unseen)


def put_together(config: RunConfig, federated: FederatedData, unseen: FederatedData | None = None) -> Setting:
    """Model and algorithm of a configuration for data that is there already."""
    algorithm = algorithms.make(config.algorithm.name, config.algorithm.options)
    dtype = getattr(torch, config.model.dtype)
    federated, unseen = federated.to(dtype), None if unseen is None else unseen.to(dtype)
    model = models.build(
        config.model.name,
        federated.shape,
        federated.outputs,
        seed=config.seed,
        head=config.model.head,
        options=config.model.options,
        buffers=config.model.buffers,
        prior=config.model.prior == "label",
        dtype=dtype,
    )
    if config.model.prior == "label" and federated.task != "classification":
        raise ConfigError(f'model.prior = "label": for classification, not {federated.task}')
    _reads(model, config.model.name, federated)
    algorithm.check(model, federated.task)
    algorithm.check_solver(config.local.solver)
    if config.local.augment is not None and len(federated.shape) != 3:
        raise ConfigError(f'local.augment = "{config.local.augment}": for images, not {federated.name}')
    if config.federation.clients_per_round > len(federated.clients):
        raise ConfigError(
            f"federation.clients_per_round = {config.federation.clients_per_round}: "
            f"there are only {len(federated.clients)} clients"
        )
    if config.federation.min_replies > (config.federation.clients_per_round or len(federated.clients)):
        raise ConfigError(f"federation.min_replies = {config.federation.min_replies}: more than the clients of a round")
    environment = config.environment.made(len(federated.clients), config.seed)
    if environment.missing == "stale" and not algorithm.stale:
        able = [name for name, kind in algorithms.algorithms().items() if kind.stale]
        raise ConfigError(
            f'environment.missing = "stale": {algorithm.title or config.algorithm.name} has no mean that could '
            f"count those who did not answer; able to: {', '.join(able)}"
        )
    return Setting(algorithm, model, federated, config.local.solver, config.seed, environment, unseen)


def _reads(model: Model, name: str, federated: FederatedData) -> None:
    """Text is numbers of characters: most models cannot read it, which is better said before the first round."""
    if not federated.train.x.is_floating_point():
        try:
            with torch.no_grad():
                model(model.params | model.private_buffers, federated.train.x[:2])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"model.name: {name} does not read {federated.name}, which is text: {error}") from None


def about(setting: Setting, config: RunConfig, engine: str, data_root: Path | None) -> dict[str, Any]:
    """What made a run, for people who find its folder."""
    names = ("fedtailor", "torch", "numpy", "safetensors")
    return {
        "versions": {name: version(name) for name in names} | {"python": platform.python_version()},
        "command": " ".join(["fedtailor", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "engine": engine,
        "task_id": config.task_id,
        "data_root": None if data_root is None else str(data_root.resolve()),
        "data": setting.data.name,
        "task": setting.data.task,
        "clients": list(setting.data.clients),
        "train_samples": setting.data.train.sizes.tolist(),
        "parameters": sum(v.numel() for v in setting.model.trainable.values()),
        "notes": list(setting.data.notes),
    }


def start(config: RunConfig, path: Path, data_root: Path | None = None, listener: Listener | None = None) -> RunFolder:
    """A new run in a new folder, to its end."""
    setting = setting_of(config, data_root)
    torch.set_num_threads(config.federation.threads or engines.threads(setting))
    name = engines.choose(setting) if config.federation.engine == "auto" else config.federation.engine
    run = _Run(config, _started(name, setting, config))  # what does not fit together is said before there is a folder
    folder = RunFolder.create(path, config, about(setting, config, name, data_root))
    return _train(folder, run, listener)


def train_on(engine: Engine, name: str, config: RunConfig, path: Path, listener: Listener | None = None) -> RunFolder:
    """The rounds of a run on an engine that is made already; goes on where the folder ends, if there is one.

    Of a finished run only the end is done again: a site that was away then has no personal model yet.
    """
    engine.start()
    if not (path / CONFIG).exists():
        RunFolder.create(path, config, about(engine.setting, config, name, None))
    folder = RunFolder.open(path)
    if folder.config != config:
        raise RunError(f"{path}: holds a run of another configuration; choose another name for this one")
    return _train(folder, _Run(config, engine), listener)


def resume(path: Path, data_root: Path | None = None, listener: Listener | None = None) -> RunFolder:
    """Go on with a run from its last checkpoint; a finished one is left as it is."""
    folder = RunFolder.open(path)
    config, made_by = folder.config, folder.about
    if folder.results is not None:
        return folder
    setting = setting_again(folder, data_root)
    return _train(folder, _Run(config, _started(made_by["engine"], setting, config)), listener)


def setting_again(folder: RunFolder, data_root: Path | None = None) -> Setting:
    """The setting that a run was started with; other data is a `RunError`."""
    made_by = folder.about
    if data_root is None and made_by["data_root"] is not None:
        data_root = Path(made_by["data_root"])
    torch.set_num_threads(made_by["threads"])  # sums over several threads round differently
    setting = setting_of(folder.config, data_root)
    sizes = setting.data.train.sizes.tolist()
    if list(setting.data.clients) != made_by["clients"] or sizes != made_by["train_samples"]:
        raise RunError(f"{folder.path}: the data is no longer what the run was started with")
    return setting


def _started(name: engines.EngineName, setting: Setting, config: RunConfig) -> Engine:
    engine = engines.make(name, setting, config.federation.chunk)
    engine.start()
    return engine


def _train(folder: RunFolder, run: _Run, listener: Listener | None) -> RunFolder:
    """The rounds that are still to do, and the end."""
    config, saved_at = run.config, -math.inf
    with folder.locked():
        run.load(folder)
        for round in range(run.round + 1, config.rounds + 1):
            line, value = run.step(round)
            length = folder.append_metrics(line)
            if listener is not None:
                clients, faults = len(run.fed.cohort), len(run.fed.faults)
                before = run.engine.setting.algorithm.preparation
                done, total = round + before, config.rounds + before
                listener(Progress(done, total, run.metric, value, clients, faults, _news(line)))
            if run.abandoned >= ABANDONED_IN_A_ROW:
                raise RunError(
                    f"{folder.path}: {run.abandoned} rounds in a row were abandoned; the last: {line['abandoned']}"
                )
            due = round % config.checkpoint.every == 0 and time.perf_counter() - saved_at >= config.checkpoint.seconds
            if due or round == config.rounds:
                run.save(folder, length)
                saved_at = time.perf_counter()
        run.finish(folder)
    return folder


class _Run:
    """What changes from round to round."""

    def __init__(self, config: RunConfig, engine: Engine) -> None:
        self.config = config
        self.engine = engine
        self.fed = Federation(engine, config.federation.limits)
        self.server = engine.setting.algorithm.server_init(engine.setting.model)
        self.metric = METRICS[engine.setting.data.task][0]
        self.round = -engine.setting.algorithm.preparation  # the last one done
        self.abandoned = 0  # rounds in a row
        self.seconds = 0.0
        self.best_round, self.best_value = 0, math.nan
        self.best: Tree = None  # all that is needed to predict as in the best round

    def step(self, round: int) -> tuple[dict[str, Any], float]:
        """One round; returns what is recorded of it, and the mean validation metric where it was measured."""
        begun, faults = time.perf_counter(), len(self.fed.faults)
        cohort = _cohort(self.config, len(self.engine.setting.data.clients), round)
        line: dict[str, Any] = {"round": round, "cohort": list(cohort)}
        try:
            self.server = self.fed.run_round(round, cohort, self.server)
            self.abandoned = 0
        except RoundAbandoned as why:
            line["abandoned"] = str(why)
            self.abandoned += 1
        if any(self.fed.missed):
            line["missed"] = [list(m) for m in self.fed.missed] if round < 1 else list(self.fed.missed[0])
        if self.fed.reported:
            line["report"] = self.fed.reported
        if self.fed.faults[faults:]:
            line["faults"] = [asdict(f) for f in self.fed.faults[faults:]]
        value = math.nan
        if round > 0 and (round % self.config.evaluation.every == 0 or round == self.config.rounds):
            splits = ["val", "test"] if self.config.evaluation.test_curve else ["val"]
            line |= measure(self.engine, round, self.server, splits)
            value = self._select(round, line["val"][self.metric])
        self.round = round
        seconds = time.perf_counter() - begun
        self.seconds += seconds
        return line | asdict(self.fed.traffic) | {"seconds": round_to(seconds)}, value

    def _select(self, round: int, values: list[float]) -> float:
        """Keep the round if it is the best one on validation data so far."""
        higher = HIGHER_IS_BETTER[self.metric]
        value = summarise(values, higher_is_better=higher).mean
        better = value > self.best_value if higher else value < self.best_value
        if better or (self.best is None and not math.isnan(value)):
            self.best_round, self.best_value, self.best = round, value, self._snapshot()
        return value

    def _snapshot(self) -> Tree:
        return tree_map(torch.clone, {"server": self.server, "clients": self.engine.get_states()})

    def save(self, folder: RunFolder, metrics_length: int) -> None:
        """Write a checkpoint."""
        status = {
            "round": self.round,
            "seconds": self.seconds,
            "abandoned": self.abandoned,
            "metrics_length": metrics_length,
            "traffic": asdict(self.fed.traffic),
            "looked_at": sorted(self.fed.looked_at),
            "best_round": self.best_round,
            "best_value": self.best_value,
        }
        trees = {"state": (self.round, {"server": self.server, "clients": self.engine.get_states()})}
        if self.best is not None:
            trees["best"] = (self.best_round, self.best)
        folder.save_checkpoint(status, trees)
        self.engine.saved([tree["clients"] for _, tree in trees.values()])

    def load(self, folder: RunFolder) -> None:
        """Go back to the last checkpoint, or to the start."""
        saved = folder.load_checkpoint()
        folder.drop_stale()
        folder.cut_metrics(saved[0]["metrics_length"] if saved else 0)
        if saved is None:
            return
        status, trees = saved
        self.server = trees["state"]["server"]
        self.engine.set_states(trees["state"]["clients"])
        self.engine.saved([tree["clients"] for tree in trees.values()])
        self.round, self.abandoned, self.seconds = status["round"], status["abandoned"], status["seconds"]
        self.best_round, self.best_value, self.best = status["best_round"], status["best_value"], trees.get("best")
        self.fed.traffic = Traffic(**status["traffic"])
        self.fed.looked_at = set(status["looked_at"])

    def finish(self, folder: RunFolder) -> None:
        """Test both the last round and the one selected on validation data; save the personal models of both."""
        last = (self.round, self._snapshot())
        # without validation samples nothing can be selected: the last round stands for both
        snapshots = {"last": last, "selected": last if self.best is None else (self.best_round, self.best)}
        results: dict[str, Any] = {"metric": self.metric, "higher_is_better": HIGHER_IS_BETTER[self.metric]}
        for kind, (round, tree) in snapshots.items():
            self.engine.set_states(tree["clients"])
            models: dict[int, Params] = {}
            test = measure(self.engine, round, tree["server"], ["test"], models, keep=kind)["test"]
            if any(models.values()):  # a site of its own keeps its model itself
                folder.save_personal(kind, {self.engine.setting.data.clients[c]: models[c] for c in sorted(models)})
            results[kind] = {"round": round, "test": _summaries(test), "clients": test}
        self.engine.set_states(last[1]["clients"])
        if self.engine.setting.unseen is not None:
            results["unseen"] = self._onboard(folder, self.engine.setting.unseen, results["last"]["test"])
        lines = folder.metrics()
        results |= {
            "traffic": asdict(self.fed.traffic),
            "seconds": round_to(self.seconds),
            "gathered": sorted(self.fed.looked_at),
            "faults": sum(len(line.get("faults", [])) for line in lines),
            "abandoned": sum("abandoned" in line for line in lines),
        }
        write_json(folder.path / RESULTS, results)

    def _onboard(self, folder: RunFolder, newcomers: FederatedData, seen: dict[str, Any]) -> dict[str, Any]:
        """Clients that took no part join now; what they reach, and by how much those who trained are better off."""
        wanted = self.config.evaluation.unseen_epochs
        found = list(onboarded(self.engine.setting, newcomers, self.server, EPOCHS if wanted is None else wanted))
        folder.save_personal("unseen", dict(zip(newcomers.clients, (model for model, _ in found), strict=True)))
        test = {k: [float(metrics["test"][k]) for _, metrics in found] for k in seen}
        summary = _summaries(test)
        gap = {k: seen[k]["mean"] - summary[k]["mean"] for k in seen}
        return {"round": self.round, "names": list(newcomers.clients), "test": summary, "clients": test, "gap": gap}


def _summaries(metrics: dict[str, list[float]]) -> dict[str, Any]:
    return {k: asdict(summarise(v, higher_is_better=HIGHER_IS_BETTER[k])) for k, v in metrics.items()}


def measure(
    engine: Engine,
    round: int,
    server: Tree,
    splits: list[str],
    models: dict[int, Params] | None = None,
    keep: str = "",
) -> dict[str, dict[str, list[float]]]:
    """Per split and metric one number per client, in the order of the data's clients; `models` collects the models."""
    clients = len(engine.setting.data.clients)
    names = METRICS[engine.setting.data.task]
    out = {s: {name: [math.nan] * clients for name in names} for s in splits}  # not a number: it did not answer
    for group, found, stack in engine.evaluate(range(clients), round, server, splits, keep):
        for split, metrics in found.items():
            for name, values in metrics.items():
                for client, value in zip(group, values.tolist(), strict=True):
                    out[split][name][client] = value
        if models is not None:
            models |= {client: {k: v[row] for k, v in stack.items()} for row, client in enumerate(group)}
    return out


def _news(line: dict[str, Any]) -> tuple[str, ...]:
    rejected = (f"round {f['round']}: {f['client']} rejected: {f['reason']}" for f in line.get("faults", []))
    return *rejected, *([line["abandoned"]] if "abandoned" in line else [])


def _cohort(config: RunConfig, clients: int, round: int) -> tuple[int, ...]:
    wanted = config.federation.clients_per_round or clients
    if wanted == clients:
        return tuple(range(clients))
    drawn = stream(config.seed, round, "cohort").choice(clients, size=wanted, replace=False)
    return tuple(sorted(int(c) for c in drawn))


def round_to(seconds: float) -> float:
    """Milliseconds are enough."""
    return float(f"{seconds:.3f}")
