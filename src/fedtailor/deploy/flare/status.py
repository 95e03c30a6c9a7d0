"""A participant as its operator sees it, from its own folder: for people, for Prometheus, and as a check of health."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from fedtailor.deploy.flare import condition, processes
from fedtailor.deploy.flare.audit import lines_of
from fedtailor.deploy.flare.provisioning import KIT, RUNS, SITE
from fedtailor.deploy.flare.server import SITES
from fedtailor.deploy.flare.site import AUDIT, read_site
from fedtailor.deploy.flare.standing import runs, standing
from fedtailor.errors import RunError
from fedtailor.experiments.store import ABOUT, CONFIG, RESULTS, RunFolder, read_json


@dataclass(frozen=True)
class RunStatus:
    """A run at the server."""

    name: str
    rounds: int
    of: int
    is_finished: bool
    sites: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Status:
    """The server or a site."""

    name: str
    role: str
    process: int | None
    condition: dict[str, Any]
    runs: list[RunStatus] = field(default_factory=list)
    state: str = "active"
    kept: list[str] = field(default_factory=list)  # runs of which a site keeps something
    messages: int = 0
    refusals: int = 0
    last_message: float | None = None


def read(folder: Path) -> Status:
    """The status of a participant on this machine."""
    if not (folder / KIT).is_dir():
        raise RunError(f"{folder}: not the folder of a participant; fedtailor federation init makes them")
    process = processes.running(folder)
    if not (folder / SITE).exists():
        about = condition.condition(folder, folder / KIT)
        paths = {file.parent for name in (CONFIG, ABOUT) for file in folder.glob(f"{RUNS}/*/{name}")}
        run_states = [_run(path) for path in sorted(paths)]
        return Status(folder.name, "server", process, about, run_states)
    private = read_site(folder / SITE).folder
    about = condition.condition(private, folder / KIT)
    record = private / AUDIT
    lines = lines_of(record)
    last = datetime.fromisoformat(lines[-1]["time"]).timestamp() if lines else None
    refused = sum("refused" in line for line in lines)
    kept_runs, state = runs(private), standing(private)["state"]
    return Status(folder.name, "site", process, about, [], state, kept_runs, len(lines), refused, last)


def _run(path: Path) -> RunStatus:
    run = RunFolder.open(path)
    sites = read_json(path / SITES) if (path / SITES).exists() else {}
    known = {site: dict(about) for site, about in sites.items()}
    return RunStatus(path.name, len(run.metrics()), run.config.rounds, (path / RESULTS).exists(), known)


def status_lines(status: Status, now: float | None = None) -> list[str]:
    """In words."""
    now = time.time() if now is None else now
    runs_as = f"runs as process {status.process}" if status.process else "does not run"
    words = [runs_as, *([] if status.role == "server" else [status.state]), *condition.words(status.condition, now)]
    lines = [f"{status.role} {status.name}: {', '.join(words)}"]
    for run in status.runs:
        end = "finished" if run.is_finished else f"round {run.rounds} of {run.of}"
        lines.append(f"run {run.name}: {end}")
        for site, about in sorted(run.sites.items()):
            ago = f"seen {_ago(now - about['seen'])} ago" if isinstance(about.get("seen"), int | float) else "not seen"
            skewed = condition.words(about, about["asked"]) if isinstance(about.get("asked"), int | float) else []
            away = [about["away"]] if about.get("away") else []
            lines.append(f"  {site}: {', '.join([ago, *away, *skewed])}")
    if status.role == "site":
        last = "none yet" if status.last_message is None else f"the last {_ago(now - status.last_message)} ago"
        lines.append(f"messages: {status.messages}, {status.refusals} refused, {last}")
        lines.append(f"keeps states of: {', '.join(status.kept) or 'no run'}")
    return [*lines, *(f"needs care: {problem}" for problem in problems(status, now))]


def problems(status: Status, now: float | None = None) -> list[str]:
    """Why a participant is not well; empty if it is."""
    now = time.time() if now is None else now
    messages = [] if status.process else [f"{status.name} does not run"]
    return messages + [f"{status.name}: {problem}" for problem in condition.problems(status.condition, now)]


def prometheus(status: Status, now: float | None = None) -> str:
    """The text format of Prometheus, for a textfile collector."""
    now = time.time() if now is None else now
    who = f'{{participant="{_label(status.name)}"}}'
    lines = [
        _metric("up", "Whether the participant's process runs.", {who: float(status.process is not None)}),
        _metric("free_bytes", "Free bytes of the participant's disk.", {who: float(status.condition["free"])}),
    ]
    if (ends := status.condition["certificate_ends"]) is not None:
        lines.append(_metric("certificate_seconds", "Seconds until the certificate ends.", {who: ends - now}))
    if status.role == "site":
        lines.append(_metric("messages_total", "Messages answered or refused.", {who: float(status.messages)}))
        lines.append(_metric("refusals_total", "Messages that were refused.", {who: float(status.refusals)}))
    rounds, seen, skew = {}, {}, {}
    for run in status.runs:
        rounds[f'{{run="{_label(run.name)}"}}'] = float(run.rounds)
        for site, about in run.sites.items():
            label = f'{{run="{_label(run.name)}",site="{_label(site)}"}}'
            if isinstance(about.get("seen"), int | float):
                seen[label] = now - about["seen"]
            if isinstance(about.get("now"), int | float) and isinstance(about.get("asked"), int | float):
                skew[label] = about["now"] - about["asked"]
    lines += [_metric("rounds_total", "Rounds that were recorded.", rounds)]
    lines += [_metric("site_seen_seconds", "Seconds since the server heard of a site.", seen)]
    lines += [_metric("site_clock_seconds", "Clock of a site minus that of the server.", skew)]
    return "".join(lines)


def _metric(name: str, text: str, values: dict[str, float]) -> str:
    kind = "counter" if name.endswith("_total") else "gauge"
    head = f"# HELP fedtailor_{name} {text}\n# TYPE fedtailor_{name} {kind}\n"
    return head + "".join(f"fedtailor_{name}{label} {value:g}\n" for label, value in values.items()) if values else ""


def _label(text: str) -> str:
    """A value of a label: quotes, backslashes and line ends would end it."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
