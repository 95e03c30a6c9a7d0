"""How `fit` grows: processor seconds, memory and loss by the size of a table, beside rivals on the same rows.

    python benchmarks/fit_growth.py --out build/growth.json
    python benchmarks/fit_growth.py --sizes 1000x50x10 shared-1000x50 --methods "fedtailor fit" LightGBM
    python benchmarks/fit_growth.py --sizes 10x1000x20 --profile
    python benchmarks/fit_growth.py --sizes shared-200x20 shared-200x20@1  # with seed 1

Every method runs in a process of its own. Seconds are those of all processors in that process, with imports; memory is
its peak. A quarter of each site's rows is for testing; the loss is over all test rows: root mean squared error, log
loss, or half the mean deviance of counts. LightGBM and pooled boosting get the site as a column.

Goals: three times LightGBM and the mixed model together, at least 5 s; five times for classes and counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when it is run as a file

Floats = NDArray[np.float64]
OURS, LIGHTGBM, MIXED = "fedtailor fit", "LightGBM", "mixed model"
FLOOR, TIMES, TIMES_OF_CLASSES = 5.0, 3.0, 5.0
LIMIT = 600.0  # seconds of a method on a table


@dataclass(frozen=True)
class Size:
    """A table to make."""

    sites: int
    rows: int  # of a site, with those for testing
    columns: int
    task: str = "number"
    shared: bool = False  # a non-linear effect of several columns that all sites share
    slopes: float = 0.3  # standard deviation of a site's slopes
    noise: float = 1.0


SIZES = {
    "10x1000x20": Size(10, 1000, 20),
    "10x1000x20-binary": Size(10, 1000, 20, "binary"),
    "10x1000x20-counts": Size(10, 1000, 20, "count"),
    "10x10000x20": Size(10, 10_000, 20),
    "10x10000x20-binary": Size(10, 10_000, 20, "binary"),
    "10x10000x20-counts": Size(10, 10_000, 20, "count"),
    "10x100000x20": Size(10, 100_000, 20),
    "100x50x10": Size(100, 50, 10),
    "100x50x10-binary": Size(100, 50, 10, "binary"),
    "100x50x10-counts": Size(100, 50, 10, "count"),
    "1000x50x10": Size(1000, 50, 10),
    "1000x50x10-binary": Size(1000, 50, 10, "binary"),
    "1000x50x10-counts": Size(1000, 50, 10, "count"),
    "5000x50x10": Size(5000, 50, 10),
    "10x2000x200": Size(10, 2000, 200),
    "10x2000x1000": Size(10, 2000, 1000),
    "10x2000x10-ordinal": Size(10, 2000, 10, "ordinal"),
    "shared-1000x50": Size(1000, 50, 10, shared=True),
    "shared-200x20": Size(200, 20, 6, shared=True),
    "shared-50x23": Size(50, 23, 8, shared=True, slopes=0.1, noise=0.5),
    "plain-1000x50": Size(1000, 50, 10, slopes=0.5),
}


def make(size: Size, seed: int) -> dict[str, Any]:
    """Rows [rows, columns], targets, sites, and which are for testing."""
    rng = np.random.default_rng([seed, size.sites, size.rows, size.columns])
    n, d = size.sites * size.rows, size.columns
    x, site = rng.normal(size=(n, d)), np.repeat(np.arange(size.sites), size.rows)
    common = np.where(np.arange(d) < 8, rng.normal(scale=0.5, size=d), 0.0)
    slopes = common + size.slopes * rng.normal(size=(size.sites, d)) * (np.arange(d) < 3)
    level = 0.7 * rng.normal(size=size.sites)
    eta = (x * slopes[site]).sum(1) + level[site]
    if size.shared:
        eta = 0.5 * eta + 2 * np.sin(1.5 * x[:, 0]) * (x[:, 1] > 0) + 1.5 * np.abs(x[:, 2]) - x[:, 3] * x[:, 4]
    elif size.task != "ordinal":
        eta = eta + 0.5 * np.sin(2 * x[:, 0])
    y: Any
    if size.task == "number":
        y = eta + size.noise * rng.normal(size=n)
    elif size.task == "binary":
        y = (rng.random(n) < 1 / (1 + np.exp(-eta))).astype(int)
    elif size.task == "count":
        y = rng.poisson(np.exp(np.clip(0.5 + 0.4 * eta, None, 4)))
    else:
        y = np.digitize(eta + rng.logistic(size=n), [-2.0, -0.7, 0.7, 2.0])
    test = np.zeros(n, dtype=bool)
    for i in range(size.sites):
        test[i * size.rows + rng.permutation(size.rows)[: max(1, size.rows // 4)]] = True
    return {"x": x, "y": y, "site": site, "test": test, "task": size.task}


def loss_of(task: str, y: Any, predicted: Floats) -> float:
    """Over all test rows; `predicted` are numbers, rates, or probabilities of classes [rows, classes]."""
    if task == "number":
        return float(np.sqrt(np.mean((predicted - y) ** 2)))
    if task == "count":
        rate = np.maximum(predicted, 1e-9)
        return float(np.mean(rate - y + np.where(y > 0, y * np.log(np.maximum(y, 1) / rate), 0.0)))
    return float(-np.log(np.clip(predicted[np.arange(len(y)), y], 1e-6, 1)).mean())


def lightgbm(t: dict[str, Any]) -> Floats:
    lgb: Any = import_module("lightgbm")
    objective = {"number": "regression", "binary": "binary", "count": "poisson", "ordinal": "multiclass"}[t["task"]]
    x, held = np.column_stack([t["x"], t["site"]]), t["test"]
    options = {
        "n_estimators": 300,
        "learning_rate": 0.05,
        "num_leaves": 31,
        "verbosity": -1,
        "random_state": 0,
        "n_jobs": 1,
    }
    kind = lgb.LGBMRegressor if t["task"] in ("number", "count") else lgb.LGBMClassifier
    model = kind(objective=objective, **options)
    model.fit(x[~held], t["y"][~held], categorical_feature=[x.shape[1] - 1])
    return np.asarray(model.predict(x[held]) if t["task"] in ("number", "count") else model.predict_proba(x[held]))


def boosting(t: dict[str, Any]) -> Floats:
    """With the mean of the site's target as a column."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    held, y = t["test"], t["y"].astype(float)
    count = np.bincount(t["site"][~held])
    means = (np.bincount(t["site"][~held], y[~held]) + y[~held].mean()) / (count + 1)
    x = np.column_stack([t["x"], means[t["site"]]])
    if t["task"] in ("number", "count"):
        loss = "poisson" if t["task"] == "count" else "squared_error"
        return HistGradientBoostingRegressor(loss=loss, random_state=0).fit(x[~held], y[~held]).predict(x[held])
    return HistGradientBoostingClassifier(random_state=0).fit(x[~held], t["y"][~held]).predict_proba(x[held])


