"""The page on the architecture: its layers are those of the linter, and commands take the paths that it shows."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.made_sites import make_sites

SOURCE = ROOT / "src/fedtailor"
PAGE = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")


def test_the_picture_shows_the_layers_that_are_checked() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ][0]
    checked = [name for layer in contract["layers"] for name in layer.split(" | ")]
    picture = PAGE.split("```text\n")[1].split("```")[0].splitlines()
    shown = [name for line in picture for name in re.split(r"\s{3,}", line.strip())[0].split()]
    assert shown == checked
    described = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, re.MULTILINE))))
    assert described == set(checked) - {"plugins", "errors", "version"}


def stations(command: str, process: str = "") -> list[str]:
    """The files that the page shows for a command, or for one of its processes."""
    section = PAGE.split(f"### fedtailor {command}\n")[1].split("\n##")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    files = [row[-2].strip("`") for row in rows if row[0] == process or (not process and row[0].startswith("`"))]
    assert len(files) == len(set(files)) > 5
    assert all((SOURCE / file).is_file() for file in files)
    return files


def trace(folder: Path, *command: str) -> list[list[str]]:
    """Of each process of a command: the files of fedtailor in the order in which it first enters them."""
    (folder / "traces").mkdir()
    hook = {"TRACE_SOURCE": str(SOURCE), "TRACE_FILES": str(folder / "traces")}
    path = os.pathsep.join([str(Path(__file__).parent / "hook"), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "fedtailor", *command],
        cwd=folder,
        env=os.environ | hook | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return [file.read_text().splitlines() for file in (folder / "traces").iterdir()]


def is_path(shown: list[str], entered: list[str]) -> bool:
    """Whether these files are entered in this order, among others."""
    found = [file for file in entered if file in shown]
    assert found == shown, f"entered: {entered}"
    return True


CONFIG = """
rounds = 2
[data]
source = "digits"
clients = 2
[model]
name = "mlp"
hidden = [8]
[algorithm]
name = "fedavg"
"""


def test_the_path_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    (entered,) = trace(tmp_path, "run", "config.toml", "--out", "run")
    assert is_path(stations("run"), entered)


def test_the_path_of_a_fit(tmp_path: Path) -> None:
    make_sites(tmp_path / "sites", 3)
    (entered,) = trace(tmp_path, "fit", "sites", "--target", "outcome", "--out", "fit")
    assert is_path(stations("fit"), entered)


@pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs NVIDIA FLARE")
def test_the_paths_of_a_federation(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    one = ("--set", "data.clients=1", "--set", "rounds=1", "--out", "federation")
    processes = trace(tmp_path, "federation", "local", "1", "config.toml", *one)
    ours = {
        "command": next(entered for entered in processes if "cli/main.py" in entered),
        "server": next(e for e in processes if "flare/server.py" in e and "cli/main.py" not in e),
        "site": next(entered for entered in processes if "training/steps.py" in entered),
    }
    for process, entered in ours.items():
        assert is_path(stations("federation local", process), entered), process
