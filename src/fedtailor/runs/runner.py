"""One run: rounds, validation, checkpoints, and at the end one look at the test data."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedtailor import engines
from fedtailor.core.disk import Disk
from fedtailor.core.federation import Engine
from fedtailor.core.me import Setting
from fedtailor.core.ranks import ALONE, Ranks
from fedtailor.data.contents import digest
from fedtailor.data.federated import FederatedData
from fedtailor.errors import ConfigError, RunError
from fedtailor.privacy.sealed import Privacy
from fedtailor.runs import tracking
from fedtailor.runs.assemble import setting_of
from fedtailor.runs.config import RunConfig
from fedtailor.runs.rounds import Run
from fedtailor.runs.store import CONFIG, RunFolder

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
        "files": digest(config.data),
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

    def made() -> tuple[Run, dict[str, Any]]:  # what does not fit together is said before there is a folder
        tracking.check(config.tracking)
        setting = setting_of(config, data_root, loaded)
        if ranks.count > 1 and config.privacy.made() != Privacy():
            raise ConfigError("privacy: not with torchrun, whose ranks share what they know; run in one process")
        name, why = config.federation.engine, "chosen"
        if name == "auto" and config.privacy.secure_sum:
            name, why = "wire", "secure sums need clients of their own"
        elif name == "auto":
            found = engines.choose(setting, config.federation.clients_per_round, _workers(config, cores))
            name, why = found.name, found.why
        torch.set_num_threads(config.federation.threads or (1 if name == "pool" else engines.threads(setting)))
        run = _begun(name, setting, config, path, ranks, cores)
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
    return _train(folder, Run(config, engine, ALONE, _disk(config, path)), listener, None)


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

    def made() -> Run | None:
        folder = RunFolder.open(path)
        config, made_by = folder.config, folder.about
        if folder.results is not None:
            return None
        tracking.check(config.tracking)
        setting = setting_again(folder, data_root, loaded)
        return _begun(made_by["engine"], setting, config, path, ranks, cores)

    run = ranks.agreed(made)
    return RunFolder(path) if run is None else _train(RunFolder(path), run, listener, until)


def setting_again(folder: RunFolder, data_root: Path | None = None, loaded: FederatedData | None = None) -> Setting:
    """The setting that a run was started with; other data is a `RunError`."""
    made_by = folder.about
    if data_root is None and made_by["data_root"] is not None:
        data_root = Path(made_by["data_root"])
    torch.set_num_threads(made_by["threads"])  # sums over several threads round differently
    config = config_of(folder)
    setting = setting_of(config, data_root, loaded)
    found = (list(setting.data.clients), setting.data.train.sizes.tolist(), digest(config.data))
    files = made_by.get("files") or found[2]  # older folders do not tell
    if found != (made_by["clients"], made_by["train_samples"], files):
        raise RunError(f"{folder.path}: the data is no longer what the run was started with")
    return setting


def config_of(folder: RunFolder) -> RunConfig:
    """What a run was started with; data that it, or its fit, keeps beside it has moved with it."""
    config = folder.config
    path: Path | None = getattr(config.data, "path", None)
    if path is None or path.exists():
        return config
    kept = (base / "data" / ("" if path.name == "data" else path.name) for base in (folder.path, folder.path.parent))
    for there in filter(Path.exists, kept):
        return config.model_copy(update={"data": config.data.model_copy(update={"path": there})})
    return config


def _begun(name: engines.EngineName, setting: Setting, config: RunConfig, path: Path, ranks: Ranks, cores: int) -> Run:
    """A run whose clients have their first state."""
    engine: Engine
    chunk, disk = config.federation.chunk, _disk(config, path)
    if ranks.count > 1:
        from fedtailor.engines.torchrun import Sharded

        engine = Sharded(setting, name, chunk, ranks, disk)
    else:
        cohort = config.federation.clients_per_round
        engine = engines.make(name, setting, chunk, _workers(config, cores), disk, cohort)
    engine.start()
    return Run(config, engine, ranks, disk)


def _workers(config: RunConfig, cores: int) -> int:
    """Processes that a run may have, on so many cores; 0 is all."""
    wanted = config.federation.workers or engines.cores()
    return min(wanted, cores or wanted)


def _disk(config: RunConfig, path: Path) -> Disk:
    return Disk(path.absolute().parent, config.federation.budget)


def _train(folder: RunFolder, run: Run, listener: Listener | None, until: int | None) -> RunFolder:
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


def _news(line: dict[str, Any]) -> tuple[str, ...]:
    rejected = (f"round {f['round']}: {f['client']} rejected: {f['reason']}" for f in line.get("faults", []))
    return *rejected, *([line["abandoned"]] if "abandoned" in line else [])
