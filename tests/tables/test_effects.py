"""What a fit means, against second computations: statsmodels, Henderson's equations, shuffles by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli.main import app
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.random import stream
from fedtailor.core.task import TASKS, usual_metrics
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments.store import read_json
from fedtailor.studies.grid import Cell
from fedtailor.tables import fit, fit_sources
from fedtailor.tables.candidates import all_in_training, cells_of, site_of_rows
from fedtailor.tables.coefficients import coefficient_record, fit_one_site, load_mixed_fit
from fedtailor.tables.effects import EFFECTS, curves, importance, sample_rows
from fedtailor.tables.explain_fit import explain_fit
from fedtailor.tables.words import aliased_sentence, sharing_words, term_words, what_leaves
from tests.made_sites import make_sites

SITES = 8


def table(is_class: bool = False) -> pl.DataFrame:
    """Ten sites whose level and slope of `dose` differ; `age` and `arm` do the same everywhere."""
    draw, parts = np.random.default_rng(3), []
    for site in range(SITES):
        n = int(draw.integers(20, 40))
        age, dose, arm = (
            draw.normal(50, 10, n),
            draw.normal(3, 1, n),
            draw.choice(["a", "b", "c"], n, p=[0.2, 0.5, 0.3]),
        )
        level, slope = draw.normal(0, 3), draw.normal(2, 1)
        y = (
            20
            + level
            + 0.1 * age
            + slope * dose
            + np.select([arm == "a", arm == "c"], [-3.0, 1.0])
            + draw.normal(0, 2, n)
        )
        said = {"y": np.where(y > 31, "ill", "well")} if is_class else {"y": y}
        parts.append(pl.DataFrame({"age": age, "dose": dose, "arm": arm, "site": [f"s{site}"] * n, **said}))
    return pl.concat(parts)


Fitted = tuple[Path, FederatedData, dict[str, Cell]]


def fitted(folder: Path, is_class: bool) -> Fitted:
    table(is_class).write_csv(folder / "all.csv")
    source = {"source": "folder", "path": str(folder / "all.csv"), "target": "y", "client_column": "site"}
    fit.fit(source, folder / "out")
    tables, loaded = fit_sources.read_source(source)
    data = all_in_training(loaded).to(torch.float64)
    return folder / "out", data, {cell.label: cell for cell in cells_of(tables, data, folder / "out")}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    return fitted(tmp_path_factory.mktemp("numbers"), False)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    return fitted(tmp_path_factory.mktemp("classes"), True)


def plain_design(data: FederatedData) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Intercept at arm b, age, dose, arm a, arm c; the target in its units; and the sites."""
    x = data.train.x.numpy()
    assert data.features == ("age", "dose", "arm=a", "arm=b", "arm=c")
    target = data.preparation.target
    y = target.mean + target.sd * data.train.y.numpy()[:, 0]
    return np.column_stack([np.ones(len(x)), x[:, 0], x[:, 1], x[:, 2], x[:, 4]]), y, site_of_rows(data.train)


def shown(found: dict[str, Any], key: str) -> np.ndarray:
    return np.array([term[key] for term in found["outputs"][0]["terms"]])


def test_common_coefficients_and_intervals_are_those_of_statsmodels(numbers: Fitted) -> None:
    from statsmodels.regression.mixed_linear_model import MixedLM

    _, data, cells = numbers
    x, y, site = plain_design(data)
    found = coefficient_record(load_mixed_fit(cells["mixed, intercept"], data), data, "mixed, intercept")
    assert [term["name"] for term in found["outputs"][0]["terms"]] == ["intercept", "age", "dose", "arm=a", "arm=c"]
    assert [term["reference"] for term in found["outputs"][0]["terms"]] == ["", "", "", "b", "b"]
    fit = MixedLM(y, x, site).fit(reml=True, method="lbfgs")
    np.testing.assert_allclose(shown(found, "value"), fit.fe_params, atol=1e-3)
    np.testing.assert_allclose(shown(found, "high") - shown(found, "low"), 2 * 1.959964 * fit.bse_fe, rtol=1e-3)
    assert shown(found, "spread")[0] == pytest.approx(float(np.sqrt(fit.cov_re[0, 0])), rel=0.01)
    assert not shown(found, "differs")[1:].any()


