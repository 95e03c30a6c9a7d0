"""Trackers: TensorBoard, MLflow and Weights & Biases get the figures of each round, and never stop a run."""

from __future__ import annotations

import importlib
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from fedtailor.core.task import recorded_metrics
from fedtailor.errors import ConfigError
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.sections import TrackingSection, dotted
from fedtailor.experiments.store import RunFolder, read_json, write_json
from fedtailor.metrics.summary import summarise

log = logging.getLogger("fedtailor")
TENSORBOARD, MLFLOW, WANDB = "tensorboard", "mlflow.json", "wandb.json"  # in the folder of a run

Values = dict[str, float]
RoundListener = Callable[[dict[str, Any]], None]  # a recorded round


def check(section: TrackingSection) -> None:
    """Raise a `ConfigError` when a tracker is wanted that is not installed."""
    wanted = {"tensorboard": section.tensorboard, "mlflow": section.mlflow is not None, "wandb": bool(section.wandb)}
    for key in (key for key, is_wanted in wanted.items() if is_wanted and find_spec(key) is None):
        extra = "wandb" if key == "wandb" else "trackers"
        raise ConfigError(f"tracking.{key}: {key} is not installed; pip install 'fedtailor[{extra}]'")


@contextmanager
def follow(folder: RunFolder, config: RunConfig) -> Iterator[RoundListener]:
    """A listener that gives rounds to the trackers of a configuration; results follow at the end."""
    wanted, directions = config.tracking, recorded_metrics(folder.about)
    followers = [
        *([_Follower("tensorboard", lambda: _TensorBoard(folder))] if wanted.tensorboard else []),
        *([_Follower("mlflow", lambda: _MLflow(folder, config, wanted.mlflow))] if wanted.mlflow else []),
        *([_Follower("wandb", lambda: _Wandb(folder, config))] if wanted.wandb else []),
    ]

    def tell(line: dict[str, Any]) -> None:
        for follower in followers:
            follower.tell(line["round"], of_round(line, directions))

    try:
        yield tell
    except BaseException:
        for follower in followers:
            follower.close(is_finished=False)
        raise
    for follower in followers:
        for step, values in of_results(folder.results or {}):
            follower.tell(step, values)
        follower.close(is_finished=True)


def of_round(line: Mapping[str, Any], directions: Mapping[str, bool]) -> Values:
    """Figures of a recorded round; `directions`: by metric, whether higher is better."""
    values: Values = {}
    for split in ("val", "test"):
        for metric, clients in line.get(split, {}).items():
            summary = summarise(clients, higher_is_better=directions[metric])
            values |= {f"{split}/{metric}": summary.mean, f"{split}/{metric} worst tenth": summary.worst_tenth}
    for name, value in line.get("report", {}).items():
        several = enumerate(value) if isinstance(value, list) else [(None, value)]
        values |= {f"report/{name}" + ("" if i is None else f"/{i}"): v for i, v in several}
    values |= {f"traffic/{key}": line[key] for key in ("up", "down", "trips")}
    values |= {"clients/asked": len(line["cohort"]), "clients/rejected": len(line.get("faults", []))}
    return values | {"seconds": line["seconds"]}


def of_results(results: Mapping[str, Any]) -> Iterator[tuple[int, Values]]:
    """Test figures at the end, each with its round."""
    for kind in ("last", "selected"):
        if kind in results:
            result = results[kind]
            values = {f"{kind}/test {metric}": summary["mean"] for metric, summary in result["test"].items()}
            worst = {f"{kind}/test {metric} worst tenth": s["worst_tenth"] for metric, s in result["test"].items()}
            yield result["round"], values | worst


class Tracker(Protocol):
    """Takes the figures of a run."""

    last: dict[str, int]  # of each figure the last step that it knows

    def write(self, step: int, values: Values) -> None: ...
    def close(self, is_finished: bool) -> None: ...


