"""What a fit found, in sentences: gains and how certain they are, how sites differ, what each column does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedtailor.studies.result_tables import metric_name, number
from fedtailor.tables.coefficients import INTERCEPT
from fedtailor.tables.site_metrics import is_noise

MOST_NAMED = 6
LOG_ODDS, LOG = "log-odds", "log of "
Coefficients = Mapping[str, Any]


def is_factor(scale: str) -> bool:
    """Whether coefficients are on a log scale, and are reported as odds ratios or factors."""
    return scale == LOG_ODDS or scale.startswith(LOG)


def signed(value: float) -> str:
    return f"{value:+.3g}"


def join_names(names: Sequence[str], most: int = MOST_NAMED) -> str:
    """a, b and c; the rest is counted."""
    parts = [*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def all_sites(sites: int) -> str:
    return {1: "the site", 2: "both sites"}.get(sites, f"all {sites} sites")


def unit_of(term: Mapping[str, Any]) -> str:
    """The unit of a coefficient, or the category that it is compared with."""
    if term["name"] == INTERCEPT:
        return "at reference values"
    if term["reference"]:
        return f"against {term['reference']}"
    return "per sd" if term["sd"] is None else "per unit"


def p_words(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def term_name(term: Mapping[str, Any]) -> str:
    """With the category that it is compared with."""
    return f"{term['name']} against {term['reference']}" if term["reference"] else str(term["name"])


def aliased_sentence(terms: Sequence[Mapping[str, Any]]) -> str:
    """Which terms have no estimate, and what each repeats."""
    parts = [f"{term['name']} (with {join_names(term['aliases'], 3)})" for term in terms if term["aliases"]]
    return f"Aliased, so without an estimate of their own: {join_names(parts)}." if parts else ""


def size_words(term: Mapping[str, Any], scale: str, each: Mapping[str, Any] | None = None) -> str:
    """The coefficient with its confidence interval, of all sites or (`each`) of one."""
    estimate = term if each is None else each
    if estimate["value"] is None:
        return "unknown"
    factor = 1.0 if term["sd"] is None else float(term["sd"])
    value, low, high = (float(estimate[key]) / factor for key in ("value", "low", "high"))
    if is_factor(scale) and term["name"] != INTERCEPT:
        what = "odds ratio" if scale == LOG_ODDS else f"{scale.removeprefix(LOG)} times"
        value, low, high = (math.exp(min(each, 50)) for each in (value, low, high))
        return f"{what} {value:.3g} {unit_of(term)} (95 % CI {low:.3g} to {high:.3g})"
    return f"{signed(value)} {unit_of(term)} (95 % CI {signed(low)} to {signed(high)})"


def sharing_words(term: Mapping[str, Any], sites: int) -> str:
    """Whether the coefficient is common to all sites."""
    if term["aliases"]:
        return f"not identifiable separately from {join_names(term['aliases'], 3)}"
    if sites == 1:
        return ""
    if not term["differs"]:
        return f"common to {all_sites(sites)}" + ("" if term["varies"] else ", constant within each")
    factor = 1.0 if term["sd"] is None else float(term["sd"])
    spread, value = term["spread"] / factor, term["value"] / factor
    sign = ", also in sign" if term["name"] != INTERCEPT and term.get("crosses") else ""
    return f"varies between sites{sign} (sd {spread:.3g} around {value:.3g})"


def term_words(term: Mapping[str, Any], scale: str, sites: int) -> str:
    shared = sharing_words(term, sites)
    if term["aliases"]:
        return f"{term['name']}: {shared}"
    doubt = "; not significant" if term["name"] != INTERCEPT and term["low"] <= 0 <= term["high"] else ""
    return f"{term['name']}: {size_words(term, scale)}{doubt}" + (f"; {shared}" if shared else "")


def model_sentence(coefficients: Coefficients) -> str:
    sites, label = len(coefficients["sites"]), coefficients["model"]
    rows = f" on all {coefficients['rows']} rows" if "rows" in coefficients else ""
    if sites == 1:
        return f"There is one site; its coefficients come from an ordinary regression{rows}."
    kind = {
        "common": "one common model, the same at all sites",
        "mixed, intercept": "a mixed model with a random intercept for each site and common slopes",
    }.get(label, "a mixed model: common coefficients, and site-specific deviations from them")
    weight = coefficients["weight"]
    part = (
        "no site is served by it"
        + ("" if coefficients.get("asked") else "; it is shown as it describes how sites differ")
        if weight < 0.01
        else f"it has {100 * weight:.0f} % of the weight in the linear models that serve the sites"
    )
    return f"Coefficients come from {kind}, fitted{rows}; {part}."


def sharing_sentences(coefficients: Coefficients) -> list[str]:
    """Which effects are common to all sites, and which vary between them."""
    sites = len(coefficients["sites"])
    if sites == 1:
        return []
    if coefficients["model"] == "common":
        why = "" if coefficients.get("asked") else ": site-specific effects did not predict better"
        return [f"All effects are the same at {all_sites(sites)}{why}."]
    by_column: dict[str, list[Mapping[str, Any]]] = {}
    for output in coefficients["outputs"]:
        for term in output["terms"]:
            by_column.setdefault(term["column"], []).append(term)
    level = by_column.pop(INTERCEPT)
    tests = {name: terms[0].get("differs_p", math.nan) for name, terms in by_column.items()}
    own = [name for name, terms in by_column.items() if any(term["differs"] for term in terms)]
    fixed = [n for n, terms in by_column.items() if n not in own and not any(term["varies"] for term in terms)]
    common = [name for name in by_column if name not in own and name not in fixed]
    alike = [name for name in common if tests[name] < 1]
    common = [name for name in common if name not in alike]  # in this model they cannot vary
    own, alike = ([tested(name, tests[name]) for name in names] for names in (own, alike))
    if any(term["differs"] for term in level):
        own.insert(0, tested("the intercept", level[0].get("differs_p", math.nan)))
    return [
        *([f"Effects that vary between sites (likelihood ratio test): {join_names(own)}."] if own else []),
        *([f"Effects that do not vary significantly: {join_names(alike)}."] if alike else []),
        *([f"Effects common to {all_sites(sites)}: {join_names(common)}."] if common else []),
        *(
            [f"Constant within each site, so only a common effect can be estimated: {join_names(fixed)}."]
            if fixed
            else []
        ),
    ]


def tested(name: str, p: float) -> str:
    return name if math.isnan(p) else f"{name} ({p_words(p)})"


SENT = {  # what the mixed models send, in a statistician's words
    "variation within the client": "within-site sums of squares",
    "vector of the model's size": "gradients",
    "vectors of the model's size": "gradients",
    "curvature": "Hessians",
    "number": "single numbers, such as log-likelihoods",
}


def what_leaves(shared: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str, str]]:
    """Models, what a site sends for them, and what stays there; models with the same in one line."""
    lines: dict[tuple[str, str], list[str]] = {}
    for name, parts in shared.items():
        sent = ", ".join(SENT.get(part, part) for part in parts["sent"].split(", "))
        lines.setdefault((sent, parts["private"]), []).append(name)
    return [("; ".join(names), sent, private) for (sent, private), names in lines.items()]


def importance_sentences(importance: Mapping[str, Any]) -> list[str]:
    """Which columns the predictions depend on."""
    metric, columns = importance["metric"], importance["columns"]
    out = []
    error = math.sqrt(max(importance["repeats"], 1))
    useful = [each for each in columns if each["mean"] > 2 * each["sd"] / error and each["mean"] > 0]
    if useful:
        points = " points" if metric == "accuracy" else ""
        parts = [f"{each['column']} ({number(metric, each['mean'])}{points})" for each in useful]
        out.append(
            f"Most important columns: {join_names(parts, 4)}; in brackets, how much {metric_name(metric)} worsens "
            "without it."
        )
    elif columns:
        out.append("No single column is important: shuffling any one of them hardly worsens the predictions.")
    useless = [each["column"] for each in columns if each not in useful]
    if useful and useless:
        out.append(f"Columns of little importance: {join_names(useless)}.")
    if importance["constant"]:
        out.append(f"Constant within each site, so without importance there: {join_names(importance['constant'])}.")
    return out


def effect_sentences(effects: Mapping[str, Any]) -> list[str]:
    coefficients, out = effects.get("coefficients"), []
    if coefficients:
        out += [model_sentence(coefficients), *sharing_sentences(coefficients)]
        for output in coefficients["outputs"]:
            if output["class"] and len(coefficients["outputs"]) > 1:
                out.append(f"Odds of {output['class']} against {output['against']}:")
            out += [term_words(term, coefficients["scale"], len(coefficients["sites"])) for term in output["terms"]]
    return out + importance_sentences(effects["importance"])


VARIES = {"intercept": "random intercept", "diagonal": "independent random slopes", "full": "correlated random slopes"}
OTHERS = {"alone": "each site's own best model", "common": "one common model", "baseline": "the baseline"}


def fit_sentences(record: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary of a fit of tables: sentences with their subjects; none of a fit without intervals."""
    if "differences" not in record:
        return []
    metric = record["metric"]
    out = [("gain", gain_sentence(record, key)) for key in OTHERS if key in record["differences"]]
    left_out = next((each for each in record.get("dropped", ()) if each["label"] == "common"), None)
    if left_out and "common" not in record["differences"]:
        out.append(("gain", f"{OTHERS['common']} was left out: {left_out['why']}"))
    if sites := site_gain_sentence(record):
        out.append(("sites", sites))
    if mixed := variation_sentence(record):
        out.append(("mixed", mixed))
    if fairness := record.get("fairness"):
        worst, spread = number(metric, fairness["worst_value"]), number(metric, fairness["spread"])
        out.append(("fairness", f"worst site {fairness['worst']}, {worst}; standard deviation over sites {spread}"))
    return out


