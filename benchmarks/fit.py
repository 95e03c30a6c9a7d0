"""`fit` against standard analyses, on tables with a site column; every method gets the same rows.

    python benchmarks/fit.py --seeds 5 --out build/fit.json
    python benchmarks/fit.py --table file.csv --site S --target T

A quarter of each site's rows is for testing. Every figure is a personal mean: the metric of each site, then the mean
over sites; of AUROC over sites that have both classes. The table shows mean and spread over seeds.

`sites worse` is the share of sites where fit's loss (squared error, log loss) is larger than that of the site's best
own model beyond noise, by the two tests of benchmarks/fit_worse.py. A row that is a test row in several seeds counts
once, with the mean of its losses.

How fit chooses was settled on other tables: made ones, and 20 of the R packages MASS, nlme, lme4, mlmRev, plm, geepack,
HSAUR, carData and ggplot2. Why it chose poorly on two tables of classes was looked for on other cuts of their rows
(seed 100).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when it is run as a file

import fedtailor as ft
from benchmarks.fit_baselines import ALONE, BASELINES, Rows
from benchmarks.fit_intervals import LEVEL, calibrated, coverage, page
from benchmarks.fit_tables import TABLES, Table, given
from benchmarks.fit_worse import LEAST, OURS, drawn_test, t_test, worse

Floats = NDArray[np.float64]
METHODS = (*BASELINES, OURS)


def cut(table: Table, seed: int) -> tuple[pl.DataFrame, pl.DataFrame, list[int]]:
    """A quarter of each site's rows to test on, and which these are; a site with a single row only trains."""
    frame, site, target = table
    frame = frame.filter(pl.col(target).is_not_null() & pl.col(site).is_not_null())
    rng, test = np.random.default_rng([seed, 7]), np.zeros(frame.height, dtype=bool)
    sites = frame[site].to_numpy()
    for name in np.unique(sites):
        rows = rng.permutation(np.flatnonzero(sites == name))
        test[rows[: max(1, round(len(rows) / 4)) if len(rows) > 1 else 0]] = True
    if frame[target].dtype == pl.String:  # nobody can predict a class of which there is no training row
        test &= frame[target].is_in(frame[target].filter(~test).unique().implode()).to_numpy()
    return frame.filter(~test), frame.filter(test), np.flatnonzero(test).tolist()


def ours(train: pl.DataFrame, test: pl.DataFrame, table: Table, rows: Rows, seed: int) -> tuple[Floats, Any]:
    """The predictions of `fit`, every row by the model of its site, and how sure it was."""
    _, site, target = table
    with tempfile.TemporaryDirectory() as folder:
        task = "classification" if rows.is_class else "regression"
        fitted = ft.fit(
            train,
            target,
            client_column=site,
            seed=seed,
            settings={"data.test": 0.0, "data.task": task},
            out=Path(folder) / "fit",
            progress=False,
        )
        out = np.full((test.height, max(len(rows.classes), 1)), np.nan)
        sure = np.full((test.height, 2), np.nan)  # ends of the interval; slope and offset of the calibration
        names = test[site].to_numpy()
        for name in np.unique(names):
            at, model = names == name, fitted.personal(str(name))
            part = test.filter(pl.Series(at))
            if rows.is_class:
                order = [[str(label) for label in model.labels].index(str(c)) for c in rows.classes]
                out[at] = model.predict_proba(part)[:, order]
                sure[at] = fitted.record["sites"][str(name)].get("calibration", (1.0, 0.0))
                if order == [1, 0]:
                    sure[at, 1] *= -1
            else:
                out[at] = model.predict(part)[:, None]
                sure[at] = np.column_stack(model.predict_interval(part, LEVEL))
    if not rows.is_class:
        return out, coverage(rows.y[1], *sure.T)
    return out, calibrated(out[:, 1], rows.y[1], *sure.T) if len(rows.classes) == 2 else None


def losses(rows: Rows, predicted: Floats) -> Floats:
    """Squared error or log loss of every test row."""
    y = rows.y[1]
    if rows.is_class:
        return -np.log(np.clip(predicted[np.arange(len(y)), y], LEAST, 1))
    return (predicted[:, 0] - y) ** 2


def figures(rows: Rows, predicted: Floats) -> dict[str, float]:
    """Personal means."""
    from sklearn.metrics import roc_auc_score

    loss, sites, y = losses(rows, predicted), rows.sites[1], rows.y[1]
    names = np.unique(sites)
    if not rows.is_class:
        return {"rmse": float(np.mean([np.sqrt(loss[sites == n].mean()) for n in names]))}
    out = {"log loss": float(np.mean([loss[sites == n].mean() for n in names]))}
    if len(rows.classes) == 2:
        both = [n for n in names if len(np.unique(y[sites == n])) == 2]
        areas = [roc_auc_score(y[sites == n], predicted[sites == n, 1]) for n in both]
        out["auroc"] = float(np.mean(areas)) if areas else float("nan")
    return out


