"""Runs of a fraction of a second, and what two runs must have in common to be the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import Any

import pytest

from fedtailor.core.data import FederatedData
from fedtailor.experiments import runner
from fedtailor.experiments.config import RunConfig, parse, with_settings
from fedtailor.experiments.store import RunFolder
from fedtailor.studies import grid
from fedtailor.testing.federations import make_data

DIGITS: dict[str, Any] = {
    "rounds": 5,
    "data": {"source": "digits", "clients": 4, "max_samples": 40},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"lr": 0.1, "batch_size": 8},
    "checkpoint": {"seconds": 0},
}
POLYNOMIAL = DIGITS | {"data": {"source": "polynomial", "clients": 4, "samples": 80}}
ADAPTED = DIGITS | {"model": {"name": "fedtailor.testing.federations:Adapted", "head": ["out"]}}
COUNTS = DIGITS | {"data": {"source": "tests.small:counts"}, "model": {"name": "linear", "dtype": "float64"}}
CLASSES = COUNTS | {"data": {"source": "tests.small:classes"}}
NORMED = DIGITS | {"model": {"name": "resnet8", "width": 8}}


SITES = dict.fromkeys(("ada", "bo", "cy", "dan"), (12, 4, 4))  # train, val, test


def counts(seed: int) -> FederatedData:
    """Counts of four sites."""
    return make_data("count", sizes=SITES, outputs=1)


def classes(seed: int) -> FederatedData:
    """Three classes at four sites, of few features: where all pairs of coefficients are sent."""
    return make_data(sizes=SITES)


def config(*settings: str, task: dict[str, Any] = DIGITS) -> RunConfig:
    """A small task with settings as on the command line."""
    made: RunConfig = parse(with_settings(task, settings))
    return made


def stop_after(rounds: int) -> runner.Listener:
    """Ctrl-C at the end of a round."""

    def listen(progress: runner.Progress) -> None:
        if progress.round == rounds:
            raise KeyboardInterrupt

    return listen


def interrupt_after_a_run(waiting: set[Future[None]]) -> None:
    """Ctrl-C in a grid; to be put in place of the pause between two looks at its runs."""
    next(as_completed(waiting))
    wait([run for run in waiting if not run.cancel()])
    raise KeyboardInterrupt


def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a grid share a thread of this process: the tests of tests/e2e use processes."""

    def pool(workers: int, context: Any, initializer: Callable[..., None], initargs: Any) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, initializer=initializer, initargs=initargs)

    monkeypatch.setattr(grid, "ProcessPoolExecutor", pool)


def records(folder: RunFolder) -> dict[str, Any]:
    """All that a run has recorded, without times; text, because not-a-number differs from itself."""
    results = {k: v for k, v in (folder.results or {}).items() if k != "seconds"}
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in folder.metrics()]
    return {
        "fingerprint": folder.fingerprint(),
        "results": json.dumps(results),
        "metrics": [json.dumps(line) for line in lines],
    }


def files(path: Path) -> list[str]:
    """Names of all files under a folder."""
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())
