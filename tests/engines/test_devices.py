"""Runs tests/devices in two processes that begin with the second device; each imports torch and all methods anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices import sim

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sim.compiler() is None, reason="no C++ compiler: the second device cannot be made")
@pytest.mark.parametrize("chosen", ["not thorough", pytest.param("thorough", marks=pytest.mark.thorough)])
def test_on_the_second_device(chosen: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", chosen, "tests/devices"]
    environment = os.environ | {"FEDTAILOR_SECOND_DEVICE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
