"""All that uses NVIDIA FLARE 2.9: the two classes that a job names, an administrator's session, the launcher of runs.

It builds on the Collab API. Names that FLARE does not publish are used here only: `_user_source_entries`, `_job`,
`byte_receiver`. FLARE keeps each received stream for a minute in a thread that sleeps, 2,600 threads at forty replies a
second: its timers share one thread here. It makes room for a message of any declared size: here up to a limit.
"""

from __future__ import annotations

import base64
import gc
import getpass
import heapq
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nvflare.collab import CollabCallError, CollabRecipe, collab
from nvflare.fuel.f3.streaming import blob_streamer, byte_receiver
from nvflare.fuel.flare_api import api_spec
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session
from nvflare.private.fed.server.server_commands import ServerCommands

from fedtailor.errors import RetryableError, RunError, UserError
from fedtailor.flare.background import in_thread
from fedtailor.flare.job_progress import CONNECTING, FINISHING, GREETING, STARTING, TRAINING, JobProgress
from fedtailor.flare.kits import ADMIN, KIT, RUNS, SERVER_FOLDER, SITE, SITE_FILE
from fedtailor.flare.participation import SITES, SiteRecord, read_sites
from fedtailor.flare.revocations import read_list

if TYPE_CHECKING:
    from fedtailor.experiments.config import RunConfig
    from fedtailor.experiments.runner import Progress
    from fedtailor.flare.site import SiteService

API_ERRORS = (
    api_spec.NoConnection,
    api_spec.SessionClosed,
    api_spec.InternalError,
    api_spec.NoReply,
    api_spec.CommandError,
)
SILENT = ("no_reply", "error")
PATIENCE = 60.0  # seconds to wait for FLARE to open or close a connection
RUNNING = ("SUBMITTED", "APPROVED", "DISPATCHED", "RUNNING")  # statuses of a job that has not ended
FINISHED = "FINISHED:COMPLETED"
STOPS, WAITS = "fedtailor stops:", "fedtailor waits:"  # begin the reason in a job's log
ATTENDED = "fedtailor sites:"  # begins the record of who took part, as JSON
PROGRESS = "fedtailor.progress"  # what an administrator asks a running job for
WHOLE = {"tensor_download_chunk_size": 0, "np_download_chunk_size": 0}  # messages in one piece: seven times as fast
POLL, LOOK_FOR_SITES = 1.0, 5.0  # seconds between two looks at a job, and for sites that are back
QUICK_POLL = 0.2  # while a person waits for sites to connect
# FLARE's sites ask for tasks every 2 s by default; there are two of them, as a job begins
SERVER_CONFIG = WHOLE | {"server": {"task_request_interval": 0.5}}
CLIENT_CONFIG = WHOLE | {"default_task_fetch_interval": 0.5}


class _Clock:
    """Calls functions at their times, in one thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, SharedTimer]] = []
        self._numbers = count()  # breaks ties: first come, first served
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, timer: SharedTimer) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + timer.interval, next(self._numbers), timer))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="timers", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due or (left := self._due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left if self._due else None)
                _, _, timer = heapq.heappop(self._due)
            timer.fire()


_CLOCK = _Clock()


class SharedTimer:
    """Like `threading.Timer`, with one thread for all; functions must be short, since the others wait."""

    def __init__(self, interval: float, function: Callable[..., Any], args: Any = None, kwargs: Any = None) -> None:
        self.interval = interval
        self.daemon = True
        self._call: Callable[[], Any] | None = lambda: function(*(args or ()), **(kwargs or {}))

    def start(self) -> None:
        _CLOCK.add(self)

    def cancel(self) -> None:
        self._call = None  # frees what it refers to

    def fire(self) -> None:
        """Call the function once; an error in it must not end the thread."""
        call, self._call = self._call, None
        try:
            if call is not None:
                call()
        except Exception:
            logging.getLogger(__name__).exception("a timer's function failed")


def threading_with_shared_timers() -> SimpleNamespace:
    """The module `threading`, with `SharedTimer` as its `Timer`."""
    return SimpleNamespace(**{name: getattr(threading, name) for name in threading.__all__} | {"Timer": SharedTimer})


class GarbageCollector:
    """Collects garbage once per round, in a process of many rounds.

    Every message of FLARE 2.9 leaves reference cycles with a buffer of half a megabyte. Old ones wait for a full
    collection, which comes late with torch's 380,000 objects loaded: what exists after the first round is frozen.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._is_frozen = False

    def note(self, round: int | None) -> None:
        """Collect, if this is a new round."""
        if round is None or round == self._last:
            return
        if self._last is not None:
            gc.collect()
            if not self._is_frozen:
                gc.freeze()
                self._is_frozen = True
        self._last = round


