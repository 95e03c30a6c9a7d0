"""The page on adding an algorithm works as it stands: its own asserts are the test."""

import re
from pathlib import Path

import pytest

from fedtailor.algorithms import algorithms
from fedtailor.core.algorithm import Algorithm
from fedtailor.experiments.store import read_json
from tests.docs.pages import ROOT, run_page

PAGE = ROOT / "docs/how-to/new-algorithm.md"


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(algorithms())
    page = run_page(PAGE, monkeypatch)
    assert set(algorithms()) - before == {"interpolation"}
    assert algorithms()["interpolation"] is page.Interpolation
    shares = read_json(Path("runs/interpolation/shares.json"))["clients"]  # by `fedtailor explain`, on the page
    assert len(shares) == 6
    assert {share for parts in shares.values() for share in parts.values()} <= {0.0, 0.25, 0.5, 0.75, 1.0}


def test_the_page_imports_public_names_only() -> None:
    """What a method needs is in `fedtailor` itself and in `fedtailor.testing`."""
    imports = re.findall(r"^(?:from|import) (fedtailor[\w.]*)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(imports) == {"fedtailor", "fedtailor.testing"}


def test_everything_that_an_algorithm_may_define_is_on_its_page() -> None:
    page = (ROOT / "docs/how-to/algorithm-members.md").read_text(encoding="utf-8")
    members = {name for name in vars(Algorithm) if not name.startswith("_")}
    assert not {name for name in members if not re.search(rf"\b{name}\b", page)}
