"""The page on one run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedtailor.core.algorithm import Algorithm, sent_names
from fedtailor.core.client import METRICS
from fedtailor.errors import UserError
from fedtailor.metrics.summary import share_hurt, summarise
from fedtailor.report import figures
from fedtailor.report.content import Cell, Chart, Figure, Page, Section, Table, cells
from fedtailor.report.reading import Recorded, beside, gains, known, recorded
from fedtailor.report.words import count, duration, signed, value
from fedtailor.runs.explain import explain, weights
from fedtailor.runs.store import CONFIG, RESULTS, read_json, read_tree
from fedtailor.runs.tables import number, private_words, size

WORST = 10  # clients in the table
MOST_FAULTS = 20
MOST_CELLS = 40_000  # of a heat map
UNFINISHED = "the run is not finished; test data is read at its end"
KINDS = {"last": "last round", "selected": "selected on validation", "unseen": "unseen clients"}

References = dict[str, Recorded]  # runs to compare with, by the algorithm's name


def run_page(path: Path, data_root: Path | None = None) -> Page:
    """Everything that is known of a run, and a word on what is not."""
    run = recorded(path)
    found = {name: beside(run, name) for name in ("local", "fedavg") if name != run.config.algorithm.name}
    others = {name: other for name, other in found.items() if other is not None}
    sections = (
        summary(run, others),
        learning(run),
        clients(run, others),
        *gain(run, others, found),
        sharing(run, data_root),
        learned_weights(run),
        told(run),
        traffic(run, others),
        left_the_client(run),
        time(run),
        configuration(run),
        citation(run),
    )
    made = f"{run.path.resolve().name}, started {run.about.get('started', 'at an unknown time')}"
    return Page(f"{run.title} on {run.about['data']}", "Run", state(run), run.results is not None, sections, made)


def state(run: Recorded) -> str:
    """How far it is."""
    done = max((line["round"] for line in run.lines), default=0)
    if run.results is not None:
        return f"finished, {count(run.config.rounds, 'round')}"
    return f"not finished: {max(done, 0)} of {count(run.config.rounds, 'round')}" + (
        ", in preparation" if done < 0 else ""
    )


def summary(run: Recorded, others: References) -> Section:
    """In plain words."""
    text = [what(run), outcome(run), *filter(None, [run.units])]
    text += [against(run, other) for other in others.values() if run.results is not None]
    if run.unreadable:
        text.append(f"{count(run.unreadable, 'line')} of metrics.jsonl could not be read and are not shown.")
    tables = (results_table(run, others.get("local")),) if run.results is not None else ()
    return Section("summary", "Summary", tuple(text), key_figures(run, others), tables=tables)


def what(run: Recorded) -> str:
    """What was trained, on what."""
    verb = "trained" if run.results is not None else "is training" if run.lines else "has not yet trained"
    samples = sum(run.about["train_samples"])
    return (
        f"{run.title} {verb} the model {run.config.model.name} ({run.about['parameters']:,} parameters) for "
        f"{count(len(run.clients), 'client')} on {run.about['data']} ({run.about['task']}), which together have "
        f"{count(samples, 'training sample')}."
    )


def outcome(run: Recorded) -> str:
    """The result, or how far it is."""
    if run.results is None:
        curve = [(r, known(v)) for r, v in run.measured("val", run.metric) if known(v)]
        if not curve:
            return f"It is {state(run)}; nothing has been measured yet."
        last, values = curve[-1]
        mean = summarise(values, higher_is_better=run.higher).mean
        return f"It is {state(run)}. In round {last} validation {run.metric} is {value(run.metric, mean)} on average."
    found = summarise(run.tested, higher_is_better=run.higher)
    if not found.clients:
        return "No client has test samples."
    if found.clients == 1:
        return f"After {count(run.config.rounds, 'round')} its test {run.metric} is {value(run.metric, found.mean)}."
    tenth = max(1, round(found.clients / 10))  # as `summarise` counts them
    worst = "the worst client" if tenth == 1 else f"the worst {tenth} clients on average"
    return (
        f"After {count(run.config.rounds, 'round')} the clients' test {run.metric} is {value(run.metric, found.mean)} "
        f"on average; {worst} {'reaches' if tenth == 1 else 'reach'} {value(run.metric, found.worst_tenth)}."
    )


def against(run: Recorded, other: Recorded) -> str:
    """One sentence on the difference to a reference."""
    names = {"local": "training alone (Local)", "fedavg": "one model for all (FedAvg)"}
    name = names[other.config.algorithm.name]
    found = known(gains(run.tested, other.tested, run.higher))
    if not found:
        return f"Nothing can be said against {name}: there is no client with figures in both."
    mean, better, worse = sum(found) / len(found), sum(g > 0 for g in found), sum(g < 0 for g in found)
    turn = "better" if mean > 0 else "worse" if mean < 0 else "the same"
    return (
        f"Against {name} that is {turn} by {signed(run.metric, abs(mean)).lstrip('+')} on average: of "
        f"{count(len(found), 'client')} {better} are better off and {worse} worse off."
    )


def key_figures(run: Recorded, others: References) -> tuple[Figure, ...]:
    """The numbers at the top."""
    out = []
    if run.results is not None:
        found = summarise(run.tested, higher_is_better=run.higher)
        out.append(Figure(f"Test {run.metric}", value(run.metric, found.mean), "mean of clients, last round"))
        if found.clients > 1:
            out.append(Figure("Worst tenth", value(run.metric, found.worst_tenth), "mean of these clients"))
        if "local" in others:
            hurt = share_hurt(run.tested, others["local"].tested, higher_is_better=run.higher)
            if math.isfinite(hurt):
                out.append(Figure("Hurt", f"{100 * hurt:.0f} %", "clients worse off than alone"))
    if run.lines:
        last = run.lines[-1]
        out.append(Figure("Sent", size(last["up"] + last["down"]), f"{size(last['up'])} of it up"))
        out.append(
            Figure("Time", duration(sum(line["seconds"] for line in run.lines)), f"engine {run.about['engine']}")
        )
    return tuple(out)


def results_table(run: Recorded, local: Recorded | None) -> Table:
    """Last round, selected round, unseen clients."""
    assert run.results is not None
    rows = []
    for kind, title in KINDS.items():
        if kind not in run.results:
            continue
        found, hurt = run.results[kind]["test"][run.metric], math.nan
        if local is not None and local.results is not None and kind != "unseen":
            mine, theirs = run.results[kind]["clients"][run.metric], local.results[kind]["clients"][run.metric]
            hurt = share_hurt(mine, theirs, higher_is_better=run.higher)
        shown = [number(run.metric, found[key]) for key in ("mean", "std", "worst_tenth")]
        share = "-" if math.isnan(hurt) else f"{100 * hurt:.0f} %"
        rows.append(cells(title, str(run.results[kind]["round"]), *shown, share))
    unit = " in %" if run.metric == "accuracy" else ""
    columns = ("", "round", "mean", "client std", "worst tenth", "hurt")
    return Table(f"Test {run.metric}{unit}", columns, rows)


def learning(run: Recorded) -> Section:
    """Curves by round."""
    charts = [figures.learning_curve(run, metric) for metric in METRICS[run.about["task"]]]
    there = tuple(chart for chart in charts if chart is not None)
    missing = ""
    if not there:
        every = run.config.evaluation.every
        missing = "no round was measured: " + ("there are no rounds yet" if not run.lines else _unmeasured(run, every))
    text: tuple[str, ...] = ()
    if there and not run.measured("test", run.metric):
        text = ("There is no test curve: test data is read once, at the end, unless evaluation.test_curve is set.",)
    return Section("learning", "Learning", text, charts=there, missing=missing)


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
    shown = [Section("gain", "Gain of each client", charts=charts)] if charts else []
    return shown + [Section(f"gain-{name}", titles[name], missing=why) for name, why in missing.items() if why]


def _no_gain(run: Recorded, other: Recorded | None) -> str:
    if run.results is None:
        return UNFINISHED
    if other is None:
        return "no finished run of it on the same task lies beside this one"
    return "" if known(gains(run.tested, other.tested, run.higher)) else "no client has test figures in both runs"


def sharing(run: Recorded, data_root: Path | None) -> Section:
    """What each client shares, as the run learned it."""
    section = Section("sharing-map", "What is shared")
    why = _no_sharing(run)
    if why:
        return _left_out(section, why)
    try:
        charts = sharing_charts(run, data_root)
    except (UserError, OSError) as error:
        return _left_out(section, " ".join(str(error).splitlines()))
    except (KeyError, RuntimeError, ValueError):  # states of another version do not fit this one
        return _left_out(section, "what was learned cannot be read by this version of fedtailor")
    text = (
        "To what degree the parameters of each client are the common ones, by feature or layer. "
        "fedtailor explain saves it for every parameter.",
    )
    return Section(section.id, section.title, text, charts=tuple(charts))


def _left_out(section: Section, why: str) -> Section:
    return Section(section.id, section.title, missing=why)


def _no_sharing(run: Recorded) -> str:
    """Why there is no map; a run that is still written to is not opened further."""
    if run.kind is None:
        return "the algorithm is not one that is installed here"
    if run.kind.shares is Algorithm.shares:
        return f"{run.title} does not say to what degree a parameter is shared"
    if run.results is None:
        return "drawn when the run is finished"
    if ":" in run.config.model.name and not _saved(run):
        return f"the model is own code, which a report does not run; call fedtailor explain {run.path} first"
    return ""


def _saved(run: Recorded) -> bool:
    """Whether `explain` was called after the end of the run."""
    shares = run.path / "shares.json"
    return shares.exists() and shares.stat().st_mtime >= (run.path / RESULTS).stat().st_mtime


def sharing_charts(run: Recorded, data_root: Path | None) -> list[Chart]:
    """The map, the degrees behind it, and how much the masks of two clients overlap."""
    if not _saved(run):
        explain(run.path, data_root)
    saved = read_json(run.path / "shares.json")
    shares, degrees = saved["clients"], saved["degrees"]
    names = list(next(iter(shares.values())))
    most = max(1, MOST_CELLS // max(1, len(names)))
    charts = [figures.sharing_map(names, dict(list(shares.items())[:most]))]
    if degrees:
        charts.append(figures.degrees_map(names, dict(list(degrees.items())[:most])))
    pairs = read_tree(run.path, saved["tensors"]).get("overlap", {})
    if 1 < len(shares) <= math.isqrt(MOST_CELLS):
        drawn = {k: v.tolist() for k, v in pairs.items() if not bool((v == v[0, 0]).all())}
        charts += [figures.overlap_map(list(shares), k, v, n) for n, (k, v) in enumerate(drawn.items(), 1)]
    return charts


def learned_weights(run: Recorded) -> Section:
    """Weights of the average, where the algorithm tells."""
    section = Section("learned-weights", "Weights in the average")
    try:
        found = weights(run.path)
    except (UserError, OSError, ValueError, KeyError) as error:
        return _left_out(section, f"cannot be read: {error}")
    if not found:
        return _left_out(section, f"{run.title} does not tell weights" if run.lines else "there are no rounds yet")
    return Section(section.id, section.title, charts=(figures.weights_chart(found),))


def told(run: Recorded) -> Section:
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
        return _left_out(section, "the algorithm is not one that is installed here")
    gathered = (run.results or {}).get("gathered", [])
    rows = [
        cells("Stays private", run.kind.private),
        cells("May be sent", ", ".join(sent_names(run.kind)) or "nothing"),
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
        shown = [cells(f["client"], str(f["round"]), f["function"], f["reason"]) for f in faults[:MOST_FAULTS]]
        title = f"Rejected replies{f', first {MOST_FAULTS}' if len(faults) > MOST_FAULTS else ''}"
        tables.append(Table(title, ("client", "round", "function", "reason"), shown, words=True))
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
    made = Table("What made it", ("", ""), rows, words=True)
    return Section("configuration", "Configuration", tables=(made,), code=((CONFIG, text),))


def citation(run: Recorded) -> Section:
    """BibTeX of the paper."""
    text = run.kind.citation.strip() if run.kind is not None else ""
    missing = "" if text else f"{run.title} names no paper"
    return Section("citation", "Citation", code=(("BibTeX", text),) if text else (), missing=missing)