def variation_sentence(record: dict[str, Any]) -> str:
    """The mean weight over sites of each kind of mixed model, as chosen on out-of-fold rows."""
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
    return f"mixed models that serve the sites: {', '.join(parts)}"


def gain_sentence(record: dict[str, Any], key: str) -> str:
    """Personal models against other ones, with the 95 % confidence interval of the difference."""
    metric, estimate = record["metric"], record["differences"][key]
    gain = estimate["gain"]
    if estimate["ci"] is None or not math.isfinite(gain):
        return f"personal models against {OTHERS[key]}: too few test rows to compare"
    low, high = estimate["ci"]
    if low == high == gain == 0:
        return f"personal models predict as {OTHERS[key]} do, on every test row"
    size, bounds = number(metric, abs(gain)), f"95 % CI {number(metric, low)} to {number(metric, high)}"
    points = " points" if metric == "accuracy" else ""
    how = "better" if gain >= 0 else "worse"
    sentence = f"personal models are {size}{points} {how} than {OTHERS[key]}"
    return (
        f"{sentence}; this difference may be due to chance ({bounds})"
        if is_noise(estimate["ci"])
        else f"{sentence} ({bounds})"
    )


def site_gain_sentence(record: dict[str, Any]) -> str:
    """How many sites gain or lose on their test rows, beyond chance."""
    rows = [row for row in record["sites"].values() if row.get("gain_ci") is not None]
    if not rows:
        return ""
    better, worse = sum(row["gain_ci"][0] > 0 for row in rows), sum(row["gain_ci"][1] < 0 for row in rows)
    rest = len(rows) - better - worse
    return (
        f"sites where the personal model is significantly better than the site's own best model: {better}; "
        f"significantly worse: {worse}; too close to call: {rest}"
    )
