"""The page on a fit: every site alone, in common and personalized, what its models mean, and the runs behind that."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from fedtailor.experiments.store import FIT, read_json
from fedtailor.metrics.summary import summarise
from fedtailor.report.compare_page import citations, configuration, left_out, places, runs_in, task_sections, tasks_of
from fedtailor.report.formatting import count, format_gain, label, percent, value
from fedtailor.report.page import Chart, KeyFigure, Page, PageSection, PageTable, TableCell, Value, cells
from fedtailor.studies.result_tables import metric_name, number
from fedtailor.tables.coefficients import INTERCEPT
from fedtailor.tables.effects import EFFECTS
from fedtailor.tables.site_metrics import is_noise
from fedtailor.tables.words import (
    LOG,
    LOG_ODDS,
    importance_sentences,
    is_factor,
    join_names,
    model_sentence,
    sharing_sentences,
    sharing_words,
    size_words,
    term_name,
    what_leaves,
)

OWN = ("Local", "alone", "trees alone")
OWN_MODEL = "its own model"
WORDS = {
    "mixed": "a mixed model, which is partly common and partly the site's own",
    "common": "the common model",
    "trees on the shared model": "trees on top of the shared model",
    "boosted": "a mixed model with boosted trees that all sites share",
}
NAMES = {"baseline": "baseline", "alone": "alone", "common": "in common", "personal": "personal models"}
NAMED = 3  # sites that are named
MANY = 12  # sites, above which the chart comes before the table, and tables are folded
QUANTILES = ("5 %", "25 %", "median", "75 %", "95 %")
MOST_TERMS, MOST_SHOWN, MOST_LINES, MOST_COLUMNS = 25, 12, 6, 12
ALL = "all sites"
NONE = "not stored with the fit; fedtailor explain computes it"


def fit_page(path: Path) -> Page:
    record = read_json(path / FIT)
    runs, failed = runs_in(path)
    finished_runs = [run for run in runs if run.results is not None]
    tasks = tasks_of(finished_runs, places(path, finished_runs))
    units = next((run.units for run in finished_runs), "")
    effects = dict(read_json(path / EFFECTS)) if (path / EFFECTS).exists() else {}
    if "differences" in record:  # a fit of tables: its runs are parts of models, not compared one by one
        names = [row["served"] for row in record["sites"].values()]
        served = "" if set(names) <= set(OWN) else served_sentence(names)  # the headline says it
        first = story(record, effects, (served, *left_out(failed)))
        sections = [first, sites(record), matters(record, effects), sharing(record, effects)]
        sections += [quality(record), card(record), halving(record, units)]
    else:
        sections = [summary(record, failed), sites(record)]
        sections += [matters(record, effects)] if effects else []
        sections += [sharing(record, effects), halving(record, units)]
        for number_, task in enumerate(tasks):
            sections += task_sections(task, f"-{number_}" if number_ else "")
    settings = configuration(tasks)
    if "differences" in record:
        settings = replace(settings, tables=tuple(replace(table, folded=True) for table in settings.tables))
    sections += [settings, citations(finished_runs)]
    title = f"Personal models for {record['data']}"
    state = "finished" if "differences" in record else f"finished, {count(record['rounds'], 'round')}"
    return Page(title, "Fit", state, True, tuple(sections), path.name)


def story(record: dict[str, Any], effects: dict[str, Any], more: Sequence[str] = ()) -> PageSection:
    """Summary of a fit of tables: who gains, by how much, and how certain that is; `more` are further sentences."""
    coefficients = effects.get("coefficients")
    text = [
        headline(record),
        who(record),
        by_size(record),
        " ".join(sharing_sentences(coefficients)) if coefficients else "",
        next(iter(importance_sentences(effects["importance"])), "") if effects else "",
        *more,
    ]
    metric, means = record["metric"], record["means"]
    rows = [row for row in record["sites"].values() if row.get("gain_ci")]
    better, worse = (sum(sign * row["gain_ci"][k] > 0 for row in rows) for k, sign in ((0, 1), (1, -1)))
    tiles = {
        "personal": ("Personal models", f"mean test {metric_name(metric)} over sites"),
        "alone": ("Alone", "each site's best own model"),
        "common": ("In common", "one model for all"),
        "baseline": ("Baseline", "each site's mean, or shares of its classes"),
    }
    figures = [
        KeyFigure(title, value(metric, means[key]), note)
        for key, (title, note) in tiles.items()
        if math.isfinite(means[key])  # there may be no test rows
    ]
    if len(record["sites"]) > 1 and rows:
        figures.append(KeyFigure("Gain, lose", f"{better}, {worse}", f"sites beyond noise, of {len(rows)}"))
    charts = [chart for chart in (levels(record),) if chart is not None]
    return PageSection("summary", "Summary", tuple(filter(None, text)), tuple(figures), tuple(charts))


def in_federation(record: dict[str, Any]) -> str:
    """The headline at a site of a federation, which has no figures of the others."""
    ((site, row),) = record["sites"].items()
    metric = record["metric"]
    if row["served"] in OWN:
        return f"{site} keeps its own model: the federation's did not help it by more than its uncertainty."
    alone, personal = value(metric, row["alone"]), value(metric, row["personal"])
    of = f"test {metric_name(metric)}"
    figures = f"{of} is {alone} with its best model alone and {personal} with the model it is served by"
    return f"{site} is served by {row['served']}, of a fit with the other sites of its federation: {figures}."


def headline(record: dict[str, Any]) -> str:
    """Whether sharing pays, in one sentence."""
    metric, means, estimate = record["metric"], record["means"], record["differences"]["alone"]
    sites = record["sites"]
    if record.get("settings", {}).get("federated"):
        return in_federation(record)
    if len(sites) == 1:
        return "There is only one site, so nothing can be shared: it is served by its own model."
    if all(row["served"] in OWN for row in sites.values()):
        every = "Both sites keep" if len(sites) == 2 else f"All {len(sites)} sites keep"
        return f"{every} their own model: sharing did not help any of them by more than its uncertainty."
    alone, personal = value(metric, means["alone"]), value(metric, means["personal"])
    of = f"mean test {metric_name(metric)}"
    figures = f"{of} is {alone} with each site's best model alone and {personal} with personal models"
    if estimate["ci"] is None or not math.isfinite(estimate["gain"]):
        return f"There are too few test rows to say whether sharing pays: {figures}."
    low, high = estimate["ci"]
    bounds = f"95 % confidence interval of the gain: {number(metric, low)} to {number(metric, high)}"
    if is_noise(estimate["ci"]):
        return f"Sharing makes no significant difference: {figures} ({bounds})."
    how = "better" if estimate["gain"] > 0 else "worse"
    size = format_gain(metric, abs(estimate["gain"])).lstrip("+")
    if metric != "accuracy" and means["alone"]:
        bounds = f"{100 * abs(estimate['gain'] / means['alone']):.1f} %; {bounds}"
    return f"Sharing {'pays' if estimate['gain'] > 0 else 'did harm'}: {figures}, {size} {how} ({bounds})."


def who(record: dict[str, Any]) -> str:
    """Which sites gain and lose significantly on their test rows."""
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
        which = f" ({'most: ' if len(names) > NAMED else ''}{join_names(names[:NAMED])})" if names else ""
        parts.append(f"{len(names) or 'none'} {verb}{which}" if names else f"none {verb}s")
    rest, few = len(known) - len(better) - len(worse), len(sites) - len(known)
    close = f"{rest} {'is' if rest == 1 else 'are'} too close to call" if rest else ""
    too_few = f"{few} {'has' if few == 1 else 'have'} too few test rows to tell" if few else ""
    verdicts = ", ".join(filter(None, [*parts, close, too_few]))
    return f"Of {count(len(sites), 'site')}, compared with their best model alone, at 95 % confidence: {verdicts}."


def by_size(record: dict[str, Any]) -> str:
    """Whether small sites gain more; empty for fewer than eight sites."""
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
    which = f"those with at most {middle:g} training rows by {format_gain(metric, mean(small))}"
    others = f"larger ones by {format_gain(metric, mean(large))}"
    if mean(small) > max(1.5 * mean(large), 0):
        return f"Small sites gain most, as they have most to learn from the others: {which} on average, {others}."
    return f"Sites change on average: {which}, {others}."


def levels(record: dict[str, Any]) -> Chart | None:
    """Mean test figures with confidence intervals."""
    metric, means, ci = record["metric"], record["means"], record["ci"]
    rows = [
        (NAMES[key], means[key], *(ci[key] or (None, None)))
        for key in ("baseline", "alone", "common", "personal")
        if key in means and math.isfinite(means[key]) and not (key == "common" and len(record["sites"]) == 1)
    ]
    if len(rows) < 2:
        return None
    better = "higher" if record["higher_is_better"] else "lower"
    over = "bootstrap over sites" if len(record["sites"]) >= 8 else "bootstrap over rows"
    return Chart(
        "levels",
        "intervals",
        f"Mean test {metric_name(metric)} of the sites: {better} is better",
        "; ".join(f"{name} {value(metric, x)}" for name, x, *_ in rows) + ".",
        ("model", metric, "low", "high"),
        rows,
        {"x": metric, "low": "low", "high": "high", "name": "model", "xlabel": f"test {label(metric)}"}
        | {"percent": percent(metric, metric, "low", "high")},
        f"Lines are 95 % confidence intervals ({over}). All models are tested on the same rows: differences are more "
        "certain than the lines suggest.",
    )


def summary(record: dict[str, Any], failed: Sequence[str] = ()) -> PageSection:
    metric, means, rows = record["metric"], record["means"], record["sites"]
    text = (
        f"{count(len(rows), 'site')} predict {record['target'] or 'the target'} with the model {record['model']}. "
        + served_sentence([row["served"] for row in rows.values()]),
        f"On test data, which no choice has seen, mean {metric_name(metric)} is {value(metric, means['alone'])} when "
        f"each site trains alone, {value(metric, means['common'])} with one common model and "
        f"{value(metric, means['personal'])} with personal models.",
        *left_out(failed),
    )
    tiles = {
        "personal": (f"Test {metric_name(metric)}", "mean of sites, personalized"),
        "alone": ("Alone", "each site's own data only"),
        "common": ("In common", "one model for all"),
    }
    figures = [KeyFigure(name, value(metric, means[key]), note) for key, (name, note) in tiles.items()]
    figures += [KeyFigure("Hurt", f"{100 * record['hurt']:.0f} %", "sites worse off than alone")]
    has_rows = all(math.isfinite(means[key]) for key in tiles)
    if not has_rows:
        text = (text[0], "There are no test rows, so nothing is compared.", *text[2:])
    return PageSection("summary", "Summary", text, tuple(figures) if has_rows else ())


def served_sentence(served: list[str]) -> str:
    own = [name for name in served if name in OWN]
    if len(own) == len(served):
        if len(served) == 1:
            return ""
        every = "Both sites keep" if len(served) == 2 else f"All {len(served)} sites keep"
        return f"{every} their own model: sharing did not help any of them by more than its uncertainty."
    kinds: dict[str, int] = {}
    for name in served:
        first = re.sub(r"^\d+ % ", "", name.split(" + ")[0])
        kind = OWN_MODEL if first in OWN else first
        kinds[kind] = kinds.get(kind, 0) + 1
    if len(kinds) == 1:
        (kind,) = kinds
        every = {1: "The site is", 2: "Both sites are"}.get(len(served), f"All {len(served)} sites are")
        model = "their own model" if kind == OWN_MODEL and len(served) > 1 else WORDS.get(kind, kind)
        return f"{every} served {'by a blend, mostly of ' if any(' + ' in name for name in served) else 'by '}{model}."
    parts = [f"{n} mostly by {WORDS.get(name, name)}" for name, n in sorted(kinds.items(), key=lambda item: -item[1])]
    verb = "is" if max(kinds.values()) == 1 else "are"
    return (
        f"Of {len(served)} sites, {parts[0].replace(' mostly', f' {verb} served mostly', 1)}"
        + "".join(f", {part}" for part in parts[1:])
        + "."
    )


def sites(record: dict[str, Any]) -> PageSection:
    metric = record["metric"]
    rows, drawn = [], []
    for name, row in record["sites"].items():
        figures = [TableCell(number(metric, row[k]), row[k]) for k in ("alone", "common", "personal")]
        sure = (TableCell(verdict(row), verdict(row)),) if "gain_ci" in row else ()
        size = TableCell(f"{row['train']:,}", row["train"])
        rows.append((TableCell(name, name), size, *figures, *sure, TableCell(row["served"], row["served"])))
        gain = row["personal"] - row["alone"] if record["higher_is_better"] else row["alone"] - row["personal"]
        drawn.append((name, gain, *(row.get("gain_ci") or (None, None)), row["served"]))
    unit = " %" if metric == "accuracy" else ""
    is_sure = any("gain_ci" in row for row in record["sites"].values())
    columns = ("site", "training rows", f"alone{unit}", f"in common{unit}", f"personalized{unit}")
    columns = (*columns, *(("gain over alone",) if is_sure else ()), "served by")
    units = f", in the units of {record['target']}" if metric == "rmse" and record["target"] else ""
    of = f"Test {metric_name(metric)}{units}"
    is_table = "differences" in record
    how = (
        "A site is served by a blend of models or, if its best model alone is better on rows held out of training, by "
        "that one."
        if is_table
        else "A site is served by a model other than its own only if that is better on validation data by more than "
        "the uncertainty."
    )
    text = (f"{of}. {how}" if record["settings"]["algorithm"] == "auto" else f"{of}.",)
    is_many = len(rows) > MANY
    if is_many:
        drawn.sort(key=lambda each: (math.isnan(each[1]), -each[1]))
    lines = {"low": "low", "high": "high"} if is_sure else {}
    chart = Chart(
        "site-gains",
        "intervals" if is_sure else "bars",
        "Gain of each site over its best model alone",
        "Gains by site: " + ", ".join(f"{name} {format_gain(metric, gain)}" for name, gain, *_ in drawn) + ".",
        ("site", "gain", "low", "high", "served by"),
        drawn,
        {"x": "gain", "name": "site", "xlabel": f"gain in {label(metric)}", **lines}
        | {"percent": percent(metric, "gain", "low", "high"), "rank": "sites, by gain", "diverging": True},
        ("Lines are 95 % confidence intervals; a site with too few test rows has none. " if is_sure else "")
        + "0 where the site is served by its own model.",
    )
    table = PageTable("At each site", columns, rows, sortable=True, folded=is_many and is_table, wraps=True)
    charts = (chart,) if any(math.isfinite(gain) and gain for _, gain, *_ in drawn) else ()
    return PageSection("sites", "Sites", text, fairness(record), charts, (table,), tables_first=not is_many)


def fairness(record: dict[str, Any]) -> tuple[KeyFigure, ...]:
    """The worst sites and the spread over sites, for personal models and for each site alone."""
    measures, metric, rows = record.get("fairness"), record["metric"], record["sites"].values()
    if not measures or len(rows) == 1:
        return ()
    higher = record["higher_is_better"]
    sure = [row for row in rows if row.get("gain_ci") is not None] or list(rows)  # the sites of the other figures
    alone = summarise([row["alone"] for row in sure], higher_is_better=higher)
    of = "" if len(sure) == len(rows) else f", of {len(sure)} with enough test rows"
    of_alone = f"alone {value(metric, alone.worst_tenth)}"
    whose = f"{measures['worst']}, with its personal model{of}"
    figures = [KeyFigure("Worst site", value(metric, measures["worst_value"]), whose)]
    if len(sure) >= 10:
        which = "Worst tenth of these sites" if of else "Worst tenth of the sites"
        figures.append(KeyFigure(which, value(metric, measures["worst_tenth"]), of_alone))
    spread = KeyFigure("Spread over sites (sd)", value(metric, measures["spread"]), f"alone {value(metric, alone.std)}")
    return (*figures, spread)


def verdict(row: dict[str, Any]) -> str:
    """Whether a site gains or loses on its test rows, by its confidence interval."""
    if row["gain_ci"] is None:
        return "too few rows"
    low, high = row["gain_ci"]
    return "gains" if low > 0 else "loses" if high < 0 else "may be noise"


def matters(record: dict[str, Any], effects: dict[str, Any]) -> PageSection:
    """Importance of columns, their coefficients, and the effect of those that matter most on predictions."""
    section = PageSection("matters", "What matters")
    if not effects:
        return section.without(NONE)
    importance = effects["importance"]
    charts = [chart for chart in (_importance(importance), _coefficients(effects)) if chart is not None]
    charts += [_curve(curve, effects, record) for curve in effects["curves"]]
    if not charts:
        return section.without("no column varies within a site")
    return PageSection(section.id, section.title, tuple(importance_sentences(importance)), charts=tuple(charts))


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
        "One bar per column: " + ", ".join(f"{row[0]} {format_gain(metric, row[1])}" for row in rows) + ".",
        ("column", "worse by", "low", "high"),
        rows,
        {"x": "worse by", "name": "column", "low": "low", "high": "high"}
        | {"xlabel": f"{label(metric)} worse by", "percent": percent(metric, "worse by", "low", "high")},
        f"How much worse {metric_name(metric)} gets when a column is shuffled within each site, on "
        f"{importance['rows']:,} rows {origin}. The thin line is the spread of {importance['repeats']} shuffles.",
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
    is_ratio = is_factor(coefficients["scale"])

    def drawn(each: dict[str, Any], *keys: str) -> list[Value]:
        return [math.exp(min(each[key], 50)) if is_ratio else each[key] for key in keys]

    for term in terms:
        name = term_name(term) if term["reference"] or term["sd"] is None else f"{term['name']} (per {term['sd']:.3g})"
        rows.append((name, ALL, *drawn(term, "value", "low", "high")))
        if len(sites) > 1 and term["differs"]:
            for site, own in zip(sites, term["sites"], strict=True):
                ends = drawn(own, "low", "high") if is_few else (None, None)
                rows.append((name, site, *drawn(own, "value"), *ends))
    effect = f"odds ratio of {output['class']}" if output["class"] else f"change in {coefficients['scale']}"
    if is_ratio and not output["class"]:
        effect = f"factor of {coefficients['scale'].removeprefix(LOG)}"
    is_varied = any(term["differs"] for term in terms) and len(sites) > 1
    dots = " Dots are the sites' coefficients, where they differ." if is_varied and not is_few else ""
    series = {"series": "site"} if is_varied else {}
    return Chart(
        "coefficients",
        "intervals",
        "What each column does",
        "Coefficients with 95 % confidence intervals: "
        + "; ".join(f"{t['name']} {size_words(t, coefficients['scale'])}" for t in terms[:8])
        + ".",
        ("column", "site", "effect", "low", "high"),
        rows,
        {"x": "effect", "low": "low", "high": "high", "name": "column", "diverging": True, "xlabel": effect}
        | series
        | {"log": is_ratio},
        "Of a number per standard deviation, which stands in brackets; of a category against its reference; the most "
        f"certain first. Lines are 95 % confidence intervals.{dots}",
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
    of_sites = "For all sites, and for those with most rows." if is_single and len(record["sites"]) > 1 else ""
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
    """Dots; with one output also those of each site, with several a series per class."""
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


def sharing(record: dict[str, Any], effects: dict[str, Any]) -> PageSection:
    """Which effects the sites have in common; and what leaves a site."""
    rows = [cells(*words) for words in what_leaves(record["shared"])]
    sent = PageTable("What leaves a site, by model", ("", "sent", "stays private"), rows, words=True)
    coefficients = effects.get("coefficients")
    if not coefficients or len(coefficients["sites"]) == 1:
        return PageSection("shared", "What is shared", tables=(sent,))
    text = (model_sentence(coefficients), *sharing_sentences(coefficients))
    columns: tuple[str, ...] = ("", "effect over all sites", "between sites")
    lines = []
    for output in coefficients["outputs"]:
        for term in output["terms"]:
            name = f"{term['name']}, {output['class']}" if len(coefficients["outputs"]) > 1 else term["name"]
            words = sharing_words(term, len(coefficients["sites"]))
            lines.append(cells(name, size_words(term, coefficients["scale"]), words[:1].upper() + words[1:]))
    table = PageTable("Common and site-specific effects", columns, lines, words=True, folded=len(lines) > MOST_TERMS)
    chart = caterpillar(coefficients)
    return PageSection("shared", "What is shared", text, charts=(chart,) if chart else (), tables=(table, sent))


def caterpillar(coefficients: dict[str, Any]) -> Chart | None:
    """Each site's coefficient of the term in which sites differ most."""
    terms = [
        t for output in coefficients["outputs"] for t in output["terms"] if t["differs"] and t["value"] is not None
    ]
    slopes = [term for term in terms if term["name"] != INTERCEPT] or terms
    if not slopes:
        return None
    term = min(slopes, key=lambda each: each["share"])
    factor, is_ratio = term["sd"] or 1.0, is_factor(coefficients["scale"]) and term["name"] != INTERCEPT

    def drawn(each: dict[str, Any], key: str) -> float:
        return math.exp(min(each[key] / factor, 50)) if is_ratio else float(each[key] / factor)

    rows = sorted(
        (site, drawn(own, "value"), drawn(own, "low"), drawn(own, "high"))
        for site, own in zip(coefficients["sites"], term["sites"], strict=True)
    )
    rows.sort(key=lambda row: -row[1])
    name, middle = term["name"], drawn(term, "value")
    unit = "" if name == INTERCEPT else f", against {term['reference']}" if term["reference"] else ", per unit"
    if is_ratio:
        unit += ", odds ratio" if coefficients["scale"] == LOG_ODDS else ", factor"
    is_crossed = rows[0][1] > (1 if is_ratio else 0) > rows[-1][1]
    return Chart(
        "own",
        "intervals",
        f"Where sites differ most: {name}",
        f"Each site's coefficient with its 95 % confidence interval, from {rows[0][0]} {rows[0][1]:.3g} to "
        f"{rows[-1][0]} {rows[-1][1]:.3g}; the common one is {middle:.3g}.",
        ("site", "coefficient", "low", "high"),
        rows,
        {"x": "coefficient", "low": "low", "high": "high", "name": "site", "diverging": is_crossed, "log": is_ratio}
        | {"xlabel": f"{name}{unit}", "rank": "sites, by their coefficient"},
        f"Coefficients are shrunk towards the common one, {middle:.3g}; the fewer rows a site has, the "
        "more. Lines are 95 % confidence intervals.",
    )


