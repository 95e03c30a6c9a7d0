"""`fit` beside what an analyst has, on tables with a site column; everybody gets the same rows.

    python benchmarks/fit.py --seeds 5 --out build/fit.json
    python benchmarks/fit.py --table file.csv --site S --target T

A quarter of each site's rows is for testing. Every figure is a personal mean: the metric of each site, then the mean
over sites; of AUROC over sites that have both classes. The table shows mean and spread over seeds.

`worse` is the share of sites where fit's loss (squared error, log loss) is larger than that of the site's best own
model, linear or boosting, whichever has the smaller loss on these very rows, in a one-sided paired t-test at 2.5 %. A
row that is a test row in several seeds counts once, with the mean of its losses. That comparison is hard on fit: the
best own model is known only in hindsight.

How fit chooses was settled on seeds 100 and 200 (`--first-seed 200`) of these tables, other cuts of the same rows, and
on made tables that are not among them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when it is run as a file

import fedtailor as ft
from benchmarks.fit_baselines import ALONE, BASELINES, Rows
from benchmarks.fit_tables import TABLES, Table, given

Floats = NDArray[np.float64]
OURS = "fedtailor fit"


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


def ours(train: pl.DataFrame, test: pl.DataFrame, table: Table, rows: Rows, seed: int, **options: Any) -> Floats:
    """The predictions of `fit`, every row by the model of its site."""
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
            **options,
        )
        out = np.full((test.height, max(len(rows.classes), 1)), np.nan)
        names = test[site].to_numpy()
        for name in np.unique(names):
            at, model = names == name, fitted.personal(str(name))
            part = test.filter(pl.Series(at))
            if rows.is_class:
                order = [[str(label) for label in model.labels].index(str(c)) for c in rows.classes]
                out[at] = model.predict_proba(part)[:, order]
            else:
                out[at] = model.predict(part)[:, None]
    return out


def losses(rows: Rows, predicted: Floats) -> Floats:
    """Squared error or log loss of every test row."""
    y = rows.y[1]
    if rows.is_class:
        return -np.log(np.clip(predicted[np.arange(len(y)), y], 1e-6, 1))
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


def worse(runs: list[dict[str, Any]]) -> float:
    """Share of sites whose best own model is better than fit's beyond noise; every row counts once."""
    from scipy.stats import ttest_rel  # type: ignore[import-untyped]

    held: dict[str, dict[int, list[list[float]]]] = {}
    for run in runs:
        for site, row, *each in zip(run["site"], run["row"], *(run["losses"][m] for m in (OURS, *ALONE)), strict=True):
            held.setdefault(site, {}).setdefault(row, []).append(each)
    count = 0
    for rows in held.values():
        ours_, *own = np.array([np.mean(each, axis=0) for each in rows.values()]).T
        best = min(own, key=np.mean)
        if len(best) > 1 and np.std(ours_ - best) > 0:
            count += bool(ttest_rel(ours_, best, alternative="greater").pvalue < 0.025)
    return count / len(held)


def measured(table: Table, seed: int, only_ours: bool = False) -> dict[str, Any]:
    """All methods on one seed of a table."""
    train, test, at = cut(table, seed)
    rows = Rows(train, test, table[1], table[2])
    methods: dict[str, Any] = {} if only_ours else dict(BASELINES)
    methods[OURS] = lambda rows: ours(train, test, table, rows, seed)
    out: dict[str, Any] = {"seed": seed, "site": [str(n) for n in rows.sites[1]], "row": at}
    out |= {"figures": {}, "seconds": {}, "losses": {}}
    for method, run in methods.items():
        begun, wall = time.process_time(), time.monotonic()
        predicted = run(rows)
        if predicted is None:
            continue
        out["seconds"][method] = [time.process_time() - begun, time.monotonic() - wall]
        out["figures"][method] = figures(rows, predicted)
        if method in (OURS, *ALONE):
            out["losses"][method] = [float(f"{loss:.6g}") for loss in losses(rows, predicted)]
    return out


def summary(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures by method over seeds, and the share of sites that are worse off."""
    metrics = list(runs[0]["figures"][OURS])
    out: dict[str, Any] = {"table": name, "metrics": metrics, "methods": {}}
    for method in runs[0]["figures"]:
        values = {m: [run["figures"][method][m] for run in runs] for m in metrics}
        out["methods"][method] = values | {"seconds": [run["seconds"][method][0] for run in runs]}
    if set(ALONE) <= runs[0]["losses"].keys():
        out["worse"] = worse(runs)
    return out


def shown(result: dict[str, Any]) -> str:
    """A table in Markdown, and the two ratios that count."""
    metrics, methods = result["metrics"], result["methods"]
    lines = [
        f"### {result['table']}",
        "",
        "| | " + " | ".join(metrics) + " | CPU seconds |",
        "|---|" + "---:|" * (len(metrics) + 1),
    ]
    for method, values in methods.items():
        cells = [
            f"{np.nanmean(values[m]):.4f}" + (f" ± {np.nanstd(values[m]):.4f}" if len(values[m]) > 1 else "")
            for m in metrics
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {np.mean(values['seconds']):.1f} |")
    if "worse" in result:
        first = metrics[0]
        mean = {method: float(np.mean(values[first])) for method, values in methods.items()}
        alone = min(mean[m] for m in ALONE)
        said = [f"{mean[OURS] / alone:.4f} x the best that does not pool"]
        if pooled := [m for m in mean if m.startswith("mixed")]:
            said.append(f"{mean[OURS] / min(mean[m] for m in pooled):.4f} x the better pooled mixed model")
        said.append(f"{100 * result['worse']:.1f} % of sites worse than their best own model beyond noise")
        lines += ["", f"{first}: {'; '.join(said)}."]
    return "\n".join(lines)


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--table", type=Path, help="a file of your own in place of the tables")
    parser.add_argument("--site", default="site")
    parser.add_argument("--target", default="y")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--out", type=Path, help="a JSON file of finished seeds, to which others are added")
    args = parser.parse_args()
    tables = {name: TABLES[name] for name in args.tables}
    if args.table:
        tables = {args.table.stem: lambda: given(args.table, args.site, args.target)}
    done: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for seed in seeds:  # all tables of a seed, then the next: what is interrupted shows all tables
        for name, load in tables.items():
            if str(seed) not in done.setdefault(name, {}):
                done[name][str(seed)] = measured(load(), seed, args.only_ours)
                if args.out:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(done))
    for name in tables:
        print(shown(summary(name, [done[name][str(seed)] for seed in seeds])), end="\n\n")


if __name__ == "__main__":
    main()
