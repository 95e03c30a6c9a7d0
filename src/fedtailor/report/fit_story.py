"""The first section of a fit's page: who gains, by how much, how sure that is, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from fedtailor.report.figures import percent
from fedtailor.report.formatting import count, label, signed, value
from fedtailor.report.page_model import Chart, Figure, Section
from fedtailor.studies.result_tables import number
from fedtailor.tables.site_metrics import is_noise
from fedtailor.tables.words import importance_words, joined, shared_words

NAMED = 3  # sites that are named
NAMES = {"baseline": "baseline", "alone": "alone", "common": "in common", "personal": "personal models"}
OWN = ("Local", "alone", "trees alone")


def story(record: dict[str, Any], effects: dict[str, Any], more: Sequence[str] = ()) -> Section:
    """Of a fit of tables; `more` are further sentences."""
    coefficients = effects.get("coefficients")
    text = [
        headline(record),
        who(record),
        by_size(record),
        " ".join(shared_words(coefficients)) if coefficients else "",
        next(iter(importance_words(effects["importance"])), "") if effects else "",
        *more,
    ]
    metric, means = record["metric"], record["means"]
    rows = [row for row in record["sites"].values() if row.get("gain_ci")]
    better, worse = (sum(sign * row["gain_ci"][k] > 0 for row in rows) for k, sign in ((0, 1), (1, -1)))
    figures = [
        Figure("Personal models", value(metric, means["personal"]), f"mean test {metric} over sites"),
        Figure("Alone", value(metric, means["alone"]), "each site's best own model"),
        Figure("In common", value(metric, means["common"]), "one model for all"),
        Figure("Baseline", value(metric, means["baseline"]), "each site's mean, or shares of its classes"),
    ]
    if len(record["sites"]) > 1 and rows:
        figures.append(Figure("Gain, lose", f"{better}, {worse}", f"sites beyond noise, of {len(rows)}"))
    charts = [chart for chart in (levels(record),) if chart is not None]
    return Section("summary", "Summary", tuple(filter(None, text)), tuple(figures), tuple(charts))


def in_federation(record: dict[str, Any]) -> str:
    """What a federation's fit gave this site; of the others it knows nothing."""
    ((site, row),) = record["sites"].items()
    metric = record["metric"]
    if row["served"] in OWN:
        return f"{site} keeps its own model: the federation's did not help it by more than its uncertainty."
    alone, personal = value(metric, row["alone"]), value(metric, row["personal"])
    figures = f"test {metric} is {alone} with its best model alone and {personal} with the model it is served by"
    return f"{site} is served by {row['served']}, of a fit with the other sites of its federation: {figures}."


def headline(record: dict[str, Any]) -> str:
    """Whether sharing pays, in one sentence."""
    metric, means, estimate = record["metric"], record["means"], record["differences"]["alone"]
    sites = record["sites"]
    if record.get("settings", {}).get("federated"):
        return in_federation(record)
    if len(sites) == 1:
        return "There is one site, so that nothing can be shared: it is served by a model of its own."
    if all(row["served"] in OWN for row in sites.values()):
        every = "Both sites keep" if len(sites) == 2 else f"All {len(sites)} sites keep"
        return f"{every} their own model: sharing did not help any of them by more than its uncertainty."
    alone, personal = value(metric, means["alone"]), value(metric, means["personal"])
    figures = f"mean test {metric} is {alone} with each site's best model alone and {personal} with personal models"
    if estimate["ci"] is None or not math.isfinite(estimate["gain"]):
        return f"Whether sharing pays cannot be told: {figures}, on too few test rows."
    low, high = estimate["ci"]
    bounds = f"95 % interval of the gain {number(metric, low)} to {number(metric, high)}"
    if is_noise(estimate["ci"]):
        return f"Sharing makes no sure difference: {figures}. That may be noise ({bounds})."
    part = abs(estimate["gain"] / means["alone"]) if means["alone"] else math.nan
    how = "better" if estimate["gain"] > 0 else "worse"
    size = signed(metric, abs(estimate["gain"])).lstrip("+") if metric == "accuracy" else f"{100 * part:.1f} %"
    return f"Sharing {'pays' if estimate['gain'] > 0 else 'did harm'}: {figures}, {size} {how} ({bounds})."


