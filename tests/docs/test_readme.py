"""The README works as it stands, and all links between pages lead somewhere."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from fedtailor import __version__
from fedtailor.algorithms import algorithms
from fedtailor.engines import ENGINES
from fedtailor.experiments.config import CompareConfig, parse, read_toml
from fedtailor.studies import compare
from fedtailor.studies.compare import cells
from fedtailor.studies.result_tables import terminal
from tests.docs.pages import ROOT, blocks, make_sites, run_page

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_readme_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_sites()
    subprocess.run([sys.executable, "-m", "fedtailor", "demo"], check=True, capture_output=True)  # of `make demo`
    run_page(README, monkeypatch, processes=True)
    out = capsys.readouterr().out
    assert "all promises hold" in out
    assert "OwnHeads" in Path("runs/mine/table.md").read_text()
    for made in ("runs/demo/report.html", "runs/sites/report.html", "predicted.csv", "north.pt2"):
        assert Path(made).exists(), made
    # the table shown is that of the demo, within what another processor may round differently
    demo = parse(read_toml(ROOT / "configs/demo.toml"), CompareConfig)
    Console().print(terminal(compare.rows(cells(demo, Path("runs/demo"))), ""))
    found, shown = rows(capsys.readouterr().out), rows(README.read_text(encoding="utf-8"))
    assert list(found) == list(shown) == ["Local", "FedAvg", "FedRep", "Ditto"]
    for name, row in found.items():
        assert row[:-1] == pytest.approx(shown[name][:-1], abs=2), name


def test_the_library_counts_its_own_methods_right() -> None:
    ours = [kind for kind in algorithms().values() if kind.__module__.startswith("fedtailor.")]
    personal = [kind for kind in ours if kind.keeps != "nothing"]
    table = (ROOT / "docs/explanation/libraries.md").read_text(encoding="utf-8")
    assert f"| {len(personal)} of {len(ours)} |" in table
    for page in (README, ROOT / "docs/methods.md"):
        text = page.read_text(encoding="utf-8")
        assert re.search(rf"\b{len(ours)} methods\b", text), page
        assert f"{len(personal)} of them personalized" in text, page


def test_readme_is_two_screens_before_its_first_list() -> None:
    text = README.read_text(encoding="utf-8")
    before = re.split(r"^(?:[-*] |\|)", text, maxsplit=1, flags=re.MULTILINE)[0]
    assert "make demo" in before
    assert "## Three stories" in before
    assert len(re.findall(r"^- |^\|", text, re.MULTILINE)) <= 12  # lists and tables are on pages


def test_first_block_in_a_fresh_clone(tmp_path: Path) -> None:
    """With an environment that is set up already: which versions it has is what `make setup` pins."""
    first = next(block for block in blocks(README) if block.language == "sh")
    assert first.text.splitlines() == ["make demo", "make test"]
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    (clone / ".venv/bin").mkdir(parents=True)
    for name, command in {"python": "", "fedtailor": "-m fedtailor"}.items():
        (clone / ".venv/bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
        (clone / ".venv/bin" / name).chmod(0o755)
    for ready in (".ready", ".all-ready"):
        (clone / ".venv" / ready).touch()
    environment = os.environ | {"PYTHONPATH": str(clone / "src")}
    done = subprocess.run(["make", "demo"], cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "FedRep" in done.stdout
    assert (clone / "runs/demo/report.html").is_file()
    environment |= {"PYTEST_ADDOPTS": "tests/numerics"}  # one folder for all, and no lint
    done = subprocess.run(["make", "test", "LINT=true"], cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)


def rows(text: str) -> dict[str, list[float]]:
    """Figures of a printed table by algorithm: accuracy, spread, selected, spread, worst tenth, hurt, up, seconds."""
    lines = re.findall(r"^ +(\w+) +((?:[\d.]+[ ±%kMB]+){7}[\d.]+) *$", text, re.MULTILINE)
    return {name: [float(v) for v in re.findall(r"[\d.]+", figures)] for name, figures in lines}


def test_algorithms_and_engines_are_named() -> None:
    text = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    for kind in algorithms().values():
        if kind.__module__.startswith("fedtailor."):
            assert kind.title in text
    for engine in ENGINES:
        assert f"`{engine}`" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    if page.parts[-2] != "results":
        assert {block.language for block in blocks(page)} <= {"python", "sh", "toml", "text"}


def test_every_page_is_on_the_map() -> None:
    listed = re.findall(r"\]\(([^)#]+\.md)\)", (ROOT / "docs/index.md").read_text(encoding="utf-8"))
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert {page for page in there if not page.startswith("results/") and not page.endswith(".intro.md")} <= set(listed)


def test_contributing_names_targets_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "CONTRIBUTING.md", monkeypatch)


def test_map_commands_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/index.md", monkeypatch)


def test_version_and_licence_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" in project["dynamic"]  # from version.py
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    for line in ("cff-version: 1.2.0", f"version: {__version__}", f"license: {project['license']}"):
        assert line in citation
    assert f"\n## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
