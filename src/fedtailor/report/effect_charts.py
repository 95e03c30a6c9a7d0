"""Sections on what the models of a fit mean: what matters to their predictions, and what sites have in common."""

from __future__ import annotations

from typing import Any

from fedtailor.report.figures import percent
from fedtailor.report.formatting import label, signed
from fedtailor.report.page_model import Chart, Section, Table, Value, cells
from fedtailor.tables.coefficients import INTERCEPT
from fedtailor.tables.words import about_model, importance_words, shared_words, sharing_words, size_words

MOST_TERMS, MOST_SHOWN, MOST_LINES, MOST_COLUMNS = 25, 12, 6, 12
ALL = "all sites"
NONE = "the fit does not keep it; fedtailor explain computes it"


def matters(record: dict[str, Any], effects: dict[str, Any]) -> Section:
    """Importance of columns, their coefficients, and how predictions change with those that matter most."""
    section = Section("matters", "What matters")
    if not effects:
        return section.without(NONE)
    importance = effects["importance"]
    charts = [chart for chart in (_importance(importance), _coefficients(effects)) if chart is not None]
    charts += [_curve(curve, effects, record) for curve in effects["curves"]]
    if not charts:
        return section.without("no column varies within a site")
    return Section(section.id, section.title, tuple(importance_words(importance)), charts=tuple(charts))


def _importance(importance: dict[str, Any]) -> Chart | None:
    metric = importance["metric"]
    rows = [
        (each["column"], each["mean"], each["mean"] - each["sd"], each["mean"] + each["sd"])
        for each in importance["columns"]
    ]
    rows = rows[:MOST_COLUMNS]
    if not any(row[1] > 0 for row in rows):
        return None
    origin = "held out of training" if importance["held_out"] else "of training"
    return Chart(
        "importance",
        "bars",
        "What the predictions need",
        "One bar per column: " + ", ".join(f"{row[0]} {signed(metric, row[1])}" for row in rows) + ".",
        ("column", "worse by", "low", "high"),
        rows,
        {"x": "worse by", "name": "column", "low": "low", "high": "high"}
        | {"xlabel": f"{label(metric)} worse by", "percent": percent(metric, "worse by", "low", "high")},
        f"How much worse {metric} gets when a column is shuffled within each site, on {importance['rows']:,} rows "
        f"{origin}. The thin line is the spread of {importance['repeats']} shuffles.",
    )


def _coefficients(effects: dict[str, Any]) -> Chart | None:
    coefficients = effects["coefficients"]
    if not coefficients or len(coefficients["outputs"]) != 1:
        return None
    (output,) = coefficients["outputs"]
    terms = [term for term in output["terms"] if term["value"] is not None and term["name"] != INTERCEPT]
    if not terms:
        return None
    terms = sorted(terms, key=lambda term: -abs(term["value"]) / max(term["high"] - term["low"], 1e-12))[:MOST_SHOWN]
    is_few, sites = len(coefficients["sites"]) < MOST_LINES, coefficients["sites"]
    rows: list[tuple[Value, ...]] = []
    for term in terms:
        name = f"{term['name']} (not {term['reference']})" if term["reference"] else term["name"]
        rows.append((name, ALL, term["value"], term["low"], term["high"]))
        if len(sites) > 1 and term["differs"]:
            for site, own in zip(sites, term["sites"], strict=True):
                ends = (own["low"], own["high"]) if is_few else (None, None)
                rows.append((name, site, own["value"], *ends))
    effect = f"change in the log-odds of {output['class']}" if output["class"] else f"change in {coefficients['scale']}"
    is_varied = any(term["differs"] for term in terms) and len(sites) > 1
    dots = " Dots are the sites' own, where they differ." if is_varied and not is_few else ""
    series = {"series": "site"} if is_varied else {}
    return Chart(
        "coefficients",
        "intervals",
        "What each column does",
        "Coefficients with 95 % intervals: "
        + "; ".join(f"{t['name']} {size_words(t, coefficients['scale'])}" for t in terms[:8])
        + ".",
        ("column", "site", "effect", "low", "high"),
        rows,
        {"x": "effect", "low": "low", "high": "high", "name": "column", "diverging": True, "xlabel": effect} | series,
        "Per standard deviation of a number; of a category against the usual one; the surest first. "
        f"Lines are 95 % intervals.{dots}",
    )


