"""The site: every page is on it, what is made from the code is complete, and the check of links finds mistakes."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from docs import hooks
from fedtailor.algorithms import algorithms
from fedtailor.cli.main import app
from fedtailor.core.algorithm import Algorithm
from fedtailor.data import SOURCES
from fedtailor.experiments.config import CompareConfig
from fedtailor.experiments.sections import SearchSection
from tests.docs.pages import ROOT, run_page


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^ +- (?:[\w ,]+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    there = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md") if ".intro" not in p.name}
    assert sorted(listed) == sorted({*there, *hooks.ROOT_PAGES.values()})


def test_every_marker_is_on_a_page() -> None:
    pages = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs/reference").glob("*.md"))
    assert sorted(re.findall(r"<!-- made from .*? -->", pages)) == sorted(hooks.MADE)


def test_every_key_of_a_configuration_is_listed_with_its_default() -> None:
    page = hooks.configuration()

    def row(heading: str, key: str) -> str:
        part = page.split(f"\n{heading}\n")[1].split("\n##")[0]
        return next(line for line in part.splitlines() if line.startswith(f"| `{key}` |"))

    tables = {f"## `[{name}]`": section for name, section in CompareConfig(search=SearchSection()) if name != "data"}
    for heading, section in tables.items():
        for key in type(section).model_fields if isinstance(section, BaseModel) else ():
            assert row(heading, key)
    for source, info in SOURCES.items():
        for key in info.config.model_fields.keys() - {"source"}:
            assert row(f'### source = "{source}"', key)
    assert row("## `[local]`", "lr") == "| `lr` | `0.05` | number > 0 | Learning rate. |"
    assert row("## `[federation]`", "max_norm").split(" | ")[1] == "`1e+08`"
    assert row("## `[compare]`", "algorithms").split(" | ")[1] == '`["local", "fedavg"]`'
    assert row("## `[evaluation]`", "unseen").split(" | ")[1:3] == ["none", "number or list of texts"]
    assert row('### source = "folder"', "target").split(" | ")[1] == "required"
    assert "<class" not in page
    assert "typing" not in page


def test_every_command_and_option_is_listed() -> None:
    page = hooks.commands()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        part = page.split(f"## fedtailor {name}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            if parameter.name != "help":
                assert (parameter.opts[0] if parameter.opts[0][0] == "-" else parameter.metavar) in part
                assert parameter.help, (name, parameter.name)


def test_every_option_of_an_algorithm_has_its_sentence() -> None:
    page = f"\n{hooks.algorithm_options()}"
    for name, kind in algorithms().items():
        if kind.__module__.startswith("fedtailor."):
            fields = {field.name for field in dataclasses.fields(kind)}
            assert fields - set(hooks.field_sentences(kind)) == set(), name
            assert f"\n## {name}\n" in page


def test_every_class_variable_of_an_algorithm_is_listed() -> None:
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    variables = [name for name, kind in Algorithm.__annotations__.items() if kind.startswith("ClassVar")]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == variables


def test_the_python_reference_is_that_of_today_and_readable_in_a_clone() -> None:
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "tools/python_reference.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ":::" not in page
    for name in ("Federation.map", "ClientContext.sgd", "ClientContext.features", "Run.rounds", "ComparisonRuns.table"):
        assert f"#### {name}\n" in page
    assert "- `epochs`: Passes over the training samples." in page


def test_links_that_lead_nowhere_and_other_hosts_are_found(tmp_path: Path) -> None:
    head = '<script src="https://example.org/x.js"></script><link rel="stylesheet" href="style.css">'
    links = '<a href="b.html#here">1</a><a href="b.html#there">2</a><a href="c.html">3</a><a href="https://x.y">4</a>'
    (tmp_path / "a.html").write_text(head + links)
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1>')
    assert list(hooks.mistakes(tmp_path)) == [
        "a.html: loads https://example.org/x.js",
        "a.html: style.css leads nowhere",
        "a.html: b.html#there has no such place",
        "a.html: c.html leads nowhere",
    ]


@pytest.mark.skipif(find_spec("material") is None, reason="make docs installs what builds the site")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    page = (tmp_path / "site/reference/python.html").read_text(encoding="utf-8")
    for name in ("Algorithm", "on_client", "ReplySpec", "ClientContext", "Federation", "Model", "Solver", "start"):
        assert f'id="{name.lower()}"' in page, name
    assert not list((tmp_path / "site").rglob("*intro*"))


@pytest.mark.parametrize("page", ["commands", "configuration", "algorithms"])
def test_commands_of_the_reference_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / f"docs/reference/{page}.md", monkeypatch)
