"""All that knows NVIDIA FLARE: the two classes that a job names, how it is submitted, and its names and files.

FLARE 2.9's Collab API. Names that it does not publish are used here only: `_user_source_entries`, `_job`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nvflare.collab import CollabCallError, CollabRecipe, collab
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from fedtailor.engines.flare.server import coordinate
from fedtailor.engines.flare.site import SiteService, read_site
from fedtailor.runs.config import parse

SITE_FILE, SERVER_FOLDER = "FEDTAILOR_SITE_FILE", "FEDTAILOR_SERVER_FOLDER"  # set by fedtailor federation start
RUNNING = ("SUBMITTED", "APPROVED", "DISPATCHED", "RUNNING")  # statuses of a job that has not ended
FINISHED = "FINISHED:COMPLETED"
WHOLE = {"tensor_download_chunk_size": 0, "np_download_chunk_size": 0}  # messages in one piece: a seventh of the time


class Participant:
    """What runs at a site: one function, bytes in and bytes out."""

    def __init__(self) -> None:
        self._service: SiteService | None = None

    @collab.init
    def start(self) -> None:
        """Read the site's own file; where it is, only the site knows."""
        self._service = SiteService(read_site(Path(os.environ[SITE_FILE])), collab.site_name)

    @collab.publish
    def call(self, request: bytes) -> bytes:
        """One request of the server."""
        assert self._service is not None
        return self._service.answer(collab.caller, request)


class Coordinator:
    """What runs at the server: the rounds of one run, from its last checkpoint to its end."""

    def __init__(self, run: str, config: str) -> None:
        self.run = run
        self.config = config  # JSON: FLARE would take tables in it for components

    @collab.main
    def main(self) -> None:
        """Called when all sites of the job are ready."""
        coordinate(_Collab(), parse(json.loads(self.config)), self.run, Path(os.environ[SERVER_FOLDER]), _log)


def _log(progress: Any) -> None:
    for news in progress.news:
        logging.getLogger("fedtailor").warning(news)


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


class _Recipe(CollabRecipe):  # type: ignore[misc]
    """A job that ships no code: the package is installed at every site."""

    @staticmethod
    def _user_source_entries(objs: Any) -> list[Any]:
        return []


def job(run: str, config: dict[str, Any], sites: int, folder: Path) -> Path:
    """Write the description of a job: names of classes and the configuration."""
    recipe = _Recipe(
        job_name=run, server=Coordinator(run, json.dumps(config)), client=Participant(), min_clients=sites
    )
    recipe._job.set_app_packages(["fedtailor"])
    recipe.add_client_config(WHOLE)
    recipe.add_server_config(WHOLE)
    recipe.export(str(folder))
    return folder / run


@contextmanager
def session(kit: Path, user: str, seconds: float = 5.0) -> Iterator[Session]:
    """An administrator's connection to the server."""
    made = new_secure_session(user, str(kit), timeout=seconds)
    try:
        yield made
    finally:
        made.close()
