"""`fit` beside what an analyst has, on tables with a site column; everybody gets the same rows.

    python -m benchmarks.fit --seeds 5 --out build/fit.json
    python -m benchmarks.fit --table file.csv --site S --target T

A quarter of each site's rows is for testing. Every figure is a personal mean: the metric of each site, then the mean
over sites; of AUROC over sites that have both classes. The table shows mean and spread over seeds.

`worse` is the share of sites where fit's loss (squared error, log loss) on all test rows of all seeds is larger than
that of the site's best own model, linear or boosting, whichever has the smaller loss on these very rows, in a one-sided
paired t-test at 2.5 %. That comparison is hard on fit: the best own model is known only in hindsight.

How fit chooses was settled on seed 100 (`--first-seed 100`) of oxboys, exam, heart, tiny and outlier: other cuts of the
same tables, so that some of those rows are test rows of seeds 0 to 4.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

import fedtailor as ft
from benchmarks.fit_baselines import ALONE, BASELINES, Rows
from benchmarks.fit_tables import TABLES, Table, given

Floats = NDArray[np.float64]
OURS = "fedtailor fit"


def cut(table: Table, seed: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """A quarter of each site's rows to test on; a site with a single row only trains."""
    frame, site, target = table
    frame = frame.filter(pl.col(target).is_not_null() & pl.col(site).is_not_null())
    rng, test = np.random.default_rng([seed, 7]), np.zeros(frame.height, dtype=bool)
    sites = frame[site].to_numpy()
    for name in np.unique(sites):
        rows = rng.permutation(np.flatnonzero(sites == name))
        test[rows[: max(1, round(len(rows) / 4)) if len(rows) > 1 else 0]] = True
    return frame.filter(~test), frame.filter(test)


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


def worse(per_site: dict[str, dict[str, list[float]]]) -> float:
    """Share of sites whose best own model is better than fit's beyond noise."""
    from scipy.stats import ttest_rel  # type: ignore[import-untyped]

    count = 0
    for ours_, *own in zip(*(per_site[m].values() for m in (OURS, *ALONE)), strict=True):
        best = min(own, key=np.mean)
        difference = np.asarray(ours_) - np.asarray(best)
        if len(difference) > 1 and difference.std() > 0:
            count += bool(ttest_rel(ours_, best, alternative="greater").pvalue < 0.025)
    return count / len(per_site[OURS])


def measure(name: str, table: Table, seeds: range, only_ours: bool = False) -> dict[str, Any]:
    """All methods on all seeds of one table."""
    found: dict[str, list[dict[str, float]]] = {}
    per_site: dict[str, dict[str, list[float]]] = {}
    seconds: dict[str, list[float]] = {}
    for seed in seeds:
        train, test = cut(table, seed)
        rows = Rows(train, test, table[1], table[2])
        methods: dict[str, Any] = {} if only_ours else dict(BASELINES)
        methods[OURS] = lambda rows, train=train, test=test, seed=seed: ours(train, test, table, rows, seed)
        for method, run in methods.items():
            begun = time.process_time()
            predicted = run(rows)
            if predicted is None:
                continue
            seconds.setdefault(method, []).append(time.process_time() - begun)
            found.setdefault(method, []).append(figures(rows, predicted))
            loss = losses(rows, predicted)
            for site in np.unique(rows.sites[1]):
                held = per_site.setdefault(method, {}).setdefault(str(site), [])
                held.extend(loss[rows.sites[1] == site].tolist())
    metrics = list(found[OURS][0])
    out: dict[str, Any] = {"table": name, "seeds": list(seeds), "metrics": metrics, "methods": {}}
    for method, each in found.items():
        out["methods"][method] = {m: [f[m] for f in each] for m in metrics} | {"seconds": seconds[method]}
    if not only_ours:
        out["worse"] = worse(per_site)
    return out


def shown(result: dict[str, Any]) -> str:
    """A table in Markdown, and the two ratios that count."""
    metrics, methods = result["metrics"], result["methods"]
    lines = [
        f"### {result['table']}",
        "",
        "| | " + " | ".join(metrics) + " | seconds |",
        "|---|" + "---:|" * (len(metrics) + 1),
    ]
    for method, values in methods.items():
        cells = [f"{np.nanmean(values[m]):.4f} ± {np.nanstd(values[m]):.4f}" for m in metrics]
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {np.mean(values['seconds']):.1f} |")
    if "worse" in result:
        first = metrics[0]
        mean = {method: float(np.mean(values[first])) for method, values in methods.items()}
        alone = min(mean[m] for m in ALONE)
        lines.append("")
        lines.append(f"{first}: {mean[OURS] / alone:.4f} x the best that does not pool; ")
        pooled = [m for m in mean if m.startswith("mixed")]
        if pooled:
            lines.append(f"{mean[OURS] / min(mean[m] for m in pooled):.4f} x the better pooled mixed model; ")
        lines.append(f"{100 * result['worse']:.1f} % of sites worse than their best own model beyond noise.")
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
    parser.add_argument("--out", type=Path, help="a JSON file, to which finished tables are added; it goes on there")
    args = parser.parse_args()
    tables = {name: TABLES[name] for name in args.tables}
    if args.table:
        tables = {args.table.stem: lambda: given(args.table, args.site, args.target)}
    done: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    for name, load in tables.items():
        if name not in done:
            seeds = range(args.first_seed, args.first_seed + args.seeds)
            done[name] = measure(name, load(), seeds, args.only_ours)
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(done, indent=1))
        print(shown(done[name]), flush=True)


if __name__ == "__main__":
    main()
