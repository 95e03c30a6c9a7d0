"""Whether new rows are like those a fit was trained on: by site and column, and of the predictions.

A fit keeps a card of its training rows (training.json): counts by interval and category, means, missing values, per
site and without any row; intervals are common, from counts that are summed over sites. The population stability index
compares counts; drift is reported where it is large and a chi-square test rejects chance, at 1 % over all columns of a
site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.stats import chi2  # type: ignore[import-untyped]

from fedtailor.core.data import FederatedData
from fedtailor.data.tabular.columns import ClientTable
from fedtailor.data.tabular.preparation import MISSING, NumberColumn
from fedtailor.data.tabular.read import read_rows
from fedtailor.data.tabular.target import numeric_values
from fedtailor.errors import DataError, RunError, nearest
from fedtailor.experiments.store import FIT, latest, read_json
from fedtailor.tables.effects import places_of
from fedtailor.tables.serve import Personal, ServedModels, site_column

Floats = NDArray[np.float64]
SOME, LARGE = 0.1, 0.25  # of the index, the usual limits
LEVEL = 0.01  # of the test, over all columns of a site
GAP = 0.05  # by which the share of missing values, or of new categories, must have grown


def stability(new: Sequence[float], old: Sequence[float]) -> tuple[float, float, float]:
    """Population stability index, largest distance of the distribution functions, and the p-value of a chi-square
    test that both are the same; half a row is added to every count of the index."""
    a, b = np.asarray(new, dtype=np.float64), np.asarray(old, dtype=np.float64)
    if len(a) < 2 or not a.sum() or not b.sum():
        return 0.0, 0.0, 1.0
    p, q = (a + 0.5) / (a + 0.5).sum(), (b + 0.5) / (b + 0.5).sum()
    distance = float(np.abs(np.cumsum(a / a.sum()) - np.cumsum(b / b.sum())).max())
    occupied = a + b > 0
    total = (a + b)[occupied]
    expected = [total * part.sum() / total.sum() for part in (a, b)]
    statistic = sum(float(((part[occupied] - e) ** 2 / e).sum()) for part, e in zip((a, b), expected, strict=True))
    return float(((p - q) * np.log(p / q)).sum()), distance, float(chi2.sf(statistic, max(int(occupied.sum()) - 1, 1)))


def drift_of(
    path: Path, file: Path, site: str = "", column: str | None = None, data_root: Path | None = None
) -> dict[str, Any]:
    """Compare the rows of a file with the training rows of their sites."""
    return drift_of_rows(path, file, *read_rows(file), site=site, column=column, data_root=data_root)


def drift_of_rows(
    path: Path,
    file: Path,
    frame: pl.DataFrame,
    values: pl.DataFrame,
    *,
    site: str = "",
    column: str | None = None,
    data_root: Path | None = None,
) -> dict[str, Any]:
    """Drift by site, and a summary in sentences; `values` are the rows with decimal points."""
    card = _read_card(path)
    notes: list[str] = []
    if site:
        parts = {site: values}
    else:
        named = column or site_column(path)
        if named is None:
            raise DataError("whose rows? Name a site with --site, or the column that names it with --client-column")
        if named not in frame.columns:
            raise DataError(f'{file}: no column "{named}", which names the site; {nearest(named, frame.columns)}')
        names = frame[named].cast(pl.String)
        parts = {str(n): values.filter(names == n) for n in names.drop_nulls().unique(maintain_order=True).to_list()}
        strangers = [name for name in parts if name not in card["sites"]]
        notes += [f"sites that are not in the fit were skipped: {', '.join(strangers[:5])}"] if strangers else []
        parts = {name: rows for name, rows in parts.items() if name not in strangers}
    if site and site not in card["sites"]:
        raise RunError(f'{path}: no site "{site}" whose training rows are known; {nearest(site, card["sites"])}')
    sites, served = {}, ServedModels(latest(path), data_root)
    for name, rows in parts.items():
        model = served.personal(name)
        sites[name] = site_drift(
            model, model.table(file, rows), card["columns"], card["prediction"], card["sites"][name]
        )
    return {"sites": sites, "words": drift_sentences(sites) + notes}


def _read_card(path: Path) -> dict[str, Any]:
    if not (path / FIT).exists():
        raise RunError(f"{path}: not the folder of a fit; fedtailor fit makes one")
    if not (path / CARD).exists():
        raise RunError(f"{path}: does not keep what its training rows were like ({CARD}); fit the tables again")
    card: dict[str, Any] = read_json(path / CARD)
    return card


def site_drift(
    model: Personal,
    table: ClientTable,
    columns: Mapping[str, Any],
    predictions: Mapping[str, Any],
    trained: Mapping[str, Any],
) -> dict[str, Any]:
    """Every column of a site's new rows, furthest first, and its predictions."""
    assert model.preparation is not None
    x, at = model.encode(table), 0
    level = LEVEL / (len(model.preparation.columns) + 1)
    drifts = []
    for column in model.preparation.columns:
        own, old = x[:, at : at + len(column.features)].double().numpy(), trained["columns"][column.name]
        at += len(column.features)
        if isinstance(column, NumberColumn):
            new = count_intervals(own[:, 0], columns[column.name]["edges"])
            missing = _missing_share(column, table)
            scale = next(iter(column.sites.values()))
            means = [scale.mean + scale.sd * each["mean"] for each in (new, old)]
            each = _compare(new["counts"], old["counts"], level) | {
                "column": column.name,
                "means": means,
                "smd": (new["mean"] - old["mean"]) / (old["sd"] or 1.0),
                "missing": [missing, float(old["missing"])],
                "unknown": 0.0,
            }
        else:
            counts = own.sum(0)
            shares = [
                float(c[column.categories.index(MISSING)] / max(sum(c), 1)) if MISSING in column.categories else 0.0
                for c in (counts, old["counts"])
            ]
            each = _compare(counts.tolist(), old["counts"], level) | {
                "column": column.name,
                "moved": _largest_shift(counts, old["counts"], column.categories),
                "missing": shares,
                "unknown": 1 - float(counts.sum()) / max(len(x), 1),
            }
        rows, before = max(len(x), 1), max(int(trained["rows"]), 1)
        for key, now, was in (("missing", *each["missing"]), ("unknown", each["unknown"], 0.0)):
            error = np.sqrt(max(now * (1 - now), 1e-9) / rows + max(was * (1 - was), 1e-9) / before)
            each[f"more_{key}"] = bool(now - was > max(GAP, 3 * error))
        each["drifted"] = bool(each["drifted"] or each["more_missing"] or each["more_unknown"])
        drifts.append(each | {"words": _column_words(each)})
    drifts.sort(key=lambda each: (not each["drifted"], -each["psi"]))
    prediction = None
    if trained["prediction"] is not None:
        values = compared_values(model, x)
        new, old = count_intervals(values, predictions["edges"]), trained["prediction"]
        prediction = _compare(new["counts"], old["counts"], level) | {"means": [new["mean"], old["mean"]]}
    return {
        "rows": len(x),
        "training_rows": trained["rows"],
        "columns": drifts,
        "prediction": prediction,
        "notes": model.notes,
    }


