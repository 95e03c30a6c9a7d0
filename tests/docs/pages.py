"""Runs a page: its code blocks, in order, in one namespace and one folder."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from fedtailor.cli.main import main
from fedtailor.studies import grid
from tests.small import one_after_the_other

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w-]+\.(?:toml|py))\n")


@dataclass(frozen=True)
class Block:
    """A fenced piece of a page."""

    language: str
    text: str
    line: int  # of the page, where its text begins

    @property
    def file(self) -> str | None:
        """A block that begins with a comment such as `# sites.toml` is the content of that file."""
        found = _FILE.match(self.text)
        return found[1] if found else None


def blocks(page: Path) -> list[Block]:
    """The fenced pieces of a page, in order."""
    text = page.read_text(encoding="utf-8")
    assert text.count("```") % 2 == 0, f"{page}: a fence is not closed"
    return [Block(m[1], m[2], text.count("\n", 0, m.start(2)) + 1) for m in _BLOCK.finditer(text)]


def run_page(
    page: Path,
    monkeypatch: pytest.MonkeyPatch,
    port: str = "",
    processes: bool = False,
    without: Collection[str] = (),
) -> ModuleType:
    """Run all Python and shell of a page in the current folder; returns the namespace it leaves.

    Where a page names a port, a free one takes its place: somebody else may follow the page on this machine.
    Blocks that import packages of `without` are left out.
    Runs of a comparison have processes of their own only if asked: each imports torch, and tests/e2e shows them.
    """
    if processes:
        monkeypatch.setattr(grid, "cores", lambda: 1)  # one at a time
    else:
        one_after_the_other(monkeypatch)
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    ran = 0
    for block in blocks(page):
        if any(re.search(rf"^(import|from) {package}\b", block.text, re.MULTILINE) for package in without):
            continue
        if block.file is not None:
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            run_python(block, page, module)
            ran += 1
        elif block.language == "sh":
            for command in block.text.splitlines():
                run_command(command.replace(port, free_port()) if port else command, monkeypatch)
                ran += 1
    assert ran, f"{page}: nothing to run"
    return module


def free_port() -> str:
    """A port of this machine that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def run_python(block: Block, page: Path, module: ModuleType) -> None:
    """Run one block; a traceback shows the page and its line."""
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    exec(code, module.__dict__)  # noqa: S102 - the page's own code is what is tested


def make_sites() -> None:
    """The three files with which the page on own data begins."""
    page = ROOT / "docs/how-to/own-data.md"
    run_python(blocks(page)[0], page, ModuleType("sites"))


def run_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command of a page. Those that would set up or run everything are only looked up."""
    words = shlex.split(command, comments=True)
    if not words:
        return
    if words[0] == "make":
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    elif "pip" in words or "venv" in words or words[0] == "source":
        for option, value in pairwise(words):
            if option == "--constraint":
                assert (ROOT / value).is_file(), command
    elif words[:2] == ["fedtailor", "federation"] and words[2] in ("init", "submit", "status"):  # they load FLARE
        done = subprocess.run([sys.executable, "-m", "fedtailor.cli.main", *words[1:]], capture_output=True, text=True)
        print(done.stdout)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    elif words[0] == "fedtailor" or words[:3] == ["python", "-m", "fedtailor"]:
        if words[0] == "python":  # which then also imports from the current folder
            monkeypatch.syspath_prepend(Path.cwd())
            words = words[2:]
        monkeypatch.setattr(sys, "argv", words)  # in this process: torch is imported already
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (None, 0), command
    elif words[0] == "torchrun":
        meeting = ["--master-addr", "127.0.0.1", "--master-port", free_port()]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *meeting, *words[1:]],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    else:
        python = words[0] == "python"
        where = ROOT if any(w.startswith(("tests", "benchmarks")) for w in words) else Path.cwd()
        done = subprocess.run(
            [sys.executable if python else words[0], *words[1:]],
            cwd=where,
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
