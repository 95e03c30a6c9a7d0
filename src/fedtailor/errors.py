"""Errors for people: one line that names the file, column, client or key, and says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CODES = {  # stable, for programs and tests; the sentence may change
    "user": "anything else that you can fix",
    "config": "a key or value of the configuration",
    "config.key": "a key that does not exist",
    "config.value": "a value of the wrong type or out of range",
    "config.name": "no algorithm, model, optimizer or similar with this name",
    "config.system": "this system lacks something that was asked for",
    "data": "a file, column, client or partition of the data",
    "run": "a run folder",
    "run.none": "not a run folder",
    "run.exists": "the folder already contains a run",
    "run.damaged": "a file is missing or was modified",
    "run.changed": "data, code or configuration is no longer what the run was started with",
    "run.version": "written by another version of fedtailor",
    "run.busy": "temporarily unavailable; try again later",
    "equilibrium": "no fixed point was found",
}


class UserError(Exception):
    """A mistake that the user can fix. The command line prints it as one line and exits with code 2.

    `code` names the kind of mistake; docs/reference/errors.md lists them.
    """

    code = "user"

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        if code:
            self.code = code


class ConfigError(UserError):
    """A configuration key or value is wrong."""

    code = "config"


class DataError(UserError):
    """A data file, column, client or partition is wrong."""

    code = "data"


class RunError(UserError):
    """A run folder cannot be read, resumed or written."""

    code = "run"


class RetryableError(RunError):
    """A run cannot go on at the moment; the same may work later."""

    code = "run.busy"


class EquilibriumError(UserError):
    """A fixed point cannot be found: no iterations to find it with, or its values are not finite."""

    code = "equilibrium"


class ClientError(Exception):
    """A client's function raised. The text names algorithm, client, function and round."""


class ClientUnreachable(ClientError):
    """A client could not be asked, or its reply did not arrive. More rounds may mend it."""


class RoundAbandoned(Exception):
    """Too few clients answered; the state is as it was before the round."""


class RankLost(BaseException):
    """Another process of the run is gone. Not an `Exception`, so that nobody takes it for the error of a client."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint to end an error with: the known name closest to `name`, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f'did you mean "{close[0]}"?'
    return "known: " + ", ".join(known)
