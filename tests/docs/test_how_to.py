"""The pages on runs, comparisons and models work as they stand."""

from pathlib import Path

import pytest

from fedtailor.runs.config import FederationSection, SearchSection
from fedtailor.runs.store import RunFolder
from tests.docs.pages import ROOT, run_page
from tests.runs.small import one_after_the_other


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


def test_compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one_after_the_other(monkeypatch)
    run_page(ROOT / "docs/how-to/compare.md", monkeypatch)
    out = capsys.readouterr().out
    assert "search/ditto_local.lr_0.3__lam_1.0-seed1000  6/6 rounds" in out
    assert "Settings were found by search on validation data: 4 trials each, seed 1000" in out
    assert "- FedAvg: local.lr 0.3 (tried 2 of 4)" in out


def test_all_keys_of_a_search_are_listed_with_their_defaults() -> None:
    section = (ROOT / "docs/how-to/compare.md").read_text(encoding="utf-8").split("## Search settings\n")[1]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    listed = {key.strip(" `"): default.strip(" `") for key, default in rows}
    defaults = SearchSection().model_dump()
    assert listed == {key: str(value) if value != {} else "none" for key, value in defaults.items()}


def test_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one_after_the_other(monkeypatch)
    run_page(ROOT / "docs/how-to/report.md", monkeypatch)
    out = capsys.readouterr().out
    for file in ("runs/small/fedrep-seed0/report.html", "small.html"):
        assert f"wrote {file}\n" in out
        assert 'id="charts"' in Path(file).read_text(encoding="utf-8")


def test_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs/how-to/several-machines.md"
    run_page(page, monkeypatch)
    assert RunFolder(Path("runs/two")).results is not None
    text = page.read_text(encoding="utf-8")
    assert f"`federation.timeout` seconds ({FederationSection().timeout:g})" in text


def test_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/how-to/own-model.md", monkeypatch)
