"""All that knows NVIDIA FLARE: the two classes that a job names, how it is submitted, and its names and files.

FLARE 2.9's Collab API. Names that it does not publish are used here only: `_user_source_entries`, `_job`,
`byte_receiver`.
"""

from __future__ import annotations

import gc
import heapq
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.collab import CollabCallError, CollabRecipe, collab
from nvflare.fuel.f3.streaming import byte_receiver
from nvflare.fuel.flare_api import api_spec
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from fedtailor.errors import RetryableError, RunError, UserError
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.experiments.runner import Progress
from fedtailor.flare.kits import ADMIN, KIT, SERVER_FOLDER, SITE_FILE
from fedtailor.flare.server import coordinate, in_thread
from fedtailor.flare.site import SiteService, read_site


class _Clock:
    """Calls functions at their times, in a thread that begins with the first of them."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, SharedTimer]] = []
        self._numbers = count()  # of two at the same time the earlier goes first
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
    """As `threading.Timer`; its function must be short, for the others wait for it."""

    def __init__(self, interval: float, function: Callable[..., Any], args: Any = None, kwargs: Any = None) -> None:
        self.interval = interval
        self.daemon = True
        self._call: Callable[[], Any] | None = lambda: function(*(args or ()), **(kwargs or {}))

    def start(self) -> None:
        _CLOCK.add(self)

    def cancel(self) -> None:
        self._call = None  # and with it what it holds

    def fire(self) -> None:
        """Once; what goes wrong in it must not end the thread."""
        call, self._call = self._call, None
        try:
            if call is not None:
                call()
        except Exception:
            logging.getLogger(__name__).exception("a timer's function failed")


def threading_with_shared_timers() -> SimpleNamespace:
    """The module `threading`, with such timers."""
    return SimpleNamespace(**{name: getattr(threading, name) for name in threading.__all__} | {"Timer": SharedTimer})


class GarbageCollector:
    """After its first round a process has what it keeps: that is set aside, and the rest collected in every round."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._is_settled = False

    def note(self, round: int | None) -> None:
        """The round that is at work, if one is."""
        if round is None or round == self._last:
            return
        if self._last is not None:
            gc.collect()
            if not self._is_settled:
                gc.freeze()
                self._is_settled = True
        self._last = round


API_ERRORS = (
    api_spec.NoConnection,
    api_spec.SessionClosed,
    api_spec.InternalError,
    api_spec.NoReply,
    api_spec.CommandError,
)
SILENT = ("no_reply", "error")
PATIENCE = 60.0  # seconds until a connection that FLARE opens or closes is given up
RUNNING = ("SUBMITTED", "APPROVED", "DISPATCHED", "RUNNING")  # statuses of a job that has not ended
FINISHED = "FINISHED:COMPLETED"
STOPS, WAITS = "fedtailor stops:", "fedtailor waits:"  # how a reason begins in the job's log
WHOLE = {"tensor_download_chunk_size": 0, "np_download_chunk_size": 0}  # messages in one piece: a seventh of the time


byte_receiver.threading = threading_with_shared_timers()  # or each reply leaves a thread that sleeps for a minute


class Participant:
    """What runs at a site: one function, bytes in and bytes out."""

    def __init__(self) -> None:
        self._service: SiteService | None = None
        self._collector = GarbageCollector()

    @collab.init
    def start(self) -> None:
        """Read the site's own file; where it is, only the site knows."""
        self._service = SiteService(read_site(Path(os.environ[SITE_FILE])), collab.site_name)

    @collab.publish
    def call(self, request: bytes) -> bytes:
        """One request of the server."""
        assert self._service is not None
        reply = self._service.answer(collab.caller, request)
        self._collector.note(self._service.round)
        return reply


