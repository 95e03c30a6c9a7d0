"""The page on a fit: every site alone, in common and personalized, what serves it, and the runs behind that."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from fedtailor.experiments.store import FIT, read_json
from fedtailor.report.compare_page import citations, configuration, places, runs_in, task_sections, tasks_of
from fedtailor.report.formatting import count, label, signed, value
from fedtailor.report.page_model import Cell, Chart, Figure, Page, Section, Table, cells
from fedtailor.studies.tables import number

OWN = ("Local", "alone", "trees alone")


def fit_page(path: Path) -> Page:
    """Everything that is known of a fit that is finished."""
    record = read_json(path / FIT)
    found = [run for run in runs_in(path)[0] if run.results is not None]
    tasks = tasks_of(found, places(path, found))
    units = next((run.units for run in found), "")
    sections = [summary(record), sites(record), sharing(record), halving(record, units)]
    for number_, task in enumerate(tasks):
        sections += task_sections(task, f"-{number_}" if number_ else "")
    sections += [configuration(tasks), citations(found)]
    title = f"Personal models for {record['data']}"
    return Page(title, "Fit", f"finished, {count(record['rounds'], 'round')}", True, tuple(sections), path.name)


def summary(record: dict[str, Any]) -> Section:
    """In plain words."""
    metric, means, rows = record["metric"], record["means"], record["sites"]
    text = (
        f"{count(len(rows), 'site')} predict {record['target'] or 'the target'} with the model {record['model']}. "
        + served_sentence([row["served"] for row in rows.values()]),
        *gain_sentences(record),
        f"On test data, which no choice has seen, mean {metric} is {value(metric, means['alone'])} when each site "
        f"trains alone, {value(metric, means['common'])} with one common model and "
        f"{value(metric, means['personal'])} with personal models."
        + (
            f" The baseline, nothing but each site's own mean or shares, has {value(metric, means['baseline'])}."
            if "baseline" in means
            else ""
        ),
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
        every = "The site keeps" if len(served) == 1 else f"All {len(served)} sites keep"
        return f"{every} their own model: sharing did not help any of them by more than its uncertainty."
    kinds: dict[str, int] = {}
    for name in served:
        first = re.sub(r"^\d+ % ", "", name.split(" + ")[0])
        kinds["its own model" if first in OWN else first] = kinds.get("its own model" if first in OWN else first, 0) + 1
    parts = [f"{n} mostly by {name}" for name, n in sorted(kinds.items(), key=lambda item: -item[1])]
    return f"Of {len(served)} sites, served are " + ", ".join(parts) + "."


def gain_sentences(record: dict[str, Any]) -> list[str]:
    """How many sites gain beyond their uncertainty, by the rows that had no part in training."""
    found = [row["gains"].get("error", {}).get("served") for row in record["sites"].values()]
    known = [g for g in found if g and math.isfinite(g["sd"])]
    if len(known) < len(found) or not known:
        return []
    sure = sum(g["mean"] > 2 * g["sd"] > 0 for g in known)
    some = sum(g["mean"] > 0 for g in known) - sure
    rest = len(known) - sure - some
    return [
        f"By rows held out of training, {count(sure, 'site')} gain over their best model alone by more than two "
        f"standard errors, {some} by less, which may be noise, and {rest} do not gain."
    ]


def sites(record: dict[str, Any]) -> Section:
    """A line per site."""
    metric = record["metric"]
    rows, drawn = [], []
    for name, row in record["sites"].items():
        shown = [Cell(number(metric, row[k]), row[k]) for k in ("alone", "common", "personal")]
        rows.append(
            (Cell(name, name), Cell(f"{row['train']:,}", row["train"]), *shown, Cell(row["served"], row["served"]))
        )
        gain = row["personal"] - row["alone"] if record["higher_is_better"] else row["alone"] - row["personal"]
        drawn.append((name, gain, row["served"]))
    unit = " %" if metric == "accuracy" else ""
    columns = ("site", "training rows", f"alone{unit}", f"in common{unit}", f"personalized{unit}", "served by")
    of = f"Test {metric}" + (f", in the units of {record['target']}" if metric == "rmse" and record["target"] else "")
    text = (
        f"{of}. A site is served by another model than its own only where validation data says that this is "
        "better, by more than its uncertainty."
        if record["settings"]["algorithm"] == "auto"
        else f"{of}.",
    )
    chart = Chart(
        "site-gains",
        "bars",
        "Gain of each site over training alone",
        "One bar per site: " + ", ".join(f"{name} {signed(metric, g)}" for name, g, _ in drawn) + ".",
        ("site", "gain", "served by"),
        drawn,
        {"x": "gain", "name": "site", "xlabel": f"gain in {label(metric)}"}
        | {"percent": ["gain"] if metric == "accuracy" else []},
        "0 where the site is served by its own model.",
    )
    table = Table("At each site", columns, rows, sortable=True)
    return Section("sites", "Sites", text, charts=(chart,), tables=(table,), tables_first=True)


def sharing(record: dict[str, Any]) -> Section:
    """In words, what leaves a site."""
    rows = [cells(name, words["sent"], words["private"]) for name, words in record["shared"].items()]
    table = Table("Per algorithm", ("", "sent", "stays private"), rows, words=True)
    return Section("shared", "What is shared", tables=(table,))


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
