"""Whose replies were far from the mean, of a run with a robust one."""

from __future__ import annotations

from fedtailor.report.page_model import Cell, Section, Table
from fedtailor.report.reading import Recorded, known

SCORES = ("distance", "left_out")  # that a robust mean reports, one number for each client of the round


def unusual(run: Recorded) -> tuple[Section, ...]:
    """Every client by its mean distance; no section where nothing was scored."""
    distances, outs = _by_client(run, "distance"), _by_client(run, "left_out")
    if not distances:
        return ()
    ranked = sorted(distances, key=lambda client: -_mean(distances[client]))
    rows = [
        (
            Cell(run.clients[client]),
            *(Cell(f"{v:.2f}", v) for v in (_mean(distances[client]), max(distances[client]))),
            Cell(f"{len(distances[client])}", len(distances[client])),
            *([Cell(f"{(out := sum(outs.get(client, []))):.0f}", out)] if outs else []),
        )
        for client in ranked
    ]
    columns = ("client", "mean distance", "largest", "rounds", *(["left out"] if outs else []))
    text = (
        f"How far each client's reply was from the robust mean ({run.config.aggregation.mean}), in multiples of the "
        "median distance of the round. A large one is a lie, or data unlike that of the others.",
    )
    table = Table("Distance of replies", columns, rows, sortable=True)
    return (Section("unusual", "Unusual replies", text, tables=(table,)),)


def _by_client(run: Recorded, name: str) -> dict[int, list[float]]:
    scores: dict[int, list[float]] = {}
    for line in run.lines:
        values = line.get("report", {}).get(name)
        cohort = line.get("cohort", [])
        if isinstance(values, list) and len(values) == len(cohort):
            for client, value in zip(cohort, values, strict=True):
                scores.setdefault(int(client), []).extend(known([float(value)]))
    return {client: held for client, held in scores.items() if held}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
