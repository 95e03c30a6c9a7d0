"""A run in plain words: what was trained, what came out, and how that compares with the runs beside it."""

from __future__ import annotations

import math

from fedtailor.metrics.summary import share_hurt, summarise
from fedtailor.report.formatting import count, duration, signed, value
from fedtailor.report.page_model import Figure, Section, Table, cells
from fedtailor.report.reading import Recorded, gains, known
from fedtailor.studies.result_tables import number, size

KINDS = {"last": "last round", "selected": "selected on validation", "unseen": "unseen clients"}

References = dict[str, Recorded]  # runs to compare with, by the algorithm's name


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
    text = [setup_words(run), outcome(run), *filter(None, [run.units])]
    text += [against(run, other) for other in others.values() if run.results is not None]
    if run.unreadable:
        text.append(f"{count(run.unreadable, 'line')} of metrics.jsonl could not be read and are not shown.")
    tables = (results_table(run, others.get("local")),) if run.results is not None else ()
    return Section("summary", "Summary", tuple(text), key_figures(run, others), tables=tables)


def setup_words(run: Recorded) -> str:
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


def against(run: Recorded, other: Recorded) -> str:
    """One sentence on the difference to a reference."""
    names = {"local": "training alone (Local)", "fedavg": "one model for all (FedAvg)"}
    name = names[other.config.algorithm.name]
    differences = known(gains(run.tested, other.tested, run.higher))
    if not differences:
        return f"Nothing can be said against {name}: there is no client with figures in both."
    mean, better, worse = (
        sum(differences) / len(differences),
        sum(g > 0 for g in differences),
        sum(g < 0 for g in differences),
    )
    turn = "better" if mean > 0 else "worse" if mean < 0 else "the same"
    return (
        f"Against {name} that is {turn} by {signed(run.metric, abs(mean)).lstrip('+')} on average: of "
        f"{count(len(differences), 'client')} {better} are better off and {worse} worse off."
    )


def key_figures(run: Recorded, others: References) -> tuple[Figure, ...]:
    """The numbers at the top."""
    out = []
    if run.results is not None:
        test = summarise(run.tested, higher_is_better=run.higher)
        out.append(Figure(f"Test {run.metric}", value(run.metric, test.mean), "mean of clients, last round"))
        if test.clients > 1:
            out.append(Figure("Worst tenth", value(run.metric, test.worst_tenth), "mean of these clients"))
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
        test, hurt = run.results[kind]["test"][run.metric], math.nan
        if local is not None and local.results is not None and kind != "unseen":
            mine, theirs = run.results[kind]["clients"][run.metric], local.results[kind]["clients"][run.metric]
            hurt = share_hurt(mine, theirs, higher_is_better=run.higher)
        figures = [number(run.metric, test[key]) for key in ("mean", "std", "worst_tenth")]
        share = "-" if math.isnan(hurt) else f"{100 * hurt:.0f} %"
        rows.append(cells(title, str(run.results[kind]["round"]), *figures, share))
    unit = " in %" if run.metric == "accuracy" else ""
    columns = ("", "round", "mean", "client std", "worst tenth", "hurt")
    return Table(f"Test {run.metric}{unit}", columns, rows)