def mixed(t: dict[str, Any]) -> Floats | None:
    """Random intercepts and a random slope of the first column, of numbers; of classes and counts intercepts."""
    from scipy import sparse  # type: ignore[import-untyped]
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM, PoissonBayesMixedGLM
    from statsmodels.regression.mixed_linear_model import MixedLM

    held, design = t["test"], np.column_stack([np.ones(len(t["x"])), t["x"]])
    x, y, site = design[~held], t["y"][~held].astype(float), t["site"][~held]
    if t["task"] == "ordinal":
        return None
    if t["task"] == "number":
        found = MixedLM(y, x, groups=site, exog_re=x[:, :2]).fit(method=["lbfgs"], reml=True)
        own = np.stack([np.asarray(found.random_effects[i]) for i in range(int(site.max()) + 1)])
        return design[held] @ found.fe_params + (design[held][:, :2] * own[t["site"][held]]).sum(1)
    sites = int(site.max()) + 1
    member = sparse.csr_matrix((np.ones(len(y)), (np.arange(len(y)), site)), shape=(len(y), sites))
    np.random.seed(0)  # noqa: NPY002
    kind = BinomialBayesMixedGLM if t["task"] == "binary" else PoissonBayesMixedGLM
    fitted = kind(y, x, member, np.zeros(sites, dtype=int), vcp_p=2, fe_p=3).fit_map()
    eta = design[held] @ fitted.fe_mean + fitted.vc_mean[t["site"][held]]
    if t["task"] == "count":
        return np.exp(np.clip(eta, None, 20))
    p = 1 / (1 + np.exp(-eta))
    return np.column_stack([1 - p, p])


