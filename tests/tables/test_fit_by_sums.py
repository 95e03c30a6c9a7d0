"""A fit of tables that stay at their sites: the program of sums gives what the fit in one process gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from fedtailor import engines
from fedtailor.algorithms._programs import boosting
from fedtailor.core import codec
from fedtailor.core.data import FederatedData
from fedtailor.core.federation import Federation
from fedtailor.core.trees import items
from fedtailor.engines.wire import Site
from fedtailor.experiments.building import assemble, load
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.tables import blend, candidates, fit
from fedtailor.tables.blend import Selection
from fedtailor.tables.shared_trees import trees_of_state
from tests.tables.test_table_fit import table

SIZES = [26, 15, 1, 19]
EFFECTS = {"regression": ("none", "intercept"), "classification": ("intercept",)}


def classes(seed: int) -> pl.DataFrame:
    frame = table(seed, SIZES, slope=1.5)
    rng = np.random.default_rng(seed)
    chance = 1 / (1 + np.exp(-(frame["y"].to_numpy() - 50) / 6))
    return frame.with_columns(pl.Series("y", np.where(rng.random(len(chance)) < chance, "yes", "no")))


def tables_of(path: Path, frame: pl.DataFrame) -> dict[str, Any]:
    frame.write_csv(path / "all.csv")
    data = {"source": "folder", "path": str(path / "all.csv"), "target": "y", "client_column": "site", "val": 0.0}
    return {"data": data, "federation": {"engine": "loop"}}


def by_sums(
    tables: dict[str, Any], data: FederatedData, engine: str, effects: Sequence[str], boosted: bool = False
) -> tuple[Federation, Any]:
    """The program on an engine, round after round."""
    solved = {"rounds": 1, "model": {"name": "linear", "dtype": "float64"}, "federation": {"engine": engine}}
    algorithm = {"name": "tablefit", "effects": list(effects), "boosted": boosted}
    config: RunConfig = parse(tables | solved | {"algorithm": algorithm})
    experiment = assemble(config, data)
    running = engines.make(engine, experiment)  # type: ignore[arg-type]
    running.start()
    fed = Federation(running, config.federation.limits)
    server = experiment.algorithm.server_init(experiment.model)
    for round in range(1 - experiment.algorithm.preparation, 2):
        server = fed.run_round(round, range(len(data.clients)), server)
    return fed, server


@pytest.fixture(scope="module", params=["regression", "classification"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Selection, FederatedData, Path, Federation, Any]:
    path = tmp_path_factory.mktemp(request.param)
    tables = tables_of(path, table(5, SIZES) if request.param == "regression" else classes(5))
    loaded = load(parse(tables | {"rounds": 1}))
    effects = EFFECTS[request.param]
    labels = [candidates.LABELS[effect] for effect in ("", *effects)]
    cells = [cell for cell in candidates.cells_of(tables, loaded, path / "fit") if cell.label in labels]
    found, data = fit.train_and_select(cells, loaded, path / "fit", 0, None, lambda *args: None, 0)
    return found, data, path / "fit", *by_sums(tables, loaded, "wire", effects)


def test_weights_and_gains_are_those_of_one_process(
    both: tuple[Selection, FederatedData, Path, Federation, Any],
) -> None:
    found, _, _, fed, _ = both
    state = fed.engine.get_states()["state"]
    np.testing.assert_allclose(state["served"].numpy(), found.weights, rtol=0, atol=1e-8)
    np.testing.assert_allclose(state["sure"].numpy(), np.array(found.gains), rtol=0, atol=1e-8)
    assert not fed.record.faults
    assert not fed.record.gathered


def test_models_predict_the_same(both: tuple[Selection, FederatedData, Path, Federation, Any]) -> None:
    found, data, out, fed, server = both
    wanted = blend.delivered_outputs(found, data, data.test, out)["personal"]
    experiment = fed.engine.experiment
    for group, _, models in fed.engine.evaluate(range(len(data.clients)), 1, server, ()):
        for row, client in enumerate(group):
            a, b = int(data.test.starts[client]), int(data.test.starts[client + 1])
            params = {k: v[row] for k, v in models.items()}
            said = experiment.algorithm.predict(experiment.model, params, data.test.x[a:b])
            said = said.log_softmax(1) if data.task == "classification" else said
            torch.testing.assert_close(said, wanted[a:b], rtol=0, atol=1e-8)


def test_only_sums_cross_the_wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message has the same tensors of the same shapes however many rows there are, and no value of a row."""
    crossed: list[tuple[str, Any]] = []
    handle = Site.handle

    def recording(self: Site, request: bytes) -> bytes:
        reply = handle(self, request)
        (header, down), (_, up) = codec.decode(request), codec.decode(reply)
        crossed.append((header["function"], (down, up)))
        return reply

    monkeypatch.setattr(Site, "handle", recording)
    shapes: list[dict[str, set[Any]]] = []
    for sizes in ([12, 9], [50, 41]):
        crossed.clear()
        tables = tables_of(tmp_path, table(7, sizes))
        data = load(parse(tables | {"rounds": 1}))
        by_sums(tables, data, "wire", ["intercept"])
        seen: dict[str, set[Any]] = {}
        rows = torch.cat([data.train.x.flatten(), data.train.y.flatten()])
        for function, tree in crossed:
            seen.setdefault(function, set()).add(tuple((path, tuple(v.shape)) for path, v in items(tree)))
            values = torch.cat([v.flatten() for _, v in items(tree)] or [rows[:0]])
            assert not torch.isin(rows, values).any(), function
        shapes.append(seen)
    assert shapes[0] == shapes[1]
    assert {"moments", "number_marginal", "errors", "curvature", "step_own", "gain_sums", "decide"} <= set(shapes[0])
    assert all(len(forms) == 1 for forms in shapes[0].values())


