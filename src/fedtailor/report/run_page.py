"""The page on one run: its sections, each followed by its charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from fedtailor.core.algorithm import Algorithm, reply_names
from fedtailor.core.task import recorded_metrics
from fedtailor.errors import UserError
from fedtailor.experiments.store import CONFIG, RESULTS, read_json, read_tree
from fedtailor.flare.participation import SITES, attendance_words, missing, read_sites, rounds_taken
from fedtailor.metrics.summary import share_hurt, summarise
from fedtailor.report.formatting import count, duration, format_gain, label, percent, thin, value
from fedtailor.report.mask_pictures import mask_section
from fedtailor.report.page import Chart, KeyFigure, Page, PageSection, PageTable, TableCell, Value, cells
from fedtailor.report.recorded_run import RecordedRun, finished_run_beside, gains, known, read_run
from fedtailor.studies.explain import explain, weights
from fedtailor.studies.result_tables import (
    OTHER_COLUMNS,
    RUN_COLUMNS,
    number,
    other_run_rows,
    private_words,
    run_rows,
    size,
)

SPLITS = {"val": "validation", "test": "test"}
WORST = 10  # clients in the table
MOST_FAULTS = 20
MOST_CELLS = 40_000  # of a heat map
LINES_OF_WEIGHTS = 8  # clients whose weights can still be told apart as lines
SCORES = ("distance", "left_out")  # that a robust mean reports, one number for each client of the round
UNFINISHED = "the run is not finished; test data is read at its end"

References = dict[str, RecordedRun]  # runs to compare with, by the algorithm's name


def run_page(path: Path, data_root: Path | None = None) -> Page:
    """All sections of a run's page; a section without content is left out, with the reason at the end."""
    run = read_run(path)
    references = [name for name in ("local", "fedavg") if name != run.config.algorithm.name]
    others = {name: other for name in references if (other := finished_run_beside(run, name)) is not None}
    sections = (
        summary(run, others),
        learning(run),
        clients(run, others),
        *gain(run, others, references),
        *unusual(run),
        *mask_section(run, data_root),
        sharing(run, data_root),
        learned_weights(run),
        reported_numbers(run),
        traffic(run, others),
        left_the_client(run),
        *sites(run),
        time(run),
        configuration(run),
        citation(run),
    )
    footer = f"{run.path.resolve().name}, started {run.about.get('started', 'at an unknown time')}"
    return Page(f"{run.title} on {run.about['data']}", "Run", state(run), run.results is not None, sections, footer)


def state(run: RecordedRun) -> str:
    done = max((line["round"] for line in run.lines), default=0)
    if run.results is not None:
        return f"finished, {count(run.config.rounds, 'round')}"
    return f"not finished: {max(done, 0)} of {count(run.config.rounds, 'round')}" + (
        ", in preparation" if done < 0 else ""
    )


def summary(run: RecordedRun, others: References) -> PageSection:
    text = [setup_words(run), outcome(run), *filter(None, [run.units])]
    text += [against(run, other) for other in others.values() if run.results is not None]
    if run.unreadable:
        text.append(f"{count(run.unreadable, 'line')} of metrics.jsonl could not be read and are not shown.")
    tables: tuple[PageTable, ...] = ()
    if run.results is not None:
        rows = [cells(*row) for row in run_rows(run.results, others["local"].results if "local" in others else None)]
        tables = (PageTable(f"Test {label(run.metric)}".replace(" (%)", " in %"), RUN_COLUMNS, rows),)
        if others_of := other_run_rows(run.results):
            tables += (PageTable("Other metrics", OTHER_COLUMNS, [cells(*row) for row in others_of]),)
    return PageSection("summary", "Summary", tuple(text), key_figures(run, others), tables=tables)


