"""A fit over sites that have a table each: equal to the fit in one process, with figures and models at the sites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import tomli_w

import fedtailor as ft
from fedtailor import algorithms
from fedtailor.algorithms._programs import boosting
from fedtailor.cli.federation_commands import fit_config, policy
from fedtailor.core.algorithm import reply_names
from fedtailor.experiments.store import RunFolder
from fedtailor.flare import server as flare
from fedtailor.flare.site import fit_results
from fedtailor.report.fit_page import headline
from fedtailor.tables import candidates
from fedtailor.tables.serve import personal
from tests.flare.sites import Authority, Sites
from tests.helpers import assert_equal
from tests.tables.test_table_fit import table

SIZES = [170, 30, 24]
SETTINGS = ["algorithm.effects=['none', 'intercept']", "federation.silence=0.2", "federation.deadline=2"]
NEW = {"x1": [0.3, -1.0], "x2": [1.0, 2.0]}


def site_files(root: Path, frame: pl.DataFrame, **allowed: Any) -> dict[str, Path]:
    """A folder for each site with its table, its certificate and its site.toml."""
    authority, files = Authority(), {}
    for (name,), part in frame.group_by("site", maintain_order=True):
        folder = root / str(name)
        folder.mkdir(parents=True)
        part.drop("site").write_csv(folder / "data.csv")
        authority.write_kit(folder / "kit", str(name))
        data = {"path": "data.csv", "target": "y", "numeric": ["x1", "x2"], "standardise": "none", "val": 0.0}
        sends = reply_names(algorithms.find("tablefit"))
        rules = {"algorithms": ["tablefit"], "sends": sends, "metrics": True, "min_samples": 10, **allowed}
        files[str(name)] = folder / "site.toml"
        files[str(name)].write_text(tomli_w.dumps({"data": data, "policy": rules}))
    return files


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sites, RunFolder]:
    root = tmp_path_factory.mktemp("federated")
    link = Sites(site_files(root, table(6, SIZES)))
    return root, link, flare.coordinate(link, fit_config({"source": "sites"}, 0, SETTINGS), "fit", root / "runs", None)


def test_a_site_predicts_as_the_fit_of_pooled_tables(
    fitted: tuple[Path, Sites, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _, run = fitted
    whole = candidates.cells_of
    monkeypatch.setattr(candidates, "cells_of", lambda *args: whole(*args)[:3])  # as SETTINGS has it
    assert run.results is not None
    assert run.results["faults"] == 0
    pooled = ft.fit(table(6, SIZES), "y", client_column="site", out=tmp_path / "fit", progress=False)
    for name in ("s1", "s2"):  # too small for trees
        path, record = fit_results(root / name / "site.toml")
        wanted = pooled.record["sites"][name]
        assert record["sites"][name]["test"] == wanted["test"]
        assert record["sites"][name]["alone"] == pytest.approx(wanted["alone"], rel=1e-6)
        assert personal(path, name).predict(NEW) == pytest.approx(pooled.personal(name).predict(NEW), rel=1e-6)


def test_the_page_of_a_site_speaks_of_its_federation(fitted: tuple[Path, Sites, RunFolder]) -> None:
    root, _, _ = fitted
    _, record = fit_results(root / "s1" / "site.toml")
    assert headline(record) == "s1 keeps its own model: the federation's did not help it by more than its uncertainty."
    mixed = record | {"sites": {"s1": record["sites"]["s1"] | {"served": "mixed"}}}
    assert headline(mixed).startswith(
        "s1 is served by mixed, of a fit with the other sites of its federation: test RMSE"
    )


def test_trees_are_grown_at_the_site_and_stay_there(fitted: tuple[Path, Sites, RunFolder]) -> None:
    root, link, _ = fitted
    before = len(link.seen)
    path, record = fit_results(root / "s0" / "site.toml")
    assert list(path.glob("trees/*.safetensors"))
    assert record["sites"]["s0"]["parts"]
    assert len(link.seen) == before
    assert fit_results(root / "s0" / "site.toml")[1]["means"] == record["means"]


def test_the_policy_that_is_printed_is_enough_and_nothing_less_is(tmp_path: Path) -> None:
    import tomllib

    rules = tomllib.loads(policy())["policy"]
    assert rules["sends"] == reply_names(algorithms.make("tablefit", {}))
    assert "gradients by bin" not in rules["sends"]
    assert "gradients by bin" in reply_names(algorithms.make("tablefit", {"boosted": True}))
    link = Sites(site_files(tmp_path, table(6, [30, 24]), sends=rules["sends"][:-1]))
    with pytest.raises(Exception, match=f'"{rules["sends"][-1]}", which the policy'):
        flare.coordinate(link, fit_config({"source": "sites"}, 0, SETTINGS), "fit", tmp_path / "runs", None)


def test_the_record_of_a_site_says_what_left(fitted: tuple[Path, Sites, RunFolder]) -> None:
    root, _, _ = fitted
    lines = [json.loads(line) for line in (root / "s1/private/audit.jsonl").read_text().splitlines()]
    left = {line["asked"]: line["left"]["keys"] for line in lines if "left" in line}
    assert {"moments", "number_marginal", "errors", "curvature", "step_own", "decide"} <= set(left)
    numbers = [n for keys in left.values() for shape in keys.values() for n in shape]
    assert max(numbers) <= 129  # thresholds; no dimension is that of rows


def test_secure_sums_give_the_same(tmp_path: Path) -> None:
    """Where policies let terms leave in sums over all three sites only."""
    ends = []
    for name, more in (("plain", {}), ("secure", {"sums_of": 3, "partners": ["s0", "s1", "s2"]})):
        link = Sites(site_files(tmp_path / name, table(6, [30, 24, 20]), **more))
        small = [
            "algorithm.effects=['none']",
            "algorithm.boosted=false",
            "federation.deadline=60",
            f"privacy.secure_sum={bool(more)}".lower(),
        ]
        run = flare.coordinate(link, fit_config({"source": "sites"}, 0, small), "fit", tmp_path / name / "runs", None)
        saved = run.load_checkpoint()
        assert saved is not None
        ends.append(saved[1]["state"]["server"])
    assert_equal(ends[1], ends[0], 1e-6)


def bent() -> pl.DataFrame:
    """Three sites that share an effect which is not linear; too small for trees of their own."""
    rng = np.random.default_rng(8)
    x, site = rng.normal(size=(330, 2)), np.repeat(np.arange(3), 110)
    y = 4 * np.abs(x[:, 0]) + x[:, 1] + site + 0.3 * rng.normal(size=330)
    return pl.DataFrame({"x1": x[:, 0], "x2": x[:, 1], "y": y, "site": [f"s{i}" for i in site]})


def test_trees_that_sites_share_by_secure_sums_are_those_of_pooled_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boosting, "MOST_TREES", 3)
    whole = candidates.cells_of
    monkeypatch.setattr(candidates, "cells_of", lambda *args: whole(*args)[:2])
    link = Sites(site_files(tmp_path, bent(), sums_of=3, partners=["s0", "s1", "s2"]))
    settings = ["algorithm.effects=['none']", "federation.deadline=60", "privacy.secure_sum=true"]
    config = fit_config({"source": "sites"}, 0, settings)
    assert config.algorithm.options["boosted"] is True
    assert "boosted" not in fit_config({"source": "sites"}, 0, settings[:2]).algorithm.options
    flare.coordinate(link, config, "fit", tmp_path / "runs", None)
    pooled = ft.fit(bent(), "y", client_column="site", out=tmp_path / "fit", progress=False)
    for name in ("s0", "s1", "s2"):
        path, record = fit_results(tmp_path / name / "site.toml")
        wanted = pooled.record["sites"][name]
        assert wanted["served"].startswith("boosted")
        assert record["sites"][name]["served"] == wanted["served"]
        assert record["sites"][name]["shared_trees"] == pytest.approx(wanted["shared_trees"], abs=1e-6)
        assert personal(path, name).predict(NEW) == pytest.approx(pooled.personal(name).predict(NEW), rel=1e-6)
