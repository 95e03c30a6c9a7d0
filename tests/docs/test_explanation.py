"""The pages that explain: their code runs, and the numbers worked out in words are those of the program."""

import pytest

from tests.docs.pages import ROOT, blocks, run_page


def test_federation(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_page(ROOT / "docs/explanation/federation.md", monkeypatch).found
    text = (ROOT / "docs/explanation/federation.md").read_text(encoding="utf-8")
    for value in ("`w` = 1.5", "The sum is 0.5", "adds them up: -0.5", "4 and 8\n   stay"):
        assert value in text
    assert [found["w"].item(), found["loss"].item(), found["by first w"].item(), *found["by lr"].tolist()] == [
        1.5,
        0.5,
        -0.5,
        4,
        8,
    ]


def test_secure_aggregation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs/explanation/secure-aggregation.md"
    run_page(page, monkeypatch)
    out = capsys.readouterr().out
    printed = next(b.text for b in blocks(page) if b.language == "text")
    assert printed in out
    assert "privacy    secure sums; changes clipped to 1; noise 4: epsilon" in out


def test_evaluation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/explanation/evaluation.md", monkeypatch)
    out = capsys.readouterr().out
    assert "hurt       unknown" not in out
    assert "worst tenth" in out
