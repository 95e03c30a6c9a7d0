"""The live pages of a federation's server and of a site: what they show, to whom, and in a real browser."""

from __future__ import annotations

import http.client
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from fedtailor.flare import operate
from fedtailor.flare.approval import read_pending
from fedtailor.report import page as page_html
from fedtailor.report.federation_page import participant_page, participant_server
from fedtailor.report.page import render_html
from fedtailor.report.watch import Server
from tests.flare.sites import Authority
from tests.flare.test_flare import Federated, away, configured
from tests.flare.test_participation import run
from tests.flare.test_site import Asked
from tests.report.test_browser import AXE_SUM, CHROMIUM, looked_at
from tests.report.test_browser import axe as axe

EVIL = "<script>window.alerted = true</script>"


@pytest.fixture(scope="session")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a server with a finished run, which a site has left in the third round; read only."""
    root = tmp_path_factory.mktemp("federation")
    federated = Federated(root, configured("fedrep", "rounds=5"))
    federated.link.before = away("client-01", {3})
    run(federated)
    folder = root / "hospital"
    (folder / "runs").mkdir(parents=True)
    shutil.copytree(federated.server.path, folder / "runs/outcome")
    Authority().write_kit(folder / "kit", "server")
    (folder / operate.LOG).write_text(f"old\nthe last line {EVIL}\n")
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The folder of a site that was asked for a run, which waits, and for another, which was refused."""
    asked = Asked(tmp_path, approve="ask")
    assert asked.start()["state"] == "waiting"
    asked.ask({"op": EVIL})
    return asked.file.parent


@pytest.fixture
def served(hospital: Path) -> Iterator[Server]:
    with participant_server(hospital) as made:
        thread = Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def get(server: Server, path: str, host: str = "") -> tuple[int, str]:
    line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    line.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = line.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_is_for_who_knows_its_address(served: Server) -> None:
    assert served.server_address[0] == "127.0.0.1"
    root = "/" + served.address.split("/", 3)[3]
    assert len(root) > 20
    code, text = get(served, root)
    assert (code, "client-01" in text) == (200, True)
    told = json.loads(get(served, f"{root}data")[1])
    assert told["finished"] is False
    assert json.loads(get(served, f"{root}data")[1]) == told  # nothing has changed
    for path in ("/", "/data", f"{root}x", root[:-2] + "/", f"{root}../data"):
        code, text = get(served, path)
        assert (code, "client-01" in text) == (404, False)
    assert get(served, root, "evil.example")[0] == 403


def test_what_a_server_shows(hospital: Path) -> None:
    page = participant_page(hospital)
    sections = {section.id: section for section in page.sections}
    assert list(sections) == ["overview", "runs", "sites-0", "log"]
    assert "hospital is not running" in sections["overview"].text[0]
    ((run_name, state, *_),) = sections["runs"].tables[0].rows
    assert (run_name.text, state.text) == ("outcome", "finished")
    rows = {row[0].text: row for row in sections["sites-0"].tables[0].rows}
    assert rows["client-00"][-1].text == "took part in all 5 rounds"
    assert "silent in round" in rows["client-01"][-1].text or "silent since round" in rows["client-01"][-1].text
    faults = [[cell.text for cell in row] for row in sections["sites-0"].tables[1].rows]
    assert faults[0][:2] == ["3", "client-01"]
    assert "the last line" in sections["log"].code[0][1]


def test_what_a_site_shows(site: Path) -> None:
    page = participant_page(site)
    sections = {section.id: section for section in page.sections}
    (identity,) = read_pending(site / "private")
    assert identity in sections["pending"].tables[0].title
    assert ("leaves" in [row[0].text for row in sections["pending"].tables[0].rows]) is True
    assert any("number of training rows" in text for s in page.sections for text in s.text)
    assert "<script>window" not in re.sub(r"<script>.{200,}?</script>", "", render_html(page), flags=re.DOTALL)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, such as Debian's package chromium")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (600, False), (390, True)])  # 600: 1200 at 200 %
@pytest.mark.parametrize("which", ["server", "site"])
def test_in_a_browser(
    which: str,
    width: int,
    dark: bool,
    hospital: Path,
    site: Path,
    tmp_path: Path,
    axe: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = (Path(__file__).parent / "checks.js").read_text(encoding="utf-8")
    ours = page_html.scripts()
    monkeypatch.setattr(page_html, "scripts", lambda: (checks, *([axe] if axe else []), *ours))
    text = render_html(participant_page(hospital if which == "server" else site))
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    told = looked_at(tmp_path, width, dark)
    assert told["problems"] == []
    assert told["requests"] == []
    assert not told["alerted"]
    assert told["wide"][0] <= told["wide"][1] <= width
    if not axe:
        pytest.skip("all but accessibility was checked: axe-core could not be fetched with npm")
    assert AXE_SUM
    assert told["axe"] == []
