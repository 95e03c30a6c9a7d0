"""Trackers: figures arrive once each, also over a resume; a failure of theirs is none of the run."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fedtailor.errors import ConfigError
from fedtailor.experiments import runner, tracking
from fedtailor.experiments.config import NO_MATTER, RunConfig, parse
from fedtailor.experiments.store import RunFolder, read_json
from fedtailor.studies.schema import template
from tests.small import config, records, stop_after

needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
Points = dict[str, list[tuple[int, float]]]


def in_tensorboard(folder: RunFolder) -> Points:
    """Everything in the event files, as it lies there: a point that was written twice is there twice."""
    loader: Any = import_module("tensorboard.backend.event_processing.event_file_loader")
    tensors: Any = import_module("tensorboard.util.tensor_util")
    found: Points = {}
    for file in sorted((folder.path / tracking.TENSORBOARD).iterdir()):
        for event in loader.EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, float(tensors.make_ndarray(value.tensor))))
    return found


def in_mlflow(folder: RunFolder) -> tuple[Any, Points]:
    store = folder.config.tracking.mlflow
    assert store is not None
    mlflow: Any = import_module("mlflow")
    client = mlflow.MlflowClient(tracking_uri=store.as_uri())
    run = client.get_run(read_json(folder.path / tracking.MLFLOW)["run"])
    points = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    return run, {key: [(point.step, point.value) for point in history] for key, history in points.items()}


def expected(folder: RunFolder) -> Points:
    """By a second, plain piece of code: what the folder of the run says."""
    lines, results = folder.metrics(), folder.results
    assert results is not None
    accuracy = [(line["round"], sum(line["val"]["accuracy"]) / len(line["val"]["accuracy"])) for line in lines]
    return {
        "val/accuracy": accuracy,
        "val/accuracy worst tenth": [(line["round"], min(line["val"]["accuracy"])) for line in lines],
        "traffic/up": [(line["round"], line["up"]) for line in lines],
        "clients/asked": [(line["round"], 4) for line in lines],
        "last/test accuracy": [(5, results["last"]["test"]["accuracy"]["mean"])],
        "selected/test accuracy": [(results["selected"]["round"], results["selected"]["test"]["accuracy"]["mean"])],
    }


def assert_same_points(found: Points, folder: RunFolder) -> None:
    for name, points in expected(folder).items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        assert [v for _, v in found[name]] == pytest.approx([v for _, v in points], rel=1e-6), name  # float32 there


@needs_tensorboard
def test_tensorboard_has_every_round_once_over_a_resume(tmp_path: Path) -> None:
    made = config("tracking.tensorboard=true", "checkpoint.every=2")
    with pytest.raises(KeyboardInterrupt):
        runner.start(made, tmp_path / "run", None, stop_after(3))  # round 3 is told, but not in a checkpoint
    folder = runner.resume(tmp_path / "run")
    assert_same_points(in_tensorboard(folder), folder)
    assert records(folder) == records(runner.start(config("checkpoint.every=2"), tmp_path / "plain"))


@needs_tensorboard
def test_rounds_that_a_tracker_lost_are_told_later(tmp_path: Path) -> None:
    made = config("tracking.tensorboard=true")
    with pytest.raises(KeyboardInterrupt):
        runner.start(made, tmp_path / "run", None, stop_after(3))
    for file in (tmp_path / "run" / tracking.TENSORBOARD).iterdir():  # as if killed before anything was flushed
        file.unlink()
    folder = runner.resume(tmp_path / "run")
    assert_same_points(in_tensorboard(folder), folder)


@needs_mlflow
def test_mlflow_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = config("tracking.mlflow=tracked", "checkpoint.every=2")
    with pytest.raises(KeyboardInterrupt):
        runner.start(made, tmp_path / "run", None, stop_after(3))
    interrupted, _ = in_mlflow(RunFolder(tmp_path / "run"))
    assert interrupted.info.status == "KILLED"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder = runner.resume(tmp_path / "run")
    run, found = in_mlflow(folder)
    assert_same_points(found, folder)
    assert run.info.run_id == interrupted.info.run_id
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert (run.data.params["local.lr"], run.data.params["algorithm.name"]) == ("0.1", "fedrep")
    other = runner.start(made, tmp_path / "other")
    assert in_mlflow(other)[0].info.experiment_id == run.info.experiment_id


@needs_tensorboard
def test_a_run_outlives_its_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: object, step: int, values: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(tracking._TensorBoard, "write", full)
    with caplog.at_level(logging.WARNING, logger="fedtailor"):
        folder = runner.start(config("tracking.tensorboard=true"), tmp_path / "run")
    assert folder.results is not None
    assert [r.message for r in caplog.records] == [
        "tracking: tensorboard failed and gets no more data; the run continues: no space left"
    ]


@needs_mlflow
def test_a_store_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tracked").write_text("a file, not a folder")
    folder = runner.start(config(f"tracking.mlflow={tmp_path / 'tracked'}"), tmp_path / "run")
    assert folder.results is not None
    assert len([r for r in caplog.records if r.name == "fedtailor"]) == 1


@pytest.mark.parametrize(("setting", "package"), [("tensorboard=true", "tensorboard"), ("mlflow=x", "mlflow")])
def test_a_missing_package_is_named_before_anything_is_written(
    setting: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"^tracking.{package}: .* pip install 'fedtailor\[trackers\]'$"):
        runner.start(config(f"tracking.{setting}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_reports_and_lists_have_names_and_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    line = {"round": 1, "cohort": [0, 2], "up": 5, "down": 6, "trips": 1, "seconds": 0.5}
    values = tracking.of_round(line | {"report": {"gap": 2.0, "weights": [0.25, 0.75]}, "faults": [{}]}, {})
    assert values["report/gap"] == 2
    assert (values["report/weights/0"], values["report/weights/1"]) == (0.25, 0.75)
    assert (values["clients/asked"], values["clients/rejected"]) == (2, 1)
    told: list[dict[str, float]] = []

    class Tracker:
        def __init__(self) -> None:
            self.last: dict[str, int] = {}

        def write(self, step: int, values: dict[str, float]) -> None:
            told.append(values)

    follower = tracking._Follower("one", Tracker)  # type: ignore[arg-type]
    follower.tell(1, {"a": float("nan"), "b": 1.0})
    follower.tell(1, {"b": 1.0})
    assert told == [{"b": 1.0}, {}]


def test_tracking_does_not_make_it_another_task() -> None:
    assert "tracking" in NO_MATTER
    assert config("tracking.mlflow=x").task_id == config().task_id
    assert parse({"tracking": {"mlflow": "x"}}).tracking.mlflow == Path("x").resolve()
    with pytest.raises(ConfigError, match=r"tracking\.mlflow = True"):
        parse({"tracking": {"mlflow": True}})
    assert "[tracking]" in template(RunConfig)