byte_receiver.threading = threading_with_shared_timers()  # or each reply leaves a thread that sleeps for a minute


class LimitedBlob(blob_streamer.BlobTask):
    """An incoming message; one that says it is too long is refused before there is room for it."""

    most = 0  # bytes; 0: FLARE's own limit, streaming_max_blob_size

    def __init__(self, future: Any, stream: Any, max_size: int = 0, preserve_chunks: bool = False) -> None:
        limits = [limit for limit in (max_size, LimitedBlob.most) if limit > 0]
        super().__init__(future, stream, min(limits, default=0), preserve_chunks)


blob_streamer.BlobTask = LimitedBlob  # a site's reply of any length would be in memory before it is looked at


class Participant:
    """What runs at a site: one function, bytes in and bytes out."""

    def __init__(self) -> None:
        self._service: SiteService | None = None
        self._collector = GarbageCollector()

    @collab.init
    def start(self) -> None:
        """Read site.toml; its path is in the environment of the site's process, or it is in FLARE's folder `local`."""
        from fedtailor.flare.site import SiteService, read_site

        file = os.environ.get(SITE_FILE) or Path(collab.workspace.get_root_dir()) / "local" / SITE
        self._service = SiteService(read_site(Path(file)), collab.site_name)

    @collab.publish
    def call(self, request: bytes) -> bytes:
        """Answer a request of the server."""
        assert self._service is not None
        reply = self._service.answer(collab.caller, request)
        self._collector.note(self._service.round)
        return reply


class Coordinator:
    """What runs at the server: the rounds of one run, from its last checkpoint to its end."""

    def __init__(
        self,
        run: str,
        config: str,
        named: Sequence[str] = (),
        least: int = 0,
        revoked: str = "",
        submitter: str = "",
    ) -> None:
        self.run = run
        self.config = config  # JSON: FLARE would read tables in it as components
        self.named = list(named)  # sites that are expected
        self.least = least
        self.revoked = revoked  # the authority's list: JSON as base64, since FLARE replaces {...}
        self.submitter = submitter

    @collab.main
    def main(self) -> None:
        """FLARE calls it when all sites of the job are ready."""
        from fedtailor.experiments.config import parse
        from fedtailor.flare.revocations import accept_list
        from fedtailor.flare.server import coordinate

        log, link = logging.getLogger("fedtailor"), _Collab()
        root = Path(os.environ.get(SERVER_FOLDER) or Path(collab.workspace.get_root_dir()) / RUNS)
        BOARD.begin(link, len(set(self.named) | set(link.sites)))
        try:
            config = parse(json.loads(self.config))
            accept_list(root.parent, root.parent / KIT, json.loads(base64.b64decode(self.revoked) or "{}"))
            coordinate(link, config, self.run, root, BOARD.listen, tuple(self.named), self.least, self.submitter)
        except UserError as error:
            log.error("%s %s", WAITS if isinstance(error, RetryableError) else STOPS, error)
            raise
        finally:
            with suppress(UserError):
                log.warning("%s %s", ATTENDED, json.dumps(read_sites(root / self.run / SITES)))


class ProgressBoard:
    """How far the job of this process is, for an administrator who asks."""

    def __init__(self) -> None:
        self._link: _Collab | None = None
        self._now = JobProgress(STARTING)
        self._collector, self._begun = GarbageCollector(), 0.0

    def begin(self, link: _Collab, named: int) -> None:
        self._link, self._begun = link, time.monotonic()
        self._now = JobProgress(GREETING, named=named)

    def listen(self, progress: Progress) -> None:
        """Take note of a round."""
        self._collector.note(progress.round)
        for news in progress.news:
            logging.getLogger("fedtailor").warning(news)
        now = self._now
        if now.stage == GREETING:
            now.first = progress.round - 1
        now.stage = FINISHING if progress.round == progress.rounds else TRAINING
        now.round, now.rounds, now.metric, now.value = progress.round, progress.rounds, progress.metric, progress.value
        now.sites, now.seconds = progress.clients, time.monotonic() - self._begun

    def answer(self, topic: str, data: Any, context: Any) -> dict[str, Any]:
        """FLARE calls it for an administrator."""
        if self._link is not None:
            self._now.exchanges = self._link.sent // max(1, len(self._link.sites))
        return self._now.plain()


BOARD = ProgressBoard()
if PROGRESS not in ServerCommands.app_cmd_registry:
    ServerCommands.register_app_command(PROGRESS, BOARD.answer)