def setup_words(run: RecordedRun) -> str:
    verb = "trained" if run.results is not None else "is training" if run.lines else "has not yet trained"
    samples = sum(run.about["train_samples"])
    return (
        f"{run.title} {verb} the model {run.config.model.name} ({run.about['parameters']:,} parameters) for "
        f"{count(len(run.clients), 'client')} on {run.about['data']} ({run.about['task']}), which together have "
        f"{count(samples, 'training sample')}."
    )


def outcome(run: RecordedRun) -> str:
    """The result in a sentence; before the end, the latest validation figure."""
    if run.results is None:
        curve = [(r, known(v)) for r, v in run.measured("val", run.metric) if known(v)]
        if not curve:
            return f"It is {state(run)}; nothing has been evaluated yet."
        last, values = curve[-1]
        average = value(run.metric, summarise(values, higher_is_better=run.higher).mean)
        return f"It is {state(run)}. In round {last} mean validation {run.metric} is {average}."
    test = summarise(run.tested, higher_is_better=run.higher)
    if not test.clients:
        return "No client has test samples."
    if test.clients == 1:
        return f"After {count(run.config.rounds, 'round')} its test {run.metric} is {value(run.metric, test.mean)}."
    tenth = max(1, round(test.clients / 10))  # as `summarise` counts them
    worst = "the worst client" if tenth == 1 else f"the worst {tenth} clients on average"
    return (
        f"After {count(run.config.rounds, 'round')} the clients' test {run.metric} is {value(run.metric, test.mean)} "
        f"on average; {worst} {'reaches' if tenth == 1 else 'reach'} {value(run.metric, test.worst_tenth)}."
    )


def against(run: RecordedRun, other: RecordedRun) -> str:
    """One sentence on the difference to a reference."""
    names = {"local": "training alone (Local)", "fedavg": "one model for all (FedAvg)"}
    name = names[other.config.algorithm.name]
    differences = known(gains(run.tested, other.tested, run.higher))
    if not differences:
        return f"No comparison with {name}: no client has test figures in both runs."
    average, better, worse = mean(differences), sum(g > 0 for g in differences), sum(g < 0 for g in differences)
    turn = "better" if average > 0 else "worse" if average < 0 else "the same"
    return (
        f"Compared with {name}, this is {turn} by {format_gain(run.metric, abs(average)).lstrip('+')} on average: of "
        f"{count(len(differences), 'client')} {better} are better off and {worse} worse off."
    )


def key_figures(run: RecordedRun, others: References) -> tuple[KeyFigure, ...]:
    """Numbers at the top of the page."""
    out = []
    if run.results is not None:
        test = summarise(run.tested, higher_is_better=run.higher)
        out.append(KeyFigure(f"Test {run.metric}", value(run.metric, test.mean), "mean of clients, last round"))
        if test.clients > 1:
            out.append(KeyFigure("Worst tenth", value(run.metric, test.worst_tenth), "mean of these clients"))
        if "local" in others:
            hurt = share_hurt(run.tested, others["local"].tested, higher_is_better=run.higher)
            if math.isfinite(hurt):
                out.append(KeyFigure("Hurt", f"{100 * hurt:.0f} %", "clients worse off than alone"))
    if run.lines:
        last = run.lines[-1]
        out.append(KeyFigure("Sent", size(last["up"] + last["down"]), f"{size(last['up'])} of it up"))
        out.append(
            KeyFigure("Time", duration(sum(line["seconds"] for line in run.lines)), f"engine {run.about['engine']}")
        )
    return tuple(out)


def learning(run: RecordedRun) -> PageSection:
    charts = [learning_curve(run, metric) for metric in recorded_metrics(run.about)]
    drawn = tuple(chart for chart in charts if chart is not None)
    if not drawn:
        why = f"evaluation.every is {run.config.evaluation.every}"
        if not run.lines:
            why = "there are no rounds yet"
        elif run.measured("val", run.metric):
            why = "no client has validation samples"
        return PageSection("learning", "Learning", missing=f"no round was evaluated: {why}")
    text: tuple[str, ...] = ()
    if not run.measured("test", run.metric):
        text = ("There is no test curve: test data is read once, at the end, unless evaluation.test_curve is set.",)
    return PageSection("learning", "Learning", text, charts=drawn)