def linear(t: dict[str, Any]) -> Floats | None:
    """Ridge, logistic or Poisson regression at every site."""
    from sklearn.linear_model import LogisticRegression, PoissonRegressor, RidgeCV

    held, classes = t["test"], int(t["y"].max()) + 1
    out = np.full((len(t["y"]), classes) if t["task"] in ("binary", "ordinal") else len(t["y"]), np.nan)
    for i in range(int(t["site"].max()) + 1):
        a, b = (t["site"] == i) & ~held, (t["site"] == i) & held
        x, y, z = t["x"][a], t["y"][a], t["x"][b]
        if t["task"] == "number":
            out[b] = RidgeCV(alphas=np.logspace(-3, 4, 22)).fit(x, y).predict(z)
        elif t["task"] == "count":
            out[b] = PoissonRegressor(alpha=0.1).fit(x, y).predict(z) if y.any() else 0.5 / len(y)
        elif len(np.unique(y)) < 2:
            shares = np.bincount(y, minlength=classes) + 1.0
            out[b] = shares / shares.sum()
        else:
            model = LogisticRegression(max_iter=500).fit(x, y)
            out[b] = 1e-4
            out[np.ix_(np.flatnonzero(b), model.classes_)] = model.predict_proba(z)
    return out[held]


def ours(t: dict[str, Any], figures: dict[str, Any]) -> Floats:
    """Also how long a file of all test rows takes to be predicted, and what the intervals cover."""
    import polars as pl

    import fedtailor as ft
    from fedtailor.serving.predict import predict_by_site

    frame = pl.DataFrame({f"x{j}": t["x"][:, j] for j in range(t["x"].shape[1])})
    frame = frame.with_columns(site=pl.Series([f"s{i:05d}" for i in t["site"]]), y=pl.Series(t["y"]))
    task = {"number": "regression", "count": "count"}.get(t["task"], "classification")
    with tempfile.TemporaryDirectory() as folder:
        begun = _seconds()
        fitted = ft.fit(
            frame.filter(~t["test"]),
            "y",
            client_column="site",
            settings={"data.test": 0.0, "data.task": task},
            out=Path(folder) / "fit",
            progress=False,
        )
        figures["fit"] = _seconds() - begun
        figures["files"] = sum(1 for path in fitted.path.rglob("*") if path.is_file())
        figures["served"] = sorted(
            {part.split(" % ")[-1] for row in fitted.record["sites"].values() for part in row["served"].split(" + ")}
        )
        file = Path(folder) / "test.parquet"
        frame.filter(t["test"]).drop("y").write_parquet(file)
        begun = _seconds()
        predicted, _ = predict_by_site(fitted.path, file, "site", 0.9 if task == "regression" else 0.0)
        figures["predict"] = _seconds() - begun
    if task == "classification":
        return predicted.select(pl.col("^probability .*$")).to_numpy()
    if task == "regression":
        y = t["y"][t["test"]]
        low, high = (predicted[f"{end} 90 %"].to_numpy() for end in ("low", "high"))
        figures["coverage"] = float(((low <= y) & (y <= high)).mean())
    return predicted["prediction"].to_numpy()


RIVALS = {LIGHTGBM: lightgbm, "boosting, pooled": boosting, MIXED: mixed, "linear at each site": linear}
METHODS = (OURS, *RIVALS)


