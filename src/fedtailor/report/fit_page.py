"""The page on a fit: every site alone, in common and personalized, what serves it, and the runs behind that."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtailor.experiments.store import FIT, read_json
from fedtailor.metrics.summary import summarise
from fedtailor.report.compare_page import (
    citations,
    configuration,
    left_out,
    places,
    runs_in,
    task_sections,
    tasks_of,
)
from fedtailor.report.effect_charts import matters, sharing
from fedtailor.report.fit_charts import card, quality
from fedtailor.report.fit_story import OWN, story
from fedtailor.report.formatting import count, label, signed, value
from fedtailor.report.page_model import Cell, Chart, Figure, Page, Section, Table, cells
from fedtailor.studies.result_tables import number
from fedtailor.tables.effects import EFFECTS

OWN_MODEL = "its own model"
MANY = 12  # sites, above which the chart comes before the table


WORDS = {
    "mixed": "a mixed model, which is partly common and partly the site's own",
    "common": "the common model",
    "trees on the shared model": "trees on top of the shared model",
}


def fit_page(path: Path) -> Page:
    """Everything that is known of a fit that is finished."""
    record = read_json(path / FIT)
    runs, failed = runs_in(path)
    finished_runs = [run for run in runs if run.results is not None]
    tasks = tasks_of(finished_runs, places(path, finished_runs))
    units = next((run.units for run in finished_runs), "")
    effects = dict(read_json(path / EFFECTS)) if (path / EFFECTS).exists() else {}
    if "differences" in record:  # of tables: its runs are parts of models, and not compared one by one
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


def summary(record: dict[str, Any], failed: Sequence[str] = ()) -> Section:
    """In plain words."""
    metric, means, rows = record["metric"], record["means"], record["sites"]
    text = (
        f"{count(len(rows), 'site')} predict {record['target'] or 'the target'} with the model {record['model']}. "
        + served_sentence([row["served"] for row in rows.values()]),
        f"On test data, which no choice has seen, mean {metric} is {value(metric, means['alone'])} when each site "
        f"trains alone, {value(metric, means['common'])} with one common model and "
        f"{value(metric, means['personal'])} with personal models.",
        *left_out(failed),
    )
    figures = (
        Figure(f"Test {metric}", value(metric, means["personal"]), "mean of sites, personalized"),
        Figure("Alone", value(metric, means["alone"]), "each site's own data only"),
        Figure("In common", value(metric, means["common"]), "one model for all"),
        Figure("Hurt", f"{100 * record['hurt']:.0f} %", "sites worse off than alone"),
    )
    return Section("summary", "Summary", text, figures)


def served_sentence(served: list[str]) -> str:
    """Who is served by what, as one would say it."""
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


def sites(record: dict[str, Any]) -> Section:
    """A line per site."""
    metric = record["metric"]
    rows, drawn = [], []
    for name, row in record["sites"].items():
        figures = [Cell(number(metric, row[k]), row[k]) for k in ("alone", "common", "personal")]
        sure = (Cell(verdict(row), verdict(row)),) if "gain_ci" in row else ()
        size = Cell(f"{row['train']:,}", row["train"])
        rows.append((Cell(name, name), size, *figures, *sure, Cell(row["served"], row["served"])))
        gain = row["personal"] - row["alone"] if record["higher_is_better"] else row["alone"] - row["personal"]
        drawn.append((name, gain, row["served"]))
    unit = " %" if metric == "accuracy" else ""
    is_sure = any("gain_ci" in row for row in record["sites"].values())
    columns = ("site", "training rows", f"alone{unit}", f"in common{unit}", f"personalized{unit}")
    columns = (*columns, *(("gain over alone",) if is_sure else ()), "served by")
    of = f"Test {metric}" + (f", in the units of {record['target']}" if metric == "rmse" and record["target"] else "")
    is_table = "differences" in record
    how = (
        "A site is served by a blend of models or, where rows held out of training say that its best model alone does "
        "better, by that one."
        if is_table
        else "A site is served by another model than its own only where validation data says that this is better, by "
        "more than its uncertainty."
    )
    text = (f"{of}. {how}" if record["settings"]["algorithm"] == "auto" else f"{of}.",)
    is_many = len(rows) > MANY
    if is_many:
        drawn.sort(key=lambda each: (math.isnan(each[1]), -each[1]))
    chart = Chart(
        "site-gains",
        "bars",
        "Gain of each site over training alone",
        "One bar per site: " + ", ".join(f"{name} {signed(metric, g)}" for name, g, _ in drawn) + ".",
        ("site", "gain", "served by"),
        drawn,
        {"x": "gain", "name": "site", "xlabel": f"gain in {label(metric)}"}
        | {"percent": ["gain"] if metric == "accuracy" else [], "rank": "sites, by gain", "diverging": True},
        "0 where the site is served by its own model.",
    )
    table = Table("At each site", columns, rows, sortable=True, folded=is_many and is_table, wraps=True)
    charts = (chart,) if any(math.isfinite(gain) and gain for _, gain, _ in drawn) else ()
    return Section("sites", "Sites", text, fairness(record), charts, (table,), tables_first=not is_many)


def fairness(record: dict[str, Any]) -> tuple[Figure, ...]:
    """How the worst fare, and how far sites are apart: personal models, and beside them each site alone."""
    measures, metric, rows = record.get("fairness"), record["metric"], record["sites"].values()
    if not measures or len(rows) == 1:
        return ()
    higher = record["higher_is_better"]
    alone = summarise([row["alone"] for row in rows], higher_is_better=higher)
    of_alone = f"alone {value(metric, alone.worst_tenth)}"
    figures = [
        Figure("Worst site", value(metric, measures["worst_value"]), f"{measures['worst']}, with its personal model")
    ]
    if len(rows) >= 10:
        figures.append(Figure("Worst tenth of the sites", value(metric, measures["worst_tenth"]), of_alone))
    spread = Figure("Spread over sites (sd)", value(metric, measures["spread"]), f"alone {value(metric, alone.std)}")
    return (*figures, spread)


def verdict(row: dict[str, Any]) -> str:
    """Of a site's gain on its test rows."""
    if row["gain_ci"] is None:
        return "too few rows"
    low, high = row["gain_ci"]
    return "gains" if low > 0 else "loses" if high < 0 else "may be noise"


def halving(record: dict[str, Any], units: str) -> Section:
    """Who was dropped, and when."""
    section = Section("halving", "Candidates dropped on the way")
    if not record["dropped"]:
        return Section(section.id, section.title, missing="none was dropped")
    metric = record["metric"]
    rows = [
        cells(d["label"], f"{d['round']}", "-" if d["val"] is None else number(metric, d["val"]), d["why"])
        for d in record["dropped"]
    ]
    table = Table("On validation data", ("", "after round", metric, "why"), rows, words=True)
    return Section(section.id, section.title, tuple(filter(None, [units])), tables=(table,))