def test_own_coefficients_have_the_variance_of_hendersons_equations(numbers: Fitted) -> None:
    _, data, cells = numbers
    x, _, site = plain_design(data)
    mixed = load_mixed_fit(cells["mixed, slopes"], data)
    found = coefficient_record(mixed, data, "mixed, slopes")
    terms = found["outputs"][0]["terms"]
    # slopes of all five features and the intercept vary, each with a variance of its own
    raw = np.column_stack([data.train.x.numpy(), np.ones(len(x))])
    factor, noise = mixed.server["factor"].numpy(), float(mixed.server["noise"])
    free = np.flatnonzero(np.diag(factor) > 1e-8)
    z = np.concatenate([np.where(site[:, None] == i, raw[:, free], 0.0) for i in range(SITES)], axis=1)
    prior = np.kron(np.eye(SITES), np.diag(1 / np.diag(factor)[free] ** 2))
    k = x.shape[1]
    equations = np.block([[x.T @ x, x.T @ z], [z.T @ x, z.T @ z + prior]])
    inverse = noise * np.linalg.inv(equations)
    unit = data.preparation.target.sd
    for term, fixed in ((terms[1], 1), (terms[2], 2)):  # age and dose
        for i in range(SITES):
            w = np.zeros(len(equations))
            w[fixed] = 1
            if fixed - 1 in free:
                w[k + i * len(free) + int(np.flatnonzero(free == fixed - 1)[0])] = 1
            width = 2 * 1.959964 * unit * np.sqrt(w @ inverse @ w)
            own = term["sites"][i]
            assert own["high"] - own["low"] == pytest.approx(width, rel=1e-6)
    assert not terms[2]["differs"]  # its variance is estimated above 0, but not beyond chance
    assert 0.05 < terms[2]["differs_p"] < terms[1]["differs_p"] < 1
    assert terms[0]["differs"]
    assert terms[2]["share"] < terms[1]["share"] <= 1


def test_a_slope_is_told_in_units_of_the_column(numbers: Fitted) -> None:
    _, data, cells = numbers
    found = coefficient_record(load_mixed_fit(cells["common"], data), data, "common")
    x, y, _ = plain_design(data)
    scale = data.preparation.columns[0].sites["s0"]
    x[:, 1] = scale.mean + scale.sd * x[:, 1]  # age in years
    slopes = np.linalg.lstsq(x, y, rcond=None)[0]
    age = found["outputs"][0]["terms"][1]
    assert age["value"] / age["sd"] == pytest.approx(slopes[1], rel=1e-6)
    assert age["spread"] == 0


def test_what_always_goes_together_is_not_told_apart(numbers: Fitted) -> None:
    _, data, cells = numbers
    only = data.only([0])
    x = only.train.x.clone()
    x[:, 1] = 2 * x[:, 0]  # dose is age again
    twins = FederatedData(**{**only.__dict__, "train": Rows(x, only.train.y, only.train.starts)})
    found = coefficient_record(fit_one_site(cells["alone"].config, twins), twins, "alone")
    by_name = {term["name"]: term for term in found["outputs"][0]["terms"]}
    assert by_name["age"]["value"] is None
    assert by_name["age"]["aliases"] == ["dose"]
    assert by_name["arm=a"]["value"] is not None


def test_log_odds_of_a_common_model_are_those_of_statsmodels(classes: Fitted) -> None:
    from statsmodels.discrete.discrete_model import Logit

    _, data, cells = classes
    x, y = data.train.x.numpy(), data.train.y.numpy()
    wanted = np.column_stack([np.ones(len(x)), x[:, 0], x[:, 1], x[:, 2], x[:, 4]])
    found = coefficient_record(load_mixed_fit(cells["common"], data), data, "common")
    fit = Logit(y, wanted).fit(disp=0)
    assert (found["outputs"][0]["class"], found["outputs"][0]["against"]) == ("well", "ill")
    # ours has a weak ridge penalty
    np.testing.assert_allclose(shown(found, "value"), fit.params, atol=0.1)
    np.testing.assert_allclose((shown(found, "high") - shown(found, "low")) / (2 * 1.959964), fit.bse, rtol=0.06)


def rows_of(x: torch.Tensor, y: torch.Tensor, sizes: list[int]) -> Rows:
    return Rows(x, y, torch.tensor([0, *np.cumsum(sizes).tolist()]))