def _missing_share(column: NumberColumn, table: ClientTable) -> float:
    """The share of rows without a value; all of them where there is no such column."""
    if column.name not in table.columns:
        return 1.0
    values = numeric_values(table.columns[column.name].of_kind(column.is_date))
    gaps = np.isnan(values) | ((values == 0) if column.zero_is_missing else False)
    return float(gaps.mean()) if len(gaps) else 0.0


def compared_values(model: Personal, x: Any) -> Floats:
    """The compared prediction: a number, the probability of the second of two classes, or of the likeliest."""
    predictions = model.readable(model.outputs(x)).double().numpy()
    if model.task != "classification":
        return predictions[:, 0]
    values: Floats = predictions[:, 1] if predictions.shape[1] == 2 else predictions.max(1)
    return values


def _compare(new: Sequence[float], old: Sequence[float], level: float) -> dict[str, Any]:
    index, distance, chance = stability(new, old)
    return {"psi": index, "ks": distance, "p": chance, "drifted": index >= SOME and chance < level}


def _largest_shift(new: Floats, old: Sequence[float], categories: Sequence[str]) -> list[Any]:
    """The category whose share changed most, now and in training."""
    p, q = new / max(new.sum(), 1), np.asarray(old) / max(sum(old), 1)
    if not len(p):
        return []
    k = int(np.abs(p - q).argmax())
    return [categories[k], float(p[k]), float(q[k])]


def _column_words(each: Mapping[str, Any]) -> str:
    if not each["drifted"]:
        return "as in training"
    out = []
    if each["psi"] >= SOME:
        size = "large" if each["psi"] >= LARGE else "moderate"
        if "means" in each:
            now, was = each["means"]
            how = "higher" if each["smd"] > 0.1 else "lower" if each["smd"] < -0.1 else "other distribution"
            out.append(f"{size} shift, {how}: mean {now:.4g}, in training {was:.4g} ({each['smd']:+.2f} sd)")
        elif each["moved"]:
            name, now, was = each["moved"]
            out.append(f"{size} change of shares: {name} {100 * now:.0f} %, in training {100 * was:.0f} %")
    if each["more_unknown"]:
        out.append(f"{100 * each['unknown']:.0f} % of rows have values that did not occur in training")
    if each["more_missing"]:
        now, was = each["missing"]
        out.append(f"{100 * now:.0f} % missing, in training {100 * was:.0f} %")
    return "; ".join(out)