class Coordinator:
    """What runs at the server: the rounds of one run, from its last checkpoint to its end."""

    def __init__(self, run: str, config: str) -> None:
        self.run = run
        self.config = config  # JSON: FLARE would take tables in it for components

    @collab.main
    def main(self) -> None:
        """Called when all sites of the job are ready."""
        log, collector = logging.getLogger("fedtailor"), GarbageCollector()

        def listen(progress: Progress) -> None:
            collector.note(progress.round)
            for news in progress.news:
                log.warning(news)

        try:
            coordinate(_Collab(), parse(json.loads(self.config)), self.run, Path(os.environ[SERVER_FOLDER]), listen)
        except UserError as error:
            log.error("%s %s", WAITS if isinstance(error, RetryableError) else STOPS, error)
            raise


class _Collab:
    """The link: a call of one site's function."""

    def __init__(self) -> None:
        self._proxies = {proxy.name: proxy for proxy in collab.clients}
        self.sites = tuple(self._proxies)

    def send(self, site: str, request: bytes, seconds: float) -> bytes:
        """FLARE's own errors become those of a connection."""
        try:
            reply: bytes = self._proxies[site](timeout=seconds).call(request)
            return reply
        except CollabCallError as error:
            if isinstance(error.cause, TimeoutError):
                raise TimeoutError(f"no reply within {seconds:.0f} s") from None
            raise ConnectionError(str(error.cause)) from None


class _Recipe(CollabRecipe):
    """A job that ships no code: the package is installed at every site."""

    @staticmethod
    def _user_source_entries(objs: Any) -> list[Any]:
        return []


def write_job(run: str, config: dict[str, Any], sites: int, folder: Path) -> Path:
    """Write the description of a job: names of classes and the configuration."""
    recipe = _Recipe(job_name=run, server=Coordinator(run, json.dumps(config)), client=Participant(), min_clients=sites)
    recipe._job.set_app_packages(["fedtailor"])
    recipe.add_client_config(WHOLE)
    recipe.add_server_config(WHOLE)
    recipe.export(str(folder))
    return folder / run


class AdminSession:
    """An administrator's connection to the server; `Unreachable` when there is none."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def sites(self) -> dict[str, set[str]]:
        """Sites that answer, and the jobs that each is at work on; who was killed stays listed, but does not answer."""
        jobs: dict[str, set[str]] = {}
        with suppress(api_spec.NoClientsAvailable):
            for entry in self._session.get_client_job_status() or []:
                if entry["status"] not in SILENT:
                    jobs.setdefault(entry["client_name"], set()).add(entry.get("job_id", ""))
        return jobs

    def last_seen(self) -> dict[str, float]:
        """When the server last heard of each site, as seconds since 1970, where it says so."""
        known = self._session.get_system_info().client_info
        return {one.name: float(one.last_connect_time) for one in known if one.last_connect_time is not None}

    def submit(self, job: Path) -> str:
        """Hand in a job; returns its id."""
        job_id: str = self._session.submit_job(str(job))
        return job_id

    def status(self, job: str) -> str:
        """Such as RUNNING or FINISHED:COMPLETED."""
        return str(self._session.get_job_status(job))

    def running(self) -> list[str]:
        """Ids of jobs that do run. A killed server's job stays listed as running for ever."""
        return [job.job_id for job in self._session.get_system_info().job_info]

    def jobs(self, name: str = "") -> list[dict[str, Any]]:
        """Jobs of this name, the latest first: job_id, job_name, status, submit_time."""
        listed: list[dict[str, Any]] = self._session.list_jobs(reverse=True)
        return [job for job in listed if not name or job["job_name"] == name]

    def details(self, job: str) -> list[str]:
        """What became of a job at each participant."""
        return [str(text) for text in self._session.get_job_meta(job).get("job_deploy_detail", [])]

    def abort(self, job: str) -> None:
        """End a job."""
        self._session.abort_job(job)

    def reason(self, job: str) -> str:
        """Why the server's half of a job ended early: a line that begins with `STOPS` or `WAITS`, or nothing."""
        logs = self._session.get_job_logs(job).get("logs", {})
        lines = [line for text in logs.values() if isinstance(text, str) for line in text.splitlines()]
        reasons = [line[line.index(w) :] for line in lines for w in (STOPS, WAITS) if w in line]
        return reasons[-1] if reasons else ""


