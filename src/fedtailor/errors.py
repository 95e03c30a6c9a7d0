"""Errors for people: one line that names the file, column, client or key, and says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can put right. The command line prints it as one line and exits with code 2."""


class ConfigError(UserError):
    """A configuration key or value is wrong."""


class DataError(UserError):
    """A data file, column, client or partition is wrong."""


class RunError(UserError):
    """A run folder cannot be read, resumed or written."""


class RetryableError(RunError):
    """A run cannot go on at the moment; the same may work later."""


class EquilibriumError(UserError):
    """A fixed point cannot be found: no iterations to find it with, or its values are not finite."""


class ClientError(Exception):
    """A client's function raised. The text names algorithm, client, function and round."""


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
