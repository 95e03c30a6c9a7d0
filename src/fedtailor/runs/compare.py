"""A grid of algorithms and seeds on one task: cells run side by side, each resumable, and end in one table."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedtailor import algorithms
from fedtailor.errors import ConfigError, RunError, UserError
from fedtailor.metrics.summary import share_hurt
from fedtailor.runs.config import CompareConfig, RunConfig, parse
from fedtailor.runs.store import CONFIG, RESULTS, RunFolder, read_json, write_json

GRID, TABLE = "compare.json", "table.md"


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    label: str
    seed: int
    folder: Path
    config: RunConfig


def cells(config: CompareConfig, folder: Path) -> list[Cell]:
    """The grid, algorithm by algorithm; all of them are checked before the first one runs."""
    for key, instead in (("algorithm", "compare.algorithms"), ("seed", "compare.seeds")):
        if key in config.model_fields_set:
            raise ConfigError(f'"{key}" has no meaning in a comparison; set {instead}')
    common = {k: v for k, v in config.plain().items() if k not in ("compare", "algorithm", "seed")}
    out = []
    for entry in config.compare.algorithms:
        table = {"name": entry} if isinstance(entry, str) else dict(entry)
        label = str(table.pop("label", ""))
        name = str(table.get("name", ""))
        made = algorithms.make(name, {k: v for k, v in table.items() if k != "name"})
        twice = [e if isinstance(e, str) else e.get("name") for e in config.compare.algorithms].count(name) > 1
        options = "".join(f", {k} {v}" for k, v in table.items() if k != "name" and twice)
        label = label or (made.title or type(made).__name__) + options
        for seed in config.compare.seeds:
            run = parse(common | {"algorithm": table, "seed": seed})
            path = folder / f"{''.join(c if c.isalnum() or c in '+-.' else '_' for c in label.lower())}-seed{seed}"
            out.append(Cell(label, seed, path, run))
    if len({*config.compare.seeds}) < len(config.compare.seeds):
        raise ConfigError(f"compare.seeds = {list(config.compare.seeds)}: a seed stands there twice")
    if len({cell.folder for cell in out}) < len(out):
        raise ConfigError('compare.algorithms: two entries are the same; give one of them a "label"')
    return out


Told = Callable[[str, int, int], None]  # cell, round, rounds


def run_grid(config: CompareConfig, folder: Path, data_root: Path | None, told: Told) -> list[Cell]:
    """Run what is not finished yet, `workers` at a time. A cell that fails is named after the others are done."""
    grid = cells(config, folder)
    _claim(config, folder, grid)
    todo = [cell for cell in grid if not (cell.folder / RESULTS).exists()]
    for cell in grid:
        if cell not in todo:
            told(cell.folder.name, cell.config.rounds, cell.config.rounds)
    workers = min(config.compare.workers or os.cpu_count() or 1, len(grid))
    context = multiprocessing.get_context("spawn")
    events: Any = context.SimpleQueue()
    failures: list[str] = []
    pool = ProcessPoolExecutor(workers, context, initializer=_prepare, initargs=(events, workers > 1))
    try:
        futures: dict[Future[None], Cell] = {pool.submit(_run_cell, cell, data_root): cell for cell in todo}
        waiting = set(futures)
        while waiting:
            finished = {f for f in waiting if f.done()}
            while not events.empty():
                told(*events.get())
            failures += [
                f"{futures[f].folder.name}: {str(error) or type(error).__name__}"
                for f in finished
                if (error := f.exception())
            ]
            waiting -= finished
            if waiting:
                _pause(waiting)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    pool.shutdown()
    while not events.empty():
        told(*events.get())
    if failures:
        raise RunError(f"{len(failures)} of {len(grid)} runs failed; the first: {failures[0]}")
    return grid


def _pause(waiting: set[Future[None]]) -> None:
    try:
        next(as_completed(waiting, timeout=0.2))
    except TimeoutError:
        pass
    except BrokenProcessPool:  # pragma: no cover - reported by the futures themselves
        pass


def _claim(config: CompareConfig, folder: Path, grid: list[Cell]) -> None:
    """A folder belongs to one grid, which may grow by algorithms and seeds; what was run must not change."""
    fixed = {k: v for k, v in config.plain().items() if k not in ("compare", "algorithm", "seed", "federation")}
    path = folder / GRID
    if path.exists() and read_json(path) != fixed:
        raise RunError(f"{folder}: holds a comparison on another task; use --fresh for a new folder, or --out")
    for cell in grid:
        there = RunFolder(cell.folder).config if (cell.folder / CONFIG).exists() else cell.config
        if (there.task_id, there.algorithm) != (cell.config.task_id, cell.config.algorithm):
            raise RunError(
                f"{cell.folder}: was run with other settings than {cell.label} has now; "
                'use --fresh for a new folder, --out, or another "label"'
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, fixed)


_events: Any = None


def _prepare(events: Any, several: bool) -> None:
    global _events
    import torch

    _events = events
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
    from fedtailor.runs import runner

    def listen(p: runner.Progress) -> None:
        _events.put((cell.folder.name, p.round, p.rounds))

    try:
        if (cell.folder / CONFIG).exists():
            runner.resume(cell.folder, data_root, listen)
        else:
            runner.start(cell.config, cell.folder, data_root, listen)
    except UserError as error:
        raise RunError(str(error)) from None


@dataclass(frozen=True)
class Row:
    """An algorithm in the table; figures over seeds."""

    label: str
    metric: str
    last: tuple[float, float]  # mean over seeds of the mean over clients; spread over seeds
    selected: tuple[float, float]
    client_std: float
    worst_tenth: float
    hurt: float
    up: float  # bytes per run
    down: float
    trips: float
    seconds: float
    seeds: int


def rows(grid: list[Cell]) -> list[Row]:
    """One row per algorithm; clients are compared with Local of the same seed, in the last round."""
    results = {(c.label, c.seed): read_json(c.folder / RESULTS) for c in grid if (c.folder / RESULTS).exists()}
    local = {
        c.seed: results[c.label, c.seed]
        for c in grid
        if c.config.algorithm.name == "local" and (c.label, c.seed) in results
    }
    out = []
    for label in dict.fromkeys(c.label for c in grid):
        found = {seed: r for (name, seed), r in results.items() if name == label}
        if not found:
            continue
        metric, higher = next(iter(found.values()))["metric"], next(iter(found.values()))["higher_is_better"]
        hurt = [
            share_hurt(r["last"]["clients"][metric], local[s]["last"]["clients"][metric], higher_is_better=higher)
            for s, r in found.items()
            if s in local
        ]
        tests = [r["last"]["test"][metric] for r in found.values()]
        out.append(
            Row(
                label,
                metric,
                _mean_spread([t["mean"] for t in tests]),
                _mean_spread([r["selected"]["test"][metric]["mean"] for r in found.values()]),
                mean(t["std"] for t in tests),
                mean(t["worst_tenth"] for t in tests),
                mean(hurt) if hurt else math.nan,
                mean(r["traffic"]["up"] for r in found.values()),
                mean(r["traffic"]["down"] for r in found.values()),
                mean(r["traffic"]["trips"] for r in found.values()),
                mean(r["seconds"] for r in found.values()),
                len(found),
            )
        )
    return out


def _mean_spread(values: list[float]) -> tuple[float, float]:
    return mean(values), stdev(values) if len(values) > 1 else math.nan


def local_reference(folder: RunFolder) -> dict[str, Any] | None:
    """The results of a finished Local run on the same task beside this one, if there is one."""
    task = folder.about["task_id"]
    for other in sorted(folder.path.resolve().parent.glob(f"*/{RESULTS}")):
        sibling = RunFolder(other.parent)
        with suppress(UserError):  # a damaged neighbour is none
            if sibling.about["task_id"] == task and sibling.config.algorithm.name == "local":
                return sibling.results
    return None