class _Collab:
    """The link over FLARE: calls a site's `Participant.call`."""

    def __init__(self) -> None:
        self._proxies = {proxy.name: proxy for proxy in collab.clients}
        self.sites = tuple(self._proxies)
        self.sent = 0

    def limit(self, most: int) -> None:
        LimitedBlob.most = most

    def send(self, site: str, request: bytes, seconds: float) -> bytes:
        self.sent += 1
        try:
            reply: bytes = self._proxies[site](timeout=seconds).call(request)
            return reply
        except CollabCallError as error:
            if isinstance(error.cause, TimeoutError):
                raise TimeoutError(f"no reply within {seconds:.0f} s") from None
            raise ConnectionError(str(error.cause)) from None


class _Recipe(CollabRecipe):
    """A job without code: fedtailor is installed at every site."""

    @staticmethod
    def _user_source_entries(objs: Any) -> list[Any]:
        return []


def write_job(run: str, server: Coordinator, folder: Path) -> Path:
    """Write a job, class names and configuration; returns its folder."""
    # FLARE's own minimum is one: with more, a job would wait for a site that has just left
    recipe = _Recipe(job_name=run, server=server, client=Participant(), min_clients=1)
    recipe._job.set_app_packages(["fedtailor"])
    recipe.add_client_config(CLIENT_CONFIG)
    recipe.add_server_config(SERVER_CONFIG)
    recipe.export(str(folder))
    return folder / run


class AdminSession:
    """An administrator's connection to the server."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def sites(self) -> dict[str, set[str]]:
        """Sites that answer, with the jobs that each runs. FLARE also lists sites that were killed."""
        jobs: dict[str, set[str]] = {}
        with suppress(api_spec.NoClientsAvailable):
            for entry in self._session.get_client_job_status() or []:
                if entry["status"] not in SILENT:
                    jobs.setdefault(entry["client_name"], set()).add(entry.get("job_id", ""))
        return jobs

    def last_seen(self) -> dict[str, float]:
        """When the server last heard from each site, as seconds since 1970, where it is known."""
        known = self._session.get_system_info().client_info
        return {one.name: float(one.last_connect_time) for one in known if one.last_connect_time is not None}

    def submit(self, job: Path) -> str:
        """Submit a job; returns its id."""
        job_id: str = self._session.submit_job(str(job))
        return job_id

    def status(self, job: str) -> str:
        """A status such as RUNNING or FINISHED:COMPLETED."""
        return str(self._session.get_job_status(job))

    def running(self) -> list[str]:
        """Ids of the jobs that really run: the status of a killed server's job stays RUNNING."""
        return [job.job_id for job in self._session.get_system_info().job_info]

    def jobs(self, name: str = "") -> list[dict[str, Any]]:
        """Jobs of this name, or all, the latest first, with `job_id`, `job_name`, `status` and `submit_time`."""
        listed: list[dict[str, Any]] = self._session.list_jobs(reverse=True)
        return [job for job in listed if not name or job["job_name"] == name]

    def abort(self, job: str) -> None:
        self._session.abort_job(job)

    def disable(self, site: str) -> None:
        """Let the server end the connection of a site, and admit it no more."""
        self._session.disable_client(site)

    def progress(self, job: str) -> JobProgress | None:
        """How far a job is, if its server's half runs."""
        with suppress(*API_ERRORS, api_spec.JobNotRunning, api_spec.InvalidTarget):
            return JobProgress.read(self._session.do_app_command(job, PROGRESS, None))
        return None

    def reason(self, job: str) -> str:
        """Why the server's half of a job ended early: text that begins with `STOPS` or `WAITS`, or nothing."""
        return self._last_line(job, STOPS, WAITS)

    def attended(self, job: str) -> dict[str, SiteRecord]:
        """What each site did in the rounds of a job that has ended, as its server's half recorded it."""
        with suppress(ValueError):
            return dict(json.loads(self._last_line(job, ATTENDED).removeprefix(ATTENDED)))
        return {}

    def _last_line(self, job: str, *marks: str) -> str:
        """The last line of a job's log from one of these marks on."""
        logs = self._session.get_job_logs(job).get("logs", {})
        lines = [line for text in logs.values() if isinstance(text, str) for line in text.splitlines()]
        found = [line[line.index(mark) :] for line in lines for mark in marks if mark in line]
        return found[-1] if found else ""


@contextmanager
def admin_session(kit: Path, user: str, seconds: float = 5.0) -> Iterator[AdminSession]:
    """Log in, and log out at the end; raises `Unreachable` when the connection fails."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # FLARE prints
        try:
            session = _within(PATIENCE, new_secure_session, user, str(kit), timeout=seconds, auto_login_max_tries=1)
        except Exception as error:
            raise Unreachable(f"the server cannot be reached: {error}") from None
    try:
        yield AdminSession(session)
    except API_ERRORS as error:
        raise Unreachable(f"the server cannot be reached: {error}") from None
    finally:
        with suppress(Exception):
            _within(PATIENCE, session.close)


def _within(seconds: float, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call with a time limit: FLARE may wait forever for threads of a lost connection."""
    try:
        return in_thread(work, *args, **options).result(seconds)
    except FutureTimeout:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None