@pytest.mark.parametrize("engine", ["vmap", "pool"])
def test_other_engines_agree(engine: str, tmp_path: Path) -> None:
    tables = tables_of(tmp_path, table(7, [12, 9, 1, 14]))
    data = load(parse(tables | {"rounds": 1}))
    (first, straight), (other, found) = (by_sums(tables, data, name, ["intercept"]) for name in ("loop", engine))
    torch.testing.assert_close(found["common"], straight["common"], rtol=0, atol=1e-6)
    states = [fed.engine.get_states()["state"]["models"] for fed in (first, other)]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=1e-6)
    other.engine.close()


def bent(seed: int, is_class: bool) -> pl.DataFrame:
    """Small sites that share an effect which is not linear."""
    rng, sites, rows = np.random.default_rng(seed), 24, 15
    x, site = rng.normal(size=(sites * rows, 3)), np.repeat(np.arange(sites), rows)
    y = 3 * np.abs(x[:, 0]) - 2.4 + x[:, 1] + rng.normal(size=sites)[site]
    if is_class:
        target = pl.Series("y", np.where(rng.random(len(y)) < 1 / (1 + np.exp(-2 * y)), "yes", "no"))
    else:
        target = pl.Series("y", y + 0.3 * rng.normal(size=len(y)))
    columns = {f"x{j}": x[:, j] for j in range(3)}
    return pl.DataFrame(columns | {"site": [f"s{i:02d}" for i in site]}).with_columns(target)


@pytest.mark.parametrize("is_class", [False, True])
def test_trees_that_sites_share_are_those_of_one_process(
    is_class: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boosting, "MOST_TREES", 6)
    tables = tables_of(tmp_path, bent(3, is_class))
    loaded = load(parse(tables | {"rounds": 1}))
    effects = ("intercept",) if is_class else ("none", "intercept")
    labels = [candidates.LABELS[effect] for effect in ("", *effects)]
    cells = [cell for cell in candidates.cells_of(tables, loaded, tmp_path / "fit") if cell.label in labels]
    found, data = fit.train_and_select(cells, loaded, tmp_path / "fit", 0, None, lambda *args: None, 0)
    fed, _ = by_sums(tables, loaded, "loop", effects, boosted=True)
    assert found.shared is not None
    assert found.shared.max() > 0.5
    state = fed.engine.get_states()["state"]
    np.testing.assert_allclose(state["served"][:, -1].numpy(), found.shared, rtol=0, atol=1e-6)
    np.testing.assert_allclose(state["sure"].numpy(), np.array(found.gains), rtol=0, atol=1e-6)
    straight = blend.read_shared_trees(tmp_path / "fit", data)(data.train.x)
    scale = (state["center"][0], state["spread"][0])
    by_hand = trees_of_state({k: v[0] for k, v in state["trees"].items()}, *scale, data.outputs)
    torch.testing.assert_close(by_hand(data.train.x), straight, rtol=0, atol=1e-6)
