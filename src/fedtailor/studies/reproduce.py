"""Published tables, run again: rows by columns by seeds from one TOML file, ours beside the paper's."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError

from fedtailor import algorithms, models
from fedtailor.errors import ClientError, ConfigError, RunError, nearest
from fedtailor.experiments.config import RunConfig, parse, read_toml, with_values
from fedtailor.experiments.sections import SearchSection, Section, Space, dotted
from fedtailor.experiments.store import RESULTS, RunFolder, read_json
from fedtailor.metrics.memory import training_step
from fedtailor.metrics.summary import over_seeds
from fedtailor.studies import search
from fedtailor.studies.explain import of_own_models, overlap_by_classes
from fedtailor.studies.grid import Cell, CellListener, folder_name, refuse_failed, run_cells, try_cells

Scale = Literal["cpu", "paper"]


LEARNING_SEED = 1000


class Part(Section):
    """A row or a column: what it sets, key by key, on top of what is common."""

    name: str
    set: dict[str, Any] = Field(default_factory=dict)
    by_column: tuple[dict[str, Any], ...] = ()  # further settings of a row, one table per column
    scale: dict[str, dict[str, Any]] = Field(default_factory=dict)  # further settings at a scale
    by_column_at: dict[str, tuple[dict[str, Any], ...]] = Field(default_factory=dict)  # in place of by_column
    search: Space = Field(default_factory=dict)  # of a row: values to try beside those that all rows try
    only: Scale | None = None  # a row of one scale alone
    learned_once: bool = False  # a row whose theta is learned in one run before, for all seeds
    learned_with: dict[str, Any] = Field(default_factory=dict)  # settings of that run alone, such as less data
    paper: tuple[str, ...] = ()  # published figures of a row, one per column
    metric: str = ""  # of a column, where it is another than the table's
    unit: str = ""


class Published(Section):
    title: str
    metric: str
    unit: str = ""
    seeds: int = Field(default=3, ge=1)
    first_seed: int = Field(default=0, ge=0)
    common: dict[str, Any] = Field(default_factory=dict)
    scale: dict[str, dict[str, Any]] = Field(default_factory=dict)  # settings of a scale, key by key
    search: SearchSection | None = None  # for each cell of the table; what it finds goes before what is set
    search_at: dict[str, SearchSection | Literal[False]] = Field(default_factory=dict)  # in its place at a scale
    may_fail: bool = False  # a run that diverges is told in its cell, and the others are shown
    columns: tuple[Part, ...] = Field(min_length=1)
    rows: tuple[Part, ...] = Field(min_length=1)


class Figure(BaseModel):
    """One cell of the table, over seeds."""

    row: str
    column: str
    mean: float
    std: float | None
    n: int
    paper: str | None
    unit: str
    failed: str = ""  # why there is no figure


def available(configs: Path) -> list[str]:
    """Names such as "learn2pfed/table1" of the tables under a folder of configurations."""
    paths = (p for p in configs.rglob("*.toml") if "rows" in read_toml(p))
    return sorted(p.relative_to(configs).with_suffix("").as_posix() for p in paths)


def load(configs: Path, name: str) -> Published:
    path = configs / f"{name}.toml"
    if not path.is_file() or name not in available(configs):
        raise ConfigError(f'no published table "{name}"; {nearest(name, available(configs))}')
    try:
        table = Published.model_validate(read_toml(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if table.search is None and (lone := [part.name for part in table.rows if part.search]):
        raise ConfigError(f'{path}: row "{lone[0]}" has values to search; add a [search] section with trials')
    return table


def rows_named(table: Published, text: str) -> list[str]:
    """Rows listed with commas between them; the name of a row may have commas itself."""
    known, parts, names = {part.name for part in table.rows}, [p.strip() for p in text.split(",") if p.strip()], []
    while parts:
        length = next((n for n in range(len(parts), 0, -1) if ", ".join(parts[:n]) in known), 1)
        names.append(", ".join(parts[:length]))
        parts = parts[length:]
    return names


Cells = dict[tuple[str, str], list[Cell]]  # (row, column) -> a run per seed


def grid(
    table: Published,
    folder: Path,
    scale: Scale,
    seeds: int,
    rows: list[str],
    best_settings: Mapping[str, search.Settings] | None = None,
) -> Cells:
    """The runs of every cell of the table, with what a search found; only of some rows if these are named."""
    out: Cells = {}
    paths: dict[str, Path] = {}  # columns may read different figures off the same run
    for (row, column), subject in subjects(table, scale, rows).items():
        tables = with_values(subject.tables, (best_settings or {}).get(subject.label, {}))
        for seed in _seeds(table, seeds):
            config: RunConfig = parse(tables | {"seed": seed}, origin=row)
            label = f"{row} {column}"
            path = paths.setdefault(config.model_dump_json(), folder / folder_name(label, seed))
            out.setdefault((row, column), []).append(Cell(label, seed, path, config))
    return out


def _seeds(table: Published, seeds: int) -> range:
    return range(table.first_seed, table.first_seed + seeds)


def subjects(table: Published, scale: Scale, rows: list[str]) -> dict[tuple[str, str], search.Subject]:
    """What is run, and searched, for every cell of the table; the same for cells that differ in name only."""
    unknown = [r for r in rows if r not in {part.name for part in table.rows}]
    if unknown:
        raise ConfigError(f'--rows: no row "{unknown[0]}"; {nearest(unknown[0], [p.name for p in table.rows])}')
    out = {}
    first: dict[str, search.Subject] = {}
    section = search_section(table, scale)
    for row in table.rows:
        if (rows and row.name not in rows) or row.only not in (None, scale):
            continue
        for i, column in enumerate(table.columns):
            by_column = row.by_column_at.get(scale, row.by_column)
            own = row.set | row.scale.get(scale, {}) | (by_column[i] if by_column else {})
            at_scale = table.scale.get(scale, {}) | column.set | column.scale.get(scale, {})
            tables = with_values(with_values(table.common, at_scale), own)
            name = parse(tables, origin=row.name).algorithm.name
            space = {} if section is None else search.space_of(section, name, row.name)
            space |= {} if scale in table.search_at else row.search
            subject = search.Subject(f"{row.name} {column.name}", tables, space)
            out[row.name, column.name] = first.setdefault(json.dumps([tables, space]), subject)
    return out


def search_section(table: Published, scale: Scale) -> SearchSection | None:
    """How settings are searched at a scale; None: they are those of the table."""
    return table.search_at.get(scale, table.search) or None


def searched(
    table: Published,
    folder: Path,
    scale: Scale,
    seeds: int,
    rows: list[str],
    data_root: Path | None,
    listener: CellListener,
) -> dict[str, search.Settings]:
    """The settings found for the cells of the table, by search or in a run that learns for all seeds."""
    section = search_section(table, scale)
    if section is None:
        return _learned(table, folder, scale, rows, data_root, listener)
    search.check_names(section, {*algorithms.algorithms(), *(part.name for part in table.rows)})
    by_label = {s.label: s for s in subjects(table, scale, rows).values()}
    plan = search.plan(section, list(by_label.values()), _seeds(table, seeds), folder)
    return search.run(plan, 0, data_root, listener)


def _learned(
    table: Published, folder: Path, scale: Scale, rows: list[str], data_root: Path | None, listener: CellListener
) -> dict[str, search.Settings]:
    """What rows that are `learned_once` use in all seeds: the theta that a run with a seed of its own ends with."""
    learned_rows = {part.name: part.learned_with for part in table.rows if part.learned_once}
    grid = {}
    for (row, _), subject in subjects(table, scale, rows).items():
        if row in learned_rows:
            values = {"seed": LEARNING_SEED, "rounds": 1} | learned_rows[row]
            config: RunConfig = parse(with_values(subject.tables, values), origin=row)
            path = folder / "learned" / folder_name(subject.label, LEARNING_SEED)
            grid[subject.label] = Cell(subject.label, LEARNING_SEED, path, config)
    run_cells(list(grid.values()), 0, data_root, lambda name, round, rounds: listener(f"learned/{name}", round, rounds))
    reports = {label: [m.get("report", {}) for m in RunFolder(cell.folder).metrics()] for label, cell in grid.items()}
    thetas = {label: [r["theta"] for r in each if "theta" in r] for label, each in reports.items()}
    return {k: {"algorithm.theta": v[-1], "algorithm.outer_iterations": 0} for k, v in thetas.items()}


def run(table: Published, cells: Cells, data_root: Path | None, listener: CellListener) -> list[Figure]:
    """Run what is missing and read off the figures of the last round."""
    unique_cells = {cell.folder: cell for group in cells.values() for cell in group}
    failed = try_cells(list(unique_cells.values()), 0, data_root, listener)
    failures = {k: str(e) for k, e in failed.items() if table.may_fail and isinstance(e, RunError | ClientError)}
    refuse_failed({k: e for k, e in failed.items() if k not in failures}, len(unique_cells))
    figures = []
    for (row, column), group in cells.items():
        part = next(p for p in table.rows if p.name == row)
        place = [c.name for c in table.columns].index(column)
        wanted = table.columns[place]
        reads = wanted.metric or table.metric
        reasons = [failures.get(cell.folder.name, "") for cell in group]
        whole = [not why or reads.startswith(("report.", "largest.")) for why in reasons]
        values = [measured(c, reads) if is_whole else math.nan for c, is_whole in zip(group, whole, strict=True)]
        average, spread = over_seeds(values)
        figures.append(
            Figure(
                row=row,
                column=column,
                mean=average,
                std=spread if len(values) > 1 else None,
                n=len(values),
                paper=part.paper[place] if part.paper else None,
                unit=wanted.unit or ("" if wanted.metric else table.unit),
                failed="" if all(whole) else next(filter(None, reasons)),
            )
        )
    return figures


def measured(cell: Cell, metric: str) -> float:
    """A figure of a finished run: a test metric of the last round, half of it ("half.mse"), that of "unseen" clients,
    that of one client ("client.NAME"), who may be unseen, kB "up" or "down" per client and round, "seconds" per round,
    the "memory" of a training step (MB), the last or the largest number that was reported under a name ("report.NAME",
    "largest.NAME"), or how much the masks of two clients with a class in common, or with none, overlap
    ("overlap.common", "overlap.none"; of the head alone "overlap.head.common", "overlap.head.none"), or a test metric
    of the models that clients had before the last average ("own.NAME"), for a method with the option `serve`."""
    kind, _, name = metric.partition(".")
    if kind in ("report", "largest"):
        values = [m["report"][name] for m in RunFolder(cell.folder).metrics() if name in m.get("report", {})]
        return float(values[-1] if kind == "report" else max(values))
    if kind == "half":
        return measured(cell, name) / 2
    results = read_json(cell.folder / RESULTS)
    if metric == "seconds":
        return float(results["seconds"]) / cell.config.rounds
    if metric == "memory":
        return _step_memory(cell)
    if kind == "client":
        return _of_client(cell, results, name)
    if kind == "own":
        return of_own_models(cell.folder, name)
    if metric.startswith("overlap."):
        return overlap_by_classes(cell.folder, head=".head." in metric)[metric.rpartition(".")[2]]
    if metric in ("up", "down"):
        clients = results["last"]["test"][results["metric"]]["clients"]
        cohort_size = cell.config.federation.clients_per_round or clients
        return float(results["traffic"][metric]) / 1000 / (cohort_size * cell.config.rounds)
    if metric == "unseen":
        return float(results["unseen"]["test"][results["metric"]]["mean"])
    return float(results["last"]["test"][metric]["mean"])


def _of_client(cell: Cell, results: dict[str, Any], name: str) -> float:
    """The first metric of one client; nan where it had no part."""
    about, unseen = RunFolder(cell.folder).about, results.get("unseen", {})
    for names, values in ((about["clients"], results["last"]), (unseen.get("names", []), unseen)):
        if name in names:
            return float(values["clients"][results["metric"]][names.index(name)])
    return math.nan


def _step_memory(cell: Cell) -> float:
    """Of the run's model and batch size, on noise shaped as its samples."""
    about, chosen = RunFolder(cell.folder).about, cell.config.model
    shape = tuple(about["shape"])
    model = models.build(chosen.name, shape, about["outputs"], seed=0, head=chosen.head, options=chosen.options)
    generator = torch.Generator().manual_seed(0)
    return training_step(model, torch.randn(cell.config.local.batch_size, *shape, generator=generator, device="cpu"))


