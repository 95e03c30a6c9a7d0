"""Whether a site takes part: its operator can pause it, leave, or withdraw a run. The server has no say in it."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fedtailor.deploy.flare.audit import lines_of
from fedtailor.deploy.flare.refusal import Refused
from fedtailor.errors import RunError
from fedtailor.experiments.store import read_json, write_json

STANDING, RECEIPTS = "standing.json", "receipts"
State = Literal["active", "paused", "left"]
WORDS = {"paused": "this site is paused by its operator", "left": "this site has left the federation"}


def standing(folder: Path) -> dict[str, Any]:
    """What the operator of a site has said: `state`, and the runs that were `withdrawn`."""
    path = folder / STANDING
    return dict(read_json(path)) if path.exists() else {"state": "active", "withdrawn": []}


def check(folder: Path, run: str = "") -> None:
    """Refuse whatever the server asks while the site takes no part."""
    record = standing(folder)
    if record["state"] in WORDS:
        raise Refused(WORDS[record["state"]])
    if run and run in record["withdrawn"]:
        raise Refused(f"this site has withdrawn from the run {run}")


def set_state(folder: Path, state: State) -> None:
    """From the next request on."""
    write_json(folder / STANDING, standing(folder) | {"state": state})


def withdraw(folder: Path, run: str) -> Path:
    """Refuse a run from now on, delete what was kept of it here, and return the receipt."""
    path = folder / run
    if Path(run).name != run or not path.is_dir() or run == RECEIPTS:
        known = ", ".join(runs(folder)) or "none"
        raise RunError(f'{folder}: no run "{run}"; there are: {known}')
    record, about = standing(folder), _rounds(folder, run)
    withdrawn = sorted({*record["withdrawn"], run})
    write_json(folder / STANDING, record | {"withdrawn": withdrawn})  # before anything is deleted
    deleted = []
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        deleted.append({"file": str(file.relative_to(folder)), "bytes": file.stat().st_size, "sha256": digest})
        file.unlink()
    for inner in sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True):
        inner.rmdir()
    path.rmdir()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    receipt = folder / RECEIPTS / f"{run}.json"
    write_json(receipt, {"run": run, "withdrawn": now, "deleted": deleted} | about)
    return receipt


def runs(folder: Path) -> list[str]:
    """Runs of which something is kept at a site."""
    return sorted(p.name for p in folder.glob("*") if p.is_dir() and p.name != RECEIPTS)


def _rounds(folder: Path, run: str) -> dict[str, Any]:
    """Rounds in which a reply left, from the record: what was added into a common model then stays in it."""
    try:
        entries = lines_of(folder / "audit.jsonl")
    except RunError as error:  # no reason not to withdraw
        return {"rounds": None, "record": str(error)}
    left = [e for e in entries if e.get("run") == run and "refused" not in e and "left" in e]
    return {"rounds": sorted({int(e["round"]) for e in left if e.get("round") is not None})}
