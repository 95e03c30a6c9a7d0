"""What a fit found, in words: how sure the gains are, and how sites differ."""

from __future__ import annotations

import math
from typing import Any

from fedtailor.studies.site_metrics import is_noise
from fedtailor.studies.tables import number

VARIES = {"intercept": "only the level", "diagonal": "every coefficient by itself", "full": "all coefficients together"}
OTHERS = {"alone": "each site's best model alone", "common": "one common model", "baseline": "the baseline"}


def sentences(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines of a fit of tables, each with what it is about; none of a fit without intervals."""
    if "differences" not in record:
        return []
    metric = record["metric"]
    out = [("gain", difference(record, key)) for key in OTHERS if key in record["differences"]]
    if sites := site_gains(record):
        out.append(("sites", sites))
    if mixed := what_varies(record):
        out.append(("mixed", mixed))
    if fairness := record.get("fairness"):
        worst, spread = number(metric, fairness["worst_value"]), number(metric, fairness["spread"])
        out.append(("fairness", f"worst site {fairness['worst']}, {worst}; spread over sites (sd) {spread}"))
    return out


def what_varies(record: dict[str, Any]) -> str:
    """Which mixed models serve, mean over sites, by what they let vary between sites; settled on out-of-fold rows."""
    weights = dict.fromkeys(VARIES, 0.0)
    for row in record["sites"].values():
        for run, weight in row.get("weights", {}).items():
            kind, _, rest = run.partition("-")
            effects = rest.partition("-")[0]
            if kind.startswith("mixed") and effects in weights:
                weights[effects] += weight
    total = sum(weights.values())
    if not total:
        return ""
    parts = [f"{100 * w / total:.0f} % {VARIES[effects]}" for effects, w in weights.items() if w / total >= 0.01]
    return f"what differs between sites in the mixed models that serve: {', '.join(parts)}"


def difference(record: dict[str, Any], key: str) -> str:
    """Personal models against something else, with the 95 % interval."""
    metric, estimate = record["metric"], record["differences"][key]
    gain = estimate["gain"]
    if estimate["ci"] is None or not math.isfinite(gain):
        return f"personal models against {OTHERS[key]}: too few test rows to tell"
    low, high = estimate["ci"]
    size, bounds = number(metric, abs(gain)), f"95 % interval {number(metric, low)} to {number(metric, high)}"
    points = " points" if metric == "accuracy" else ""
    how = "better" if gain >= 0 else "worse"
    sentence = f"personal models are {size}{points} {how} than {OTHERS[key]}"
    return (
        f"{sentence}; this difference may be noise ({bounds})" if is_noise(estimate["ci"]) else f"{sentence} ({bounds})"
    )


def site_gains(record: dict[str, Any]) -> str:
    """How many sites gain or lose on their test rows, beyond noise."""
    rows = [row for row in record["sites"].values() if row.get("gain_ci") is not None]
    if not rows:
        return ""
    better, worse = sum(row["gain_ci"][0] > 0 for row in rows), sum(row["gain_ci"][1] < 0 for row in rows)
    rest = len(rows) - better - worse
    return (
        f"on test rows, sites that gain over their best model alone beyond noise: {better}; that lose: {worse}; "
        f"too close to call: {rest}"
    )
