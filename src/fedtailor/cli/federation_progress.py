"""What `federation submit`, `fit`, `model` and `local` show while they wait, and who took part when it is over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedtailor.flare.job_progress import JobProgress

QUIET = 5.0  # seconds without a line, where there is no terminal
INCOMPLETE = 3  # exit code of a run that is done, in which a site missed a round
Least = Annotated[
    int,
    typer.Option(
        "--least",
        min=0,
        help="Begin, and go on, with at least this many sites. Default: all at the start, later more than half.",
    ),
]


@contextmanager
def show_job(*, to_stderr: bool = False) -> Iterator[Callable[[JobProgress], None]]:
    """A line that is refreshed on a terminal; otherwise a line whenever something has changed."""
    from rich.console import Console

    from fedtailor.experiments.progress import shows_bars

    console = Console(stderr=to_stderr)
    if not shows_bars(console):
        yield JobLines(sys.stderr if to_stderr else sys.stdout)
        return
    with console.status("connecting") as line:
        begun = time.monotonic()
        yield lambda progress: line.update(f"{progress.words}  {time.monotonic() - begun:.0f} s")


class JobLines:
    """A line for every stage and every round, but at most one in a few seconds within a stage."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._stage, self._text, self._at = "", "", 0.0

    def __call__(self, progress: JobProgress) -> None:
        now, text = time.monotonic(), progress.words
        if progress.stage == self._stage and (text == self._text or now - self._at < QUIET):
            return
        self._stage, self._text, self._at = progress.stage, text, now
        print(text, file=self._stream, flush=True)


def print_participation(sites: Mapping[str, dict[str, Any]], say: Callable[[str], None] = typer.echo) -> int:
    """Print who took part in a finished run; returns the exit code."""
    from fedtailor.flare.participation import missing, participation_lines

    for line in participation_lines(sites):
        say(line)
    if not (absent := missing(sites)):
        return 0
    print(f"done without {', '.join(absent)} in some or all rounds; exit code {INCOMPLETE}", file=sys.stderr)
    return INCOMPLETE


def participation_of(run: Path) -> dict[str, dict[str, Any]]:
    """What each site did, from the folder of a run at the server."""
    from fedtailor.flare.participation import SITES, read_sites

    return read_sites(run / SITES)
