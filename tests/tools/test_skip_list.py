"""A new skip fails; a known one is counted, and only where what it needs is missing."""

import sys
from typing import Any

import pytest

from tests.skip_list import summary, unknown

KEPT: list[dict[str, Any]] = [
    {"reason": "needs a"},
    {"reason": "needs b", "unless": {"program": "sh"}},
    {"reason": "needs c", "unless": {"module": "no_such_module"}},
    {"reason": "needs d", "unless": {"variable": "FEDTAILOR_TRIED"}},
]


def test_reasons_are_held_to_the_list_and_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = ["needs a", "needs a thing", "needs b", "needs c", "needs d", "too slow"]
    monkeypatch.delenv("FEDTAILOR_TRIED", raising=False)
    assert unknown(reasons, KEPT) == ["needs b", "too slow"]
    monkeypatch.setenv("FEDTAILOR_TRIED", "1")
    assert unknown(reasons, KEPT) == ["needs b", "needs d", "too slow"]


def test_every_skip_is_counted() -> None:
    lines, wrong = summary(["other C libraries cannot be told"] * 2 + ["tired"])
    assert lines[0] == "3 tests skipped"
    assert "    2  other C libraries cannot be told" in lines
    assert wrong == ["tired"]


def test_a_new_skip_fails_the_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    import subprocess

    from tests.docs.pages import ROOT

    file = tmp_path_factory.mktemp("skips") / "test_new.py"
    file.write_text("import pytest\ndef test(): pytest.skip('tired')\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, f"--rootdir={ROOT}", "-p", "tests.conftest", str(file)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 tests skipped" in done.stdout
    assert "tired  NOT ON THE LIST" in done.stdout
