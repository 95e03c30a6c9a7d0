"""The page on one run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedtailor.core.algorithm import reply_names
from fedtailor.core.task import recorded_metrics
from fedtailor.experiments.store import CONFIG
from fedtailor.report import figures
from fedtailor.report.formatting import count, duration
from fedtailor.report.page_model import Cell, Page, Section, Table, cells
from fedtailor.report.reading import Recorded, beside, gains, known, recorded
from fedtailor.report.run_sharing import learned_weights, sharing
from fedtailor.report.run_summary import References, state, summary
from fedtailor.report.unusual import unusual
from fedtailor.studies.result_tables import number, private_words, size

WORST = 10  # clients in the table
MOST_FAULTS = 20
UNFINISHED = "the run is not finished; test data is read at its end"


def run_page(path: Path, data_root: Path | None = None) -> Page:
    """Everything that is known of a run, and a word on what is not."""
    run = recorded(path)
    references = {name: beside(run, name) for name in ("local", "fedavg") if name != run.config.algorithm.name}
    others = {name: other for name, other in references.items() if other is not None}
    sections = (
        summary(run, others),
        learning(run),
        clients(run, others),
        *gain(run, others, references),
        *unusual(run),
        sharing(run, data_root),
        learned_weights(run),
        reported_numbers(run),
        traffic(run, others),
        left_the_client(run),
        time(run),
        configuration(run),
        citation(run),
    )
    footer = f"{run.path.resolve().name}, started {run.about.get('started', 'at an unknown time')}"
    return Page(f"{run.title} on {run.about['data']}", "Run", state(run), run.results is not None, sections, footer)


def learning(run: Recorded) -> Section:
    """Curves by round."""
    charts = [figures.learning_curve(run, metric) for metric in recorded_metrics(run.about)]
    drawn = tuple(chart for chart in charts if chart is not None)
    missing = ""
    if not drawn:
        every = run.config.evaluation.every
        missing = "no round was measured: " + ("there are no rounds yet" if not run.lines else _unmeasured(run, every))
    text: tuple[str, ...] = ()
    if drawn and not run.measured("test", run.metric):
        text = ("There is no test curve: test data is read once, at the end, unless evaluation.test_curve is set.",)
    return Section("learning", "Learning", text, charts=drawn, missing=missing)


def _unmeasured(run: Recorded, every: int) -> str:
    return "no client has validation samples" if run.measured("val", run.metric) else f"evaluation.every is {every}"


def clients(run: Recorded, others: References) -> Section:
    """Who is well served, and who is not."""
    if run.results is None:
        return Section("clients", "Clients", missing=UNFINISHED)
    if len(known(run.tested)) < 2:
        return Section("clients", "Clients", missing="fewer than two clients have test samples")
    charts = [figures.distribution(run)]
    if len(set(run.about["train_samples"])) > 1:
        charts.append(figures.by_samples(run))
    return Section("clients", "Clients", charts=tuple(charts), tables=(worst_table(run, others),))


def worst_table(run: Recorded, others: References) -> Table:
    """The clients with the lowest figures, beside what they have elsewhere."""
    order = sorted(
        (i for i, v in enumerate(run.tested) if not math.isnan(v)), key=lambda i: run.tested[i], reverse=not run.higher
    )[:WORST]
    rows = [
        (
            Cell(run.clients[i], run.clients[i]),
            Cell(f"{run.about['train_samples'][i]:,}", run.about["train_samples"][i]),
            *(Cell(number(run.metric, r.tested[i]), r.tested[i]) for r in (run, *others.values())),
        )
        for i in order
    ]
    unit = " %" if run.metric == "accuracy" else ""
    title = "Worst clients first" if len(run.clients) <= WORST else f"The {len(rows)} worst clients"
    columns = ("client", "training samples", f"{run.title} {run.metric}{unit}", *(o.title for o in others.values()))
    return Table(title, columns, rows, sortable=True)


def gain(run: Recorded, others: References, wanted: Iterable[str]) -> list[Section]:
    """Client by client against the references, and for each that is not there a word why."""
    titles = {"local": "Gain over Local", "fedavg": "Gain over FedAvg"}
    missing = {name: _no_gain(run, others.get(name)) for name in wanted}
    charts = tuple(figures.gain(run, others[name]) for name, why in missing.items() if not why)
    sections = [Section("gain", "Gain of each client", charts=charts)] if charts else []
    return sections + [Section(f"gain-{name}", titles[name], missing=why) for name, why in missing.items() if why]


def _no_gain(run: Recorded, other: Recorded | None) -> str:
    if run.results is None:
        return UNFINISHED
    if other is None:
        return "no finished run of it on the same task lies beside this one"
    return "" if known(gains(run.tested, other.tested, run.higher)) else "no client has test figures in both runs"


def reported_numbers(run: Recorded) -> Section:
    """Numbers of the algorithm itself."""
    charts = tuple(figures.reported(run))
    missing = "" if charts else f"{run.title} reports no numbers of its own"
    early = any(line["round"] < 1 and "report" in line for line in run.lines)
    text = ("Rounds up to 0 are the preparation, in which something is learned for the run.",) if early else ()
    return Section("reported", "Reported by the algorithm", text, charts=charts, missing=missing)


def traffic(run: Recorded, others: References) -> Section:
    """Bytes and what they bring."""
    if not run.lines:
        return Section("traffic", "Traffic", missing="there are no rounds yet")
    last = run.lines[-1]
    rows = [
        cells("all rounds", size(last["up"]), size(last["down"]), f"{last.get('trips', 0):,}"),
        cells(
            "per round",
            *(size(last[key] / len(run.lines)) for key in ("up", "down")),
            f"{last.get('trips', 0) / len(run.lines):,.1f}",
        ),
    ]
    table = Table("Bytes and round trips", ("", "up", "down", "trips"), rows)
    chart = figures.bytes_curve([run, *others.values()])
    return Section("traffic", "Traffic", charts=() if chart is None else (chart,), tables=(table,))


def left_the_client(run: Recorded) -> Section:
    """What is declared to leave a client, and what happened."""
    section = Section("privacy", "What left the clients")
    if run.kind is None:
        return section.without("the algorithm is not one that is installed here")
    gathered = (run.results or {}).get("gathered", [])
    rows = [
        cells("Stays private", run.kind.private),
        cells("May be sent", ", ".join(reply_names(run.kind)) or "nothing"),
        cells(
            "Single replies the server looked at",
            ", ".join(gathered) or ("none" if run.results else "known at the end"),
        ),
        *([cells("Hidden", private_words(hidden))] if (hidden := (run.results or {}).get("privacy")) else []),
        cells("Replies rejected", str(sum(len(line.get("faults", [])) for line in run.lines))),
        cells("Rounds abandoned", str(sum("abandoned" in line for line in run.lines))),
    ]
    tables = [Table("As the algorithm declares it; other replies are rejected", ("", ""), rows, words=True)]
    faults = [fault for line in run.lines for fault in line.get("faults", [])]
    if faults:
        fault_rows = [cells(f["client"], str(f["round"]), f["function"], f["reason"]) for f in faults[:MOST_FAULTS]]
        title = f"Rejected replies{f', first {MOST_FAULTS}' if len(faults) > MOST_FAULTS else ''}"
        tables.append(Table(title, ("client", "round", "function", "reason"), fault_rows, words=True))
    return Section(section.id, section.title, tables=tuple(tables))


def time(run: Recorded) -> Section:
    """Seconds."""
    if not run.lines:
        return Section("time", "Time", missing="there are no rounds yet")
    total = sum(line["seconds"] for line in run.lines)
    text = f"{duration(total)} for {count(len(run.lines), 'round')}: {duration(total / len(run.lines))} each."
    return Section("time", "Time", (text,), charts=(figures.seconds_curve(run),) if len(run.lines) > 1 else ())


def configuration(run: Recorded) -> Section:
    """As it was run, and what made it."""
    versions: dict[str, Any] = run.about.get("versions", {})
    rows = [
        cells("Command", str(run.about.get("command", "unknown"))),
        cells("Versions", ", ".join(f"{name} {v}" for name, v in versions.items())),
        cells("Threads", str(run.about.get("threads", "unknown"))),
        *(cells("Data", note) for note in run.about.get("notes", [])),
    ]
    text = (run.path / CONFIG).read_text(encoding="utf-8")
    origin = Table("What made it", ("", ""), rows, words=True)
    return Section("configuration", "Configuration", tables=(origin,), code=((CONFIG, text),))


def citation(run: Recorded) -> Section:
    """BibTeX of the paper."""
    text = run.kind.citation.strip() if run.kind is not None else ""
    missing = "" if text else f"{run.title} names no paper"
    return Section("citation", "Citation", code=(("BibTeX", text),) if text else (), missing=missing)
