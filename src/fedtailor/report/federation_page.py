"""The live page of a participant: a server's sites and runs, or what left a site and what waits for a person there."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from fedtailor.errors import RunError
from fedtailor.experiments.store import RunFolder
from fedtailor.flare.approval import read_pending
from fedtailor.flare.audit import read_runs
from fedtailor.flare.kits import RUNS, SITE
from fedtailor.flare.operate import LOG, RunStatus, Status, condition_words, problems, read_status
from fedtailor.flare.participation import attendance_words, has_missed, rounds_taken
from fedtailor.flare.policy import account_text
from fedtailor.flare.site import AUDIT, read_site
from fedtailor.report.audit_page import audit_sections
from fedtailor.report.formatting import count, duration
from fedtailor.report.page import KeyFigure, Page, PageSection, PageTable, TableCell, cells, render_html
from fedtailor.report.watch import Server
from fedtailor.studies.result_tables import size
from fedtailor.version import __version__

LOG_LINES, MOST_FAULTS, MOST_RUNS = 30, 20, 10
FIGURES = ("seconds", "faults", "abandoned", "up", "down", "epsilon")  # of a run
EVERY = 2.0  # seconds between two looks at the folder, however many browsers ask


class WatchedParticipant:
    """The page of a participant's folder, made anew every few seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock()
        self._cached, self._at = ("", False, ""), -EVERY

    def current(self) -> tuple[str, bool, str]:
        """The version, whether nothing more will come, and the page."""
        with self._lock:
            if time.monotonic() - self._at > EVERY:
                page = render_html(participant_page(self.folder), live=True)
                self._cached = (hashlib.sha256(page.encode()).hexdigest()[:16], False, page)
                self._at = time.monotonic()
            return self._cached


def participant_server(folder: Path, port: int = 0) -> Server:
    """Serves the page on this machine, under an address that only its reader knows."""
    read_status(folder, asks=False)  # report errors in it now
    try:
        return Server(WatchedParticipant(folder), port, secrets.token_urlsafe(16))
    except (OSError, OverflowError) as error:
        raise RunError(f"--port {port}: cannot be used: {error}; 0 takes a free one") from None


def participant_page(folder: Path) -> Page:
    status = read_status(folder)
    now = status.condition["now"]
    state = f"running as process {status.process}" if status.process else "not running"
    wrong = problems(status, now)
    words = (*(f"Attention: {problem}." for problem in wrong), *([] if wrong else ["All is well."]))
    about = condition_words(status.condition, now)
    overview = PageSection("overview", "Overview", (*words, f"{', '.join(about)}."), tuple(_figures(status)))
    sections = _of_site(folder, status) if (folder / SITE).exists() else _of_server(folder, status)
    footer = f"Served by fedtailor {__version__} to this machine only."
    return Page(status.name, status.role.capitalize(), state, False, (overview, *sections, _log(folder)), footer)


def _figures(status: Status) -> Iterator[KeyFigure]:
    if status.role == "server":
        yield KeyFigure("Runs", str(len(status.runs)), f"{sum(run.is_finished for run in status.runs)} finished")
        yield KeyFigure("Sites", str(len({site for run in status.runs for site in run.sites})), "of all runs")
        return
    yield KeyFigure("State", status.state)
    yield KeyFigure("Messages", f"{status.messages:,}", f"{status.refusals:,} refused")
    yield KeyFigure("Bytes that left", f"{status.left:,}")
    if status.epsilon is not None:
        yield KeyFigure("Epsilon spent", f"{status.epsilon:.3g}")


def _of_server(folder: Path, status: Status) -> Iterator[PageSection]:
    latest = sorted(status.runs, key=lambda run: (folder / RUNS / run.name).stat().st_mtime, reverse=True)[:MOST_RUNS]
    rows = [
        (
            *cells(run.name, "finished" if run.is_finished else f"round {run.rounds} of {run.of}"),
            *(
                _number(run.figures.get(key), key)
                for key in ("seconds", "faults", "abandoned", "up", "down", "epsilon")
            ),
        )
        for run in latest
    ]
    columns = ("run", "state", "time", *FIGURES[1:])
    yield (
        PageSection("runs", "Runs", tables=(PageTable("Latest runs", columns, rows),))
        if rows
        else PageSection("runs", "Runs", ("No run yet.",))
    )
    for number, run in enumerate(latest):
        yield _sites(number, run, folder)


def _number(value: float | None, key: str) -> TableCell:
    if value is None:
        return TableCell("-")
    text = {"seconds": duration, "up": size, "down": size}.get(key, lambda v: f"{v:g}")(value)
    return TableCell(text, value)


def _sites(number: int, run: RunStatus, folder: Path) -> PageSection:
    rows = []
    for site, about in sorted(run.sites.items()):
        seen = about.get("seen")
        known = condition_words(about, about["asked"]) if isinstance(about.get("asked"), int | float) else []
        taken = rounds_taken(about)
        last = f"{datetime.fromtimestamp(seen, UTC):%Y-%m-%d %H:%M:%S}" if isinstance(seen, int | float) else "never"
        rows.append((*cells(site), TableCell(str(taken), taken), *cells(last, ", ".join(known), _attended(about))))
    columns = ("site", "rounds", "last seen (UTC)", "condition", "took part")
    tables = [PageTable("Sites", columns, rows, words=True, wraps=True)]
    lines = RunFolder(folder / RUNS / run.name).metrics()
    faults = [(line["round"], fault) for line in lines for fault in line.get("faults", [])][-MOST_FAULTS:]
    if faults:
        cells_of = [cells(str(round), fault["client"], fault["function"], fault["reason"]) for round, fault in faults]
        tables.append(PageTable("Latest faults", ("round", "site", "in", "why"), cells_of, words=True, wraps=True))
    absent = sorted(site for site, about in run.sites.items() if has_missed(about))
    text = f"Missed a round: {', '.join(absent)}." if absent else "No site has missed a round."
    return PageSection(f"sites-{number}", f"Sites of {run.name}", (text,), tables=tuple(tables))


def _attended(about: dict[str, Any]) -> str:
    return attendance_words(about) if about.get("history") else str(about.get("away", ""))


def _of_site(folder: Path, status: Status) -> Iterator[PageSection]:
    private = read_site(folder / SITE).folder
    requests = read_pending(private)
    tables = [
        PageTable(
            f"{record['name']}: {record['decision'] or 'waits'} ({identity})",
            ("", ""),
            [cells(key, str(text)) for key, text in record["what"].items()],
            words=True,
            wraps=True,
        )
        for identity, record in requests.items()
    ]
    waiting = sum(not record["decision"] for record in requests.values())
    if tables:
        text = f"{count(waiting, 'run')} to decide on, with fedtailor federation pending {status.name} --yes or --no."
        yield PageSection("pending", "Approval", (text,), tables=tuple(tables))
    spent = account_text(private)
    if spent:
        yield PageSection("privacy", "Privacy budget", (f"{spent}.",))
    yield from audit_sections(read_runs(private / AUDIT)) if status.messages else ()


def _log(folder: Path) -> PageSection:
    path = folder / LOG
    if not path.exists():
        return PageSection("log", "Log", missing="there is none yet")
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16_384))
        lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    return PageSection("log", "Log", code=((f"The last lines of {LOG}", "\n".join(lines)),))
