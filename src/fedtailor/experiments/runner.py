"""One run: rounds, validation, checkpoints, and at the end one look at the test data."""

from __future__ import annotations

import math
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import torch

from fedtailor import engines
from fedtailor.core.data import FederatedData, Shape
from fedtailor.core.engine import Engine
from fedtailor.core.experiment import Experiment
from fedtailor.core.process_group import SINGLE_PROCESS, ProcessGroup
from fedtailor.core.random import STREAMS
from fedtailor.core.reduce import Limits
from fedtailor.core.trees import Tree
from fedtailor.data.fingerprint import digest
from fedtailor.engines import devices, machine
from fedtailor.engines.attacked import CHANGES, Attacked
from fedtailor.engines.disk import Disk
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments import tracking, user_code
from fedtailor.experiments.building import architecture_notes, attack_of, build_experiment, head_notes, robust_notes
from fedtailor.experiments.callbacks import Callbacks, Followed
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.run_state import RunState
from fedtailor.experiments.store import CONFIG, METRICS, RunFolder
from fedtailor.experiments.user_code import code_notes, code_of, refuse_other_code
from fedtailor.training import compiling

ABANDONED_IN_A_ROW = 10


@dataclass(frozen=True)
class Progress:
    """What a listener is given after a round."""

    round: int
    rounds: int
    metric: str
    value: float  # mean over clients, on validation data; not a number in rounds without evaluation
    clients: int
    faults: int
    news: tuple[str, ...] = ()  # replies rejected in this round, or why it was abandoned
    epsilon: float | str | None = None  # spent so far, where there is noise; or why it protects nobody


Listener = Callable[[Progress], None]


class Options(TypedDict, total=False):
    """Options of a run other than its configuration and folder."""

    ranks: ProcessGroup  # every one of them makes the call; the first writes the folder
    cores: int  # that it may use; 0 is all
    loaded: FederatedData | None  # in place of the data that the configuration names
    until: int | None  # the last round for now; `resume` goes on from there
    callbacks: Sequence[Any]  # objects with methods of `Callback`; the first rank calls them
    device: str | None  # in place of the one that the configuration names
    server: Tree  # state of the server to begin with, in place of the algorithm's


