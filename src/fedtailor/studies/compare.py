"""A grid of algorithms and seeds on one task: cells run side by side, each resumable, and end in one table."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from fedtailor import algorithms
from fedtailor.data.fingerprint import digest
from fedtailor.errors import ConfigError, RunError, UserError, nearest
from fedtailor.experiments.config import CompareConfig, parse, with_values
from fedtailor.experiments.sections import dotted
from fedtailor.experiments.store import CONFIG, RESULTS, RunFolder, hold, read_json, write_json
from fedtailor.metrics.summary import over_seeds, share_hurt
from fedtailor.studies import search
from fedtailor.studies.grid import Cell, CellListener, folder_name, run_cells

GRID, TABLE, ROWS = "compare.json", "table.md", "rows.json"


def cells(
    config: CompareConfig, folder: Path, best_settings: Mapping[str, search.Settings] | None = None
) -> list[Cell]:
    """The grid, algorithm by algorithm, with what a search found; all are checked before the first one runs."""
    for key, instead in (("algorithm", "compare.algorithms"), ("seed", "compare.seeds")):
        if key in config.model_fields_set:
            raise ConfigError(f'"{key}" has no meaning in a comparison; set {instead}')
    out = []
    for label, tables in _entries(config):
        tables = with_values(tables, (best_settings or {}).get(label, {}))
        for seed in config.compare.seeds:
            run = parse(tables | {"seed": seed})
            out.append(Cell(label, seed, folder / folder_name(label, seed), run))
    if len({*config.compare.seeds}) < len(config.compare.seeds):
        raise ConfigError(f"compare.seeds = {list(config.compare.seeds)}: a seed stands there twice")
    if len({cell.folder for cell in out}) < len(out):
        raise ConfigError('compare.algorithms: two entries are the same; give one of them a "label"')
    return out


def _entries(config: CompareConfig) -> list[tuple[str, dict[str, Any]]]:
    """Label and configuration, but for the seed, of every algorithm."""
    common = {k: v for k, v in config.plain().items() if k not in ("compare", "search", "algorithm", "seed")}
    out = []
    for entry in config.compare.algorithms:
        table = {"name": entry} if isinstance(entry, str) else dict(entry)
        label, own = str(table.pop("label", "")), dotted(table.pop("set", {}))
        _refuse_set(own)
        name = str(table.get("name", ""))
        program = algorithms.make(name, {k: v for k, v in table.items() if k != "name"})
        is_repeated = [e if isinstance(e, str) else e.get("name") for e in config.compare.algorithms].count(name) > 1
        options = "".join(f", {k} {v}" for k, v in (table | own).items() if k != "name" and is_repeated)
        tables = with_values(common | {"algorithm": table}, own)
        out.append((label or (program.title or type(program).__name__) + options, tables))
    return out


def _refuse_set(values: Any) -> None:
    """A row may set any key but those by which its clients would not be those of the other rows."""
    if not isinstance(values, dict):
        raise ConfigError('compare.algorithms: "set" is a table, such as set = {"local.lr" = 0.1}')
    for key in values:
        if key.split(".")[0] in ("data", "seed", "compare", "search") or key == "algorithm.name":
            raise ConfigError(f'compare.algorithms: set "{key}": rows of a comparison share data and seeds')


def run_grid(
    config: CompareConfig, folder: Path, data_root: Path | None, listener: CellListener, redo: Sequence[str] = ()
) -> list[Cell]:
    """Run what is not finished yet of a comparison, after the search if there is one; rows of `redo` from the start."""
    grid, workers = cells(config, folder), config.compare.workers
    plan = _plan(config, folder)
    labels = {cell.label for cell in grid}
    for label in (*redo, *([config.compare.against] if config.compare.against else [])):
        if label not in labels:
            raise ConfigError(f'compare: no row "{label}" here; {nearest(label, labels)}')
    with hold(folder, "comparison"):
        _claim(config, folder)
        for label in redo:
            _remove([cell.folder for cell in grid if cell.label == label])
            _remove([] if plan is None else search.folders(plan, label))
        if plan is not None:
            grid = cells(config, folder, search.run(plan, workers, data_root, listener))
        run_cells(grid, workers, data_root, listener)
        write_json(folder / ROWS, [{"label": c.label, "seed": c.seed, "folder": c.folder.name} for c in grid])
    return grid


def read_cells(folder: Path) -> list[Cell]:
    """The finished runs of a comparison's folder, by what the folder records of its last table."""
    if not (folder / ROWS).exists():
        raise RunError(f"{folder}: its rows are not recorded; the same fedtailor compare records them")
    out = []
    for entry in read_json(folder / ROWS):
        path = folder / Path(str(entry["folder"])).name
        if (path / RESULTS).exists():
            out.append(Cell(str(entry["label"]), int(entry["seed"]), path, RunFolder(path).config))
    return out


