"""The page on newcomers works as it stands, and its messages are those given."""

import re

import pytest

from tests.docs.pages import ROOT, run_page

PAGE = ROOT / "docs/how-to/onboard.md"


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(PAGE, monkeypatch)
    out = capsys.readouterr().out
    assert re.search(r"west.*\b78\b.*\b12\b.*\b30\b", out)
    assert "runs/sites/newcomers/west" in out
    assert "unseen clients" in out


def test_messages_are_in_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8").split("## Errors you may see\n")[1]
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src/fedtailor").rglob("*.py"))
    messages = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert len(messages) == 6
    assert [m for m in messages if m not in code] == []