def about(
    experiment: Experiment, config: RunConfig, engine: str, data_root: Path | None, ranks: int = 1
) -> dict[str, Any]:
    """What made a run: versions, data, code and machine."""
    names, code = ("fedtailor", "torch", "numpy", "safetensors"), code_of(config)
    return {
        "versions": {name: version(name) for name in names} | {"python": platform.python_version()},
        "command": " ".join(["fedtailor", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "engine": engine,
        "ranks": ranks,
        "task_id": config.task_id,
        "data_root": None if data_root is None else str(data_root.resolve()),
        "data": experiment.data.name,
        "files": digest(config.data),
        "code": code,
        "task": experiment.task.name if experiment.task.kind == "own" else experiment.data.task,
        "metrics": {metric.name: metric.higher_is_better for metric in experiment.metrics},
        "clients": list(experiment.data.clients),
        "train_samples": experiment.data.train.sizes.tolist(),
        "parameters": sum(v.numel() for v in experiment.model.trainable.values()),
        "shape": plain_shape(experiment.data.shape),
        "outputs": experiment.task.outputs(experiment.data.outputs),
        "classes": list(experiment.data.classes),
        "checked_lines": True,
        "streams": STREAMS,
        "notes": [
            *experiment.data.notes,
            *code_notes(code),
            *architecture_notes(experiment, engine),
            *head_notes(experiment, config),
            *robust_notes(experiment),
        ],
    }


def plain_shape(shape: Shape) -> Any:
    return {k: list(v) for k, v in shape.items()} if isinstance(shape, dict) else list(shape)


def start(
    config: RunConfig,
    path: Path,
    data_root: Path | None = None,
    listener: Listener | None = None,
    **options: Unpack[Options],
) -> RunFolder:
    """Start a run in a new folder, and train to its end or to the round `until`."""
    ranks, cores = options.get("ranks", SINGLE_PROCESS), options.get("cores", 0)

    def prepare_run() -> tuple[RunState, dict[str, Any]]:  # what does not fit together is said before there is a folder
        tracking.check(config.tracking)
        experiment = build_experiment(config, data_root, options.get("loaded"))
        experiment, placement = _place(experiment, config, options.get("device"), ranks)
        user_code.remember(config)
        if ranks.count > 1 and (not experiment.aggregation.is_plain or config.attack.name != "none"):
            why = "privacy, aggregation, attack: not with torchrun, whose ranks share what they know"
            raise ConfigError(f"{why}; run in one process")
        if ranks.count > 1 and experiment.model.architectures is not None:
            raise ConfigError("model.by_client: not with torchrun; run in one process")
        name, why = config.federation.engine, "chosen"
        if name == "auto" and config.privacy.secure_sum:
            name, why = "wire", "secure sums need clients of their own"
        elif name == "auto":
            choice = engines.choose(experiment, config.federation.clients_per_round, _workers(config, cores))
            name, why = choice.name, choice.why
        elif name == "vmap":
            engines.refuse_forced_stack(experiment)
        run = _begin_run(name, experiment, config, path, ranks, cores)
        stack.callback(run.engine.close)
        run.server = run.server if options.get("server") is None else options["server"]
        placement |= {"engine_why": why, **_stack_size(run, placement["device"])}
        return run, about(experiment, config, name, data_root, ranks.count) | placement

    with ExitStack() as stack:
        stack.enter_context(machine.training_settings(config.federation.threads or 1))
        run, run_about = ranks.agreed(prepare_run)
        prepared = run.engine.experiment.data.preparation
        ranks.agreed(lambda: RunFolder.create(path, config, run_about, prepared) if ranks.rank == 0 else None)
        return _train(RunFolder(path), run, listener, options)


def train_on(
    engine: Engine,
    name: str,
    config: RunConfig,
    path: Path,
    listener: Listener | None = None,
    limits: Limits | None = None,
) -> RunFolder:
    """The rounds of a run on an engine that is made already; goes on where the folder ends, if there is one.

    Of a finished run only the end is done again: a site that was away then has no personal model yet. `limits` take
    the place of the configuration's.
    """
    user_code.remember(config)
    engine.start()
    if not (path / CONFIG).exists():
        RunFolder.create(path, config, about(engine.experiment, config, name, None))
    folder = RunFolder.open(path)
    if folder.config != config:
        raise RunError(f"{path}: holds a run of another configuration; choose another name for this one")
    _refuse_other_streams(folder)
    refuse_other_code(folder)
    run = RunState(config, engine, SINGLE_PROCESS, _disk(config, path))
    run.fed.limits = limits or config.federation.limits
    return _train(folder, run, listener, {})


def resume(
    path: Path, data_root: Path | None = None, listener: Listener | None = None, **options: Unpack[Options]
) -> RunFolder:
    """Continue a run from its last checkpoint; a finished run is left unchanged."""
    ranks, cores = options.get("ranks", SINGLE_PROCESS), options.get("cores", 0)

    def reopen() -> RunState | None:
        folder = RunFolder.open(path)
        config, run_about = folder.config, folder.about
        if folder.results is not None:
            refuse_other_code(folder)
            return None
        _refuse_other_streams(folder)
        tracking.check(config.tracking)
        stack.enter_context(machine.training_settings(run_about["threads"]))
        experiment = reload_experiment(folder, data_root, options.get("loaded"))
        experiment, _ = _place(experiment, config, options.get("device"), ranks)
        run = _begin_run(run_about["engine"], experiment, config, path, ranks, cores)
        stack.callback(run.engine.close)
        return run

    with ExitStack() as stack:
        run = ranks.agreed(reopen)
        return RunFolder(path) if run is None else _train(RunFolder(path), run, listener, options)


def _refuse_other_streams(folder: RunFolder) -> None:
    """Fail if a version with other random streams started the run: its last rounds would belong to another run."""
    run_about = folder.about
    if run_about.get("streams", STREAMS if "checked_lines" in run_about else 1) != STREAMS:
        config = shlex.quote(str(folder.path / CONFIG))
        raise RunError(
            f"{folder.path}: started by an earlier version of fedtailor with other random numbers; start a new run: "
            f"fedtailor run {config} --out NEW",
            code="run.version",
        )


def reload_experiment(
    folder: RunFolder, data_root: Path | None = None, loaded: FederatedData | None = None, *, serves: bool = False
) -> Experiment:
    """The experiment that a run was started with; other data is a `RunError`, and other code unless it `serves`."""
    if serves:
        user_code.require_trusted(folder.config, str(folder.path), may_be_edited=True)
    else:
        refuse_other_code(folder)
    run_about = folder.about
    if data_root is None and run_about["data_root"] is not None:
        data_root = Path(run_about["data_root"])
    config = config_of(folder)
    experiment = build_experiment(config, data_root, loaded)
    present = (list(experiment.data.clients), experiment.data.train.sizes.tolist(), digest(config.data))
    files = run_about.get("files") or present[2]  # older folders do not tell
    if present != (run_about["clients"], run_about["train_samples"], files):
        raise RunError(f"{folder.path}: the data is no longer what the run was started with", code="run.changed")
    return experiment


def config_of(folder: RunFolder) -> RunConfig:
    """What a run was started with; data that it, or its fit, keeps beside it has moved with it."""
    config = folder.config
    path: Path | None = getattr(config.data, "path", None)
    if path is None or path.exists():
        return config
    places = (base / "data" / ("" if path.name == "data" else path.name) for base in (folder.path, folder.path.parent))
    for moved in filter(Path.exists, places):
        return config.model_copy(update={"data": config.data.model_copy(update={"path": moved})})
    return config


def _begin_run(
    name: engines.EngineName, experiment: Experiment, config: RunConfig, path: Path, ranks: ProcessGroup, cores: int
) -> RunState:
    """The state of a new run; its clients have their first private states."""
    if config.federation.goal:
        raise ConfigError("federation.goal: only for a federation of sites; a simulation has environment.deadline")
    engine: Engine
    chunk, disk = config.federation.chunk, _disk(config, path)
    if ranks.count > 1:
        from fedtailor.engines.ranks import Sharded

        engine = Sharded(experiment, name, chunk, ranks, disk)
    else:
        cohort = config.federation.clients_per_round
        # on another device, one worker for each there is
        workers = _workers(config, cores) if experiment.device == devices.CPU else config.federation.workers
        engine = engines.make(name, experiment, chunk, workers, disk, cohort)
        if config.attack.name in CHANGES:
            engine = cast(Engine, Attacked(engine, attack_of(config)))
    engine.start()
    return RunState(config, engine, ranks, disk)


def _place(
    experiment: Experiment, config: RunConfig, wanted: str | None, ranks: ProcessGroup
) -> tuple[Experiment, dict[str, Any]]:
    """The experiment on its device, and which device that is and why."""
    rank = devices.local_rank() if ranks.count > 1 else None
    device, why = devices.find(wanted or config.federation.device, rank=rank, dtype=experiment.model.dtype)
    experiment = devices.place(experiment, device)
    if config.local.compile and config.federation.engine == "pool":
        raise ConfigError("local.compile: not with federation.engine = pool; use loop or vmap")
    if config.local.compile:
        solver = config.local.build(config.rounds)
        compiling.check(experiment, solver.arithmetic, solver.batch_size)
    return experiment, {"device": str(device), "device_why": why}


def _stack_size(run: RunState, device: str) -> dict[str, int]:
    chunk = getattr(run.engine, "chunk", 0)
    return {"chunk": chunk} if chunk and device != "cpu" else {}


def _workers(config: RunConfig, cores: int) -> int:
    """Processes that a run may have, on so many cores; 0 is all."""
    if config.local.compile:  # a forked process may wait for ever for the compiler of its parent
        return 1
    wanted = config.federation.workers or engines.cores()
    return min(wanted, cores or wanted)


def _disk(config: RunConfig, path: Path) -> Disk:
    return Disk(path.absolute().parent, config.federation.budget)


def _train(folder: RunFolder, run: RunState, listener: Listener | None, options: Options) -> RunFolder:
    """The rounds that are still to do, and the end; with `until` only those up to there, and a checkpoint."""
    config, ranks, saved_at, length, until = run.config, run.ranks, -math.inf, 0, options.get("until")
    followed = Followed(folder.path, config, run.metric, run.higher_is_better)
    callbacks = Callbacks(options.get("callbacks", ()) if ranks.rank == 0 else (), followed)
    last = config.rounds if until is None else min(until, config.rounds)
    is_first = ranks.rank == 0
    with ExitStack() as stack:
        ranks.agreed(lambda: stack.enter_context(folder.locked()) if is_first else None)
        ranks.agreed(lambda: run.load(folder))
        track = stack.enter_context(tracking.follow(folder, config)) if is_first else None
        if track is not None:
            for line in folder.metrics():  # a tracker may have lost the last of them
                track(line)
        length = (folder.path / METRICS).stat().st_size if (folder.path / METRICS).exists() else 0
        is_over = run.is_stopped
        for round in range(run.round + 1, last + 1):
            if is_over:
                break
            callbacks.round_begins(round)
            line, value = run.step(round)
            if track is not None:
                length = folder.append_metrics(line)
                track(line)
            if listener is not None:
                clients, faults = len(run.fed.present), len(run.fed.record.faults)
                before = run.engine.experiment.algorithm.preparation
                done, total = round + before, config.rounds + before
                listener(Progress(done, total, run.metric, value, clients, faults, _news(line), line.get("epsilon")))
            if run.abandoned >= ABANDONED_IN_A_ROW:
                named = line["abandoned"]
                why = f"{folder.path}: {run.abandoned} rounds in a row were abandoned; the last: {named}"
                ranks.agreed(partial(_refuse, why))
            is_over = ranks.all_gather_object(callbacks.round_ends(line, value) or run.is_stopped)[0]
            due = round % config.checkpoint.every == 0 and time.perf_counter() - saved_at >= config.checkpoint.seconds
            if ranks.all_gather_object(due)[0] or round == last or is_over:  # clocks differ: the first rank's counts
                run.save(folder, length)
                saved_at = time.perf_counter()
        if last == config.rounds or is_over:
            run.finish(folder)
            if run.goes_back:  # newcomers are onboarded from the state that was tested
                run.save(folder, length)
            callbacks.run_ends(folder.results or {})
    return folder


def _refuse(why: str) -> None:
    raise RunError(why)


def _news(line: dict[str, Any]) -> tuple[str, ...]:
    rejected = (f"round {f['round']}: {f['client']} rejected: {f['reason']}" for f in line.get("faults", []))
    smaller = f"round {line['round']}: memory was out; stacks of {line.get('chunk')} clients from here on"
    return *rejected, *([smaller] if "chunk" in line else []), *([line["abandoned"]] if "abandoned" in line else [])