def drift_sentences(sites: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which columns and predictions drifted, and at how many sites."""
    if not sites:
        return ["no row belongs to a site of the fit"]
    at: dict[str, list[str]] = {}
    for name, site in sites.items():
        for each in site["columns"]:
            if each["drifted"]:
                at.setdefault(each["column"], []).append(name)
    out = []
    for column, names in sorted(at.items(), key=lambda item: -len(item[1])):
        where = f"at {names[0]}" if len(names) == 1 else f"at {len(names)} of {len(sites)} sites"
        out.append(f"{column} has drifted {where}")
    if not at:
        out.append("no column has drifted significantly")
    moved = [name for name, site in sites.items() if site["prediction"] and site["prediction"]["drifted"]]
    if moved:
        where = f"at {moved[0]}" if len(moved) == 1 else f"at {len(moved)} of {len(sites)} sites"
        out.append(f"predictions have drifted {where}")
    else:
        out.append("predictions are distributed as in training")
    few = [name for name, site in sites.items() if site["rows"] < 30]
    if few:
        out.append(f"{len(few)} of {len(sites)} sites have fewer than 30 new rows, enough to detect large drift only")
    return out


CARD = "training.json"
QUANTILES = tuple(np.linspace(0.1, 0.9, 9))
MARKS = 480


def quantiles(parts: Sequence[Floats], wanted: Sequence[float] = QUANTILES) -> Floats:
    """Distinct quantiles of the values of all sites, from histograms that are summed."""
    known = [part for part in parts if len(part)]
    if not known:
        return np.zeros(0)
    low, high = min(float(p.min()) for p in known), max(float(p.max()) for p in known)
    if low == high:
        return np.zeros(0)
    marks = np.linspace(low, high, MARKS + 1)
    share = np.cumsum(sum(np.histogram(p, marks)[0] for p in known)) / sum(map(len, known))
    edges = [float(marks[min(int(np.searchsorted(share, q - 1e-12)), MARKS - 1) + 1]) for q in wanted]
    return np.unique([edge for edge in edges if edge < high])


def count_intervals(values: Floats, edges: Sequence[float]) -> dict[str, Any]:
    """Counts of values by interval, their mean and standard deviation."""
    where = np.searchsorted(np.asarray(edges, dtype=np.float64), values, side="left")
    return {
        "counts": np.bincount(where, minlength=len(edges) + 1).tolist(),
        "mean": float(values.mean()) if len(values) else 0.0,
        "sd": float(values.std()) if len(values) else 0.0,
    }


def training_card(data: FederatedData, predictions: Floats | None, whose: NDArray[np.int64]) -> dict[str, Any]:
    """The content of training.json; `predictions`: out-of-fold, in units of the target."""
    places, bounds = places_of(data), list(pairwise(data.train.starts.tolist()))
    x = data.train.x.numpy().astype(np.float64)
    columns: dict[str, dict[str, Any]] = {}
    sites: dict[str, dict[str, Any]] = {
        n: {"rows": b - a, "columns": {}} for n, (a, b) in zip(data.clients, bounds, strict=True)
    }
    for column in data.preparation.columns:
        at = places[column.name]
        if isinstance(column, NumberColumn):
            edges = quantiles([x[a:b, at[0]] for a, b in bounds]).tolist()
            columns[column.name] = {"kind": "number", "edges": edges}
            for name, (a, b) in zip(data.clients, bounds, strict=True):
                own = count_intervals(x[a:b, at[0]], edges)
                sites[name]["columns"][column.name] = own | {"missing": column.sites[name].missing}
        else:
            columns[column.name] = {"kind": "category", "categories": list(column.categories)}
            for name, (a, b) in zip(data.clients, bounds, strict=True):
                sites[name]["columns"][column.name] = {"counts": x[a:b, at].sum(0).astype(int).tolist()}
    edges = [] if predictions is None else quantiles([predictions[whose == i] for i in range(len(bounds))]).tolist()
    for i, name in enumerate(data.clients):
        sites[name]["prediction"] = None if predictions is None else count_intervals(predictions[whose == i], edges)
    return {"columns": columns, "prediction": {"edges": edges}, "sites": sites}
