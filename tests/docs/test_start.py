"""Pages for those who come new: other libraries, the gallery, agents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedtailor.cli.main import app
from fedtailor.experiments.config import parse, read_toml
from tests.docs.pages import ROOT, run_page


@pytest.mark.parametrize(("page", "made"), [("from-pfllib", "runs/pfllib/table.md"), ("from-fl-bench", "runs/flbench")])
def test_other_libraries(page: str, made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / f"docs/how-to/{page}.md", monkeypatch)
    assert Path(made).exists()


def test_flower(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/how-to/from-flower.md", monkeypatch)
    assert "model      net:Net" in capsys.readouterr().out


def test_agents(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/agents.md", monkeypatch)
    assert 0 < float(capsys.readouterr().out.strip().splitlines()[-1]) <= 1
    assert Path("runs/agent/report.html").exists()


def test_every_picture_is_there_and_the_run_of_the_gallery_is_that_of_the_pictures() -> None:
    page = (ROOT / "docs/gallery.md").read_text(encoding="utf-8")
    for image in re.findall(r"\]\((images/[^)]+)\)", page):
        assert (ROOT / "docs" / image).stat().st_size > 20_000, image
    script = (ROOT / "tools/pictures.sh").read_text(encoding="utf-8")
    assert re.search(r"--set.*algorithm\.name=learn2pfed-net.*--set.*rounds=10", script)
    Path("shared.toml").write_text(page.split("```toml\n# shared.toml\n")[1].split("```")[0])
    demo = {k: v for k, v in read_toml(ROOT / "configs/demo.toml").items() if k != "compare"}
    demo |= {"rounds": 10, "algorithm": {"name": "learn2pfed-net"}}
    assert parse(read_toml(Path("shared.toml"))) == parse(demo)


def test_the_short_page_for_agents_names_what_exists() -> None:
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    known = {name.rstrip("_") for name in known} | {"federation"}
    assert set(re.findall(r"`fedtailor ([a-z]+)", text)) <= known
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / target).exists(), target