class _Follower:
    """Gives each figure of a round once to a tracker, and none after its first failure."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name = name
        self.tracker: Tracker | None = None
        with self._log_failure():
            self.tracker = make()

    def tell(self, step: int, values: Values) -> None:
        """Write what the tracker does not have yet: after a resume some rounds are run again."""
        if self.tracker is not None:
            last = self.tracker.last
            new = {k: v for k, v in values.items() if math.isfinite(v) and step > last.get(k, -math.inf)}
            with self._log_failure():
                self.tracker.write(step, new)
                last |= dict.fromkeys(new, step)

    def close(self, *, is_finished: bool) -> None:
        if self.tracker is not None:
            with self._log_failure():
                self.tracker.close(is_finished)

    @contextmanager
    def _log_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.tracker = None
            why = " ".join(str(error).split()) or type(error).__name__
            log.warning("tracking: %s failed and gets no more data; the run continues: %s", self.name, why)


class _TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, folder: RunFolder) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = folder.path / TENSORBOARD
        self.last = _steps_in(path) if path.exists() else {}
        self.writer: Any = SummaryWriter(str(path), flush_secs=10)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self, is_finished: bool) -> None:
        self.writer.close()


def _steps_in(path: Path) -> dict[str, int]:
    """The last step of each figure in a folder of event files."""
    events: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    log_reader = events.EventAccumulator(str(path), size_guidance={events.SCALARS: 0})  # 0 is all
    log_reader.Reload()
    return {tag: max(event.step for event in log_reader.Scalars(tag)) for tag in log_reader.Tags()[events.SCALARS]}


class _MLflow:
    """A run of MLflow in a folder; the run's own folder remembers which."""

    def __init__(self, folder: RunFolder, config: RunConfig, store: Path | None) -> None:
        assert store is not None
        # these are read when it is imported; it must report to nobody, and newer versions refuse folders unless told
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow: Any = importlib.import_module("mlflow")
        self.entities = importlib.import_module("mlflow.entities")
        store.mkdir(parents=True, exist_ok=True)
        self.client = mlflow.MlflowClient(tracking_uri=store.resolve().as_uri())
        known = folder.path / MLFLOW
        self.last: dict[str, int] = {}
        if known.exists():
            self.run: str = read_json(known)["run"]
            for key in self.client.get_run(self.run).data.metrics:
                self.last[key] = max(point.step for point in self.client.get_metric_history(self.run, key))
            self.client.update_run(self.run, status="RUNNING")
            return
        experiment = _experiment(self.client, config.data.source, store)
        self.run = self.client.create_run(
            experiment, run_name=folder.path.name, tags={"fedtailor.folder": str(folder.path.resolve())}
        ).info.run_id
        write_json(known, {"run": self.run})
        parameters = [self.entities.Param(k, str(v)[:500]) for k, v in dotted(config.plain()).items()]
        self.client.log_batch(self.run, params=parameters)

    def write(self, step: int, values: Values) -> None:
        now = int(time.time() * 1000)
        points = [self.entities.Metric(k, float(v), now, step) for k, v in values.items()]
        self.client.log_batch(self.run, metrics=points)

    def close(self, is_finished: bool) -> None:
        self.client.set_terminated(self.run, "FINISHED" if is_finished else "KILLED")


def _experiment(client: Any, name: str, store: Path) -> str:
    """The experiment of this name; runs that begin at the same time must not make two of it."""
    with FileLock(store / ".fedtailor.lock"):
        existing = client.get_experiment_by_name(name)
        return existing.experiment_id if existing is not None else client.create_experiment(name)


class _Wandb:
    """A run of Weights & Biases: files in the run's folder, or sent as it goes on. The folder remembers its id."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self.known = folder.path / WANDB
        fresh: dict[str, Any] = {"id": uuid.uuid4().hex[:16], "last": {}}
        before = read_json(self.known) if self.known.exists() else fresh
        self.id: str = before["id"]
        self.last: dict[str, int] = dict(before["last"])
        wandb: Any = importlib.import_module("wandb")
        self.run = wandb.init(
            project=config.tracking.wandb,
            name=folder.path.name,
            id=self.id,
            dir=str(folder.path.resolve()),
            mode=config.tracking.wandb_mode,
            resume="allow" if config.tracking.wandb_mode == "online" else None,
            config=dotted(config.plain()),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("*", step_metric="round")  # results are logged at their own round
        self._remember()

    def write(self, step: int, values: Values) -> None:
        if values:
            self.run.log(values | {"round": step})
            self.last |= dict.fromkeys(values, step)
            self._remember()

    def close(self, is_finished: bool) -> None:
        self.run.finish(exit_code=0 if is_finished else 1)

    def _remember(self) -> None:
        write_json(self.known, {"id": self.id, "last": self.last})