def who(record: dict[str, Any]) -> str:
    """Which sites gain and lose on their test rows, beyond noise."""
    sites = record["sites"]
    known = {name: row for name, row in sites.items() if row.get("gain_ci") is not None}
    if len(sites) == 1 or not known:
        return ""
    sign = 1 if record["higher_is_better"] else -1
    gain = {name: sign * (row["personal"] - row["alone"]) for name, row in known.items()}
    better = sorted((n for n, row in known.items() if row["gain_ci"][0] > 0), key=lambda n: -gain[n])
    worse = sorted((n for n, row in known.items() if row["gain_ci"][1] < 0), key=lambda n: gain[n])
    parts = []
    for names, verb in ((better, "gain"), (worse, "lose")):
        verb = f"{verb}s" if len(names) == 1 else verb
        which = f" ({'most: ' if len(names) > NAMED else ''}{joined(names[:NAMED])})" if names else ""
        parts.append(f"{len(names) or 'none'} {verb}{which}" if names else f"none {verb}s")
    rest, few = len(known) - len(better) - len(worse), len(sites) - len(known)
    close = f"{rest} {'is' if rest == 1 else 'are'} too close to call" if rest else ""
    too_few = f"{few} {'has' if few == 1 else 'have'} too few test rows to tell" if few else ""
    verdicts = ", ".join(filter(None, [*parts, close, too_few]))
    return f"Of {count(len(sites), 'site')}, compared with their best model alone and beyond noise: {verdicts}."


def by_size(record: dict[str, Any]) -> str:
    """Whether small sites gain more, where there are enough sites to say so."""
    sign = 1 if record["higher_is_better"] else -1
    pairs = [(row["train"], sign * (row["personal"] - row["alone"])) for row in record["sites"].values()]
    pairs = [(size, gain) for size, gain in pairs if math.isfinite(gain)]
    if len(pairs) < 8:
        return ""
    middle = median(size for size, _ in pairs)
    small, large = [g for n, g in pairs if n <= middle], [g for n, g in pairs if n > middle]
    if not small or not large:
        return ""
    metric = record["metric"]
    which = f"those with at most {middle:g} training rows by {signed(metric, mean(small))}"
    others = f"larger ones by {signed(metric, mean(large))}"
    if mean(small) > max(1.5 * mean(large), 0):
        return f"Small sites gain most, as they have most to learn from the others: {which} on average, {others}."
    return f"Sites change on average: {which}, {others}."


def levels(record: dict[str, Any]) -> Chart | None:
    """Mean test figures side by side, with their intervals."""
    metric, means, ci = record["metric"], record["means"], record["ci"]
    rows = [
        (NAMES[key], means[key], *(ci[key] or (None, None)))
        for key in ("baseline", "alone", "common", "personal")
        if key in means and math.isfinite(means[key]) and not (key == "common" and len(record["sites"]) == 1)
    ]
    if len(rows) < 2:
        return None
    better = "higher" if record["higher_is_better"] else "lower"
    over = "over sites" if len(record["sites"]) >= 8 else "over rows"
    return Chart(
        "levels",
        "intervals",
        f"Mean test {metric} of the sites: {better} is better",
        "; ".join(f"{name} {value(metric, x)}" for name, x, *_ in rows) + ".",
        ("model", metric, "low", "high"),
        rows,
        {"x": metric, "low": "low", "high": "high", "name": "model", "xlabel": f"test {label(metric)}"}
        | {"percent": percent(metric, metric, "low", "high")},
        f"Lines are 95 % intervals {over}. All models are measured on the same rows: differences are surer than the "
        "lines suggest.",
    )
