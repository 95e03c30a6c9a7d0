"""A fit to tables: solved candidates, folds, weights, and what is promised to each site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import fedtailor as ft
from fedtailor.core.data import FederatedData, Rows
from fedtailor.errors import DataError
from fedtailor.experiments.store import FIT, read_json
from fedtailor.serving.predict import predict_by_site
from fedtailor.studies.grid import Cell
from fedtailor.tables import boosted_trees
from fedtailor.tables import candidates as linear
from fedtailor.tables import fit as fitting
from fedtailor.tables.blend import Candidates, common_weights, stack
from fedtailor.tables.boosted_trees import Trees, trees_of
from fedtailor.tables.candidates import all_in_training, folds_of, train
from fedtailor.tables.fit import fit
from fedtailor.tables.fit_sources import is_table_fit, read_source
from fedtailor.tables.serve import personal
from fedtailor.tables.stacked_sites import StackedSites
from fedtailor.tables.words import fit_sentences


def table(seed: int, sizes: list[int], slope: float = 0.5, big: bool = False) -> pl.DataFrame:
    rng, parts = np.random.default_rng(seed), []
    for i, n in enumerate(sizes):
        x = rng.normal(size=(n, 2))
        own = np.array([1.0, -1.0]) + rng.normal(scale=slope, size=2)
        y = 50 + 10 * (x @ own + rng.normal(scale=1.0)) + rng.normal(scale=5, size=n)
        if big and i == 0:
            y = y + 30 * (x[:, 0] > 0) * (x[:, 1] > 0)
        parts.append(pl.DataFrame({"x1": x[:, 0], "x2": x[:, 1], "y": y, "site": [f"s{i}"] * n}))
    return pl.concat(parts)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("table")
    table(1, [260, 12, 9, 1, 2, 14, 10], big=True).write_csv(folder / "all.csv")
    source = {"source": "folder", "path": str(folder / "all.csv"), "target": "y", "client_column": "site"}
    return folder / "out", fit(source, folder / "out")


def test_every_site_is_served_also_one_with_a_single_row(fitted: tuple[Path, dict[str, Any]]) -> None:
    out, record = fitted
    assert list(record["sites"]) == [f"s{i}" for i in range(7)]
    assert json.dumps(record) == json.dumps(read_json(out / FIT))  # text: a figure of no test rows is no number
    assert np.isnan(record["sites"]["s3"]["personal"])
    assert record["sites"]["s3"]["train"] == 1
    rows = {"x1": [0.1, 0.2], "x2": [0.0, 1.0]}
    for name in record["sites"]:
        assert np.isfinite(personal(out, name).predict(rows)).all()


def test_trees_serve_the_large_site_and_are_read_back(fitted: tuple[Path, dict[str, Any]]) -> None:
    out, record = fitted
    row = record["sites"]["s0"]
    assert row["trees"]
    assert sum(row["parts"].values()) == pytest.approx(1)
    assert all(not record["sites"][name]["trees"] for name in record["sites"] if name != "s0")
    assert personal(out, "s0").extras.trees is not None
    # what the record says of test rows is what the model says of them
    assert row["personal"] < row["baseline"]


def test_weights_are_a_distribution_and_the_blend_is_one_linear_model(fitted: tuple[Path, dict[str, Any]]) -> None:
    out, record = fitted
    for name, row in record["sites"].items():
        assert sum(row["weights"].values()) == pytest.approx(1)
        own = personal(out, name)
        said = sum(w * next(iter(personal(out / run, name).params.values())) for run, w in row["weights"].items())
        assert torch.allclose(next(iter(own.params.values())), torch.as_tensor(said))


def test_arrays_are_rows_as_in_a_file(fitted: tuple[Path, dict[str, Any]]) -> None:
    own = personal(fitted[0], "s1")
    rows = {"x1": [0.3, -1.0], "x2": [1.0, 2.0]}
    assert own.predict(np.array([[0.3, 1.0], [-1.0, 2.0]])) == pytest.approx(own.predict(rows))
    with pytest.raises(DataError, match="takes 2 columns"):
        own.predict(np.zeros((2, 3)))


def test_a_file_of_many_sites_is_predicted_by_the_model_of_each(fitted: tuple[Path, dict[str, Any]]) -> None:
    out, _ = fitted
    file = out.parent / "new.csv"
    table(2, [3, 3]).with_columns(pl.Series("site", ["s1", "s2", "s1", "s2", "s1", "stranger"])).write_csv(file)
    frame, notes = predict_by_site(out, file, "site")
    for name in ("s1", "s2"):
        at = frame["site"] == name
        wanted = personal(out, name).predict(pl.read_csv(file).filter(at))
        assert frame.filter(at)["prediction"].to_numpy() == pytest.approx(wanted)
    assert frame["site"].to_list() == ["s1", "s2", "s1", "s2", "s1", "stranger"]
    assert any("stranger" in note for note in notes)


def test_choices_do_not_depend_on_test_rows(fitted: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, record = fitted
    whole = table(1, [260, 12, 9, 1, 2, 14, 10], big=True)
    again = ft.fit(whole, "y", client_column="site", out=tmp_path / "out", progress=False).record
    assert [r["weights"] for r in again["sites"].values()] == [r["weights"] for r in record["sites"].values()]


def test_a_candidate_that_fails_is_dropped_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = linear.out_of_fold

    def failing(config: Any, *args: Any) -> torch.Tensor:
        if config.algorithm.options.get("effects") == "intercept":
            raise torch.linalg.LinAlgError("eigh did not converge")
        return whole(config, *args)

    monkeypatch.setattr(linear, "out_of_fold", failing)
    made = ft.fit(table(3, [12, 9, 10]), "y", client_column="site", out=tmp_path / "out", progress=False)
    assert [(d["label"], d["why"]) for d in made.record["dropped"]] == [("mixed, intercept", "eigh did not converge")]
    assert np.isfinite(made.personal("s0").predict({"x1": [0.1], "x2": [0.0]})).all()


def test_a_fit_goes_on_without_repeating_folds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, whole, cut = list[str](), linear.train, fitting.select

    def counting(config: Any, *args: Any) -> Any:
        trained.append(config.algorithm.name)
        return whole(config, *args)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(linear, "train", counting)
    monkeypatch.setattr(fitting, "select", interrupted)
    made: dict[str, Any] = {"client_column": "site", "out": tmp_path / "out", "progress": False}
    with pytest.raises(KeyboardInterrupt):
        ft.fit(table(3, [12, 9, 10]), "y", **made)
    assert len(trained) == 5 * 5  # folds of alone, common and three mixed models
    trained.clear()
    monkeypatch.setattr(fitting, "select", cut)
    again = ft.fit(table(3, [12, 9, 10]), "y", **made)
    assert trained == []
    fresh = ft.fit(table(3, [12, 9, 10]), "y", client_column="site", out=tmp_path / "fresh", progress=False)
    assert again.record["sites"] == fresh.record["sites"]


def test_a_kill_loses_the_running_fold_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, whole = list[str](), linear.train

    def killed(config: Any, *args: Any) -> Any:
        if len(trained) == 12:  # in the third fold of the third candidate
            raise KeyboardInterrupt
        trained.append(config.algorithm.name)
        return whole(config, *args)

    made: dict[str, Any] = {"client_column": "site", "progress": False}
    with monkeypatch.context() as patch:
        patch.setattr(linear, "train", killed)
        with pytest.raises(KeyboardInterrupt):
            ft.fit(table(3, [12, 9, 10]), "y", out=tmp_path / "out", **made)

    def counting(config: Any, *args: Any) -> Any:
        trained.append(config.algorithm.name)
        return whole(config, *args)

    monkeypatch.setattr(linear, "train", counting)
    again = ft.fit(table(3, [12, 9, 10]), "y", out=tmp_path / "out", **made)
    assert len(trained) == 5 * 5  # folds of alone, common and three mixed models: none twice
    assert not list((tmp_path / "out").glob("*/fold-*"))
    fresh = ft.fit(table(3, [12, 9, 10]), "y", out=tmp_path / "fresh", **made)
    assert again.record["sites"] == fresh.record["sites"]


def test_without_time_the_sites_keep_their_own_models(tmp_path: Path) -> None:
    table(4, [12, 9, 10]).write_csv(tmp_path / "all.csv")
    source = {"source": "folder", "path": str(tmp_path / "all.csv"), "target": "y", "client_column": "site"}
    record = fit(source, tmp_path / "out", time_limit=0.001)
    assert {row["served"] for row in record["sites"].values()} == {"alone"}
    assert {d["why"] for d in record["dropped"]} == {"the time limit"}
    assert "common" in {d["label"] for d in record["dropped"]}
    assert "common" not in record["differences"]  # nothing is better than a model that is not there
    assert np.isnan(record["means"]["common"])
    assert ("gain", "one common model was left out: the time limit") in fit_sentences(record)


@pytest.mark.parametrize("effects", ["none", "intercept", "diagonal"])
def test_stacked_sites_compute_what_a_federation_does(
    effects: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, cells = candidates_of(table(5, [30, 1, 28, 90, 7]), tmp_path)
    data = all_in_training(loaded).to(torch.float64)
    config = next(cell.config for cell in cells if cell.config.algorithm.options.get("effects") == effects)
    server, models = train(config, data)
    monkeypatch.setattr(StackedSites, "suits", staticmethod(lambda experiment: False))
    wanted, of_federation = train(config, data)
    torch.testing.assert_close(server["beta"], wanted["beta"], rtol=0, atol=1e-6)
    torch.testing.assert_close(models.weight, of_federation.weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(models.bias, of_federation.bias, rtol=0, atol=1e-6)


def test_many_coefficients_leave_out_candidates_by_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {f"x{j}": rng.normal(size=40) for j in range(420)}
    frame = pl.DataFrame(columns | {"y": rng.normal(size=40), "site": ["a", "b"] * 20})
    frame.write_csv(tmp_path / "wide.csv")
    source = {"source": "folder", "path": str(tmp_path / "wide.csv"), "target": "y", "client_column": "site"}
    tables, loaded = read_source(source)
    assert is_table_fit(loaded, tables, "auto")
    assert [cell.label for cell in linear.cells_of(tables, loaded, tmp_path / "out")] == ["alone", "common"]
    assert [each["label"] for each in linear.unaffordable(loaded)] == ["mixed, intercept", "mixed, slopes"]


def test_a_rare_class_is_shown_by_the_roc_curve(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=400)
    y = np.where(x + 0.3 * rng.normal(size=400) > 2.0, "dead", "alive")
    frame = pl.DataFrame({"x": x, "y": y, "site": ["a", "b"] * 200})
    assert 5 < (y == "dead").sum() < 20
    record = ft.fit(frame, "y", client_column="site", out=tmp_path / "out", progress=False).record
    assert record["metric"] == "auroc"


def test_folds_of_a_large_site_learn_from_some_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boosted_trees, "MOST", 100)
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(450, 2)))
    y, folds, seen = x[:, :1] + 0.1, np.arange(450) % 5, []
    whole = boosted_trees.fit_trees

    def counting(x: torch.Tensor, *args: Any) -> Trees:
        seen.append(len(x))
        return whole(x, *args)

    monkeypatch.setattr(boosted_trees, "fit_trees", counting)
    said = boosted_trees.cross_fit_trees(x, y, None, folds, 1, False, 0)
    assert seen == [90] * 5
    assert float((said - y).square().mean()) < 0.2 * float(y.var())


def test_weights_of_all_sites_find_the_better_candidate() -> None:
    rng = np.random.default_rng(0)
    y = torch.from_numpy(rng.normal(size=(200, 1)))
    good, bad = (y + torch.from_numpy(rng.normal(scale=s, size=(200, 1))) for s in (0.1, 2.0))
    site = torch.arange(200) % 4
    made = Candidates(torch.stack([bad, good]), y, site, 4, False)
    assert common_weights(made)[0].tolist() == pytest.approx([0, 1], abs=0.05)
    found = stack(made, (np.arange(200) // 4) % 5)
    assert found.weights.sum(1).tolist() == pytest.approx([1] * 4)
    assert float(found.weights[:, 1].min()) > 0.9


def candidates(seed: int, sites: int, rows: int, bias: float) -> tuple[Candidates, np.ndarray]:
    """Two candidates of equal noise at every site; the first is off by `bias` at even sites, the second at odd ones."""
    rng = np.random.default_rng(seed)
    site = torch.arange(sites * rows) % sites
    y = torch.from_numpy(rng.normal(size=(sites * rows, 1)))
    off = torch.where(site % 2 == 0, bias, 0.0)[:, None]
    first, second = (y + torch.from_numpy(rng.normal(size=y.shape)) + v for v in (off, bias - off))
    folds = (np.arange(sites * rows) // sites) % 5
    return Candidates(torch.stack([first, second]), y, site, sites, False), folds


def test_sites_have_weights_of_their_own_only_if_that_is_surely_better() -> None:
    same = stack(*candidates(0, sites=30, rows=6, bias=0.0)).weights
    assert float((same - same[0]).abs().max()) == 0.0
    own = stack(*candidates(0, sites=30, rows=160, bias=2.0)).weights
    # alone a site would give 5 / 6 to the candidate that is not off, all sites together 1 / 2
    assert float(own[::2, 1].min()) > 0.6
    assert float(own[1::2, 0].min()) > 0.6


def test_one_candidate_serves_all_unless_a_blend_is_surely_better() -> None:
    rng = np.random.default_rng(3)
    y = torch.from_numpy(rng.normal(size=(150, 1)))
    good = y + torch.from_numpy(rng.normal(scale=0.5, size=y.shape))
    poor = y + 3 * (good - y)  # its errors are those of the first, larger: a blend cannot help
    made = Candidates(torch.stack([good, poor]), y, torch.arange(150) % 5, 5, False)
    assert stack(made, (np.arange(150) // 5) % 5).weights.tolist() == [[1.0, 0.0]] * 5
    other = y + torch.from_numpy(rng.normal(scale=0.5, size=y.shape))
    made = Candidates(torch.stack([good, other]), y, torch.arange(150) % 5, 5, False)
    assert stack(made, (np.arange(150) // 5) % 5).common.tolist() == pytest.approx([0.5, 0.5], abs=0.15)


def test_weights_of_a_quadratic_are_those_of_a_grid() -> None:
    """Two candidates, one site: the loss over a fine grid of weights has its least value where the weights are."""
    rng = np.random.default_rng(1)
    y = torch.from_numpy(rng.normal(size=(400, 1)))
    a, b = (y + torch.from_numpy(rng.normal(scale=s, size=(400, 1))) for s in (1.0, 0.7))
    made = Candidates(torch.stack([a, b]), y, torch.zeros(400, dtype=torch.int64), 1, False)
    grid = np.linspace(0, 1, 1001)
    losses = [float(((w * a + (1 - w) * b) - y).square().sum()) for w in grid]
    assert float(common_weights(made)[0, 0]) == pytest.approx(grid[int(np.argmin(losses))], abs=0.01)


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_trees_say_what_scikit_learn_says(classes: int, tmp_path: Path) -> None:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    rng = np.random.default_rng(classes)
    x = rng.normal(size=(150, 3))
    x[rng.random(x.shape) < 0.05] = np.nan
    score = np.nan_to_num(x[:, 0]) + rng.normal(size=150)
    kind = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
    y = np.digitize(score, [-0.5, 0.5][: classes - 1]) if classes else score
    model = kind(max_iter=10, random_state=0).fit(x, y)
    trees_of(model, max(classes, 1)).save(tmp_path / "trees.safetensors")
    said = Trees.read(tmp_path / "trees.safetensors", 3, max(classes, 1))(torch.from_numpy(x))
    if classes:
        assert said.softmax(1).numpy() == pytest.approx(model.predict_proba(x), abs=1e-9)
    else:
        assert said[:, 0].numpy() == pytest.approx(model.predict(x), abs=1e-9)


def test_folds_do_not_know_the_classes() -> None:
    """With the site's shares of the classes in every fold, the site's share would seem to be known exactly."""
    y = torch.tensor([0, 1] * 50)
    rows = Rows(torch.zeros((100, 1)), y, torch.tensor([0, 100]))
    data = FederatedData(name="one", clients=("a",), train=rows, val=rows, test=rows, task="classification", outputs=2)
    shares = [[float((y[folds_of(data, seed) == f] == 1).double().mean()) for f in range(5)] for seed in range(200)]
    # drawn without replacement: 0.5 +- sqrt(0.25 / 20 * 80 / 99)
    assert np.std(shares) == pytest.approx((0.25 / 20 * 80 / 99) ** 0.5, rel=0.1)


def test_a_time_limit_ends_a_candidate_in_the_middle_of_its_training(tmp_path: Path) -> None:
    loaded, cells = candidates_of(table(5, [30, 25, 28, 20]), tmp_path)
    data = all_in_training(loaded).to(torch.float64)
    mixed = next(cell for cell in cells if cell.label == "mixed, slopes")
    exchanges = 0

    def check() -> None:
        nonlocal exchanges
        exchanges += 1
        if exchanges == 5:
            raise linear.OutOfTime

    with pytest.raises(linear.OutOfTime):
        train(mixed.config, data, None, check)
    assert exchanges == 5


def test_with_a_time_limit_that_suffices_the_same_is_said_out_of_fold(tmp_path: Path) -> None:
    said = []
    for limit, folder in ((0.0, "without"), (1e6, "with")):
        loaded, cells = candidates_of(table(5, [30, 25, 28, 20]), tmp_path / folder)
        data = all_in_training(loaded).to(torch.float64)
        clock = linear.Clock(limit)
        found = linear.cross_fit(cells, data, folds_of(data, 0), None, lambda *a: None, clock)
        assert not found.dropped
        said.append(found.outputs)
    for label, outputs in said[0].items():
        assert torch.allclose(outputs, said[1][label], atol=1e-3), label


def candidates_of(frame: pl.DataFrame, folder: Path) -> tuple[FederatedData, list[Cell]]:
    folder.mkdir(parents=True, exist_ok=True)
    frame.write_csv(folder / "all.csv")
    source = {"source": "folder", "path": str(folder / "all.csv"), "target": "y", "client_column": "site"}
    tables, loaded = read_source(source, algorithm="auto", data_root=None)
    return loaded, linear.cells_of(tables, loaded, folder / "out")