class Unreachable(ConnectionError):
    """The server cannot be reached."""


def asker() -> str:
    """Who submits, for the people at the sites: the server passes it on."""
    with suppress(OSError, KeyError):
        return f"{getpass.getuser()} on {socket.gethostname()}, as {ADMIN}"
    return ADMIN


@dataclass
class Launcher:
    """Brings a run to its end: submits it, and again from its checkpoint whenever its job dies.

    It can itself be restarted at any time: it finds a job of the run that is running.
    """

    admin: Path  # the administrator's folder
    config: RunConfig
    run: str
    sites: tuple[str, ...]  # all that are expected: the run begins with them
    say: Callable[[str], None]
    show: Callable[[JobProgress], None] = lambda progress: None
    least: int = 0  # sites without which no round begins; 0: all at the start, more than half of them later
    patience: float = 60.0  # seconds to wait for sites to connect
    tries: int = 5  # jobs in a row that end within a minute
    check: Callable[[], bool] = lambda: False  # whether the run is known to be finished
    poll: float = POLL

    def run_to_end(self) -> dict[str, SiteRecord]:
        """Return what each site did when the run is finished; a `RunError` for a reason that will not go away."""
        died, reported = 0, ""
        self.say(f"{self.run}: {self._least_words()}")
        while True:
            try:
                begun = time.monotonic()
                with admin_session(self.admin / KIT, ADMIN) as session:
                    reported = ""
                    job = self._running(session) or self._submit(session)
                    if self._watch(session, job):
                        return session.attended(job)
                    why = session.reason(job)
                if why.startswith(STOPS):
                    raise RunError(f"{self.run}: {why.removeprefix(STOPS).strip()}")
                died = died + 1 if time.monotonic() - begun < 60 else 1
                if died >= self.tries:
                    raise RunError(f"{self.run}: {died} jobs in a row ended early; see log.txt of server and sites")
                self.say(f"the job ended early{why and ' (' + why.removeprefix(WAITS).strip() + ')'}; again")
            except Unreachable as error:
                if self.check():
                    return {}
                if str(error) != reported:
                    reported = str(error)
                    self.say(f"{error}; trying again")
                time.sleep(POLL)

    def _least_words(self) -> str:
        count = len(self.sites)
        if self.least or count < 3:
            return f"begins with {self.least or count} of {count} sites ({', '.join(self.sites)}), as does every round"
        names, majority = ", ".join(self.sites), count // 2 + 1
        return f"begins with all {count} sites ({names}); later rounds with {majority} or more"

    def _running(self, session: AdminSession) -> str | None:
        """A job of this run that is running, as after the launcher was killed."""
        at_work = set(session.running())
        return next((job["job_id"] for job in session.jobs(self.run) if job["job_id"] in at_work), None)

    def _submit(self, session: AdminSession) -> str:
        until = time.monotonic() + self.patience
        while missing := set(self.sites) - set(connected := session.sites()):
            if connected and time.monotonic() > until:
                break
            self.show(JobProgress(CONNECTING, sites=len(connected), named=len(self.sites)))
            time.sleep(QUICK_POLL)
        if missing:
            self.say(f"without {', '.join(sorted(missing))}: not connected within {self.patience:.0f} s")
        with tempfile.TemporaryDirectory() as folder:
            revoked = base64.b64encode(json.dumps(read_list(self.admin)).encode()).decode()
            server = Coordinator(self.run, json.dumps(self.config.plain()), self.sites, self.least, revoked, asker())
            job = session.submit(write_job(self.run, server, Path(folder)))
        self.say(f"{self.run}: submitted to {', '.join(sorted(connected))}")
        return job

    def _watch(self, session: AdminSession, job: str) -> bool:
        """Wait for the end of a job; returns whether it succeeded. A site that comes back restarts it."""
        looked, outside, is_over = time.monotonic(), set[str](), False
        while (status := session.status(job)) in RUNNING:
            if self.check():
                return True
            progress = session.progress(job) if status == "RUNNING" else None
            self.show(progress or JobProgress(STARTING, named=len(self.sites)))
            if not is_over and time.monotonic() - looked > LOOK_FOR_SITES and job in session.running():
                looked, before = time.monotonic(), outside
                outside = {site for site, jobs in session.sites().items() if job not in jobs}
                if returned := outside & before:  # seen twice: not about to start or to end
                    self.say(
                        f"{', '.join(sorted(returned))} joined; the run continues with all of them from its checkpoint"
                    )
                    session.abort(job)
                    is_over = True
            time.sleep(self.poll)
        return status == FINISHED
