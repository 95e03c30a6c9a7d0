"""The page on a real federation works as it stands."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from fedtailor.cli.federation_commands import policy
from fedtailor.flare import operate
from fedtailor.flare.kits import TEMPLATE
from fedtailor.flare.policy import Policy
from fedtailor.flare.site import SiteFile
from tests.docs.pages import ROOT, blocks, run_page


@pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs NVIDIA FLARE")
def test_federation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], empty_folder: Path) -> None:
    try:
        run_page(ROOT / "docs/how-to/federation.md", monkeypatch, port="18777")
    finally:
        for participant in empty_folder.glob("hospitals/*"):
            operate.stop_participant(participant)
    out = capsys.readouterr().out
    assert "outcome: submitted to north, south, west\n" in out
    assert "outcome: done." in out
    assert "site west: connected" in out
    assert "run outcome: finished:completed" in out
    assert "selected round" in out


def test_the_template_of_a_site_has_every_key_of_the_policy() -> None:
    named = re.findall(r"^(?:# )?(\w+) = ", TEMPLATE, re.MULTILINE) + re.findall(
        r"^\[policy\.(\w+)\]", TEMPLATE, re.MULTILINE
    )
    assert set(Policy.model_fields) <= set(named)


def test_what_a_fit_needs_of_a_policy_is_listed() -> None:
    (shown,) = (tomllib.loads(b.text) for b in blocks(ROOT / "docs/how-to/federation.md") if b.file == "fit.toml")
    needed = tomllib.loads(policy())["policy"]
    assert {k: sorted(v) for k, v in shown["policy"].items()} == {k: sorted(v) for k, v in needed.items()}
    SiteFile.model_validate(shown)


def test_the_file_of_a_site_of_another_flare() -> None:
    (shown,) = (tomllib.loads(b.text) for b in blocks(ROOT / "docs/how-to/existing-flare.md") if b.file == "site.toml")
    assert SiteFile.model_validate(shown).kit == Path("..")
