"""What a person sees while a run goes on: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from fedtailor.experiments.runner import Listener, Progress

CellListener = Callable[[str, int, int], None]  # the name of a run, its round, its rounds


@contextmanager
def show_progress(console: Console, title: str) -> Iterator[Listener]:
    if not shows_bars(console):
        yield _Lines(title)
        return
    with bars(console) as progress:
        task = progress.add_task(escape(title), total=None, note="")

        def listen(p: Progress) -> None:
            for line in p.news:
                progress.console.print(line, markup=False, highlight=False)
            progress.update(task, completed=p.round, total=p.rounds, note=_note(p))

        yield listen


def shows_bars(console: Console) -> bool:
    """On a terminal, and in a notebook that has the widgets for it."""
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


def bars(console: Console) -> Bars:
    """Bars with round, metric, clients and time left."""
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=console,
    )


def _note(p: Progress) -> str:
    value = "" if math.isnan(p.value) else f"val {p.metric} {p.value:.4f}  "
    faults = f"  {p.faults} rejected" if p.faults else ""
    spent = "" if p.epsilon is None else f"  epsilon {p.epsilon if isinstance(p.epsilon, str) else f'{p.epsilon:.3g}'}"
    return f"{value}{p.clients} clients{spent}{faults}"


class _Lines:
    """At most one line a second, and the last."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.last = 0.0

    def __call__(self, p: Progress) -> None:
        for line in p.news:
            print(line, flush=True)
        if time.monotonic() - self.last < 1 and p.round < p.rounds:
            return
        self.last = time.monotonic()
        print(f"{self.title}  round {p.round}/{p.rounds}  {_note(p)}", flush=True)


@contextmanager
def show_grid(console: Console) -> Iterator[CellListener]:
    """Shows the cells of a comparison: one bar each on a terminal, one line for each that ends otherwise."""
    if not shows_bars(console):
        done: set[str] = set()

        def print_cell(cell: str, round: int, rounds: int) -> None:
            if round == rounds and cell not in done:
                done.add(cell)
                print(f"{cell}  {round}/{rounds} rounds", flush=True)

        yield print_cell
        return
    with bars(console) as progress:
        tasks: dict[str, TaskID] = {}

        def listen(cell: str, round: int, rounds: int) -> None:
            if cell not in tasks:
                tasks[cell] = progress.add_task(escape(cell), total=rounds, note="rounds")
            progress.update(tasks[cell], completed=round)

        yield listen
