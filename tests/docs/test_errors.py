"""The page of errors: its code runs, and it lists the codes that there are."""

import re

import pytest

from fedtailor import errors
from fedtailor.errors import CODES, UserError
from tests.docs.pages import ROOT, run_page

PAGE = ROOT / "docs/reference/errors.md"


def test_the_code_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_page(PAGE, monkeypatch).code == "config.key"


def test_every_code_is_listed_with_its_class() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {code: what for code, _, what in rows} == CODES
    kinds = {code: getattr(errors, kind) for code, kind, _ in rows}
    ours = [kind for kind in UserError.__subclasses__() if kind.__module__ == errors.__name__]
    every: list[type[UserError]] = [UserError, *ours, errors.RetryableError]
    for kind in every:
        assert kinds[kind.code] is kind
    assert all(code.partition(".")[0] in (kind.code, "run") for code, kind in kinds.items())
