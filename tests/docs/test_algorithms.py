"""The pages on algorithms: their commands run, and every option they name exists."""

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, run_page


def test_learn2pfed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("configs").symlink_to(ROOT / "configs")
    run_page(ROOT / "docs/algorithms/learn2pfed.md", monkeypatch)
    out = capsys.readouterr().out
    assert "| oracle |" in out
    assert "share of the common model" in out


@pytest.mark.parametrize(
    "page", ["cfl", "duw", "fedbabu", "fedpac", "fedselect", "knn-per", "lg-fedavg", "lp-proj", "pfedme"]
)
def test_page(page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / f"docs/algorithms/{page}.md", monkeypatch)
    assert "last round" in capsys.readouterr().out
