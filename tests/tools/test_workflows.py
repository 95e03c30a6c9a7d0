"""Workflows, containers and services call what exists: make targets, commands of fedtailor, files."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from fedtailor.cli.main import app
from tests.docs.pages import ROOT

TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
COMMANDS = typer.main.get_command(app).commands["federation"].commands  # type: ignore[attr-defined]


def runs(workflow: Path) -> list[str]:
    """Every command line of a workflow."""
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_only_calls_make_and_installs(workflow: Path) -> None:
    lines = runs(workflow)
    for line in lines:
        assert line.startswith(("make ", "sudo apt-get ")), line
        if line.startswith("make "):
            assert line.removeprefix("make ") in TARGETS
    assert lines or workflow.stem == "release"


def test_every_python_of_the_classifiers_is_tested() -> None:
    versions = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == versions


@pytest.mark.parametrize("name", ["cli", "federation"])
def test_images_are_pinned_not_root_and_copy_what_is_there(name: str) -> None:
    text = (ROOT / f"docker/{name}.Dockerfile").read_text()
    steps = re.findall(r"^([A-Z]+) (.*(?:\\\n.*)*)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), re.MULTILINE)
    kinds = [kind for kind, _ in steps]
    assert re.fullmatch(r"python:3\.\d+-slim-[a-z]+", dict(steps)["FROM"])  # hadolint DL3006, DL3007
    assert dict(steps)["USER"] == "10001"  # DL3002
    assert kinds.index("USER") > kinds.index("RUN")
    assert "ADD" not in kinds  # DL3020
    for kind, rest in steps:
        if kind in ("ENTRYPOINT", "CMD"):
            assert rest.startswith("[")  # DL3025
        if kind == "COPY":
            source = rest.split()[0]
            assert source == "dist/*.whl" or (ROOT / source).exists()
            assert f"!{source}" in (ROOT / ".dockerignore").read_text().splitlines()


def participants() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((ROOT / "docker/compose.yml").read_text())["services"]
    return services


def test_the_hospitals_are_locked_down_and_see_their_own_folder_only() -> None:
    assert list(participants()) == ["server", "north", "south", "west"]
    for name, service in participants().items():
        assert service["read_only"] is True
        assert (service["user"], service["cap_drop"]) == ("10001", ["ALL"])
        assert service["volumes"] == [f"../hospitals/{name}:/participant"]
        assert service["command"] == ["server" if name == "server" else "site", "/participant"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("role", ["server", "site"])
def test_units_are_valid(role: str, tmp_path: Path) -> None:
    """But for the path of the command, which is that of the machine."""
    text = (ROOT / f"docker/fedtailor-{role}.service").read_text()
    unit = tmp_path / f"fedtailor-{role}.service"
    unit.write_text(text.replace("/opt/fedtailor/bin/fedtailor", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    unit.write_text(text.replace("[Service]", "[Service]\nProtectSistem=strict"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert "ProtectSistem" in done.stderr


def test_commands_in_services_exist() -> None:
    for role in ("server", "site"):
        unit = (ROOT / f"docker/fedtailor-{role}.service").read_text()
        words = shlex.split(re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)[0])
        assert words[1] == "federation"
        assert words[2] in COMMANDS
        assert words[3] == role
        assert f"ReadWritePaths={words[4]}\n" in unit
    pod = yaml.safe_load((ROOT / "docker/site.kubernetes.yaml").read_text())["spec"]["template"]["spec"]
    assert pod["containers"][0]["livenessProbe"]["exec"]["command"][2] in COMMANDS
    text = (ROOT / "docker/federation.Dockerfile").read_text()
    assert re.findall(r'"federation", "(\w+)"', text) == ["health", "start"]
    assert {"health", "start"} <= set(COMMANDS)