def markdown(table: Published, figures: list[Figure], notes: Sequence[str] = ()) -> str:
    """Ours and, in brackets, the paper's; below them what there is to say."""
    columns = [c.name for c in table.columns]
    lines = ["| | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for row in dict.fromkeys(f.row for f in figures):
        by_column = {f.column: f for f in figures if f.row == row}
        lines.append("| " + " | ".join([row, *(text(by_column[c]) for c in columns)]) + " |")
    failed = [f"- {f.row} {f.column}: {f.failed}" for f in figures if f.failed]
    return "\n".join([*lines, *notes, *(["", "Failed:", "", *failed] if failed else [])]) + "\n"


def text(figure: Figure) -> str:
    """A cell of the table."""
    if figure.failed:
        return "failed"
    if math.isnan(figure.mean) and figure.n:
        return "-"
    scale = 100 if figure.unit == "%" else 1
    number_format = "{:.2f}" if figure.unit == "%" else "{:.3g}"
    ours = number_format.format(scale * figure.mean)
    if figure.std is not None and not math.isnan(figure.std):
        ours += " ± " + number_format.format(scale * figure.std)
    return ours + (f" ({figure.paper})" if figure.paper else "")


EPOCHS = ("epochs", "head_epochs", "body_epochs", "personal_epochs", "local_rounds")


class RowSetting(BaseModel):
    """The settings of a row in columns that share them, with the defaults filled in."""

    row: str
    columns: list[str]
    settings: dict[str, Any]  # by key, such as "local.lr"
    given: list[str]  # keys that the table sets; the others are defaults
    searched: dict[str, list[Any]]  # values to try beside these


def resolve(config: RunConfig) -> dict[str, Any]:
    """Every setting by key; of the algorithm also those of its preset and its defaults."""
    program = algorithms.make(config.algorithm.name, config.algorithm.options)
    fields = {f.name: getattr(program, f.name) for f in dataclasses.fields(program)}
    plain = {k: v for k, v in config.plain().items() if k != "algorithm"}
    own = json.loads(json.dumps(fields, default=list))
    found: dict[str, Any] = dotted(plain | {"algorithm": {"name": config.algorithm.name} | own})
    return found


def row_settings(table: Published, scale: Scale, rows: list[str]) -> list[RowSetting]:
    """One entry for all columns of a row that run with the same settings."""
    found: dict[str, RowSetting] = {}
    for (row, column), subject in subjects(table, scale, rows).items():
        settings = resolve(parse(subject.tables, origin=row))
        values = json.loads(json.dumps(subject.space, default=list))
        entry = RowSetting(row=row, columns=[], settings=settings, given=list(dotted(subject.tables)), searched=values)
        found.setdefault(json.dumps([row, settings, values]), entry).columns.append(column)
    return list(found.values())


def settings_text(entry: RowSetting) -> str:
    """An entry for people."""
    of, asked = entry.settings, entry.settings["federation.clients_per_round"]
    algorithm = {k.removeprefix("algorithm."): v for k, v in of.items() if k.startswith("algorithm.")}
    local = [f"{k} {algorithm[k]}" for k in EPOCHS if k in algorithm]
    local += [f"batches of {of['local.batch_size']}" if of["local.batch_size"] else "full batch"]
    local += [f"{of['local.optimizer']}, step size {of['local.lr']}, momentum {of['local.momentum']}"]
    local += [f"{k} {of[f'local.{k}']}" for k in ("augment", "weight_decay", "clip") if of.get(f"local.{k}")]
    options = [f"{k} {_short(v)}" for k, v in algorithm.items() if k not in ("name", *EPOCHS)]
    lines = {
        "data": _given(entry, "data", "source"),
        "clients": f"{of.get('data.clients') or 'all of the data'}, {asked or 'all'} in each round",
        "rounds": str(of["rounds"]),
        "local": ", ".join(local),
        "model": _given(entry, "model", "name"),
        "method": ", ".join([algorithm["name"], *options]),
        "environment": _given(entry, "environment"),
        "searched": "; ".join(f"{k} {_short(v)}" for k, v in entry.searched.items()),
    }
    said = [f"  {name:<12}{text}" for name, text in lines.items() if text]
    return "\n".join([f"{entry.row}: {', '.join(entry.columns)}", *said])


def _given(entry: RowSetting, section: str, first: str = "") -> str:
    """What the table sets in a section."""
    keys = [k for k in entry.given if k.startswith(f"{section}.") and k != f"{section}.{first}"]
    name = [str(entry.settings[f"{section}.{first}"])] if first else []
    return ", ".join([*name, *(f"{k.partition('.')[2]} {_short(entry.settings.get(k))}" for k in keys)])


def _short(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
