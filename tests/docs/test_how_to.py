"""The pages on runs and on models work as they stand."""

import pytest

from tests.docs.pages import ROOT, run_page


def test_resume(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/how-to/resume.md", monkeypatch)
    assert "status     3 of 6 rounds; go on with: fedtailor resume runs/interrupted" in capsys.readouterr().out


def test_messages_of_the_page_on_runs_are_in_the_code() -> None:
    page = (ROOT / "docs/how-to/resume.md").read_text(encoding="utf-8")
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src/fedtailor").rglob("*.py"))
    code = code.replace("{CONFIG}", "config.toml")
    messages = [line.split("`")[1] for line in page.split("exit code 2:\n")[1].splitlines() if line.startswith("| `")]
    assert len(messages) == 6
    for message in [*messages, "no space left on the disk; the last checkpoint is intact. Free some, then "]:
        assert message in code
        assert message in page


def test_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/how-to/own-model.md", monkeypatch)
