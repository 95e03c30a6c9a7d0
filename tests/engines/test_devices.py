"""Runs tests/devices, file by file, each in a process that begins with the second device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices import sim

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.name for path in (ROOT / "tests/devices").glob("test_*.py"))


@pytest.mark.skipif(sim.compiler() is None, reason="no C++ compiler: the second device cannot be made")
@pytest.mark.parametrize("file", FILES)
def test_on_the_second_device(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/devices/{file}"]
    environment = os.environ | {"FEDTAILOR_SECOND_DEVICE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