def quality(record: dict[str, Any]) -> PageSection:
    """Calibration and ROC curves, or residuals, on test rows."""
    section = PageSection("quality", "How good the models are")
    plots = record.get("plots", {})
    charts = [*_of_classes(plots), *_of_numbers(plots, record["target"], len(record["sites"]))]
    if not charts:
        return section.without("there are too few test rows for plots, or more than two classes")
    return PageSection(
        section.id, section.title, ("On test rows, with the models that serve the sites.",), charts=tuple(charts)
    )


def _of_classes(plots: dict[str, Any]) -> list[Chart]:
    if "reliability" not in plots:
        return []
    bins = plots["reliability"]
    rows: list[tuple[Value, ...]] = [("personal models", p, share, n) for p, share, n in bins]
    rows += [("perfect", 0.0, 0.0, None), ("perfect", 1.0, 1.0, None)]
    furthest = max(abs(p - share) for p, share, _ in bins)
    reliability = Chart(
        "reliability",
        "lines",
        "Calibration",
        f"Predicted probability against observed frequency, in bins; largest difference {furthest:.2f}.",
        ("line", "probability", "frequency", "rows"),
        rows,
        {
            "x": "probability",
            "y": "frequency",
            "series": "line",
            "xlabel": "predicted probability",
            "ylabel": "frequency",
        },
        "On the diagonal, predicted probabilities equal observed frequencies.",
    )
    curves = {name: points for name, points in plots["roc"].items() if points}
    if not curves:
        return [reliability]
    roc = Chart(
        "roc",
        "lines",
        "ROC curves",
        f"True against false positive rate, of all sites and the largest: {', '.join(curves)}.",
        ("site", "false positives", "true positives"),
        [(name, x, y) for name, points in curves.items() for x, y in points],
        {
            "x": "false positives",
            "y": "true positives",
            "series": "site",
            "xlabel": "false positives",
            "ylabel": "true positives",
        },
        "All sites together, and the sites with most test rows.",
    )
    return [reliability, roc]


