"""Operating a participant on this machine: its process, its condition, its status for people and for Prometheus."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments.store import ABOUT, CONFIG, RESULTS, RunFolder, write_atomically
from fedtailor.flare import service
from fedtailor.flare.audit import read_lines
from fedtailor.flare.kits import (
    FORMERLY,
    KIT,
    OURS,
    RUNS,
    SERVER_FOLDER,
    SITE,
    SITE_FILE,
    read_condition,
    write_plain_json,
)
from fedtailor.flare.participation import SITES, attendance_words, read_sites, rounds_taken
from fedtailor.flare.policy import spent_epsilon
from fedtailor.flare.site import AUDIT, kept_runs, read_participation, read_site

PID, LOG = "process.json", "log.txt"
JOB_FOLDER = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MEMORY = {"MALLOC_ARENA_MAX": "2"}  # or each of FLARE's many threads fragments an arena of its own
TRIAL_ENDS = 1.0  # seconds that the participants of a trial have to end
EXPIRES_SOON, DISK_FULL = 30 * 86400, 2**30  # seconds to the end of a certificate, bytes free


@dataclass(frozen=True)
class StartCommand:
    """How to run a participant."""

    command: list[str]
    environment: dict[str, str]


def start_command(role: str, folder: Path) -> StartCommand:
    """The command that runs the server or a site, with its paths in the environment; updates its kit first."""
    script = (folder / KIT / "startup" / "sub_start.sh").resolve()
    if not script.exists():
        raise ConfigError(f"{folder}: not the folder of a participant; fedtailor federation init creates them")
    if any(c.isspace() for c in str(script)):  # FLARE cuts the commands of its jobs at spaces
        if role == "server":  # which undoes links
            raise ConfigError(f'"{folder.resolve()}": a server cannot run in a path with spaces; move the folder')
        script = _without_spaces(folder) / KIT / "startup" / script.name
    if role == "site":
        read_site(folder / SITE)  # report errors in it now
        paths = {SITE_FILE: str((folder / SITE).resolve())}
    else:
        paths = {SERVER_FOLDER: str((folder / RUNS).resolve())}
    _update_resources(role, folder)
    search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return StartCommand(["bash", str(script), "--once"], MEMORY | os.environ | paths | {"PATH": search_path})


def _without_spaces(folder: Path) -> Path:
    link = Path(tempfile.mkdtemp(prefix="fedtailor-")) / "participant"
    if any(c.isspace() for c in str(link)):
        raise ConfigError(f'"{link.parent}": FLARE needs a temporary folder without spaces in its path; set TMPDIR')
    link.symlink_to(folder.resolve(), target_is_directory=True)
    return link


def _update_resources(role: str, folder: Path) -> None:
    """Let a kit of fedtailor 0.2.0 run today's classes, and keep a server's jobs out of the system's shared folder."""
    file = folder / KIT / "local" / "resources.json"
    if not file.exists():
        return
    text = file.read_text(encoding="utf-8")
    resources = json.loads(text.replace(FORMERLY, OURS))
    if role == "server":
        store = (folder / "store").resolve()
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(store / "snapshots")
        (jobs,) = (c for c in resources["components"] if c["id"] == "job_manager")
        jobs["args"]["uri_root"] = str(store / "jobs")
    if resources != json.loads(text):
        try:
            write_plain_json(file, resources)
        except OSError as error:
            again = f"fedtailor federation start {role} {folder}"
            raise RunError(f"{file}: must be updated ({error}); make it writable and run {again}") from None


def start_participant(role: str, folder: Path) -> int:
    """Start a participant in the background, unless it is running; returns its process id."""
    if (pid := find_process(folder)) is not None:
        return pid
    how = start_command(role, folder)
    if role == "server" and service.is_taken(address := service.read_address(folder / KIT)):
        raise RunError(f"{folder}: another program listens on {address.target}; end it, or make a federation elsewhere")
    rotate_log(folder / LOG)
    prune_jobs(folder / KIT)
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            how.command,
            env=how.environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    about = {"pid": process.pid, "started": _start_time(process.pid), "folder": str(folder.resolve())}
    write_atomically(folder / PID, json.dumps(about).encode())
    threading.Thread(target=process.wait, daemon=True).start()  # or it would remain as a zombie
    return process.pid


