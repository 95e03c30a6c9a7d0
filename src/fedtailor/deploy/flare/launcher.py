"""Brings a run to its end: submits it, watches, and submits it again from its checkpoint whenever a job dies."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedtailor.deploy.flare import flare_adapter as nvidia
from fedtailor.deploy.flare.provisioning import ADMIN, KIT
from fedtailor.errors import RunError
from fedtailor.experiments.config import RunConfig

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

    def to_the_end(self) -> None:
        """Returns when the run is finished; a reason that will not go away is a `RunError`."""
        died, reported = 0, ""
        while True:
            try:
                begun = time.monotonic()
                with nvidia.office(self.admin / KIT, ADMIN) as office:
                    reported = ""
                    job = self._running(office) or self._submit(office)
                    if self._watch(office, job):
                        return
                    why = office.reason(job)
                if why.startswith(nvidia.STOPS):
                    raise RunError(why.removeprefix(nvidia.STOPS).strip())
                died = died + 1 if time.monotonic() - begun < 60 else 1
                if died >= self.tries:
                    raise RunError(f"{self.run}: {died} jobs in a row ended early; see the logs of server and sites")
                self.say(f"the job ended early{why and ' (' + why.removeprefix(nvidia.WAITS).strip() + ')'}; again")
            except nvidia.Unreachable as error:
                if self.check():
                    return
                if str(error) != reported:
                    reported = str(error)
                    self.say(f"{error}; trying again")
                time.sleep(POLL)

    def _running(self, office: nvidia.AdminSession) -> str | None:
        """A job of this run that is at work already, as after the launcher was killed."""
        at_work = set(office.running())
        return next((job["job_id"] for job in office.jobs(self.run) if job["job_id"] in at_work), None)

    def _submit(self, office: nvidia.AdminSession) -> str:
        until = time.monotonic() + self.patience
        while missing := set(self.sites) - set(connected := office.sites()):
            if connected and time.monotonic() > until:
                break
            time.sleep(POLL)
        if missing:
            self.say(f"without {', '.join(sorted(missing))}, who did not come within {self.patience:.0f} s")
        with tempfile.TemporaryDirectory() as folder:
            least = self.config.federation.min_replies  # with more, a job would wait for a site that just went
            job = office.submit(nvidia.job(self.run, self.config.plain(), least, Path(folder)))
        self.say(f"{self.run}: submitted to {', '.join(sorted(connected))}")
        return job

    def _watch(self, office: nvidia.AdminSession, job: str) -> bool:
        """Whether the job ended well."""
        looked, outside, is_over = time.monotonic(), set[str](), False
        while (status := office.status(job)) in nvidia.RUNNING:
            if self.check():
                return True
            if not is_over and time.monotonic() - looked > LOOK_AROUND and job in office.running():
                looked, before = time.monotonic(), outside
                outside = {site for site, jobs in office.sites().items() if job not in jobs}
                if returned := outside & before:  # seen twice: not one that is about to begin or to end
                    self.say(
                        f"{', '.join(sorted(returned))} joined; the run continues with all of them from its checkpoint"
                    )
                    office.abort(job)
                    is_over = True
            time.sleep(POLL)
        return status == nvidia.FINISHED
