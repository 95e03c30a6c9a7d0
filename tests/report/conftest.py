"""Three algorithms on one small task, run once and copied for each test that asks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedtailor.experiments import runner
from tests.small import config

NAMES = ("local", "fedavg", "fedrep")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs; read only."""
    folder = tmp_path_factory.mktemp("finished")
    for name in NAMES:
        runner.start(config("rounds=3", f"algorithm.name={name}"), folder / f"{name}-seed0")
    return folder


@pytest.fixture
def runs(finished: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    shutil.copytree(finished, tmp_path / "runs")
    return tmp_path / "runs"
