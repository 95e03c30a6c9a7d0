"""A model over sites of a federation, each with its own table, site.toml and policy: equal to that in one process."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import tomli_w

from fedtailor.flare import server as flare
from fedtailor.inference.finished_model import finished
from fedtailor.inference.formula_data import agreement, read_agreement
from fedtailor.inference.statistical_model import Request, StatisticalModel, config_of, model
from tests.flare.sites import Authority, Sites
from tests.inference.test_sums import FORMULAS, numbers, rows


def over_sites(root: Path, frame: pl.DataFrame, request: Request) -> StatisticalModel:
    agreed = agreement(frame, request.formula, request.family, request.site)
    root.mkdir(parents=True)
    (root / "agreed.toml").write_text(agreed)
    authority, files, about = Authority(), {}, tomllib.loads(agreed)
    names = [str(name) for name in frame["site"].unique(maintain_order=True)]
    partners = {"sums_of": 2, "partners": names} if request.secure else {}
    for name in names:
        (root / name).mkdir()
        frame.filter(pl.col("site") == name).drop("site").write_csv(root / name / "rows.csv")
        authority.write_kit(root / name / "kit", name)
        files[name] = root / name / "site.toml"
        files[name].write_text(tomli_w.dumps(about | {"policy": about["policy"] | partners}))
    design = read_agreement(root / "agreed.toml")
    config = config_of(request, design)
    return finished(request, design, flare.coordinate(Sites(files), config, "model", root / "runs", None))


@pytest.mark.parametrize(("family", "secure"), [("gaussian", False), ("cox", True)])
def test_sites_of_a_federation_agree_with_one_process(tmp_path: Path, family: Any, secure: bool) -> None:
    frame = rows(sites=3, each=31).with_columns(pl.col("y").round(6), pl.col("x").round(6))
    request = Request(FORMULAS[family], family, "site", secure=secure)
    there = over_sites(tmp_path / "sites", frame, request)
    here = model(frame, request.formula, request.family, site="site")
    assert list(numbers(there.estimates)) == pytest.approx(list(numbers(here.estimates)), rel=1e-6, abs=1e-9)
    assert there.estimates.groups == here.estimates.groups
    assert not there.estimates.modes  # they stay at the sites
    lines = [json.loads(line) for line in (tmp_path / "sites/site1/private/audit.jsonl").read_text().splitlines()]
    left = [line["left"]["keys"] for line in lines if "left" in line]
    assert left
    if not secure:
        sizes = [n for keys in left for shape in keys.values() for n in shape]
        assert 31 not in sizes  # no dimension is that of rows
        assert max(sizes) == 26  # those of X'X with the response, and log|V|