def find_process(folder: Path) -> int | None:
    """The process id of a participant, if it is running from this folder.

    A later process with the same id started later; that of a folder which was copied runs in the other one.
    """
    try:
        known = json.loads((folder / PID).read_text())
        if _start_time(known["pid"]) != known["started"] or not _runs_in(known, folder):
            return None
        return int(known["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _runs_in(known: dict[str, Any], folder: Path) -> bool:
    import psutil

    try:
        return Path(psutil.Process(known["pid"]).cwd()).resolve().is_relative_to(folder.resolve())  # FLARE changes it
    except psutil.AccessDenied:  # another user's
        return bool(known.get("folder", str(folder.resolve())) == str(folder.resolve()))
    except psutil.NoSuchProcess:
        return False


def wait_until_serving(folder: Path, seconds: float = 60.0) -> str:
    """Wait until a server that was started answers; returns what is wrong if it does not, or nothing."""
    address, until = service.read_address(folder / KIT), time.monotonic() + seconds
    while (fault := service.fault_of(address)) and time.monotonic() < until:
        if find_process(folder) is None:
            return f"the server has ended; see {folder / LOG}"
        time.sleep(0.2)
    return fault


def wait_for(folder: Path) -> None:
    """Wait until a participant has ended; rotates its log meanwhile."""
    while find_process(folder) is not None:
        rotate_log(folder / LOG)
        time.sleep(0.5)


def rotate_log(log: Path, most: int = 10 * 2**20, keep: int = 3) -> None:
    """Move a large log to log.1, that to log.2, and so on. The log is truncated in place: its writer continues."""
    if not log.exists() or log.stat().st_size < most:
        return
    for number in range(keep - 1, 0, -1):
        if (old := log.with_name(f"{log.name}.{number}")).exists():
            os.replace(old, log.with_name(f"{log.name}.{number + 1}"))
    first = log.with_name(f"{log.name}.1")
    first.write_bytes(log.read_bytes())
    os.truncate(log, 0)


def prune_jobs(kit: Path, keep: int = 20) -> None:
    """Delete FLARE's folders of all but the latest jobs: logs and the class names of a job, of which many gather."""
    jobs = [path for path in kit.glob("*-*-*-*-*") if JOB_FOLDER.fullmatch(path.name) and path.is_dir()]
    for path in sorted(jobs, key=lambda path: path.stat().st_mtime, reverse=True)[keep:]:
        shutil.rmtree(path, ignore_errors=True)


def stop_participant(folder: Path, seconds: float = 5.0) -> bool:
    """End a participant and its jobs, if necessary by SIGKILL; returns whether it was running."""
    pid = find_process(folder)
    if pid is None:
        return False
    family = {p: _start_time(p) for p in process_tree(pid)}
    until = time.monotonic() + seconds
    for how in (signal.SIGTERM, signal.SIGKILL):
        alive = [p for p, since in family.items() if _start_time(p) == since is not None]
        for each in alive:
            with suppress(ProcessLookupError):
                os.kill(each, how)
        while time.monotonic() < until and any(_start_time(p) == family[p] for p in alive):
            time.sleep(0.05)
    return True


def process_tree(pid: int) -> list[int]:
    import psutil

    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _start_time(pid: int) -> float | None:
    """When a process started; None if it has ended."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


class ProcessSupervisor:
    """Restarts participants that end, for a federation on one machine."""

    def __init__(self, roles: dict[Path, str]) -> None:
        self.roles: dict[Path, str] = {}  # by folder
        self._over = threading.Event()
        for folder, role in roles.items():
            self.add(role, folder)
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def add(self, role: str, folder: Path) -> None:
        """Start another participant, and keep it running."""
        start_participant(role, folder)
        self.roles = self.roles | {folder: role}

    def _keep(self) -> None:
        while not self._over.wait(1.0):
            for folder, role in self.roles.items():
                with suppress(RunError):  # the port may still be in use: again in a second
                    start_participant(role, folder)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        with ThreadPoolExecutor(len(self.roles)) as pool:  # all that matters is on disk
            list(pool.map(partial(stop_participant, seconds=TRIAL_ENDS), self.roles))


def condition_words(about: dict[str, Any], now: float) -> list[str]:
    """A condition in words, as far as it is known; `now` is the reader's clock when it was reported."""
    parts = [f"version {about['version']}"] if isinstance(about.get("version"), str) else []
    parts += [f"torch {about['torch']}"] if isinstance(about.get("torch"), str) else []
    if isinstance(about.get("now"), int | float):
        skew = about["now"] - now
        parts += [f"clock {skew:+.0f} s"] if abs(skew) >= 0.5 else []
    if isinstance(about.get("free"), int | float):
        parts.append(f"{about['free'] / 2**30:.1f} GB free")
    if isinstance(about.get("certificate_ends"), int | float):
        parts.append(f"certificate until {datetime.fromtimestamp(about['certificate_ends'], UTC):%Y-%m-%d}")
    return parts


def condition_problems(about: dict[str, Any], now: float) -> list[str]:
    """What the operator of a participant in this condition must attend to."""
    messages = []
    ends = about.get("certificate_ends")
    if isinstance(ends, int | float) and ends - now < EXPIRES_SOON:
        days = f"its certificate ends in {(ends - now) / 86400:.0f} days"
        messages.append("its certificate has ended" if ends < now else days)
    if isinstance(about.get("free"), int | float) and about["free"] < DISK_FULL:
        messages.append(f"only {about['free'] / 2**20:.0f} MB of disk are free")
    return messages


@dataclass(frozen=True)
class RunStatus:
    """A run, in the server's folder."""

    name: str
    rounds: int
    of: int
    is_finished: bool
    sites: dict[str, dict[str, Any]]
    figures: dict[str, float] = field(default_factory=dict)  # seconds, faults, abandoned, up, down, epsilon so far


@dataclass(frozen=True)
class Status:
    """A participant, read from its own folder."""

    name: str
    role: str
    process: int | None
    condition: dict[str, Any]
    runs: list[RunStatus] = field(default_factory=list)
    state: str = "active"
    kept: list[str] = field(default_factory=list)  # runs of which a site has files
    messages: int = 0
    refusals: int = 0
    last_message: float | None = None
    left: int = 0  # bytes of replies
    epsilon: float | None = None  # spent of a site's budget
    fault: str = ""  # why its connection to the server, or the server's service, does not work


def read_status(folder: Path, *, asks: bool = True) -> Status:
    """The status of a participant; `asks` its service, too, where its process runs."""
    if not (folder / KIT).is_dir():
        raise RunError(f"{folder}: not the folder of a participant; fedtailor federation init creates them")
    process = find_process(folder)
    fault = service_fault(folder, process) if asks and process is not None else ""
    if not (folder / SITE).exists():
        about = read_condition(folder, folder / KIT)
        paths = {file.parent for name in (CONFIG, ABOUT) for file in folder.glob(f"{RUNS}/*/{name}")}
        run_states = [_run(path) for path in sorted(paths)]
        return Status(folder.name, "server", process, about, run_states, fault=fault)
    private = read_site(folder / SITE).folder
    about = read_condition(private, folder / KIT)
    record = private / AUDIT
    lines = read_lines(record)
    last = datetime.fromisoformat(lines[-1]["time"]).timestamp() if lines else None
    refused = sum("refused" in line for line in lines)
    known, state = kept_runs(private), read_participation(private)["state"]
    left = sum(line["left"]["bytes"] for line in lines if "left" in line)
    spent = spent_epsilon(private)
    counts = (len(lines), refused, last, left, spent)
    return Status(folder.name, "site", process, about, [], state, known, *counts, fault)


def service_fault(folder: Path, process: int) -> str:
    """Why a participant whose process runs does not serve: a handshake, a round trip, and a site's own connection."""
    address = service.read_address(folder / KIT)
    if fault := service.fault_of(address):
        return fault
    if (folder / SITE).exists() and service.is_connected(process, address.port) is False:
        return f"its process has no connection to {address.target}"
    return ""


def _run(path: Path) -> RunStatus:
    run = RunFolder.open(path)
    known = {site: dict(about) for site, about in read_sites(path / SITES).items()}
    lines = run.metrics()
    return RunStatus(path.name, len(lines), run.config.rounds, (path / RESULTS).exists(), known, _figures(lines))


def _figures(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Sums over the rounds of a run; bytes and epsilon are recorded as sums."""
    latest = lines[-1] if lines else {}
    known = {key: float(latest[key]) for key in ("up", "down", "epsilon") if isinstance(latest.get(key), int | float)}
    return known | {
        "seconds": sum(float(line.get("seconds", 0.0)) for line in lines),
        "faults": float(sum(len(line.get("faults", [])) for line in lines)),
        "abandoned": float(sum("abandoned" in line for line in lines)),
    }


def status_lines(status: Status, now: float | None = None) -> list[str]:
    now = time.time() if now is None else now
    runs_as = f"running as process {status.process}" if status.process else "not running"
    words = [runs_as, *([] if status.role == "server" else [status.state]), *condition_words(status.condition, now)]
    lines = [f"{status.role} {status.name}: {', '.join(words)}"]
    for run in status.runs:
        end = "finished" if run.is_finished else f"round {run.rounds} of {run.of}"
        lines.append(f"run {run.name}: {end}")
        for site, about in sorted(run.sites.items()):
            ago = f"seen {_ago(now - about['seen'])} ago" if isinstance(about.get("seen"), int | float) else "not seen"
            skewed = condition_words(about, about["asked"]) if isinstance(about.get("asked"), int | float) else []
            attended = [attendance_words(about)] if about.get("history") else [*filter(None, [about.get("away")])]
            lines.append(f"  {site}: {', '.join([ago, *attended, *skewed])}")
    if status.role == "site":
        last = "none yet" if status.last_message is None else f"the last {_ago(now - status.last_message)} ago"
        lines.append(f"messages: {status.messages}, {status.refusals} refused, {last}")
        lines.append(f"stored runs: {', '.join(status.kept) or 'none'}")
    return [*lines, *(f"attention: {problem}" for problem in problems(status, now))]


def problems(status: Status, now: float | None = None) -> list[str]:
    """What its operator must attend to; empty if the participant is healthy."""
    now = time.time() if now is None else now
    messages = [] if status.process else [f"{status.name} is not running"]
    messages += [f"{status.name}: {status.fault}"] if status.fault else []
    return messages + [f"{status.name}: {problem}" for problem in condition_problems(status.condition, now)]


RUN_METRICS = {  # by name: the figure of a run, and what it is
    "round_seconds_total": ("seconds", "Seconds of all rounds of a run."),
    "faults_total": ("faults", "Replies of a run that were missing or could not be used."),
    "abandoned_total": ("abandoned", "Rounds of a run that were abandoned."),
    "up_bytes_total": ("up", "Bytes of tensors from the sites of a run."),
    "down_bytes_total": ("down", "Bytes of tensors to the sites of a run."),
    "run_epsilon": ("epsilon", "Epsilon of the noise that the server adds in a run."),
    "run_finished": ("", "Whether a run is finished."),
}


def prometheus_text(status: Status, now: float | None = None) -> str:
    """The status in Prometheus' text format, for the textfile collector."""
    now = time.time() if now is None else now
    who = f'{{participant="{_label(status.name)}"}}'
    lines = [
        _metric("up", "Whether the participant's process runs.", {who: float(status.process is not None)}),
        _metric("serving", "Whether the server answers it.", {who: float(bool(status.process) and not status.fault)}),
        _metric("free_bytes", "Free bytes of the participant's disk.", {who: float(status.condition["free"])}),
    ]
    if (ends := status.condition["certificate_ends"]) is not None:
        lines.append(_metric("certificate_seconds", "Seconds until the certificate ends.", {who: ends - now}))
        lines.append(_metric("certificate_days", "Days until the certificate ends.", {who: (ends - now) / 86400}))
    if status.role == "site":
        lines.append(_metric("messages_total", "Messages answered or refused.", {who: float(status.messages)}))
        lines.append(_metric("refusals_total", "Messages that were refused.", {who: float(status.refusals)}))
        lines.append(_metric("left_bytes_total", "Bytes of replies that left.", {who: float(status.left)}))
        if status.epsilon is not None:
            lines.append(_metric("epsilon", "Epsilon that is spent of the site's budget.", {who: status.epsilon}))
    rounds, seen, skew, missed = {}, {}, {}, {}
    figures: dict[str, dict[str, float]] = {name: {} for name in RUN_METRICS}
    for run in status.runs:
        label = f'{{run="{_label(run.name)}"}}'
        rounds[label] = float(run.rounds)
        for name, (key, _) in RUN_METRICS.items():
            if key in run.figures:
                figures[name][label] = run.figures[key]
        figures["run_finished"][label] = float(run.is_finished)
        for site, about in run.sites.items():
            label = f'{{run="{_label(run.name)}",site="{_label(site)}"}}'
            if isinstance(about.get("seen"), int | float):
                seen[label] = now - about["seen"]
            if isinstance(about.get("now"), int | float) and isinstance(about.get("asked"), int | float):
                skew[label] = about["now"] - about["asked"]
            if about.get("history"):
                missed[label] = float(about["round"] - rounds_taken(about))
    lines += [_metric("rounds_total", "Rounds that were recorded.", rounds)]
    lines += [_metric(name, text, figures[name]) for name, (_, text) in RUN_METRICS.items()]
    lines += [_metric("site_missed_rounds", "Rounds of a run in which a site took no part.", missed)]
    lines += [_metric("site_seen_seconds", "Seconds since a site last answered the server.", seen)]
    lines += [_metric("site_clock_seconds", "Clock of a site minus that of the server.", skew)]
    return "".join(lines)


def _metric(name: str, text: str, values: dict[str, float]) -> str:
    kind = "counter" if name.endswith("_total") else "gauge"
    head = f"# HELP fedtailor_{name} {text}\n# TYPE fedtailor_{name} {kind}\n"
    return head + "".join(f"fedtailor_{name}{label} {value:g}\n" for label, value in values.items()) if values else ""


def _label(text: str) -> str:
    """Escape what would end the value of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
