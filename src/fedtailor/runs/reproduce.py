"""Published tables, run again: rows by columns by seeds from one TOML file, ours beside the paper's."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedtailor.errors import ConfigError, nearest
from fedtailor.runs.config import RunConfig, parse, read_toml, with_settings
from fedtailor.runs.grid import Cell, Told, folder_name, run_cells
from fedtailor.runs.store import RESULTS, RunFolder, read_json

Scale = Literal["cpu", "paper"]


class Part(BaseModel):
    """A row or a column: what it sets, key by key, on top of what is common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    set: dict[str, Any] = Field(default_factory=dict)
    by_column: tuple[dict[str, Any], ...] = ()  # further settings of a row, one table per column
    paper: tuple[str, ...] = ()  # published figures of a row, one per column
    metric: str = ""  # of a column, where it is another than the table's
    unit: str = ""


class Published(BaseModel):
    """A published table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    metric: str
    unit: str = ""
    seeds: int = Field(default=3, ge=1)
    first_seed: int = Field(default=0, ge=0)
    common: dict[str, Any] = Field(default_factory=dict)
    scale: dict[str, dict[str, Any]] = Field(default_factory=dict)  # settings of a scale, key by key
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


def available(configs: Path) -> list[str]:
    """Names such as "learn2pfed/table1" of the tables under a folder of configurations."""
    return sorted(f"{p.parent.name}/{p.stem}" for p in configs.glob("*/*.toml") if "rows" in read_toml(p))


def load(configs: Path, name: str) -> Published:
    """A published table by name."""
    path = configs / f"{name}.toml"
    if not path.is_file() or name not in available(configs):
        raise ConfigError(f'no published table "{name}"; {nearest(name, available(configs))}')
    try:
        return Published.model_validate(read_toml(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def rows_named(table: Published, text: str) -> list[str]:
    """Rows listed with commas between them; the name of a row may have commas itself."""
    known, parts, found = {part.name for part in table.rows}, [p.strip() for p in text.split(",") if p.strip()], []
    while parts:
        length = next((n for n in range(len(parts), 0, -1) if ", ".join(parts[:n]) in known), 1)
        found.append(", ".join(parts[:length]))
        parts = parts[length:]
    return found


Cells = dict[tuple[str, str], list[Cell]]  # (row, column) -> a run per seed


def grid(table: Published, folder: Path, scale: Scale, seeds: int, rows: list[str]) -> Cells:
    """The runs of every cell of the table; only of some rows if these are named."""
    unknown = [r for r in rows if r not in {part.name for part in table.rows}]
    if unknown:
        raise ConfigError(f'--rows: no row "{unknown[0]}"; {nearest(unknown[0], [p.name for p in table.rows])}')
    out: Cells = {}
    same: dict[str, Path] = {}  # columns may read different figures off the same run
    for row in table.rows:
        if rows and row.name not in rows:
            continue
        for i, column in enumerate(table.columns):
            further = row.by_column[i] if row.by_column else {}
            changes = table.scale.get(scale, {}) | column.set | row.set | further
            for seed in range(table.first_seed, table.first_seed + seeds):
                settings = [f"{key}={_toml(value)}" for key, value in changes.items()]
                config: RunConfig = parse(with_settings(table.common, [*settings, f"seed={seed}"]), origin=row.name)
                label = f"{row.name} {column.name}"
                path = same.setdefault(config.model_dump_json(), folder / folder_name(label, seed))
                out.setdefault((row.name, column.name), []).append(Cell(label, seed, path, config))
    return out


def run(table: Published, cells: Cells, data_root: Path | None, told: Told) -> list[Figure]:
    """Run what is missing and read off the figures of the last round."""
    once = {cell.folder: cell for group in cells.values() for cell in group}
    run_cells(list(once.values()), 0, data_root, told)
    figures = []
    for (row, column), group in cells.items():
        part = next(p for p in table.rows if p.name == row)
        place = [c.name for c in table.columns].index(column)
        wanted = table.columns[place]
        values = [measured(cell, wanted.metric or table.metric) for cell in group]
        figures.append(
            Figure(
                row=row,
                column=column,
                mean=mean(values),
                std=stdev(values) if len(values) > 1 else None,
                n=len(values),
                paper=part.paper[place] if part.paper else None,
                unit=wanted.unit or ("" if wanted.metric else table.unit),
            )
        )
    return figures


def measured(cell: Cell, metric: str) -> float:
    """A figure of a finished run: a test metric of the last round, kB "up" or "down" per client and round, or the last
    number that the algorithm reported under a name ("report.NAME")."""
    results = read_json(cell.folder / RESULTS)
    if metric.startswith("report."):
        name = metric.removeprefix("report.")
        return float([m["report"][name] for m in RunFolder(cell.folder).metrics() if name in m.get("report", {})][-1])
    if metric in ("up", "down"):
        clients = results["last"]["test"][results["metric"]]["clients"]
        asked = cell.config.federation.clients_per_round or clients
        return float(results["traffic"][metric]) / 1000 / (asked * cell.config.rounds)
    return float(results["last"]["test"][metric]["mean"])


def markdown(table: Published, figures: list[Figure]) -> str:
    """Ours and, in brackets, the paper's."""
    columns = [c.name for c in table.columns]
    lines = ["| | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for row in dict.fromkeys(f.row for f in figures):
        found = {f.column: f for f in figures if f.row == row}
        lines.append("| " + " | ".join([row, *(text(found[c]) for c in columns)]) + " |")
    return "\n".join(lines) + "\n"


def text(figure: Figure) -> str:
    """A cell of the table."""
    scale = 100 if figure.unit == "%" else 1
    shown = "{:.2f}" if figure.unit == "%" else "{:.3g}"
    ours = shown.format(scale * figure.mean)
    if figure.std is not None and not math.isnan(figure.std):
        ours += " ± " + shown.format(scale * figure.std)
    return ours + (f" ({figure.paper})" if figure.paper else "")


def _toml(value: Any) -> str:
    import tomli_w

    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip()
