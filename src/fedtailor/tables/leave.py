"""A site leaves a fit: the others are fitted anew without it, and all that was fitted to its rows is deleted.

The new fit starts from nothing of the earlier one, so it is that of the sites that stay. A record says who left, which
files went, and what serves now; each record has the hash of the one before.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl

from fedtailor.data.configs import FolderConfig
from fedtailor.data.files import client_name, expand_home
from fedtailor.data.tabular.prepare import prepare_tables
from fedtailor.data.tabular.read import read_client_tables, read_rows
from fedtailor.errors import RunError
from fedtailor.experiments.building import data_seed
from fedtailor.experiments.store import (
    CURRENT,
    FIT,
    UPDATE,
    latest,
    make_current,
    number_of,
    read_json,
    root_of,
    write_json,
)
from fedtailor.studies.grid import CellListener
from fedtailor.tables.fit import fit_table
from fedtailor.tables.update import OF_CANDIDATES, read_earlier

DEPARTURES = "departures"  # folder of the records


@dataclass(frozen=True)
class Departure:
    """Where the models of the sites that stay are, and the record."""

    folder: Path
    file: Path
    departure: dict[str, Any]


def leave(
    path: Path,
    sites: Sequence[str],
    *,
    identity: Path | None = None,
    data_root: Path | None = None,
    listener: CellListener = lambda cell, round, rounds: None,
) -> Departure:
    """Fit the other sites anew, delete the earlier fits, and record it.

    identity: folder with a certificate and its key, which sign the record.
    """
    root = root_of(path)
    before = latest(root)
    record, config = read_earlier(before)
    source = config.data
    assert isinstance(source, FolderConfig)
    out = before
    if not set(sites) <= set(source.without):  # else the deletion was interrupted
        out = root / f"{UPDATE}{number_of(root) + 1}"
        _check(sites, list(record["sites"]))
        tables = {key: value for key, value in config.plain().items() if key not in OF_CANDIDATES}
        shutil.rmtree(out, ignore_errors=True)
        source = _own_copy(source, root, out, sites)
        source = source.model_copy(update={"without": tuple(sorted({*source.without, *sites}))})
        tables["data"] = source.model_dump(mode="json", exclude_none=True)
        loaded = prepare_tables(read_client_tables(source), source, data_seed(config))
        fit_table(tables, loaded, out, data_root, listener, 0.0, record["metric"])
        make_current(root, out)
    deleted = _delete_others(root, out)
    return _write_record(root, out, sites, deleted, identity)


def _check(leaving: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [site for site in leaving if site not in known]:
        raise RunError(f'no site "{unknown[0]}"; there are: {", ".join(known)}')
    if set(leaving) >= set(known):
        raise RunError("no site would be left; delete the folder")


def departure_statement(content: dict[str, Any]) -> bytes:
    """What a record of leaving says, as it is signed."""
    return json.dumps({"departure": content}, sort_keys=True).encode()


def _own_copy(source: FolderConfig, root: Path, out: Path, leaving: Sequence[str]) -> FolderConfig:
    """Rows that the fit itself keeps are copied, but for those of the sites that leave; others stay where they are."""
    path = expand_home(source.path).resolve()
    if not path.is_relative_to(root.resolve()):
        return source
    folder = out / "data"
    folder.mkdir(parents=True)
    if source.client_column is None:
        for file in path.iterdir():
            if client_name(file) is not None and client_name(file) not in leaving:
                shutil.copy2(file, folder / file.name)
        return source.model_copy(update={"path": folder})
    frame = read_rows(path)[1]
    stays = ~frame[source.client_column].cast(pl.String).is_in(list(leaving))
    frame.filter(stays.fill_null(True)).write_parquet(folder / "sites.parquet")
    return source.model_copy(update={"path": folder / "sites.parquet"})


def _delete_others(root: Path, keep: Path) -> dict[str, str]:
    """Delete all earlier fits of a folder; the files with their hashes."""
    old = [part for part in root.iterdir() if part.name not in (keep.name, CURRENT, DEPARTURES)]
    files = sorted(file for part in old for file in ([part] if part.is_file() else part.rglob("*")) if file.is_file())
    hashes = {str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    for part in old:
        shutil.rmtree(part) if part.is_dir() and not part.is_symlink() else part.unlink()
    return hashes


def _write_record(
    root: Path, out: Path, sites: Sequence[str], deleted: dict[str, str], identity: Path | None
) -> Departure:
    earlier = sorted((root / DEPARTURES).glob("*.json"))
    content: dict[str, Any] = {
        "left": sorted(sites),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "stay": list(read_json(out / FIT)["sites"]),
        "serves": out.name,
        "fit": hashlib.sha256((out / FIT).read_bytes()).hexdigest(),
        "deleted": deleted,
        "previous": hashlib.sha256(earlier[-1].read_bytes()).hexdigest() if earlier else "",
    }
    statement = departure_statement(content)
    signature = {"kind": "checksum", "sha256": hashlib.sha256(statement).hexdigest()}
    if identity is not None:
        from fedtailor.aggregation.identity import CERTIFICATE, KEY, read_identity  # need cryptography

        signer = read_identity(identity, ())
        if signer is None:
            raise RunError(f"{identity}: has no {CERTIFICATE} and {KEY}; name the startup folder of a kit")
        signature = {
            "kind": "signature",
            "by": signer.name,
            "certificate": base64.b64encode(signer.certificate).decode(),
            "signature": base64.b64encode(signer.sign(statement)).decode(),
        }
    file = root / DEPARTURES / f"{len(earlier) + 1:04d}.json"
    file.parent.mkdir(exist_ok=True)
    write_json(file, content | {"signature": signature})
    return Departure(out, file, content | {"signature": signature})
