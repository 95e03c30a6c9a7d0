"""How a command begins and ends: the ranks of torchrun, and how to continue after an interruption."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtailor.errors import ClientError, ConfigError, RankLost

if TYPE_CHECKING:
    from fedtailor.core.process_group import ProcessGroup


def refuse_torchrun(command: str) -> None:
    from fedtailor.core.process_group import under_torchrun

    if under_torchrun():
        raise ConfigError(
            f"fedtailor {command}: cannot be run with torchrun; compare.workers is the number of parallel runs. "
            "torchrun is for fedtailor run and fedtailor resume"
        )


@contextmanager
def process_group(timeout: float) -> Iterator[ProcessGroup]:
    """The processes that torchrun started; otherwise this one alone, without touching torch.distributed."""
    from fedtailor.core.process_group import SINGLE_PROCESS, under_torchrun

    if not under_torchrun():
        yield SINGLE_PROCESS
        return
    from fedtailor.engines.ranks import join, leave

    ranks = join(timeout)
    yield ranks
    leave(ranks)


def print_error(text: str) -> None:
    """Print why the command ends; under torchrun only one rank prints it."""
    if "RANK" in os.environ:
        from fedtailor.core.process_group import under_torchrun
        from fedtailor.engines.ranks import has_last_word

        if under_torchrun() and not has_last_word():
            return
    print(text, file=sys.stderr, flush=True)


def command_words(*words: object, **options: object) -> list[str]:
    """The words of a command line with the options that were given; a list is an option given several times."""
    arguments = [str(word) for word in words]
    for name, values in options.items():
        for value in values if isinstance(values, list) else [values] if values else []:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments


@contextmanager
def resumable(
    again: list[str], path: Path, ranks: ProcessGroup | None = None, begun_by: str = "config.toml"
) -> Iterator[None]:
    """Whatever stops the run, print the command that continues it; it has begun if `path` contains `begun_by`."""
    started_by = []
    if ranks is not None and ranks.count > 1:
        started_by = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", str(ranks.count)), "-m"]
    hint = f"continue with: {shlex.join([*started_by, 'fedtailor', *again])}"
    try:
        yield
    except KeyboardInterrupt:
        begun = (path / begun_by).exists()
        print_error(f"interrupted; {hint}" if begun else "interrupted before the run began")
        raise typer.Exit(130) from None
    except RankLost as lost:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all ranks now; this one ends by itself
        begun = (path / begun_by).exists()
        go_on = f"the last checkpoint is intact; {hint} (with any number of ranks)"
        print_error(f"error: a rank was lost ({lost}); {go_on if begun else 'the run had not begun'}")
        raise typer.Exit(1) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        print_error(f"error: {path}: no space left on the disk; the last checkpoint is intact. Free some, then {hint}")
        raise typer.Exit(1) from None
    except ClientError as error:
        print_error(f"error: {error}\nthe last checkpoint is intact; {hint}")
        raise typer.Exit(1) from None


def accept_trust(run: Path, wanted: bool) -> None:
    """With --trust: allow the code that a folder names to run; its file and hash are printed."""
    if wanted:
        from fedtailor.experiments.user_code import accept_folder

        accept_folder(run)
