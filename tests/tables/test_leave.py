"""A site leaves a fit: what serves is the fresh fit without it, and nothing of it stays."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import fedtailor as ft
from fedtailor.aggregation.identity import read_identity
from fedtailor.api import Fit
from fedtailor.errors import RunError
from fedtailor.experiments.store import read_json
from fedtailor.tables.leave import departure_statement, leave
from tests.flare.sites import Authority

SITES = ("east", "north", "south", "west")


def tables(folder: Path, sites: tuple[str, ...] = SITES) -> Path:
    folder.mkdir()
    for name in sites:
        rng = np.random.default_rng(sum(map(ord, name)))
        x = rng.normal(size=(60, 2))
        y = x @ np.array([1.0, -0.5]) + rng.normal() + rng.normal(size=60)
        pl.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y}).write_csv(folder / f"{name}.csv")
    return folder


def test_leaving_is_a_fresh_fit_without_the_site(tmp_path: Path) -> None:
    kept = tuple(name for name in SITES if name != "west")
    fit = ft.fit(tables(tmp_path / "all"), "y", out=tmp_path / "fit", progress=False)
    fresh = ft.fit(tables(tmp_path / "rest", kept), "y", out=tmp_path / "fresh", progress=False)
    before = read_json(tmp_path / "fit/fit.json")
    assert "west" in before["sites"]
    with pytest.raises(RunError):
        leave(fit.path, ["nowhere"])
    result = leave(fit.path, ["west"])
    after = ft.load(tmp_path / "fit")
    assert isinstance(after, Fit)
    assert after.sites == list(kept)
    rows = pl.DataFrame({"a": [0.0, 1.0, -2.0], "b": [1.0, 0.0, 0.5]})
    for name in kept:
        np.testing.assert_allclose(after.personal(name).predict(rows), fresh.personal(name).predict(rows), atol=1e-8)
    with pytest.raises(RunError):
        after.personal("west")

    names = {entry.name for entry in (tmp_path / "fit").iterdir()}
    assert names == {"current.json", "departures", "update-1"}
    record = dict(read_json(result.file))
    signature = record.pop("signature")
    assert signature == {"kind": "checksum", "sha256": hashlib.sha256(departure_statement(record)).hexdigest()}
    assert (record["left"], record["stay"]) == (["west"], list(kept))
    assert record["fit"] == hashlib.sha256((result.folder / "fit.json").read_bytes()).hexdigest()
    assert "fit.json" in record["deleted"]
    assert not any((tmp_path / "fit" / file).exists() for file in record["deleted"])
    assert "west" not in json.dumps(read_json(result.folder / "fit.json")["sites"])

    second = leave(tmp_path / "fit", ["north"])
    assert second.departure["previous"] == hashlib.sha256(result.file.read_bytes()).hexdigest()
    assert list(ft.load(tmp_path / "fit").sites) == ["east", "south"]  # type: ignore[union-attr]
    (tmp_path / "all" / "west.csv").unlink()  # its rows are not needed any more
    assert ft.load(tmp_path / "fit").update().path == second.folder  # type: ignore[union-attr]


def test_a_certificate_signs_the_record(tmp_path: Path) -> None:
    startup = Authority().write_kit(tmp_path / "kit", "east")
    fit = ft.fit(tables(tmp_path / "all"), "y", out=tmp_path / "fit", progress=False)
    result = leave(fit.path, ["west"], identity=startup)
    record = dict(read_json(result.file))
    signature = record.pop("signature")
    identity = read_identity(startup, ())
    assert identity is not None
    parts = base64.b64decode(signature["certificate"]), base64.b64decode(signature["signature"])
    assert identity.check(*parts, departure_statement(record), "record") == "east"
    with pytest.raises(ValueError, match="not signed"):
        identity.check(*parts, departure_statement(record | {"left": []}), "record")
