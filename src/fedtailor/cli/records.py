"""What commands print as JSON: the figures of a folder, for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedtailor.errors import RunError


def run_record(path: Path) -> dict[str, Any]:
    """A run, a comparison or a fit, as far as it has come."""
    from fedtailor.experiments.store import FIT, RunFolder, read_json
    from fedtailor.studies.compare import GRID

    if (path / FIT).exists():
        record = read_json(path / FIT)
        return {"folder": path, "what": "fit", "finished": "sites" in record, **record}
    if (path / GRID).exists():
        return {"folder": path, "what": "comparison", "finished": (path / "table.json").exists(), "table": _rows(path)}
    folder = RunFolder.open(path)
    results = folder.results
    about = folder.about
    task = {k: about[k] for k in ("data", "task", "clients", "train_samples", "notes", "parameters", "engine")}
    return {
        "folder": path,
        "what": "run",
        "finished": results is not None,
        "rounds": len(folder.metrics()),
        **task,
        "config": folder.config.plain(),
        "results": results,
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    from fedtailor.studies import result_tables

    file = path / "table.json"
    if not file.exists():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(result_tables.read(path, file.name))
    except ValueError as error:
        raise RunError(f"{file}: cannot be read ({error}); the same fedtailor compare writes it again") from None
    return rows


def shares_record(path: Path, data_root: Path | None) -> dict[str, Any]:
    """Weights of the average by round, or shares and degrees by client."""
    from fedtailor.studies.explain import explain, weights

    if by_round := weights(path):
        return {"weights": by_round}
    _, shares, degrees = explain(path, data_root)
    return {"shares": shares, "degrees": degrees}


def newcomer_record(name: str, newcomer: Any) -> dict[str, Any]:
    """Its samples, its metrics, and where its model is."""
    return {
        "name": name,
        "samples": newcomer.samples,
        "metrics": newcomer.metrics,
        "model": newcomer.path,
        "curve": newcomer.curve,
    }