@contextmanager
def admin_session(kit: Path, user: str, seconds: float = 5.0) -> Iterator[AdminSession]:
    """Connect, and log out at the end; what goes wrong between here and the server is `Unreachable`."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # it prints that it connects
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
    """A result, or a `TimeoutError`: FLARE may wait for ever for threads of a connection that is gone."""
    try:
        return in_thread(work, *args, **options).result(seconds)
    except FutureTimeout:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None


class Unreachable(ConnectionError):
    """The server does not answer."""


POLL = 1.0  # seconds between two looks
LOOK_AROUND = 5.0  # seconds between two looks for sites that came back


@dataclass
class Launcher:
    """One run of a federation, by name; it may be started anew at any time and finds what runs already."""

    admin: Path  # the administrator's folder
    config: RunConfig
    run: str
    sites: tuple[str, ...]  # those to wait for at the start
    say: Callable[[str], None]
    patience: float = 60.0  # seconds to wait for all of them before going on with those that are there
    tries: int = 5  # jobs in a row that die young
    check: Callable[[], bool] = lambda: False  # whether the run is known to be finished

    def run_to_end(self) -> None:
        """Returns when the run is finished; a reason that will not go away is a `RunError`."""
        died, reported = 0, ""
        while True:
            try:
                begun = time.monotonic()
                with admin_session(self.admin / KIT, ADMIN) as session:
                    reported = ""
                    job = self._running(session) or self._submit(session)
                    if self._watch(session, job):
                        return
                    why = session.reason(job)
                if why.startswith(STOPS):
                    raise RunError(why.removeprefix(STOPS).strip())
                died = died + 1 if time.monotonic() - begun < 60 else 1
                if died >= self.tries:
                    raise RunError(f"{self.run}: {died} jobs in a row ended early; see the logs of server and sites")
                self.say(f"the job ended early{why and ' (' + why.removeprefix(WAITS).strip() + ')'}; again")
            except Unreachable as error:
                if self.check():
                    return
                if str(error) != reported:
                    reported = str(error)
                    self.say(f"{error}; trying again")
                time.sleep(POLL)

    def _running(self, session: AdminSession) -> str | None:
        """A job of this run that is at work already, as after the launcher was killed."""
        at_work = set(session.running())
        return next((job["job_id"] for job in session.jobs(self.run) if job["job_id"] in at_work), None)

    def _submit(self, session: AdminSession) -> str:
        until = time.monotonic() + self.patience
        while missing := set(self.sites) - set(connected := session.sites()):
            if connected and time.monotonic() > until:
                break
            time.sleep(POLL)
        if missing:
            self.say(f"without {', '.join(sorted(missing))}, who did not come within {self.patience:.0f} s")
        with tempfile.TemporaryDirectory() as folder:
            least = self.config.federation.min_replies  # with more, a job would wait for a site that just went
            job = session.submit(write_job(self.run, self.config.plain(), least, Path(folder)))
        self.say(f"{self.run}: submitted to {', '.join(sorted(connected))}")
        return job

    def _watch(self, session: AdminSession, job: str) -> bool:
        """Whether the job ended well."""
        looked, outside, is_over = time.monotonic(), set[str](), False
        while (status := session.status(job)) in RUNNING:
            if self.check():
                return True
            if not is_over and time.monotonic() - looked > LOOK_AROUND and job in session.running():
                looked, before = time.monotonic(), outside
                outside = {site for site, jobs in session.sites().items() if job not in jobs}
                if returned := outside & before:  # seen twice: not one that is about to begin or to end
                    self.say(
                        f"{', '.join(sorted(returned))} joined; the run continues with all of them from its checkpoint"
                    )
                    session.abort(job)
                    is_over = True
            time.sleep(POLL)
        return status == FINISHED
