"""Charts of a run: each function turns records into rows, and says in words what they show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from fedtailor.report.formatting import count, label, signed, value
from fedtailor.report.page_model import Chart, Value
from fedtailor.report.reading import Recorded, gains, known
from fedtailor.report.unusual import SCORES
from fedtailor.studies.result_tables import size

SPLITS = {"val": "validation", "test": "test"}
MOST_ROUNDS = 1500  # points of a curve that a chart can show
LINES_OF_WEIGHTS = 8  # clients whose weights can still be told apart as lines


def percent(metric: str, *columns: str) -> list[str]:
    """Columns that are drawn in percent."""
    return list(columns) if metric == "accuracy" else []


def thinned(rows: Sequence[Any], most: int = MOST_ROUNDS) -> list[Any]:
    """At most so many, evenly, with the last."""
    step = -(-len(rows) // most) if rows else 1
    return [row for i, row in enumerate(rows) if (len(rows) - 1 - i) % step == 0]


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear between neighbours."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def learning_curve(run: Recorded, metric: str) -> Chart | None:
    """Mean over clients by round, and where the middle 80 % of them are."""
    rows: list[tuple[Value, ...]] = []
    for split, name in SPLITS.items():
        for round, values in thinned(run.measured(split, metric)):
            if finite := sorted(known(values)):
                rows.append((round, name, mean(finite), quantile(finite, 0.1), quantile(finite, 0.9), len(finite)))
    if not rows:
        return None
    ends = [
        f"{name} from {value(metric, curve[0])} to {value(metric, curve[-1])}"
        for name in SPLITS.values()
        if (curve := [float(row[2] or 0) for row in rows if row[1] == name])
    ]
    band = " The band holds the middle 80 % of the clients." if len(run.clients) > 2 else ""
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


def distribution(run: Recorded) -> Chart:
    """Every client's test figure."""
    rows = sorted(
        ((c, n, v) for c, n, v in zip(run.clients, run.about["train_samples"], run.tested, strict=True)),
        key=lambda row: (math.isnan(row[2]), row[2]),
    )
    finite = [row[2] for row in rows if math.isfinite(row[2])]
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


def by_samples(run: Recorded) -> Chart:
    """Does it depend on how much data a client has?"""
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


def gain(run: Recorded, other: Recorded) -> Chart:
    """By how much each client is better off than in another run."""
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
        f"mean {signed(run.metric, mean(finite)) if finite else '-'}.",
        ("client", "gain", run.title if run.title != other.title else f"{run.title} here", other.title),
        rows,
        {"x": "gain", "name": "client", "diverging": True, "percent": percent(run.metric, "gain")}
        | {"xlabel": f"gain in {run.metric}" + (" (points)" if run.metric == "accuracy" else "")},
        f"With a positive gain a client is better off{lower}, with a negative one worse off.",
    )


def bytes_curve(runs: Iterable[Recorded]) -> Chart | None:
    """What a figure costs on the wire."""
    runs = list(runs)
    metric, rows = runs[0].metric, []
    for run in runs:
        measured = [(line, known(line["val"][metric])) for line in run.lines if metric in line.get("val", {})]
        lines = thinned([(line, finite) for line, finite in measured if finite], 400)
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


def seconds_curve(run: Recorded) -> Chart:
    """Where the time went."""
    rows = thinned([(line["round"], line["seconds"]) for line in run.lines])
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


def weights_chart(by_round: Mapping[int, Mapping[str, float]]) -> Chart:
    """Weight of each client in the average."""
    clients = list(dict.fromkeys(client for row in by_round.values() for client in row))
    rows = [(r, c, w) for r, row in thinned(list(by_round.items()), 200) for c, w in row.items()]
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


def sharing_map(names: Sequence[str], shares: Mapping[str, Mapping[str, float]]) -> Chart:
    """Clients by parts of the model."""
    rows = [(client, name, row[name]) for client, row in shares.items() for name in names]
    means = {name: mean(row[name] for row in shares.values()) for name in names}
    extremes = sorted(means, key=lambda name: means[name])
    summary = (
        f"Heat map of {count(len(shares), 'client')} by {count(len(names), 'part')} of the model, 0 own and 1 common. "
        f"Most own: {extremes[0]} ({means[extremes[0]]:.2f}); most common: {extremes[-1]} ({means[extremes[-1]]:.2f})."
    )
    options = {"x": "part", "y": "client", "fill": "share", "scale": "share", "low": "own", "high": "common"}
    return Chart("sharing", "heat", "Sharing map", summary, ("client", "part", "share"), rows, options)


def degrees_map(names: Sequence[str], degrees: Mapping[str, Mapping[str, float]]) -> Chart:
    """What ties a parameter to the common one; over many orders of magnitude."""
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
    """Of what is own, how much every two clients have in common."""
    rows = [(a, b, float(pairs[i][j])) for i, a in enumerate(clients) for j, b in enumerate(clients)]
    others = known(float(pairs[i][j]) for i in range(len(clients)) for j in range(i))
    text = f"mean of pairs {mean(others):.2f}" if others else "one client only"
    return Chart(
        f"overlap-{number}",
        "heat",
        f"Overlap of the masks, {layer}",
        f"Heat map of the intersection over union of what is own in {layer}, client by client; {text}.",
        ("client", "other", "overlap"),
        rows,
        {"x": "other", "y": "client", "fill": "overlap", "scale": "from zero", "low": "disjoint", "high": "the same"}
        | {"most": 1, "square": True},
    )


def reported(run: Recorded) -> list[Chart]:
    """Numbers that the algorithm itself tells, by round; of lists the entries in the last round that has them."""
    names = dict.fromkeys(name for line in run.lines for name in line.get("report", {}))
    charts = [_reported_chart(run, name) for name in names if name not in ("weights", *SCORES)]
    return [chart for chart in charts if chart is not None]


def _reported_chart(run: Recorded, name: str) -> Chart | None:
    reported = [(line["round"], line["report"][name]) for line in run.lines if name in line.get("report", {})]
    title = name.replace("_", " ").capitalize()
    numbers = [(r, float(v)) for r, v in reported if isinstance(v, int | float)]
    if numbers and known(v for _, v in numbers):
        return _small(f"reported-{name}", title, "round", thinned(numbers, 500), "")
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
