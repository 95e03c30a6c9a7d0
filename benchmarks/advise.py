"""How right `fedtailor advise` is: every site of real tables in turn considers joining the others.

A quarter of each site's rows is for testing. The others' fit and the site's own sums give the interval of the expected
gain; the gain on its test rows is that of the same two models. That has noise of its own, of a size that is known given
the noise of a row: the interval with it must hold 90 % of the measured gains.

    FEDTAILOR_DATA=data python -m benchmarks.advise --out docs/results/advise.json
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from scipy import stats  # type: ignore[import-untyped]

from benchmarks.fit_tables import MULTISITE, TABLES
from fedtailor.core.data import FederatedData
from fedtailor.experiments.building import load
from fedtailor.experiments.config import parse
from fedtailor.numerics.site_sums import (
    SharedFit,
    SiteSums,
    fit_shared,
    own_models,
    pooled_within,
    refit,
    with_coefficients,
)
from fedtailor.tables.advice import bootstrap, exchange_sums, gains_of, numbers_only, quadratic, unit_of
from fedtailor.tables.fit_sources import keep_frames, source_of

NAMES = (*MULTISITE, "school")


def read(name: str, seed: int) -> FederatedData:
    frame, site, target = TABLES[name]()
    with TemporaryDirectory() as folder:
        kept = keep_frames(frame, Path(folder) / "rows", site)
        return load(
            parse({"seed": seed, "rounds": 1, "data": source_of(kept, target, site) | {"val": 0.0}}, origin="advise"),
            None,
        )


def moved(drawn: SharedFit, all_sites: SharedFit, without: SharedFit, others: SiteSums) -> SharedFit:
    """A draw of the bootstrap of all sites, moved to the variances of the others."""
    factor = drawn.factor - all_sites.factor + without.factor
    noise = (drawn.noise - all_sites.noise + without.noise).clamp(min=1e-12)
    return with_coefficients(others, replace(drawn, factor=factor, noise=noise))


def measure(name: str, seed: int, draws: int) -> dict[str, Any]:
    begun, loaded = time.monotonic(), read(name, seed)
    data, unit = numbers_only(loaded), unit_of(loaded)[0]
    sums = exchange_sums(data)
    shared = fit_shared(sums)
    fits, rows = bootstrap(sums, shared, draws), []
    for i in range(len(data.clients)):
        x, y = (part.double() for part in data.test.of(i))
        if len(x) < 2 or not len(data.train.of(i)[0]):
            continue
        others, asked = sums.without(i), sums.only([i])
        without = refit(others, shared, is_draft=True)
        drawn = [moved(each, shared, without, others) for each in fits]
        gains = gains_of(asked, without, drawn, pooled_within(others))
        own, ours = own_models(asked), without.models(asked)[0]
        x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
        measured = float(((y - x @ own.mT).square() - (y - x @ ours.mT).square()).mean())
        noise = 2 * float((without.noise * quadratic(own - ours, x.mT @ x) / len(x) ** 2).sqrt())
        rows.append((measured, float(gains.mean), float(gains.low), float(gains.high), noise, gains.verdicts[0]))
    return summary(rows, unit) | {"table": name, "seed": seed, "seconds": round(time.monotonic() - begun)}


def summary(rows: list[tuple[Any, ...]], unit: float) -> dict[str, Any]:
    measured, mean, low, high, noise = (np.array([row[k] for row in rows]) for k in range(5))
    half, reach = (high - low) / 2, stats.norm.ppf(0.95)
    wide = np.sqrt(half**2 + (reach * noise) ** 2)
    center, spread = (high + low) / 2, float(np.std(measured, ddof=1))
    verdicts = [row[5] for row in rows]
    says = [(v, m) for v, m in zip(verdicts, measured, strict=True) if v in ("share", "alone")]
    return {
        "sites": len(rows),
        "mean_gain": float(measured.mean()) * unit**2,
        "mean_expected": float(mean.mean()) * unit**2,
        "covers_measured": float(np.mean((low <= measured) & (measured <= high))),
        "covers_with_noise": float(np.mean(np.abs(measured - center) <= wide)),
        "median_width": float(np.median(high - low)) * unit**2,
        "sd_of_gains": spread * unit**2,
        "width_to_sd": float(np.median(high - low)) / spread,
        "test_noise_to_sd": float(np.sqrt(np.mean(noise**2))) / spread,
        "do_not_know": float(np.mean([v == "do not know" for v in verdicts])),
        "share": float(np.mean([v == "share" for v in verdicts])),
        "right_when_it_says": float(np.mean([(m > 0) == (v == "share") for v, m in says])) if says else None,
        "correlation": float(np.corrcoef(mean, measured)[0, 1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="+", default=list(NAMES), choices=list(TABLES))
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="Of the split into training and test.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    records = []
    for name in options.tables:
        for seed in options.seeds:
            records.append(measure(name, seed, options.draws))
            print(json.dumps(records[-1]), flush=True)
            if options.out:
                options.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