def learning_curve(run: RecordedRun, metric: str) -> Chart | None:
    """Mean over clients by round, with the band of their middle 80 %."""
    rows: list[tuple[Value, ...]] = []
    for split, name in SPLITS.items():
        for round, values in thin(run.measured(split, metric)):
            if finite := sorted(known(values)):
                rows.append((round, name, mean(finite), quantile(finite, 0.1), quantile(finite, 0.9), len(finite)))
    if not rows:
        return None
    ends = [
        f"{name} from {value(metric, curve[0])} to {value(metric, curve[-1])}"
        for name in SPLITS.values()
        if (curve := [float(row[2] or 0) for row in rows if row[1] == name])
    ]
    band = " The band covers the middle 80 % of the clients." if len(run.clients) > 2 else ""
    options: dict[str, Any] = {"x": "round", "y": "mean", "series": "data", "ylabel": label(metric)}
    options |= {"percent": percent(metric, "mean", "low", "high")}
    if band:
        options |= {"low": "low", "high": "high"}
    splits = list(dict.fromkeys(str(row[1]) for row in rows))
    if run.results and metric == run.metric and "validation" in splits:
        options["mark"] = {"x": run.results["selected"]["round"], "text": "selected"}
    return Chart(
        f"learning-{metric}",
        "lines",
        f"{metric.capitalize()} by round",
        f"Line chart of the mean {metric} over clients by round: {'; '.join(ends)}.",
        ("round", "data", "mean", "low", "high", "clients"),
        rows,
        options,
        f"Mean over clients, on {' and '.join(splits)} data.{band}",
    )


