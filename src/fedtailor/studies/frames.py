"""Runs and comparisons as polars frames, one row per round, client or row of the table; `.to_pandas()` for pandas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from fedtailor.experiments.store import RunFolder
from fedtailor.studies.compare import Row
from fedtailor.studies.result_tables import record

SPLITS = ("val", "test")
TRAFFIC = ("up", "down", "trips")


def _frame(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Any] | None = None) -> pl.DataFrame:
    if not rows:
        return pl.DataFrame(schema=columns)
    return pl.DataFrame(rows, infer_schema_length=None, schema_overrides=columns)


def rounds(folder: RunFolder) -> pl.DataFrame:
    """One row per round: metrics as means over clients, reports of the algorithm, traffic so far, faults.

    A number that the algorithm reports is a column `report_NAME`; a list of numbers is a list in it.
    """
    return _frame([_round(line) for line in folder.metrics()])


def _round(line: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"round": line["round"], "clients": len(line["cohort"])}
    row |= {f"{k}_{metric}": _mean(v) for k in SPLITS for metric, v in line.get(k, {}).items()}
    row |= {f"report_{name}": value for name, value in line.get("report", {}).items()}
    row |= {k: line[k] for k in TRAFFIC}
    row |= {"faults": len(line.get("faults", [])), "is_abandoned": "abandoned" in line, "seconds": line["seconds"]}
    return row


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None and not math.isnan(v)]
    return sum(known) / len(known) if known else None


def client_rounds(folder: RunFolder) -> pl.DataFrame:
    """One row per round and client: metrics where they were measured, and whether the client was asked."""
    names = folder.about["clients"]
    rows = []
    for line in folder.metrics():
        asked = set(line["cohort"])
        for c, client in enumerate(names):
            figures = {f"{k}_{metric}": v[c] for k in SPLITS for metric, v in line.get(k, {}).items()}
            rows.append({"round": line["round"], "client": client, "is_asked": c in asked} | figures)
    return _frame(rows)


def faults(folder: RunFolder) -> pl.DataFrame:
    """One row per reply that was not used, and per round that was abandoned; there `client` is empty."""
    rows = []
    for line in folder.metrics():
        rows += [
            {"round": f["round"]} | {k: f[k] for k in ("client", "function", "reason")} for f in line.get("faults", [])
        ]
        if "abandoned" in line:
            rows.append({"round": line["round"], "client": "", "function": "", "reason": line["abandoned"]})
    columns = {"round": pl.Int64, **dict.fromkeys(("client", "function", "reason"), pl.String)}
    return _frame(rows, columns)


def table(rows: Sequence[Row]) -> pl.DataFrame:
    return _frame([record(row) | {name: mean for name, (mean, _) in row.others.items()} for row in rows])


def client_results(cells: Sequence[tuple[str, int, RunFolder]]) -> pl.DataFrame:
    """One row per algorithm, seed and client: test metrics of the last and the selected round."""
    rows = []
    for label, seed, folder in cells:
        if (results := folder.results) is None:
            continue
        for c, client in enumerate(folder.about["clients"]):
            kinds = [kind for kind in ("last", "selected") if kind in results]
            figures = {f"{kind}_{m}": v[c] for kind in kinds for m, v in results[kind]["clients"].items()}
            rows.append({"algorithm": label, "seed": seed, "client": client} | figures)
    return _frame(rows)


def all_rounds(cells: Sequence[tuple[str, int, RunFolder]]) -> pl.DataFrame:
    """The rounds of all runs, with the algorithm and the seed of each."""
    return _frame(
        [
            {"algorithm": label, "seed": seed} | _round(line)
            for label, seed, folder in cells
            for line in folder.metrics()
        ]
    )
