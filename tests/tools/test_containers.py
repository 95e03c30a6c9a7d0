"""What the images do, step by step, in an empty folder: there need not be a container engine."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtailor.cli.main import app
from tests.docs.pages import ROOT


def step(*words: str) -> int:
    """A command of an image or of the compose file; its exit code."""
    return CliRunner().invoke(app, list(words)).exit_code


@pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs NVIDIA FLARE")
def test_a_participant_is_provisioned_started_healthy_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    compose = (ROOT / "docker/compose.yml").read_text()
    provision = re.findall(r"^#   fedtailor (federation init .*)$", compose, re.MULTILINE)[0]
    assert step(*shlex.split(provision), "--port", "18899") == 0
    assert {"server", "north", "south", "west", "admin"} <= {path.name for path in Path("hospitals").iterdir()}

    image = (ROOT / "docker/federation.Dockerfile").read_text()
    health = re.findall(r'HEALTHCHECK .* CMD \["fedtailor", (.*)\]$', image, re.MULTILINE)[0]
    check = [word.strip('" ').replace("/participant", "hospitals/server") for word in health.split(",")]
    assert step(*check) == 1
    try:
        assert step("federation", "start", "server", "hospitals/server", "--background") == 0
        assert step(*check) == 0
    finally:
        step("federation", "stop", "hospitals/server")
    assert step(*check) == 1
