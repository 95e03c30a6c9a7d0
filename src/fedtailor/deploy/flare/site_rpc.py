"""Requests to sites over any link: numbered, all at once, with a deadline and signs of life."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from fedtailor.deploy.flare.messages import ENVELOPE, PING

TRIES = 3  # of a request whose connection broke; its number makes that harmless


class Link(Protocol):
    """What carries bytes to a site and back; an `OSError` when that fails, a `TimeoutError` when it takes too long."""

    sites: tuple[str, ...]

    def send(self, site: str, request: bytes, seconds: float) -> bytes: ...


class SiteRpc:
    """Who does not answer is away at once, and asked no more until a sign of life comes back."""

    def __init__(self, link: Link, deadline: float, silence: float) -> None:
        self.link = link
        self.deadline = deadline
        self.silence = silence
        self.away: dict[str, str] = {}
        self._out = set[str]()  # refused or never there: not looked for again
        self._session = secrets.token_bytes(16)
        self._numbers = dict.fromkeys(link.sites, PING)
        self._probes: dict[str, Future[Any]] = {}
        self.behind = set[str]()  # whose reply a call did not wait for
        self.late: dict[str, bytes] = {}  # such replies, since they have come

    def ask(self, requests: Iterable[tuple[str, bytes]], goal: int = 0) -> dict[str, bytes | OSError]:
        """Every site its request, all at the same time; with a goal not waiting for more replies than that."""
        replies: dict[str, bytes | OSError] = {}
        waiting: dict[Future[Any], str] = {}
        for site, message in requests:
            if site in self.away:
                replies[site] = ConnectionError(self.away[site])
            else:
                self._numbers[site] += 1
                waiting[in_thread(self._send, site, self._numbers[site], message)] = site
        pings: dict[str, Future[Any]] = {}
        while waiting:
            done, _ = wait(waiting, timeout=self.silence / 2, return_when=FIRST_COMPLETED)
            for future in done:
                site = waiting.pop(future)
                replies[site] = self._result(site, future)
            if goal and sum(isinstance(reply, bytes) for reply in replies.values()) >= goal:
                return replies | {site: self._left_behind(site, future, goal) for future, site in waiting.items()}
            if done:
                continue
            for future, site in list(waiting.items()):  # a long computation, or nobody there?
                if site not in pings:
                    pings[site] = in_thread(self.ping, site)
                elif pings[site].done() and isinstance(error := self._result(site, pings.pop(site)), OSError):
                    replies[site] = error
                    del waiting[future]
        return replies

    def _result(self, site: str, future: Future[Any]) -> bytes | OSError:
        try:
            reply: bytes = future.result()
            return reply
        except OSError as error:
            self.away[site] = f"does not answer ({error})"
            return error

    def _left_behind(self, site: str, future: Future[Any], goal: int) -> OSError:
        """A site that still computes is away until it has answered; then it begins the next round with the others."""
        self.away[site] = f"is late: {goal} replies close the round"
        self._probes[site] = future
        self.behind.add(site)
        return TimeoutError(self.away[site])

    def ping(self, site: str) -> bytes:
        """A sign of life, or an `OSError`."""
        return self.link.send(site, ENVELOPE.pack(self._session, PING), self.silence)

    def _send(self, site: str, number: int, message: bytes) -> bytes:
        request, until = ENVELOPE.pack(self._session, number) + message, time.monotonic() + self.deadline
        for attempt in range(TRIES):
            try:
                return self.link.send(site, request, max(0.1, until - time.monotonic()))
            except TimeoutError:
                raise
            except OSError:
                if attempt + 1 == TRIES:
                    raise
                time.sleep(0.2)
        raise AssertionError

    def leave_out(self, site: str, why: str) -> None:
        """A site that takes no part, whatever it answers."""
        self.away[site] = why
        self._out.add(site)

    def settle(self) -> None:
        """Wait for those who are late: at the end of a run everybody gets a model."""
        wait([self._probes[site] for site in self.away if site in self._probes], timeout=self.deadline)
        self.look()

    def look(self) -> None:
        """Take back who answers again; does not wait."""
        for site in set(self.away) - self._out:
            probe = self._probes.get(site)
            if probe is not None and not probe.done():
                continue
            is_back, was_behind = probe is not None and probe.exception() is None, site in self.behind
            self.behind.discard(site)
            if probe is not None and is_back:
                del self.away[site], self._probes[site]
                if was_behind:
                    self.late[site] = probe.result()
            else:
                self._probes[site] = in_thread(self.ping, site)


def in_thread(work: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    """A future of a thread that does not keep the process alive: a lost call may be waited for until its deadline."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
