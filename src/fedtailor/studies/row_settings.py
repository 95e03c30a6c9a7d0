"""With which settings every row of a published table runs: `fedtailor reproduce TABLE --dry-run`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from pydantic import BaseModel

from fedtailor import algorithms
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.experiments.sections import dotted
from fedtailor.studies.reproduce import Published, Scale, subjects

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
