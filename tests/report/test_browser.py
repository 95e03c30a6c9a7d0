"""The page in a real browser: no errors, no requests, nothing empty; wide, narrow, light, dark; axe-core agrees."""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from fedtailor.experiments.store import read_json, write_json
from fedtailor.report import page as page_html
from fedtailor.report.write import write
from fedtailor.tables.fit import fit
from tests.made_sites import make_sites

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
AXE, AXE_SUM = "axe-core@4.14.0", "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878"
EVIL = "<script>window.alerted = true</script>"
FRAME = """<!doctype html><iframe src="page.html" width="{width}" height="900" style="border:0"></iframe>
<pre id="told"></pre><script>
addEventListener("message", (event) => {{ document.getElementById("told").textContent = JSON.stringify(event.data); }});
</script>"""
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, such as Debian's package chromium")


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core from npm, or nothing where npm cannot get it."""
    folder = tmp_path_factory.mktemp("axe")
    if shutil.which("npm") is None:
        return ""
    try:
        subprocess.run(["npm", "pack", AXE], cwd=folder, capture_output=True, check=True, timeout=60)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return ""
    with tarfile.open(next(folder.glob("*.tgz"))) as package:
        file = package.extractfile("package/axe.min.js")
        assert file is not None
        content = file.read()
    assert hashlib.sha256(content).hexdigest() == AXE_SUM
    return content.decode()


def looked_at(folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """What the checks in page.html tell, in a frame of this width."""
    (folder / "frame.html").write_text(FRAME.format(width=width), encoding="utf-8")
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--window-size=1400,1000"]
    options += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    options += [f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    command = [CHROMIUM, *options, "--dump-dom", (folder / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    assert found[1], f"the page told nothing: {done.stderr[-2000:]}"
    told: dict[str, Any] = json.loads(html.unescape(found[1]))
    return told


WAYS = pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False), (390, True)])


@WAYS
@pytest.mark.parametrize("which", ["fedrep-seed0", ""], ids=["run", "comparison"])
def test_in_a_browser(
    runs: Path, tmp_path: Path, axe: str, monkeypatch: pytest.MonkeyPatch, which: str, width: int, dark: bool
) -> None:
    for run in runs.iterdir():
        about = read_json(run / "run.json")
        about["clients"][0] = EVIL
        write_json(run / "run.json", about)
    check(runs / which if which else runs, tmp_path, axe, monkeypatch, width, dark)


@WAYS
def test_a_fit_in_a_browser(
    fitted: Path, tmp_path: Path, axe: str, monkeypatch: pytest.MonkeyPatch, width: int, dark: bool
) -> None:
    check(fitted, tmp_path, axe, monkeypatch, width, dark)


@pytest.fixture(scope="session")
def of_a_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished fit of a table with solved models; read only."""
    folder = tmp_path_factory.mktemp("table")
    source = {"path": str(make_sites(folder / "sites", sites=3, rows=80)), "target": "outcome"}
    fit(source, folder / "fit")
    return folder / "fit"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_fit_of_a_table_in_a_browser(
    of_a_table: Path, tmp_path: Path, axe: str, monkeypatch: pytest.MonkeyPatch, width: int, dark: bool
) -> None:
    check(of_a_table, tmp_path, axe, monkeypatch, width, dark, least=3)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished fit of three sites; read only."""
    folder = tmp_path_factory.mktemp("fitted")
    source = {"source": "folder", "path": str(make_sites(folder / "sites", sites=3, rows=40)), "target": "outcome"}
    fit(source, folder / "fit", rounds=4, values={"model.name": "mlp", "model.hidden": [4]})
    return folder / "fit"


def check(
    subject: Path, folder: Path, axe: str, monkeypatch: pytest.MonkeyPatch, width: int, dark: bool, least: int = 5
) -> None:
    """Everything that a page must be."""
    checks = (Path(__file__).parent / "checks.js").read_text(encoding="utf-8")
    ours = page_html.scripts()
    monkeypatch.setattr(page_html, "scripts", lambda: (checks, *([axe] if axe else []), *ours))
    write(subject, folder / "page.html")
    told = looked_at(folder, width, dark)
    assert told["problems"] == []
    assert told["requests"] == []
    assert not told["alerted"]
    assert (told["theme"], told["other"]) == (("dark", "light") if dark else ("light", "dark"))
    assert told["wide"][0] <= told["wide"][1] <= width
    assert told["charts"] >= least
    assert told["empty"] == []
    assert told["overlapping"] == []
    assert told["sorted"] == "descending"
    assert told["keys"] == sorted(told["keys"], reverse=True)
    assert told["table"] > 0
    if not axe:
        pytest.skip("all but accessibility was checked: axe-core could not be fetched with npm")
    assert told["axe"] == []