def test_importance_by_hand() -> None:
    draw = np.random.default_rng(0)
    sizes, sites = [12, 30], ["a", "b"]
    x = torch.from_numpy(draw.normal(size=(42, 3)))
    y = (2 * x[:, :1] + x[:, 1:2]).clone()
    held = rows_of(x, y, sizes)

    def predict(rows: Rows) -> torch.Tensor:
        return 2 * rows.x[:, :1] + rows.x[:, 1:2]

    rmse = next(m for m in usual_metrics(TASKS["regression"]()) if m.name == "rmse")
    columns = {"first": [0], "second": [1], "unused": [2]}
    found = importance(predict, held, sites, columns, rmse, 10.0, seed=4, repeats=3)
    squares = np.zeros((3, 3))  # columns, repeats
    at_b = np.zeros((3, 3))
    for site, name in enumerate(sites):
        rng = stream(4, name, "importance")
        own = x[:12] if site == 0 else x[12:]
        for j in range(3):
            for r in range(3):
                order = rng.permutation(len(own))
                weight = (2.0, 1.0, 0.0)[j]
                lost = (weight * (own[order, j] - own[:, j])).square()
                squares[j, r] += float(lost.sum())
                at_b[j, r] = 10 * float(lost.mean().sqrt())
    wanted = 10 * np.sqrt(squares / 42)
    assert [each["column"] for each in found["columns"]] == ["first", "second", "unused"]
    np.testing.assert_allclose([each["mean"] for each in found["columns"]], wanted.mean(1), rtol=1e-12)
    np.testing.assert_allclose([each["sd"] for each in found["columns"]], wanted.std(1, ddof=1), rtol=1e-9)
    np.testing.assert_allclose([each["sites"]["b"] for each in found["columns"]], at_b.mean(1), rtol=1e-12)


def test_rows_are_few_where_there_are_many() -> None:
    x = torch.zeros(100_000, 50)
    few = sample_rows(rows_of(x, x[:, :1], [99_990, 10]), 100, seed=0)
    assert few.sizes.tolist()[1] == 10
    assert 10 <= few.sizes.tolist()[0] <= 1200


def test_curves_of_a_known_function(numbers: Fitted) -> None:
    _, data, _ = numbers

    def predict(rows: Rows) -> torch.Tensor:
        return 3 * rows.x[:, :1] + rows.x[:, 2:3] + (torch.from_numpy(site_of_rows(rows)) == 0)[:, None] * rows.x[:, :1]

    found = curves(predict, lambda o: o.numpy(), data.train, data, ["arm", "age"], seed=0)
    assert [each["column"] for each in found] == ["arm", "age"]
    age = found[1]
    scale = data.preparation.columns[0].sites["s0"]
    slope = np.diff(np.array(age["sites"]["s3"])[:, 0]) / np.diff(age["x"]) * scale.sd
    np.testing.assert_allclose(slope, 3.0)
    slope = np.diff(np.array(age["sites"]["s0"])[:, 0]) / np.diff(age["x"]) * scale.sd
    np.testing.assert_allclose(slope, 4.0)
    by_arm = np.array(found[0]["y"])[:, 0]
    np.testing.assert_allclose(by_arm - by_arm[1], [1.0, 0.0, 0.0], atol=1e-12)


def test_a_fit_keeps_them(numbers: Fitted, classes: Fitted) -> None:
    out, data, _ = numbers
    found = read_json(out / EFFECTS)
    assert found["coefficients"]["model"].startswith("mixed")
    assert {each["column"] for each in found["importance"]["columns"]} == {"age", "dose", "arm"}
    assert found["importance"]["columns"][0]["column"] == "dose"
    assert found["importance"]["rows"] == len(data.test.x)
    assert found["curves"][0]["column"] == "dose"
    of_classes = read_json(classes[0] / EFFECTS)
    assert all(0 <= v <= 1 for curve in of_classes["curves"] for (v,) in curve["y"])


def test_coefficients_are_those_of_all_rows_and_of_the_model_that_is_asked_for(numbers: Fitted) -> None:
    from statsmodels.regression.mixed_linear_model import MixedLM

    out, data, _ = numbers
    every = all_in_training(data, test=True)
    x, y, site = plain_design(every)
    assert len(y) == len(table(False)) > len(data.train.x)
    found = explain_fit(out, model="mixed, intercept")["coefficients"]
    fit = MixedLM(y, x, site).fit(reml=True, method="lbfgs")
    np.testing.assert_allclose(shown(found, "value"), fit.fe_params, atol=1e-3)
    assert found["rows"] == len(y)
    assert explain_fit(out, model="common")["coefficients"]["model"] == "common"
    for name in ("alone", "nothing"):
        with pytest.raises(ConfigError):
            explain_fit(out, model=name)


def test_importance_is_in_the_loss(numbers: Fitted, classes: Fitted) -> None:
    metrics = [read_json(folder / EFFECTS)["importance"]["metric"] for folder, *_ in (numbers, classes)]
    assert metrics == ["rmse", "log_loss"]


def test_models_that_send_the_same_are_one_line() -> None:
    same = {"sent": "curvature, number", "private": "model"}
    found = what_leaves({"alone": {"sent": "nothing", "private": "all"}, "a": same, "b": same})
    assert [names for names, *_ in found] == ["alone", "a; b"]
    assert found[1][1].startswith("Hessians, ")


def test_aliased_terms_are_named() -> None:
    terms = [{"name": "schgend=boys", "aliases": ["type=Mxd"]}, {"name": "age", "aliases": []}]
    assert "schgend=boys (with type=Mxd)" in aliased_sentence(terms)
    assert not aliased_sentence(terms[1:])