def _of_numbers(plots: dict[str, Any], target: str, sites: int) -> list[Chart]:
    residuals = plots.get("residuals")
    if not residuals:
        return []
    rows = [(name, each[2], each[0], each[1], each[3], each[4]) for name, each in residuals.items()]
    wide = max(residuals, key=lambda name: residuals[name][-1] - residuals[name][0])
    return [
        Chart(
            "residuals",
            "intervals",
            f"Residuals of {'each site' if len(residuals) == sites else count(len(residuals), 'site')}",
            f"Five quantiles of the residuals of each site; the widest are those of {wide}.",
            ("site", "median", *(QUANTILES[k] for k in (0, 1, 3, 4))),
            rows,
            {
                "x": "median",
                "low": QUANTILES[0],
                "high": QUANTILES[4],
                "inner": [QUANTILES[1], QUANTILES[3]],
                "name": "site",
                "diverging": True,
                "xlabel": f"{target}, true minus predicted",
            },
            "Dot: median; thick: half of the rows; thin: 90 % of them. Right of zero the model predicts too little."
            + ("" if len(residuals) == sites else " The sites with most test rows."),
        )
    ]


def card(record: dict[str, Any]) -> PageSection:
    """Rows, target and drift of each site before training."""
    section = PageSection("card", "The sites' data")
    if "card" not in record:
        return section.without("the fit is not of tables")
    rows, drifting = [], 0
    for name, each in record["card"].items():
        drifting += bool(each["drift"])
        words = ", ".join(f"{feature} {apart:+.1f} sd" for feature, apart in each["drift"]) or "-"
        size = TableCell(f"{each['rows']:,}", each["rows"])
        rows.append((*cells(name), size, *cells(each["target"], words)))
    text = (
        f"{drifting} of {count(len(rows), 'site')} {'has' if drifting == 1 else 'have'} features that are far from "
        "those of all sites together: by half a standard deviation or more, and significantly.",
        *(note for note in record["notes"] if "missing at" in note or "NOT ALL ROWS" in note or "far from all" in note),
    )
    columns = ("site", "training rows", record["target"] or "target", "features that differ most")
    return PageSection(
        section.id,
        section.title,
        text,
        tables=(PageTable("Before training", columns, rows, sortable=True, words=True, folded=len(rows) > MANY),),
    )


def halving(record: dict[str, Any], units: str) -> PageSection:
    section = PageSection("halving", "Candidates dropped on the way")
    if not record["dropped"]:
        return PageSection(section.id, section.title, missing="no candidate was dropped")
    metric = record["metric"]
    rows = [
        cells(d["label"], f"{d['round']}", "-" if d["val"] is None else number(metric, d["val"]), d["why"])
        for d in record["dropped"]
    ]
    table = PageTable("On validation data", ("", "after round", metric, "why"), rows, words=True)
    return PageSection(section.id, section.title, tuple(filter(None, [units])), tables=(table,))