def quantile(ordered: Sequence[float], q: float) -> float:
    """The quantile of sorted numbers, linearly interpolated."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def clients(run: RecordedRun, others: References) -> PageSection:
    if run.results is None:
        return PageSection("clients", "Clients", missing=UNFINISHED)
    if len(known(run.tested)) < 2:
        return PageSection("clients", "Clients", missing="fewer than two clients have test samples")
    charts = [distribution(run)]
    if len(set(run.about["train_samples"])) > 1:
        charts.append(by_samples(run))
    return PageSection("clients", "Clients", charts=tuple(charts), tables=(worst_table(run, others),))


def worst_table(run: RecordedRun, others: References) -> PageTable:
    """The clients with the worst figures, with their figures in the other runs."""
    order = sorted(
        (i for i, v in enumerate(run.tested) if not math.isnan(v)), key=lambda i: run.tested[i], reverse=not run.higher
    )[:WORST]
    rows = [
        (
            TableCell(run.clients[i], run.clients[i]),
            TableCell(f"{run.about['train_samples'][i]:,}", run.about["train_samples"][i]),
            *(TableCell(number(run.metric, r.tested[i]), r.tested[i]) for r in (run, *others.values())),
        )
        for i in order
    ]
    unit = " %" if run.metric == "accuracy" else ""
    title = "Worst clients first" if len(run.clients) <= WORST else f"The {len(rows)} worst clients"
    columns = ("client", "training samples", f"{run.title} {run.metric}{unit}", *(o.title for o in others.values()))
    return PageTable(title, columns, rows, sortable=True)


def distribution(run: RecordedRun) -> Chart:
    rows = sorted(
        ((c, n, v) for c, n, v in zip(run.clients, run.about["train_samples"], run.tested, strict=True)),
        key=lambda row: (math.isnan(row[2]), row[2]),
    )
    finite = known(row[2] for row in rows)
    extremes = (
        f"lowest {value(run.metric, finite[0])}, highest {value(run.metric, finite[-1])}" if finite else "no figures"
    )
    return Chart(
        "clients",
        "dots",
        f"Test {run.metric} of each client",
        f"One dot per client along its test {run.metric}: {extremes}, {count(len(finite), 'client')}.",
        ("client", "training samples", run.metric),
        rows,
        {
            "x": run.metric,
            "name": "client",
            "xlabel": f"test {label(run.metric)}",
            "percent": percent(run.metric, run.metric),
        },
        "A dot is a client; the line is the mean.",
    )


def by_samples(run: RecordedRun) -> Chart:
    rows = list(zip(run.clients, run.about["train_samples"], run.tested, strict=True))
    options = {"x": "training samples", "y": run.metric, "name": "client", "ylabel": f"test {label(run.metric)}"}
    return Chart(
        "samples",
        "scatter",
        "By training samples",
        f"One dot per client: training samples across, test {run.metric} upwards.",
        ("client", "training samples", run.metric),
        rows,
        options | {"percent": percent(run.metric, run.metric)},
    )


def gain(run: RecordedRun, others: References, wanted: Iterable[str]) -> list[PageSection]:
    """Gain of each client over each reference; a section that says why, for each that is missing."""
    titles = {"local": "Gain over Local", "fedavg": "Gain over FedAvg"}
    missing = {name: _no_gain(run, others.get(name)) for name in wanted}
    charts = tuple(gain_chart(run, others[name]) for name, why in missing.items() if not why)
    sections = [PageSection("gain", "Gain of each client", charts=charts)] if charts else []
    return sections + [PageSection(f"gain-{name}", titles[name], missing=why) for name, why in missing.items() if why]


def _no_gain(run: RecordedRun, other: RecordedRun | None) -> str:
    if run.results is None:
        return UNFINISHED
    if other is None:
        return "there is no finished run of it on the same task in this folder"
    return "" if known(gains(run.tested, other.tested, run.higher)) else "no client has test figures in both runs"


def gain_chart(run: RecordedRun, other: RecordedRun) -> Chart:
    each = gains(run.tested, other.tested, run.higher)
    mine = zip(run.clients, each, run.tested, other.tested, strict=True)
    rows = sorted(mine, key=lambda row: (math.isnan(row[1]), -row[1]))
    finite = known(each)
    better, worse = sum(g > 0 for g in finite), sum(g < 0 for g in finite)
    lower = "" if run.higher else f" (lower {run.metric})"
    return Chart(
        f"gain-{other.config.algorithm.name}",
        "bars",
        f"Gain over {other.title}",
        f"One bar per client: {better} better off than with {other.title}, {worse} worse off, "
        f"mean {format_gain(run.metric, mean(finite)) if finite else '-'}.",
        ("client", "gain", run.title if run.title != other.title else f"{run.title} here", other.title),
        rows,
        {"x": "gain", "name": "client", "diverging": True, "percent": percent(run.metric, "gain")}
        | {"xlabel": f"gain in {run.metric}" + (" (points)" if run.metric == "accuracy" else "")},
        f"With a positive gain a client is better off{lower}, with a negative one worse off.",
    )


def unusual(run: RecordedRun) -> tuple[PageSection, ...]:
    """Clients by the mean distance of their replies from a robust mean; no section if none was used."""
    distances, outs = _by_client(run, "distance"), _by_client(run, "left_out")
    if not distances:
        return ()
    ranked = sorted(distances, key=lambda client: -_mean(distances[client]))
    rows = [
        (
            TableCell(run.clients[client]),
            *(TableCell(f"{v:.2f}", v) for v in (_mean(distances[client]), max(distances[client]))),
            TableCell(f"{len(distances[client])}", len(distances[client])),
            *([TableCell(f"{(out := sum(outs.get(client, []))):.0f}", out)] if outs else []),
        )
        for client in ranked
    ]
    columns = ("client", "mean distance", "largest", "rounds", *(["left out"] if outs else []))
    text = (
        f"How far each client's reply was from the robust mean ({run.config.aggregation.mean}), in multiples of the "
        "median distance of the round. A large distance means a manipulated reply, or data unlike that of the others.",
    )
    table = PageTable("Distance of replies", columns, rows, sortable=True)
    return (PageSection("unusual", "Unusual replies", text, tables=(table,)),)


def _by_client(run: RecordedRun, name: str) -> dict[int, list[float]]:
    scores: dict[int, list[float]] = {}
    for line in run.lines:
        values = line.get("report", {}).get(name)
        cohort = line.get("cohort", [])
        if isinstance(values, list) and len(values) == len(cohort):
            for client, value in zip(cohort, values, strict=True):
                scores.setdefault(int(client), []).extend(known([float(value)]))
    return {client: held for client, held in scores.items() if held}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def sharing(run: RecordedRun, data_root: Path | None) -> PageSection:
    """How much of its model each client shares, as the run learned it."""
    section = PageSection("sharing-map", "What is shared")
    why = _no_sharing(run)
    if why:
        return section.without(why)
    try:
        charts = sharing_charts(run, data_root)
    except (UserError, OSError) as error:
        return section.without(" ".join(str(error).splitlines()))
    except (KeyError, RuntimeError, ValueError):  # states of another version
        return section.without("this version of fedtailor cannot read what was learned")
    text = (
        "How much of each client's parameters is shared, by feature or layer. "
        "fedtailor explain saves it for every parameter.",
    )
    return PageSection(section.id, section.title, text, charts=tuple(charts))


def _no_sharing(run: RecordedRun) -> str:
    """Why there is no map; empty if there is one."""
    if run.kind is None:
        return "the algorithm is not installed here"
    if run.kind.shares is Algorithm.shares:
        return f"{run.title} does not report how much of a parameter is shared"
    if run.results is None:
        return "drawn when the run is finished"
    if ":" in run.config.model.name and not _saved(run):
        return f"the model is custom code, which a report does not run; call fedtailor explain {run.path} first"
    return ""


def _saved(run: RecordedRun) -> bool:
    """Whether `explain` was called since the run ended."""
    shares = run.path / "shares.json"
    return shares.exists() and shares.stat().st_mtime >= (run.path / RESULTS).stat().st_mtime


def sharing_charts(run: RecordedRun, data_root: Path | None) -> list[Chart]:
    """The map, the degrees behind it, and how much the masks of two clients overlap."""
    if not _saved(run):
        explain(run.path, data_root)
    saved = read_json(run.path / "shares.json")
    shares, degrees = saved["clients"], saved["degrees"]
    names = list(next(iter(shares.values())))
    most = max(1, MOST_CELLS // max(1, len(names)))
    charts = [sharing_map(names, dict(list(shares.items())[:most]))]
    if degrees:
        charts.append(degrees_map(names, dict(list(degrees.items())[:most])))
    pairs = read_tree(run.path, saved["tensors"]).get("overlap", {})
    if 1 < len(shares) <= math.isqrt(MOST_CELLS):
        drawn = {k: v.tolist() for k, v in pairs.items() if not bool((v == v[0, 0]).all())}
        charts += [overlap_map(list(shares), k, v, n) for n, (k, v) in enumerate(drawn.items(), 1)]
    return charts


def sharing_map(names: Sequence[str], shares: Mapping[str, Mapping[str, float]]) -> Chart:
    rows = [(client, name, row[name]) for client, row in shares.items() for name in names]
    means = {name: mean(row[name] for row in shares.values()) for name in names}
    extremes = sorted(means, key=lambda name: means[name])
    summary = (
        f"Heat map of {count(len(shares), 'client')} by {count(len(names), 'part')} of the model: 0 is private, 1 is "
        f"common. Most private: {extremes[0]} ({means[extremes[0]]:.2f}); most common: {extremes[-1]} "
        f"({means[extremes[-1]]:.2f})."
    )
    options = {"x": "part", "y": "client", "fill": "share", "scale": "share", "low": "private", "high": "common"}
    return Chart("sharing", "heat", "Sharing map", summary, ("client", "part", "share"), rows, options)


def degrees_map(names: Sequence[str], degrees: Mapping[str, Mapping[str, float]]) -> Chart:
    """How strongly each part is tied to the common model; over many orders of magnitude."""
    entries = [(client, name, row[name]) for client, row in degrees.items() for name in names]
    rows = [(client, name, "inf" if degree == math.inf else degree) for client, name, degree in entries]
    finite = known(degree for _, _, degree in entries)
    span = f"from {min(finite):.3g} to {max(d for _, _, d in entries):.3g}" if finite else "none finite"
    return Chart(
        "degrees",
        "heat",
        "Effective degree",
        f"Heat map of the effective degree by client and part of the model, {span}.",
        ("client", "part", "degree"),
        rows,
        {"x": "part", "y": "client", "fill": "degree", "scale": "log", "low": "loose", "high": "tied"},
        "How strongly each part is tied to the common model; the colour is logarithmic.",
    )


def overlap_map(clients: Sequence[str], layer: str, pairs: Sequence[Sequence[float]], number: int) -> Chart:
    """Intersection over union of the private masks of every two clients."""
    rows = [(a, b, float(pairs[i][j])) for i, a in enumerate(clients) for j, b in enumerate(clients)]
    others = known(float(pairs[i][j]) for i in range(len(clients)) for j in range(i))
    text = f"mean of pairs {mean(others):.2f}" if others else "one client only"
    return Chart(
        f"overlap-{number}",
        "heat",
        f"Overlap of the masks, {layer}",
        f"Heat map of the intersection over union of the private masks of {layer}, client by client; {text}.",
        ("client", "other", "overlap"),
        rows,
        {"x": "other", "y": "client", "fill": "overlap", "scale": "from zero", "low": "disjoint", "high": "the same"}
        | {"most": 1, "square": True},
    )


def learned_weights(run: RecordedRun) -> PageSection:
    """Weights in the average, if the algorithm reports them."""
    section = PageSection("learned-weights", "Weights in the average")
    try:
        by_round = weights(run.path)
    except (UserError, OSError, ValueError, KeyError) as error:
        return section.without(f"cannot be read: {error}")
    if not by_round:
        return section.without(f"{run.title} does not report weights" if run.lines else "there are no rounds yet")
    return PageSection(section.id, section.title, charts=(weights_chart(by_round),))


def weights_chart(by_round: Mapping[int, Mapping[str, float]]) -> Chart:
    clients = list(dict.fromkeys(client for row in by_round.values() for client in row))
    rows = [(r, c, w) for r, row in thin(list(by_round.items()), 200) for c, w in row.items()]
    common = ("round", "client", "weight")
    last = ", ".join(f"{c} {w:.3f}" for c, w in list(list(by_round.values())[-1].items())[:10])
    summary = f"The weight of each client in the average by round; in the last: {last}."
    title, id = "Weight of each client by round", "weights"
    if len(clients) <= LINES_OF_WEIGHTS:
        options = {"x": "round", "y": "weight", "series": "client", "ylabel": "weight", "dots": True}
        return Chart(id, "lines", title, f"Line chart. {summary}", common, rows, options)
    options = {
        "x": "round",
        "y": "client",
        "fill": "weight",
        "scale": "from zero",
        "low": "no weight",
        "high": "largest",
    }
    return Chart(id, "heat", title, f"Heat map. {summary}", common, rows, options)


def reported_numbers(run: RecordedRun) -> PageSection:
    charts = tuple(reported(run))
    missing = "" if charts else f"{run.title} reports no numbers"
    early = any(line["round"] < 1 and "report" in line for line in run.lines)
    text = ("Rounds up to 0 are the preparation before the run.",) if early else ()
    return PageSection("reported", "Reported by the algorithm", text, charts=charts, missing=missing)


def reported(run: RecordedRun) -> list[Chart]:
    """Numbers that the algorithm reports, by round; of a list, its entries in the last round that has it."""
    names = dict.fromkeys(name for line in run.lines for name in line.get("report", {}))
    charts = [_reported_chart(run, name) for name in names if name not in ("weights", *SCORES)]
    return [chart for chart in charts if chart is not None]


def _reported_chart(run: RecordedRun, name: str) -> Chart | None:
    reported = [(line["round"], line["report"][name]) for line in run.lines if name in line.get("report", {})]
    title = name.replace("_", " ").capitalize()
    numbers = [(r, float(v)) for r, v in reported if isinstance(v, int | float)]
    if numbers and known(v for _, v in numbers):
        return _small(f"reported-{name}", title, "round", thin(numbers, 500), "")
    lists = [(r, v) for r, v in reported if isinstance(v, list) and all(isinstance(x, int | float) for x in v)]
    if lists and known(lists[-1][1]):
        round, values = lists[-1]
        return _small(f"reported-{name}", title, "entry", list(enumerate(map(float, values), 1)), f"Round {round}.")
    return None


def _small(id: str, title: str, x: str, rows: list[tuple[int, float]], note: str) -> Chart:
    finite = known(v for _, v in rows)
    log = min(finite) > 0 and max(finite) > 100 * min(finite)
    summary = f"Line chart of {title.lower()} by {x}: from {finite[0]:.4g} to {finite[-1]:.4g}."
    options = {"x": x, "y": "value", "small": True, "log": log}
    note = " ".join(part for part in (note, "Logarithmic." if log else "") if part)
    return Chart(id, "lines", title, summary, (x, "value"), rows, options, note)


def traffic(run: RecordedRun, others: References) -> PageSection:
    if not run.lines:
        return PageSection("traffic", "Traffic", missing="there are no rounds yet")
    last = run.lines[-1]
    rows = [
        cells("all rounds", size(last["up"]), size(last["down"]), f"{last.get('trips', 0):,}"),
        cells(
            "per round",
            *(size(last[key] / len(run.lines)) for key in ("up", "down")),
            f"{last.get('trips', 0) / len(run.lines):,.1f}",
        ),
    ]
    table = PageTable("Bytes and round trips", ("", "up", "down", "trips"), rows)
    chart = bytes_curve([run, *others.values()])
    return PageSection("traffic", "Traffic", charts=() if chart is None else (chart,), tables=(table,))


def bytes_curve(runs: Iterable[RecordedRun]) -> Chart | None:
    runs = list(runs)
    metric, rows = runs[0].metric, []
    for run in runs:
        measured = [(line, known(line["val"][metric])) for line in run.lines if metric in line.get("val", {})]
        lines = thin([(line, finite) for line, finite in measured if finite], 400)
        rows += [(run.title, line["round"], line["up"] + line["down"], mean(finite)) for line, finite in lines]
    if not rows:
        return None
    most = max(line["up"] + line["down"] for run in runs for line in run.lines)
    return Chart(
        "bytes",
        "lines",
        f"Validation {metric} against bytes",
        f"Line chart: bytes sent so far across, up to {size(most)}, mean validation {metric} upwards; "
        f"{', '.join(run.title for run in runs)}.",
        ("algorithm", "round", "bytes", metric),
        rows,
        {"x": "bytes", "y": metric, "series": "algorithm", "ylabel": label(metric), "xlabel": "bytes, both ways"}
        | {"bytes": True, "percent": percent(metric, metric)},
        "Both directions, all clients together, as they would be serialised.",
    )


def left_the_client(run: RecordedRun) -> PageSection:
    """What the algorithm declares to send, and what happened."""
    section = PageSection("privacy", "What left the clients")
    if run.kind is None:
        return section.without("the algorithm is not installed here")
    gathered = (run.results or {}).get("gathered", [])
    rows = [
        cells("Stays private", run.kind.private),
        cells("May be sent", ", ".join(reply_names(run.kind)) or "nothing"),
        cells(
            "Individual replies seen by the server",
            ", ".join(gathered) or ("none" if run.results else "known at the end"),
        ),
        *([cells("Hidden", private_words(hidden))] if (hidden := (run.results or {}).get("privacy")) else []),
        cells("Replies rejected", str(sum(len(line.get("faults", [])) for line in run.lines))),
        cells("Rounds abandoned", str(sum("abandoned" in line for line in run.lines))),
    ]
    tables = [PageTable("As declared by the algorithm; any other reply is rejected", ("", ""), rows, words=True)]
    faults = [fault for line in run.lines for fault in line.get("faults", [])]
    if faults:
        fault_rows = [cells(f["client"], str(f["round"]), f["function"], f["reason"]) for f in faults[:MOST_FAULTS]]
        title = f"Rejected replies{f', first {MOST_FAULTS}' if len(faults) > MOST_FAULTS else ''}"
        tables.append(PageTable(title, ("client", "round", "function", "reason"), fault_rows, words=True))
    return PageSection(section.id, section.title, tables=tuple(tables))


def sites(run: RecordedRun) -> list[PageSection]:
    """Of a run in a federation of sites: which of them took part in which rounds, and why others did not."""
    if not (known_sites := read_sites(run.path / SITES)):
        return []
    rows = [
        (*cells(site), TableCell(str(rounds_taken(record)), rounds_taken(record)), *cells(attendance_words(record)))
        for site, record in sorted(known_sites.items())
    ]
    absent = missing(known_sites)
    text = f"Missed a round: {', '.join(absent)}." if absent else "Every site took part in every round."
    table = PageTable("Who took part", ("site", "rounds", ""), rows, words=True)
    return [PageSection("sites", "Sites", (text,), tables=(table,))]


def time(run: RecordedRun) -> PageSection:
    if not run.lines:
        return PageSection("time", "Time", missing="there are no rounds yet")
    total = sum(line["seconds"] for line in run.lines)
    text = f"{duration(total)} for {count(len(run.lines), 'round')}: {duration(total / len(run.lines))} each."
    return PageSection("time", "Time", (text,), charts=(seconds_curve(run),) if len(run.lines) > 1 else ())


def seconds_curve(run: RecordedRun) -> Chart:
    rows = thin([(line["round"], line["seconds"]) for line in run.lines])
    return Chart(
        "seconds",
        "lines",
        "Seconds per round",
        f"Line chart of the seconds of each round, between {min(r[1] for r in rows)} and {max(r[1] for r in rows)}.",
        ("round", "seconds"),
        rows,
        {"x": "round", "y": "seconds", "small": True, "zero": True},
        "Evaluation included.",
    )


def configuration(run: RecordedRun) -> PageSection:
    versions: dict[str, Any] = run.about.get("versions", {})
    rows = [
        cells("Command", str(run.about.get("command", "unknown"))),
        cells("Versions", ", ".join(f"{name} {v}" for name, v in versions.items())),
        cells("Threads", str(run.about.get("threads", "unknown"))),
        *(cells("Data", note) for note in run.about.get("notes", [])),
    ]
    text = (run.path / CONFIG).read_text(encoding="utf-8")
    origin = PageTable("Origin", ("", ""), rows, words=True)
    return PageSection("configuration", "Configuration", tables=(origin,), code=((CONFIG, text),))


def citation(run: RecordedRun) -> PageSection:
    text = run.kind.citation.strip() if run.kind is not None else ""
    missing = "" if text else f"{run.title} names no paper"
    return PageSection("citation", "Citation", code=(("BibTeX", text),) if text else (), missing=missing)