def _plan(config: CompareConfig, folder: Path) -> search.Plan | None:
    """The runs of the search; None if nothing is searched."""
    if config.search is None:
        return None
    names = [(label, str(tables["algorithm"]["name"]), tables) for label, tables in _entries(config)]
    search.check_names(config.search, {n for label, name, _ in names for n in (label, name)})
    subjects = [search.Subject(label, t, search.space_of(config.search, name, label)) for label, name, t in names]
    return search.plan(config.search, subjects, config.compare.seeds, folder)


def _remove(folders: Sequence[Path]) -> None:
    for path in folders:
        if (path / CONFIG).exists():
            shutil.rmtree(path)


def _claim(config: CompareConfig, folder: Path) -> None:
    """A folder belongs to one task; its grid may grow by algorithms and seeds, and its search by trials."""
    fixed = _fixed(config)
    path, files = folder / GRID, digest(config.data)
    if path.exists():
        saved = read_json(path)
        before = saved.pop("files", None)  # older folders do not tell
        if saved != fixed and _fixed(parse(dict(saved), CompareConfig, str(path))) != fixed:  # of older folders, too
            raise RunError(f"{folder}: holds a comparison on another task; use --fresh for a new folder, or --out")
        if None not in (before, files) and before != files:
            raise RunError(f"{folder}: the data is no longer what it was; use --fresh for a new folder, or --out")
        files = files or before
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, fixed | {"files": files})


def _fixed(config: CompareConfig) -> dict[str, Any]:
    """What all runs of a folder have in common."""
    free = ("compare", "search", "algorithm", "seed", "federation", "tracking")
    return {k: v for k, v in config.plain().items() if k not in free}


@dataclass(frozen=True)
class Cost:
    """What a run takes, on average."""

    up: float  # bytes
    down: float
    trips: float
    seconds: float

    @property
    def bytes(self) -> float:
        return self.up + self.down


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
    cost: Cost
    means: Mapping[int, float]  # by seed: mean over clients in the last round
    higher_is_better: bool = True
    others: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # every other metric, as `last`


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
        by_seed = {seed: r for (name, seed), r in results.items() if name == label}
        if not by_seed:
            continue
        metric, higher = next(iter(by_seed.values()))["metric"], next(iter(by_seed.values()))["higher_is_better"]
        hurt = [
            share_hurt(r["last"]["clients"][metric], local[s]["last"]["clients"][metric], higher_is_better=higher)
            for s, r in by_seed.items()
            if s in local
        ]
        tests = {seed: r["last"]["test"][metric] for seed, r in by_seed.items()}
        out.append(
            Row(
                label,
                metric,
                over_seeds([t["mean"] for t in tests.values()]),
                over_seeds([r["selected"]["test"][metric]["mean"] for r in by_seed.values()]),
                mean(t["std"] for t in tests.values()),
                mean(t["worst_tenth"] for t in tests.values()),
                mean(hurt) if hurt else math.nan,
                Cost(
                    up=mean(r["traffic"]["up"] for r in by_seed.values()),
                    down=mean(r["traffic"]["down"] for r in by_seed.values()),
                    trips=mean(r["traffic"]["trips"] for r in by_seed.values()),
                    seconds=mean(r["seconds"] for r in by_seed.values()),
                ),
                {seed: t["mean"] for seed, t in tests.items()},
                higher,
                _others(list(by_seed.values()), metric),
            )
        )
    return out


def _others(results: Sequence[Mapping[str, Any]], metric: str) -> dict[str, tuple[float, float]]:
    """What all seeds measured besides the metric of the table, in the last round."""
    each = [r["last"]["test"] for r in results]
    names = [name for name in each[0] if name != metric and all(name in one for one in each)]
    return {name: over_seeds([one[name]["mean"] for one in each]) for name in names}


def local_reference(folder: RunFolder) -> dict[str, Any] | None:
    """The results of a finished Local run on the same task beside this one, if there is one."""
    task = folder.config.task_id  # by the keys of today, for folders of any version
    for other in sorted(folder.path.resolve().parent.glob(f"*/{RESULTS}")):
        sibling = RunFolder(other.parent)
        with suppress(UserError):  # a damaged neighbour is none
            if sibling.config.task_id == task and sibling.config.algorithm.name == "local":
                return sibling.results
    return None