def test_explained_in_words_and_rows(numbers: Fitted) -> None:
    out, data, _ = numbers
    found = explain_fit(out)
    by_name = {term["name"]: term for term in found["coefficients"]["outputs"][0]["terms"]}
    own = [
        name for name in ("age", "dose", "arm") if any(t["differs"] for t in by_name.values() if t["column"] == name)
    ]
    assert own == []  # the likelihood ratio of dose is 1.2: eight sites do not tell
    vary = next(line for line in found["words"] if "(p " in line and "the intercept" in line)
    assert not any(f" {name} " in vary for name in ("age", "dose", "arm"))
    p = by_name["dose"]["differs_p"]
    assert any(f"dose (p = {p:.2f})" in line and line != vary for line in found["words"])
    dose = next(line for line in found["words"] if line.startswith("dose: "))
    per_unit = by_name["dose"]["value"] / by_name["dose"]["sd"]
    assert f"{per_unit:+.3g} per unit" in dose
    assert "common to all 8 sites" in dose
    frame = ft.load(out).coefficients  # type: ignore[union-attr]
    common = frame.filter(pl.col("site").is_null() & (pl.col("term") == "dose"))
    assert common["value"].item() == pytest.approx(per_unit)
    assert frame.height == 5 * (1 + SITES)
    only = explain_fit(out, "s3")
    assert list(only["served"]) == ["s3"]
    own = only["coefficients"]["outputs"][0]["terms"][2]
    assert own["sites"] == [by_name["dose"]["sites"][data.clients.index("s3")]]
    with pytest.raises(RunError, match='no site "s33"'):
        explain_fit(out, "s33")


@pytest.mark.parametrize(
    ("sites", "words"),
    [(1, ""), (2, "common to both sites"), (4, "common to all 4 sites"), (200, "common to all 200 sites")],
)
def test_words_for_few_and_many_sites(sites: int, words: str) -> None:
    term = {"name": "age", "column": "age", "reference": "", "sd": 10.0, "varies": True, "aliases": []}
    term |= {"value": 2.0, "low": 1.0, "high": 3.0, "spread": 0.0, "differs": False, "share": 1.0}
    assert sharing_words(term, sites) == words
    line = term_words(term, "y", sites)
    assert line == "age: +0.2 per unit (95 % CI +0.1 to +0.3)" + (f"; {words}" if words else "")
    assert term_words(term | {"low": -1.0}, "log-odds", 1).endswith("(95 % CI 0.905 to 1.35); not significant")
    assert (
        sharing_words(term | {"differs": True, "spread": 30.0, "crosses": True}, 12)
        == "varies between sites, also in sign (sd 3 around 0.2)"
    )


def test_a_network_is_explained_by_its_predictions(tmp_path: Path) -> None:
    sites = make_sites(tmp_path / "sites", sites=2, rows=60, outlier=False)
    source = {"path": str(sites), "target": "outcome"}
    values = {"model.name": "mlp", "model.hidden": [8]}
    fit.fit(source, tmp_path / "out", algorithm="fedavg", rounds=8, values=values)
    found = explain_fit(tmp_path / "out")
    assert found["coefficients"] is None
    assert found["importance"]["columns"][0]["column"] == "a"  # of weight 2, b has -1
    assert (tmp_path / "out" / EFFECTS).exists()
    assert explain_fit(tmp_path / "out") == found


def test_what_a_fit_had_no_time_for_is_computed_when_asked_for(numbers: Fitted, tmp_path: Path) -> None:
    out, _, _ = numbers
    before = read_json(out / EFFECTS)
    (out / EFFECTS).unlink()
    after = explain_fit(out)
    assert after["coefficients"]["model"] == before["coefficients"]["model"]
    terms, again = (found["coefficients"]["outputs"][0]["terms"] for found in (before, after))
    assert [t["value"] for t in again] == pytest.approx([t["value"] for t in terms])
    assert [t["sites"][3]["low"] for t in again] == pytest.approx([t["sites"][3]["low"] for t in terms])
    assert [e["column"] for e in after["importance"]["columns"]] == [
        e["column"] for e in before["importance"]["columns"]
    ]


def test_the_command(numbers: Fitted) -> None:
    out, _, _ = numbers
    done = CliRunner().invoke(app, ["explain", str(out), "--site", "s3"])
    assert done.exit_code == 0, done.output
    assert "dose (per unit)" in done.output.replace("\n", " ")
    assert "site s3: mixed" in done.output
    told = json.loads(CliRunner().invoke(app, ["explain", str(out), "--json"]).output)
    assert told["importance"]["columns"][0]["column"] == "dose"
    assert told["words"]
