"""The page on adding an algorithm works as it stands: its own asserts are the test."""

import pytest

from fedtailor.algorithms import algorithms
from tests.docs.pages import ROOT, run_page


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(algorithms())
    page = run_page(ROOT / "docs/how-to/new-algorithm.md", monkeypatch)
    assert set(algorithms()) - before == {"interpolation"}
    assert algorithms()["interpolation"] is page.Interpolation