def measured(table: Table, seed: int, methods: Sequence[str], out: dict[str, Any]) -> None:
    """Those methods on one seed of a table that have not been run."""
    train, test, at = cut(table, seed)
    rows = Rows(train, test, table[1], table[2])
    out |= {"seed": seed, "site": [str(n) for n in rows.sites[1]], "row": at, "y": rows.y[1].tolist()}
    for key in ("figures", "seconds", "said"):
        out.setdefault(key, {})
    for method in methods:
        if method in out["seconds"]:
            continue
        begun, wall = time.process_time(), time.monotonic()
        predicted: Floats | None
        if method == OURS:
            predicted, out["sure"] = ours(train, test, table, rows, seed)
        else:
            predicted = BASELINES[method](rows)
        out["seconds"][method] = [time.process_time() - begun, time.monotonic() - wall]
        if predicted is None:
            continue
        out["figures"][method] = figures(rows, predicted)
        if method in (OURS, *ALONE):
            out["said"][method] = [[float(f"{v:.7g}") for v in said] for said in predicted]


def summary(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures by method over seeds, and the share of sites that are worse off."""
    metrics = list(next(iter(runs[0]["figures"].values())))
    out: dict[str, Any] = {"table": name, "metrics": metrics, "methods": {}}
    for method in (m for m in METHODS if m in runs[0]["figures"]):
        values = {m: [run["figures"][method][m] for run in runs] for m in metrics}
        out["methods"][method] = values | {"seconds": [run["seconds"][method][0] for run in runs]}
    if {OURS, *ALONE} <= runs[0]["said"].keys():
        out["worse"] = worse(runs, drawn_test)
        out["worse by t"] = worse(runs, t_test)
    return out


def ratios(result: dict[str, Any]) -> tuple[float, float]:
    """Fit's first metric by that of the best method that does not pool, and by the better pooled mixed model."""
    first = result["metrics"][0]
    mean = {method: float(np.mean(values[first])) for method, values in result["methods"].items()}
    pooled = min((mean[m] for m in mean if m.startswith("mixed")), default=np.nan)
    return mean[OURS] / min(mean[m] for m in ALONE), mean[OURS] / pooled


def overview(results: Sequence[dict[str, Any]]) -> str:
    """A line per table."""
    lines = [
        "| table | metric | fit | / best alone | / pooled mixed model | sites worse, % | by t-test, % | seconds |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        name = result["metrics"][0]
        two = " | ".join("" if np.isnan(v) else f"{v:.3f}" for v in ratios(result))
        shares = " | ".join(f"{100 * result[key]:.1f}" for key in ("worse", "worse by t"))
        ours_ = result["methods"][OURS]
        cells = (result["table"], name, _spread(ours_[name]), two, shares, f"{np.mean(ours_['seconds']):.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(result: dict[str, Any]) -> str:
    """All methods on one table in Markdown."""
    metrics, methods = result["metrics"], result["methods"]
    lines = [
        f"### {result['table']}",
        "",
        "| | " + " | ".join(metrics) + " | CPU seconds |",
        "|---|" + "---:|" * (len(metrics) + 1),
    ]
    for method, values in methods.items():
        cells = [_spread(values[m]) for m in metrics]
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {np.mean(values['seconds']):.1f} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    """Mean, and standard deviation over seeds."""
    return f"{np.nanmean(values):.4f}" + (f" ± {np.nanstd(values):.4f}" if len(values) > 1 else "")


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--table", type=Path, help="a file of your own in place of the tables")
    parser.add_argument("--site", default="site")
    parser.add_argument("--target", default="y")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path, help="a JSON file of finished seeds, to which others are added")
    args = parser.parse_args()
    tables = {name: TABLES[name] for name in args.tables}
    if args.table:
        tables = {args.table.stem: lambda: given(args.table, args.site, args.target)}
    done: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for seed in seeds:  # all tables of a seed, then the next: what is interrupted shows all tables
        for name, load in tables.items():
            run = done.setdefault(name, {}).setdefault(str(seed), {})
            if set(args.methods) - run.get("seconds", {}).keys():
                measured(load(), seed, args.methods, run)
                if args.out:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(done))
    runs = {name: [done[name][str(seed)] for seed in seeds] for name in tables}
    results = [summary(name, each) for name, each in runs.items()]
    if set(METHODS) <= {*args.methods}:
        print(overview(results), end="\n\n")
    for result in results:
        print(shown(result), end="\n\n")
    if OURS in args.methods:
        print(
            "### Intervals and calibrated probabilities",
            page({n: [r["sure"] for r in e if r["sure"]] for n, e in runs.items()}),
            sep="\n\n",
        )


if __name__ == "__main__":
    main()