def _curve(curve: dict[str, Any], effects: dict[str, Any], record: dict[str, Any]) -> Chart:
    column, outputs = curve["column"], effects["outputs"]
    target = record["target"] or "the target"
    prediction = f"probability of {outputs[0]}" if record["task"] == "classification" else f"predicted {target}"
    is_single = len(outputs) <= 1
    if curve["kind"] == "category":
        return _categories(curve, prediction if is_single else "probability", outputs)
    sizes = {name: record["sites"][name]["train"] for name in curve["sites"] if name in record["sites"]}
    rows: list[tuple[Value, ...]] = []
    if is_single:
        lines = {ALL: curve["y"]} if len(record["sites"]) > 1 else {}
        largest = sorted(sizes, key=lambda name: -sizes[name])[: MOST_LINES - 1]
        lines |= {name: curve["sites"][name] for name in largest}
        rows = [(name, x, y[0]) for name, points in lines.items() for x, y in zip(curve["x"], points, strict=True)]
    else:
        prediction = "probability"
        rows = [(name, x, y[k]) for k, name in enumerate(outputs) for x, y in zip(curve["x"], curve["y"], strict=True)]
    first, last = curve["y"][0][0], curve["y"][-1][0]
    x = f"{column}, in standard deviations" if curve["is_standardised"] else column
    of_sites = "Over all sites, and at those with most rows." if is_single and len(record["sites"]) > 1 else ""
    return Chart(
        f"effect-{column}",
        "lines",
        f"Prediction by {column}",
        f"{prediction} goes from {first:.3g} at {curve['x'][0]:.4g} to {last:.3g} at {curve['x'][-1]:.4g}.",
        ("line", x, prediction),
        rows,
        {
            "x": x,
            "y": prediction,
            "series": "line",
            "xlabel": x,
            "ylabel": prediction,
            "first": ALL,
            "dates": curve["is_date"],
        },
        f"All else as it is (accumulated local effects). {of_sites}".strip(),
    )


def _categories(curve: dict[str, Any], prediction: str, outputs: list[str]) -> Chart:
    """Dots, those of sites too where one number is predicted; else one series per class."""
    column, levels = curve["column"], curve["x"]
    rows: list[tuple[Value, ...]]
    if len(outputs) <= 1:
        lines = {ALL: curve["y"]} | (curve["sites"] if 1 < len(curve["sites"]) < MOST_LINES else {})
        rows = [(level, name, y[0]) for name, points in lines.items() for level, y in zip(levels, points, strict=True)]
        note = "All else as it is." if len(lines) > 1 else "Mean over all sites, all else as it is."
    else:
        rows = [(level, n, y[k]) for k, n in enumerate(outputs) for level, y in zip(levels, curve["y"], strict=True)]
        note = "Mean over all sites, all else as it is."
    means = [(level, y[0]) for level, y in zip(levels, curve["y"], strict=True)]
    return Chart(
        f"effect-{column}",
        "intervals",
        f"Prediction by {column}",
        f"{prediction} by category: " + ", ".join(f"{level} {y:.3g}" for level, y in means) + ".",
        (column, "line", prediction),
        rows,
        {"x": prediction, "name": column, "xlabel": prediction}
        | ({"series": "line"} if len({row[1] for row in rows}) > 1 else {}),
        note,
    )


def sharing(record: dict[str, Any], effects: dict[str, Any]) -> Section:
    """Per column whether sites have its effect in common; and in words, what leaves a site."""
    rows = [cells(name, words["sent"], words["private"]) for name, words in record["shared"].items()]
    sent = Table("What leaves a site, by model", ("", "sent", "stays private"), rows, words=True)
    coefficients = effects.get("coefficients")
    if not coefficients or len(coefficients["sites"]) == 1:
        return Section("shared", "What is shared", tables=(sent,))
    text = (about_model(coefficients), *shared_words(coefficients))
    columns: tuple[str, ...] = ("", "effect over all sites", "between sites")
    lines = []
    for output in coefficients["outputs"]:
        for term in output["terms"]:
            name = "level" if term["name"] == INTERCEPT else term["name"]
            name = f"{name}, {output['class']}" if len(coefficients["outputs"]) > 1 else name
            words = sharing_words(term, len(coefficients["sites"]))
            lines.append(cells(name, size_words(term, coefficients["scale"]), words[:1].upper() + words[1:]))
    table = Table("Common, or a site's own", columns, lines, words=True, folded=len(lines) > MOST_TERMS)
    chart = caterpillar(coefficients)
    return Section("shared", "What is shared", text, charts=(chart,) if chart else (), tables=(table, sent))


def caterpillar(coefficients: dict[str, Any]) -> Chart | None:
    """Every site's own coefficient of the term in which sites differ most."""
    terms = [
        t for output in coefficients["outputs"] for t in output["terms"] if t["differs"] and t["value"] is not None
    ]
    slopes = [term for term in terms if term["name"] != INTERCEPT] or terms
    if not slopes:
        return None
    term = min(slopes, key=lambda each: each["share"])
    factor = term["sd"] or 1.0
    rows = sorted(
        (site, own["value"] / factor, own["low"] / factor, own["high"] / factor)
        for site, own in zip(coefficients["sites"], term["sites"], strict=True)
    )
    rows.sort(key=lambda row: -row[1])
    name = "level" if term["name"] == INTERCEPT else term["name"]
    unit = "" if name == "level" else f", against {term['reference']}" if term["reference"] else ", per unit"
    return Chart(
        "own",
        "intervals",
        f"Where sites differ most: {name}",
        f"Each site's own coefficient with its 95 % interval, from {rows[0][0]} {rows[0][1]:.3g} to {rows[-1][0]} "
        f"{rows[-1][1]:.3g}; the common one is {term['value'] / factor:.3g}.",
        ("site", "coefficient", "low", "high"),
        rows,
        {"x": "coefficient", "low": "low", "high": "high", "name": "site", "diverging": rows[0][1] * rows[-1][1] < 0}
        | {"xlabel": f"{name}{unit}", "rank": "sites, by their coefficient"},
        f"The coefficient of each site, drawn towards the common one, {term['value'] / factor:.3g}, the more the fewer "
        "rows it has. Lines are 95 % intervals.",
    )
