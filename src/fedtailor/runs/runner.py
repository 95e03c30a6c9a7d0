"""One run: rounds, validation, checkpoints, and at the end one look at the test data."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedtailor import algorithms, data, engines, models
from fedtailor.core.client import HIGHER_IS_BETTER, METRICS
from fedtailor.core.disk import Disk
from fedtailor.core.federation import Engine, Federation, Traffic
from fedtailor.core.me import Setting
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.ranks import ALONE, Ranks
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.data.federated import FederatedData
from fedtailor.errors import ConfigError, RoundAbandoned, RunError
from fedtailor.local import equilibrium
from fedtailor.metrics.summary import summarise
from fedtailor.privacy import noise
from fedtailor.privacy.rehearsal import rehearse
from fedtailor.privacy.sealed import Privacy
from fedtailor.runs import tracking
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
    epsilon: float | None = None  # spent so far, where there is noise


Listener = Callable[[Progress], None]


def setting_of(config: RunConfig, data_root: Path | None = None, loaded: FederatedData | None = None) -> Setting:
    """Data, model and algorithm of a configuration, put together; `loaded` is its data if it was read before."""
    federated, unseen = loaded or data.load(config.data, seed=config.seed, root=data_root), None
    if config.evaluation.unseen is not None:
        federated, unseen = hold_out(federated, config.evaluation.unseen, config.seed)
    return put_together(config, federated, unseen)


def put_together(config: RunConfig, federated: FederatedData, unseen: FederatedData | None = None) -> Setting:
    """Model and algorithm of a configuration for data that is there already."""
    algorithm = algorithms.make(config.algorithm.name, config.algorithm.options)
    dtype = getattr(torch, config.model.dtype)
    federated, unseen = federated.to(dtype), None if unseen is None else unseen.to(dtype)
    model = model_of(config, federated.shape, federated.outputs)
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
    privacy = config.privacy.made()
    setting = Setting(
        algorithm,
        model,
        federated,
        config.local.solver,
        config.seed,
        environment,
        unseen,
        clip=privacy.clip,
        is_sealed=privacy.secure_sum,
    )
    if privacy.is_sealed:
        _can_be_private(setting, config, privacy)
    return setting


def _can_be_private(setting: Setting, config: RunConfig, privacy: Privacy) -> None:
    """Refuse before the first round what could not be kept."""
    if privacy.noise:
        noise.require()
        if config.environment.missing == "stale":
            raise ConfigError('privacy.noise: not with environment.missing = "stale", which counts by sample counts')
    if privacy.secure_sum:
        try:
            import cryptography  # noqa: F401
        except ImportError:
            raise ConfigError(f"privacy.secure_sum: the package cryptography is missing; {noise.INSTALL}") from None
        if config.federation.engine not in ("auto", "wire"):
            raise ConfigError(
                f'privacy.secure_sum: not with federation.engine = "{config.federation.engine}", where server and '
                'clients share their memory; use "wire"'
            )
        if (config.federation.clients_per_round or len(setting.data.clients)) < 2:
            raise ConfigError("privacy.secure_sum: a sum over one client is its reply; at least 2 are needed")
    rehearse(setting, privacy)


def model_of(config: RunConfig, shape: tuple[int, ...], outputs: int) -> Model:
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
        dtype=getattr(torch, config.model.dtype),
    )


def _reads(model: Model, name: str, federated: FederatedData) -> None:
    """Text is numbers of characters: most models cannot read it, which is better said before the first round."""
    if not federated.train.x.is_floating_point():
        try:
            with torch.no_grad():
                model(model.params | model.private_buffers, federated.train.x[:2])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"model.name: {name} does not read {federated.name}, which is text: {error}") from None


def about(setting: Setting, config: RunConfig, engine: str, data_root: Path | None, ranks: int = 1) -> dict[str, Any]:
    """What made a run, for people who find its folder."""
    names = ("fedtailor", "torch", "numpy", "safetensors")
    return {
        "versions": {name: version(name) for name in names} | {"python": platform.python_version()},
        "command": " ".join(["fedtailor", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "engine": engine,
        "ranks": ranks,
        "task_id": config.task_id,
        "data_root": None if data_root is None else str(data_root.resolve()),
        "data": setting.data.name,
        "task": setting.data.task,
        "clients": list(setting.data.clients),
        "train_samples": setting.data.train.sizes.tolist(),
        "parameters": sum(v.numel() for v in setting.model.trainable.values()),
        "shape": list(setting.data.shape),
        "outputs": setting.data.outputs,
        "classes": list(setting.data.classes),
        "notes": list(setting.data.notes),
    }


def start(
    config: RunConfig,
    path: Path,
    data_root: Path | None = None,
    listener: Listener | None = None,
    ranks: Ranks = ALONE,
    cores: int = 0,
    loaded: FederatedData | None = None,
    until: int | None = None,
) -> RunFolder:
    """A new run in a new folder, to its end, or until a round after which `resume` goes on. On so many cores; 0 is all.

    Every one of `ranks` calls this; the first writes the folder.
    """

    def made() -> tuple[_Run, dict[str, Any]]:  # what does not fit together is said before there is a folder
        tracking.check(config.tracking)
        setting = setting_of(config, data_root, loaded)
        if ranks.count > 1 and config.privacy.made() != Privacy():
            raise ConfigError("privacy: not with torchrun, whose ranks share what they know; run in one process")
        name, why = config.federation.engine, "chosen"
        wanted = config.federation.clients_per_round, min(config.federation.workers or engines.cores(), cores or 10**6)
        if name == "auto" and config.privacy.secure_sum:
            name, why = "wire", "secure sums need clients of their own"
        elif name == "auto":
            found = engines.choose(setting, *wanted)
            name, why = found.name, found.why
        torch.set_num_threads(config.federation.threads or (1 if name == "pool" else engines.threads(setting)))
        disk = Disk(path.absolute().parent, config.federation.budget)
        run = _Run(config, _started(name, setting, config, ranks, cores, disk), ranks, disk)
        return run, about(setting, config, name, data_root, ranks.count) | {"engine_why": why}

    run, made_by = ranks.agreed(made)
    prepared = run.engine.setting.data.preparation
    ranks.agreed(lambda: RunFolder.create(path, config, made_by, prepared) if ranks.rank == 0 else None)
    return _train(RunFolder(path), run, listener, until)


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
    disk = Disk(path.absolute().parent, config.federation.budget)
    return _train(folder, _Run(config, engine, ALONE, disk), listener, None)


def resume(
    path: Path,
    data_root: Path | None = None,
    listener: Listener | None = None,
    ranks: Ranks = ALONE,
    cores: int = 0,
    loaded: FederatedData | None = None,
    until: int | None = None,
) -> RunFolder:
    """Go on with a run from its last checkpoint; a finished one is left as it is. Every one of `ranks` calls this."""

    def made() -> _Run | None:
        folder = RunFolder.open(path)
        config, made_by = folder.config, folder.about
        if folder.results is not None:
            return None
        tracking.check(config.tracking)
        setting = setting_again(folder, data_root, loaded)
        disk = Disk(path.absolute().parent, config.federation.budget)
        return _Run(config, _started(made_by["engine"], setting, config, ranks, cores, disk), ranks, disk)

    run = ranks.agreed(made)
    return RunFolder(path) if run is None else _train(RunFolder(path), run, listener, until)


def setting_again(folder: RunFolder, data_root: Path | None = None, loaded: FederatedData | None = None) -> Setting:
    """The setting that a run was started with; other data is a `RunError`."""
    made_by = folder.about
    if data_root is None and made_by["data_root"] is not None:
        data_root = Path(made_by["data_root"])
    torch.set_num_threads(made_by["threads"])  # sums over several threads round differently
    setting = setting_of(folder.config, data_root, loaded)
    sizes = setting.data.train.sizes.tolist()
    if list(setting.data.clients) != made_by["clients"] or sizes != made_by["train_samples"]:
        raise RunError(f"{folder.path}: the data is no longer what the run was started with")
    return setting


def _started(
    name: engines.EngineName, setting: Setting, config: RunConfig, ranks: Ranks, cores: int, disk: Disk
) -> Engine:
    engine: Engine
    if ranks.count > 1:
        from fedtailor.engines.torchrun import Sharded

        engine = Sharded(setting, name, config.federation.chunk, ranks, disk)
    else:
        wanted = config.federation.workers or engines.cores()
        workers, cohort = min(wanted, cores or wanted), config.federation.clients_per_round
        engine = engines.make(name, setting, config.federation.chunk, workers, disk, cohort)
    engine.start()
    return engine


def _train(folder: RunFolder, run: _Run, listener: Listener | None, until: int | None) -> RunFolder:
    """The rounds that are still to do, and the end; with `until` only those up to there, and a checkpoint."""
    config, ranks, saved_at, length = run.config, run.ranks, -math.inf, 0
    last = config.rounds if until is None else min(until, config.rounds)
    is_first = ranks.rank == 0
    with ExitStack() as held:
        ranks.agreed(lambda: held.enter_context(folder.locked()) if is_first else None)
        ranks.agreed(lambda: run.load(folder))
        tell = held.enter_context(tracking.followed(folder, config)) if is_first else None
        if tell is not None:
            for line in folder.metrics():  # a tracker may have lost the last of them
                tell(line)
        for round in range(run.round + 1, last + 1):
            line, value = run.step(round)
            if tell is not None:
                length = folder.append_metrics(line)
                tell(line)
            if listener is not None:
                clients, faults = len(run.fed.cohort), len(run.fed.faults)
                before = run.engine.setting.algorithm.preparation
                done, total = round + before, config.rounds + before
                listener(Progress(done, total, run.metric, value, clients, faults, _news(line), line.get("epsilon")))
            if run.abandoned >= ABANDONED_IN_A_ROW:
                named = line["abandoned"]
                why = f"{folder.path}: {run.abandoned} rounds in a row were abandoned; the last: {named}"
                ranks.agreed(partial(_refuse, why))
            due = round % config.checkpoint.every == 0 and time.perf_counter() - saved_at >= config.checkpoint.seconds
            if ranks.told(due)[0] or round == last:  # clocks differ: the first rank's counts
                run.save(folder, length)
                saved_at = time.perf_counter()
        if last == config.rounds:
            run.finish(folder)
    return folder


def _refuse(why: str) -> None:
    raise RunError(why)


class _Run:
    """What changes from round to round."""

    def __init__(self, config: RunConfig, engine: Engine, ranks: Ranks, disk: Disk) -> None:
        self.config = config
        self.disk = disk
        self.ranks = ranks
        self.engine = engine
        self.fed = Federation(engine, config.federation.limits, ranks, privacy=config.privacy.made())
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
        with equilibrium.watched() as solves:
            try:
                self.server = self.fed.run_round(round, cohort, self.server)
                self.abandoned = 0
            except RoundAbandoned as why:
                line["abandoned"] = str(why)
                self.abandoned += 1
        if any(self.fed.missed):
            line["missed"] = [list(m) for m in self.fed.missed] if round < 1 else list(self.fed.missed[0])
        if report := self.fed.reported | equilibrium.told(solves):
            line["report"] = report
        if self.fed.privacy.noise:
            line["epsilon"] = self._spent().epsilon
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

    def _spent(self) -> noise.Spent:
        """What the noisy sums up to here have cost."""
        clients, wanted = len(self.engine.setting.data.clients), self.config.federation.clients_per_round
        return noise.spent(
            Counter(self.fed.noisy_sums.values()),
            clients=clients,
            cohort=wanted or clients,
            noise=self.config.privacy.noise,
            delta=self.config.privacy.delta,
        )

    def _select(self, round: int, values: list[float]) -> float:
        """Keep the round if it is the best one on validation data so far."""
        higher = HIGHER_IS_BETTER[self.metric]
        value = summarise(values, higher_is_better=higher).mean
        better = value > self.best_value if higher else value < self.best_value
        if better or (self.best is None and not math.isnan(value)):
            self.best_round, self.best_value, self.best = round, value, self._snapshot()
        return value

    def _snapshot(self) -> Tree:
        """Server and clients as they are now; of the clients, those of this rank."""
        return self.disk.copy({"server": self.server, "clients": self.engine.get_states()})

    def _whole(self, tree: Tree) -> Tree:
        """A snapshot with the clients of all ranks, on the first."""
        return tree | {"clients": self.ranks.at_first(tree["clients"], self._everybody)}

    @property
    def _everybody(self) -> range:
        return range(len(self.engine.setting.data.clients))

    def save(self, folder: RunFolder, metrics_length: int) -> None:
        """Write a checkpoint."""
        status = {
            "round": self.round,
            "seconds": self.seconds,
            "abandoned": self.abandoned,
            "metrics_length": metrics_length,
            "traffic": asdict(self.fed.traffic),
            "looked_at": sorted(self.fed.looked_at),
            "noisy_sums": {str(round): sums for round, sums in self.fed.noisy_sums.items()},
            "best_round": self.best_round,
            "best_value": self.best_value,
        }
        now = {"server": self.server, "clients": self.engine.get_states()}
        trees = {"state": (self.round, self._whole(now))}
        if self.best is not None:
            trees["best"] = (self.best_round, self._whole(self.best))
        if self.ranks.rank == 0:
            folder.save_checkpoint(status, trees, self.disk.touch)
        self.engine.saved([tree["clients"] for _, tree in trees.values()])

    def load(self, folder: RunFolder) -> None:
        """Go back to the last checkpoint, or to the start."""
        saved = folder.load_checkpoint()
        if self.ranks.rank == 0:
            folder.drop_stale()
            folder.cut_metrics(saved[0]["metrics_length"] if saved else 0)
        if saved is None:
            return
        status, trees = saved[0], {name: self._part(tree) for name, tree in saved[1].items()}
        self.server = trees["state"]["server"]
        self.engine.set_states(trees["state"]["clients"])
        self.engine.saved([tree["clients"] for tree in trees.values()])
        self.round, self.abandoned, self.seconds = status["round"], status["abandoned"], status["seconds"]
        self.best_round, self.best_value, self.best = status["best_round"], status["best_value"], trees.get("best")
        self.fed.traffic = Traffic(**status["traffic"])
        self.fed.looked_at = set(status["looked_at"])
        self.fed.noisy_sums = {int(round): sums for round, sums in status.get("noisy_sums", {}).items()}

    def _part(self, tree: Tree) -> Tree:
        """Of a whole snapshot, server and this rank's clients."""
        return tree | {"clients": self.ranks.own(tree["clients"], self._everybody)}

    def finish(self, folder: RunFolder) -> None:
        """Test both the last round and the one selected on validation data; save the personal models of both."""
        last = (self.round, self._snapshot())
        # without validation samples nothing can be selected: the last round stands for both
        snapshots = {"last": last, "selected": last if self.best is None else (self.best_round, self.best)}
        results: dict[str, Any] = {"metric": self.metric, "higher_is_better": HIGHER_IS_BETTER[self.metric]}
        for kind, (round, tree) in snapshots.items():
            self.engine.set_states(tree["clients"])
            test = self._tested(folder, kind, round, tree["server"])
            results[kind] = {"round": round, "test": _summaries(test), "clients": test}
        self.engine.set_states(last[1]["clients"])
        if self.ranks.rank:
            return
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
        if self.fed.privacy.is_sealed or self.fed.privacy.clip:
            results["privacy"] = self._privacy()
        write_json(folder.path / RESULTS, results)

    def _privacy(self) -> dict[str, Any]:
        """What was hidden, and what is known of it in numbers."""
        told = self.config.privacy
        found: dict[str, Any] = {"secure_sum": told.secure_sum, "clip": told.clip, "noise": told.noise}
        if told.noise:
            found |= {"delta": told.delta, "noisy_sums": sum(self.fed.noisy_sums.values()), **asdict(self._spent())}
        return found

    def _tested(self, folder: RunFolder, kind: str, round: int, server: Tree) -> dict[str, list[float]]:
        """Test metrics of all clients; their personal models are saved as they come."""
        names = self.engine.setting.data.clients
        if self.ranks.count == 1:
            with folder.personal_models(kind) as keep:
                return measure(self.engine, round, server, ["test"], lambda c, m: keep(names[c], m), kind)["test"]
        mine: dict[int, Params] = {}
        test = measure(self.engine, round, server, ["test"], mine.__setitem__)["test"]
        stack = tree_map(lambda *rows: torch.stack(rows), *(mine[c] for c in sorted(mine))) if mine else None
        rows = self.ranks.at_first(stack, self._everybody)
        if rows is not None:
            with folder.personal_models(kind) as keep:
                for c in self._everybody:
                    keep(names[c], {k: v[c] for k, v in rows.items()})
        return test

    def _onboard(self, folder: RunFolder, newcomers: FederatedData, seen: dict[str, Any]) -> dict[str, Any]:
        """Clients that took no part join now; what they reach, and by how much those who trained are better off."""
        wanted = self.config.evaluation.unseen_epochs
        found = list(onboarded(self.engine.setting, newcomers, self.server, EPOCHS if wanted is None else wanted))
        with folder.personal_models("unseen") as keep:
            for client, (model, _) in zip(newcomers.clients, found, strict=True):
                keep(client, model)
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
    keep: Callable[[int, Params], None] = lambda client, model: None,
    kind: str = "",
) -> dict[str, dict[str, list[float]]]:
    """Per split and metric one number per client, in the order of the data's clients; `keep` is given the models."""
    clients = len(engine.setting.data.clients)
    names = METRICS[engine.setting.data.task]
    out = {s: {name: [math.nan] * clients for name in names} for s in splits}  # not a number: it did not answer
    for group, found, stack in engine.evaluate(range(clients), round, server, splits, kind):
        for split, metrics in found.items():
            for name, values in metrics.items():
                for client, value in zip(group, values.tolist(), strict=True):
                    out[split][name][client] = value
        for row, client in enumerate(group if stack else ()):  # the models of other ranks and of sites are there
            keep(client, {k: v[row] for k, v in stack.items()})
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