def _seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def size_of(name: str, seed: int = 0) -> tuple[Size, int]:
    """The table of a name such as "shared-200x20@1", and its seed."""
    kind, _, own = name.partition("@")
    return SIZES[kind], int(own or seed)


def measure(name: str, method: str, seed: int) -> dict[str, Any]:
    """One method on one table, in this process."""
    table = make(*size_of(name, seed))
    made, wall, figures = _seconds(), time.monotonic(), dict[str, Any]()
    predicted = ours(table, figures) if method == OURS else RIVALS[method](table)
    seconds = figures.get("fit", _seconds() - made)
    figures |= {"seconds": seconds, "wall": time.monotonic() - wall}
    figures["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # GB
    if predicted is not None:
        figures["loss"] = loss_of(table["task"], table["y"][table["test"]], predicted)
    return figures


def in_process(name: str, method: str, seed: int, limit: float) -> dict[str, Any]:
    """The figures of a process of its own; none if it took too long or failed."""
    command = [sys.executable, __file__, "--one", name, method, str(seed)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=True)
    except subprocess.TimeoutExpired:
        return {"more than": limit}
    except subprocess.CalledProcessError as error:
        return {"failed": (error.stderr.strip().splitlines() or ["?"])[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def goal(name: str, runs: dict[str, dict[str, Any]]) -> float | None:
    """Seconds that a fit may take; None where a rival is missing."""
    rivals = [runs.get(method, {}).get("seconds") for method in (LIGHTGBM, MIXED)]
    if rivals[0] is None:
        return None
    times = TIMES if size_of(name)[0].task == "number" else TIMES_OF_CLASSES
    return max(FLOOR, times * sum(v or 0.0 for v in rivals))


def shown(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A line per table in Markdown: seconds and loss of every method, and memory of fit."""
    methods = [method for method in METHODS if any(method in runs for runs in results.values())]
    lines = ["| table | " + " | ".join(methods) + " | goal | GB | predict | files | cover, % |"]
    lines.append("|---|" + "---:|" * (len(methods) + 5))
    for name, runs in results.items():
        cells = []
        for method in methods:
            run = runs.get(method, {})
            text = f"{run['seconds']:.1f} s" if "seconds" in run else ""
            text = f"more than {run['more than']:.0f} s" if "more than" in run else text
            cells.append(
                text + (f"; {run['loss']:.4f}" if "loss" in run else "") + ("failed" if "failed" in run else "")
            )
        own, most = runs.get(OURS, {}), goal(name, runs)
        cells.append("" if most is None else f"{most:.1f} s")
        cells += [f"{own['memory']:.2f}", f"{own['predict']:.1f} s", str(own["files"])] if "memory" in own else [""] * 3
        cells.append(f"{100 * own['coverage']:.1f}" if "coverage" in own else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def profile(name: str, seed: int) -> None:
    """Where the time of a fit goes."""
    import cProfile
    import pstats

    table = make(*size_of(name, seed))
    with cProfile.Profile() as of_fit:
        ours(table, {})
    pstats.Stats(of_fit).sort_stats("cumulative").print_stats(45)
    pstats.Stats(of_fit).sort_stats("tottime").print_stats(25)


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), help=", ".join(SIZES) + "; NAME@SEED")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a method on a table")
    parser.add_argument("--profile", action="store_true", help="show where the time of a fit goes")
    parser.add_argument("--out", type=Path, help="a JSON file of finished ones, to which others are added")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := [name for name in args.sizes if name.partition("@")[0] not in SIZES]:
        parser.error(f"--sizes {unknown[0]}: known are {', '.join(SIZES)}")
    if args.one:
        print(json.dumps(measure(args.one[0], args.one[1], int(args.one[2]))))
        return
    if args.profile:
        for name in args.sizes:
            profile(name, args.seed)
        return
    done: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    for name in args.sizes:
        for method in args.methods:
            if method not in done.setdefault(name, {}):
                done[name][method] = in_process(name, method, args.seed, args.limit)
                if args.out:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(done))
    print(shown({name: done[name] for name in args.sizes}))


if __name__ == "__main__":
    main()
