"""Runs side by side: each in its own folder and resumable, `workers` of them at a time."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from fedtailor.engines import cores
from fedtailor.errors import RunError, UserError
from fedtailor.experiments import user_code
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.store import CONFIG, RESULTS, RunFolder
from fedtailor.experiments.user_code import change_of

METHODS = ("algorithm", "server", "privacy", "aggregation")  # sections that belong to a row


@dataclass(frozen=True)
class Cell:
    label: str
    seed: int
    folder: Path
    config: RunConfig


def folder_name(label: str, seed: int) -> str:
    return f"{''.join(c if c.isalnum() or c in '+-.' else '_' for c in label.lower())}-seed{seed}"


CellListener = Callable[[str, int, int], None]  # cell, round, rounds
Failed = dict[str, BaseException]  # by the name of a cell's folder


def run_cells(grid: list[Cell], workers: int, data_root: Path | None, listener: CellListener) -> None:
    """Run what is not finished yet, `workers` at a time. A cell that fails is named after the others are done."""
    refuse_failed(try_cells(grid, workers, data_root, listener), len(grid))


def refuse_failed(failed: Failed, runs: int) -> None:
    """Name the first of the runs that failed, if there are any."""
    for name, error in failed.items():
        raise RunError(f"{len(failed)} of {runs} runs failed; the first: {name}: {str(error) or type(error).__name__}")


def try_cells(grid: list[Cell], workers: int, data_root: Path | None, listener: CellListener) -> Failed:
    """Run what is not finished yet, `workers` at a time, and say which failed."""
    if not grid:
        return {}
    _refuse_others(grid)
    todo = [cell for cell in grid if not (cell.folder / RESULTS).exists()]
    for cell in grid:
        if cell not in todo:
            listener(cell.folder.name, cell.config.rounds, cell.config.rounds)
    workers = min(workers or cores(), len(grid))
    context = _Spawn()
    events: Any = context.SimpleQueue()
    failed: Failed = {}
    pool = ProcessPoolExecutor(workers, context, initializer=_prepare, initargs=(events, workers > 1))
    try:
        futures: dict[Future[None], Cell] = {pool.submit(_run_cell, cell, data_root): cell for cell in todo}
        waiting = set(futures)
        while waiting:
            finished = {f for f in waiting if f.done()}
            while not events.empty():
                listener(*events.get())
            failed |= {futures[f].folder.name: error for f in finished if (error := f.exception())}
            waiting -= finished
            if waiting:
                _pause(waiting)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in context.started:
            if process.pid is not None:  # it may be that very one that could not be started
                process.terminate()
        raise
    pool.shutdown()
    while not events.empty():
        listener(*events.get())
    return failed


class _Spawn(SpawnContext):
    """Remembers the processes that it starts: others of the user's program are not ours to end."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[SpawnProcess] = []

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]
        self.started.append(process := SpawnProcess(*args, **options))
        return process


def _pause(waiting: set[Future[None]]) -> None:
    try:
        next(as_completed(waiting, timeout=0.2))
    except TimeoutError:
        pass
    except BrokenProcessPool:  # pragma: no cover - reported by the futures themselves
        pass


def _refuse_others(grid: list[Cell]) -> None:
    """A folder that holds a run with other settings, or of other code, is not taken for this one."""
    begun = [cell for cell in grid if (cell.folder / CONFIG).exists()]
    for cell in begun:
        saved, wanted = RunFolder(cell.folder).config, cell.config
        if any(getattr(saved, part) != getattr(wanted, part) for part in ("task_id", *METHODS)):
            raise RunError(
                f"{cell.folder}: was run with other settings than {cell.label} has now; "
                'use --fresh for a new folder, --out, or another "label"'
            )
        user_code.remember(wanted)
    if stale := {cell.folder: change for cell in begun if (change := change_of(RunFolder(cell.folder)))}:
        first, names = next(iter(stale)), ", ".join(dict.fromkeys(folder.name for folder in stale))
        rows = " ".join(dict.fromkeys(f'--redo "{cell.label}"' for cell in begun if cell.folder in stale))
        raise RunError(
            f"{first.parent}: {stale[first]} since {names} ran; remove these folders to run them again "
            f"(with compare: {rows}), or use --fresh for a new one, or --out"
        )


_events: Any = None
_cores = 0  # that a run may use; 0 is all


def _prepare(events: Any, several: bool) -> None:
    global _events, _cores
    import torch

    _events, _cores = events, int(several)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if several:  # runs share the cores
        torch.set_num_threads(1)


def _end_with_parent() -> None:
    """A worker whose parent was killed has nobody to report to; its run can be resumed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_cell(cell: Cell, data_root: Path | None) -> None:
    try:
        start_or_resume(cell, data_root, lambda *progress: _events.put(progress), cores=_cores)
    except UserError as error:
        raise RunError(str(error)) from None


def start_or_resume(cell: Cell, data_root: Path | None, listener: CellListener, **options: Any) -> None:
    """Run a cell in this process, from where it stopped; options: of `runner.start`."""
    from fedtailor.experiments import runner

    def listen(p: runner.Progress) -> None:
        listener(cell.folder.name, p.round, p.rounds)

    if (cell.folder / CONFIG).exists():
        user_code.remember(cell.config)
        runner.resume(cell.folder, data_root, listen, **options)
    else:
        runner.start(cell.config, cell.folder, data_root, listen, **options)
