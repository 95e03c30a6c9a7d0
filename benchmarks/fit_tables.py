"""Tables with a site column for benchmarks/fit.py: six real ones, School, heart disease, and three made ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

MULTISITE = {
    "exam": ("school", "normexam"),
    "math": ("School", "MathAch"),
    "radon": ("county.name", "log.radon"),
    "oxboys": ("Subject", "height"),
    "contraception": ("district", "use"),
    "headache": ("id", "headache"),
}
HEART = tuple("age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal num".split())  # noqa: SIM905
MISSING = ["?", "NA", ""]

Table = tuple[pl.DataFrame, str, str]  # rows, site column, target column


def root() -> Path:
    return Path(os.environ.get("FEDTAILOR_DATA", "data"))


def multisite(name: str) -> Table:
    site, target = MULTISITE[name]
    frame = pl.read_csv(root() / "multisite" / f"{name}.csv", null_values=MISSING, infer_schema_length=None)
    return frame.with_columns(pl.col(site).cast(pl.String)), site, target


def school() -> Table:
    from scipy.io import loadmat  # type: ignore[import-untyped]

    held = loadmat(root() / "school" / "school.mat")
    parts = []
    for i in range(held["X"].shape[1]):
        x, y = np.asarray(held["X"][0, i], float), np.asarray(held["Y"][0, i], float).ravel()
        columns = {f"x{j}": x[:, j] for j in range(x.shape[1]) if j < x.shape[1] - 1}  # the last is constant
        parts.append(pl.DataFrame(columns | {"score": y, "school": [f"s{i:03d}"] * len(y)}))
    return pl.concat(parts), "school", "score"


def heart() -> Table:
    parts = []
    for place in ("cleveland", "hungarian", "switzerland", "va"):
        path = root() / "heart_disease" / f"processed.{place}.data"
        frame = pl.read_csv(
            path, has_header=False, new_columns=list(HEART), null_values=MISSING, infer_schema_length=None
        )
        frame = frame.with_columns(pl.col(list(HEART)).cast(pl.Float64))
        frame = frame.with_columns(
            pl.when(pl.col("num") > 0).then(pl.lit("ill")).otherwise(pl.lit("well")).alias("num"),
            pl.lit(place).alias("hospital"),
            *(pl.col(c).cast(pl.Int64).cast(pl.String) for c in ("cp", "restecg", "slope", "thal")),
        )
        parts.append(frame)
    return pl.concat(parts), "hospital", "num"


def drift() -> Table:
    """20 sites along a line: features move, and so do the coefficients."""
    rng, parts = np.random.default_rng(11), []
    for i in range(20):
        t, n = i / 19, int(rng.integers(30, 120))
        x = rng.normal(size=(n, 4)) + np.array([2 * t, 0, -t, 0])
        y = 1 + x @ np.array([1 - 2 * t, 0.5, 0.3, t]) + rng.normal(scale=0.8, size=n)
        parts.append(_frame(x, y, f"site {i:02d}"))
    return pl.concat(parts), "site", "y"


def outlier() -> Table:
    """11 sites agree; the twelfth works the other way round, with three times the noise and a wild value."""
    rng, parts = np.random.default_rng(12), []
    for i in range(12):
        odd, n = i == 11, 60
        x = rng.normal(size=(n, 5))
        beta = np.array([1.0, -0.5, 0.5, 0.0, 0.25]) + rng.normal(scale=0.1, size=5)
        y = x @ (-beta if odd else beta) + rng.normal(scale=1.5 if odd else 0.5, size=n)
        if odd:
            x[0, 0] = 99_999
        parts.append(_frame(x, y, f"site {i:02d}"))
    return pl.concat(parts), "site", "y"


def tiny() -> Table:
    """120 sites of 4 to 9 rows and a class to predict."""
    rng, parts = np.random.default_rng(13), []
    for i in range(120):
        n = int(rng.integers(4, 10))
        x = rng.normal(size=(n, 4))
        beta = np.array([1.0, -0.7, 0.4, 0.0]) + rng.normal(scale=0.3, size=4)
        p = 1 / (1 + np.exp(-(x @ beta + rng.normal(scale=0.8))))
        frame = _frame(x, np.zeros(n), f"site {i:03d}").drop("y")
        parts.append(frame.with_columns(pl.Series("y", np.where(rng.random(n) < p, "yes", "no"))))
    return pl.concat(parts), "site", "y"


def _frame(x: np.ndarray, y: np.ndarray, site: str) -> pl.DataFrame:
    columns = {f"x{j + 1}": x[:, j] for j in range(x.shape[1])}
    return pl.DataFrame(columns | {"y": y, "site": [site] * len(y)})


def given(path: Path, site: str, target: str) -> Table:
    """A table of your own."""
    if path.suffix == ".parquet":
        frame = pl.read_parquet(path)
    else:
        frame = pl.read_csv(path, null_values=MISSING, infer_schema_length=None)
    return frame.with_columns(pl.col(site).cast(pl.String)), site, target


TABLES: dict[str, Callable[[], Table]] = {name: (lambda name=name: multisite(name)) for name in MULTISITE} | {
    "school": school,
    "heart": heart,
    "drift": drift,
    "outlier": outlier,
    "tiny": tiny,
}
