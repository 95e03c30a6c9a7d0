"""Tables of results: for a terminal, for people as Markdown and LaTeX, for programs as CSV and JSON."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from fedtailor.data.files import escape_formula
from fedtailor.errors import ConfigError, RunError, nearest
from fedtailor.experiments.store import CHANGED, read_json, write_atomically, write_json
from fedtailor.metrics.summary import share_hurt
from fedtailor.studies.compare import TABLE, Row
from fedtailor.studies.significance import Paired

COLUMNS = ("algorithm", "test {}", "selected", "client std", "worst tenth", "hurt", "up", "down", "trips", "seconds")
ESSENTIAL = ("algorithm", "test {}", "selected", "worst tenth", "hurt", "up", "seconds")  # fit 80 columns
NAMES = ("algorithm", "test", "selected", "std", "worst", "hurt", "up", "down", "trips", "seconds")
RUN_COLUMNS = ("", "round", "mean", "client std", "worst tenth", "hurt")
OTHER_COLUMNS = ("", "last round", "client std", "worst tenth", "selected")
KINDS = {"last": "last round", "selected": "selected on validation", "unseen": "unseen clients"}
KEYS = {name: place for place, name in enumerate(NAMES)}  # by which columns are chosen
FIGURES: dict[str, Callable[[Row], float]] = {
    "test": lambda row: row.last[0],
    "selected": lambda row: row.selected[0],
    "worst": lambda row: row.worst_tenth,
}


def run_rows(results: Mapping[str, Any], local: Mapping[str, Any] | None) -> list[list[str]]:
    """The test figures of a run as text, under `RUN_COLUMNS`; `local` are the results of training alone."""
    metric, higher = results["metric"], results["higher_is_better"]
    rows = []
    for kind, title in KINDS.items():
        if kind not in results:
            continue
        hurt = math.nan
        if local is not None and kind != "unseen":
            mine, theirs = results[kind]["clients"][metric], local[kind]["clients"][metric]
            hurt = share_hurt(mine, theirs, higher_is_better=higher)
        figures = [number(metric, results[kind]["test"][metric][key]) for key in ("mean", "std", "worst_tenth")]
        share = "-" if math.isnan(hurt) else f"{100 * hurt:.0f} %"
        rows.append([title, str(results[kind]["round"]), *figures, share])
    return rows


def cells_of(row: Row) -> list[str]:
    return [
        row.label,
        spread(row.metric, *row.last),
        spread(row.metric, *row.selected),
        number(row.metric, row.client_std),
        number(row.metric, row.worst_tenth),
        "-" if math.isnan(row.hurt) else f"{100 * row.hurt:.0f} %",
        size(row.cost.up),
        size(row.cost.down),
        f"{row.cost.trips:.0f}",
        f"{row.cost.seconds:.1f}",
    ]


def header(rows: Sequence[Row]) -> list[str]:
    name = rows[0].metric + (" %" if rows[0].metric == "accuracy" else "")
    return [title.format(name) for title in COLUMNS]


def terminal(rows: Sequence[Row], title: str) -> Table:
    """The essential columns, as rich draws them."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    essential = [COLUMNS.index(name) for name in ESSENTIAL]
    titles = header(rows)
    table.add_column(titles[0])  # a long label is wrapped; figures never are
    for i in essential[1:]:
        title = titles[i].replace(" ", "\n", 1)
        widest = max(len(text) for text in [*title.splitlines(), *(cells_of(row)[i] for row in rows)])
        table.add_column(title, justify="right", no_wrap=True, min_width=widest)
    for row in rows:
        cells = cells_of(row)
        table.add_row(*(cells[i] for i in essential))
    return table


def files(rows: Sequence[Row], notes: Sequence[str] = ()) -> dict[str, str]:
    """The table in every format, by the name of its file."""
    return {
        TABLE: markdown(rows, notes),
        "table.tex": latex(rows, notes),
        "table.csv": comma_separated(rows),
        "table.json": strict_json(rows),
    }


def markdown(rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """The table as Markdown, and below it what there is to say of it."""
    lines = ["| " + " | ".join(header(rows)) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
    lines += ["| " + " | ".join(cells_of(row)) + " |" for row in rows]
    lines += other_metrics(rows)
    return "\n".join([*lines, *notes]) + "\n"


def other_metrics(rows: Sequence[Row]) -> list[str]:
    """Lines of a second table, with every metric that is not the first one's."""
    names = list(dict.fromkeys(name for row in rows for name in row.others))
    if not names:
        return []
    lines = [
        "",
        "| algorithm | " + " | ".join(f"test {name}" for name in names) + " |",
        "|---" * (1 + len(names)) + "|",
    ]
    for row in rows:
        cells = [spread(name, *row.others[name]) if name in row.others else "-" for name in names]
        lines.append("| " + " | ".join([row.label, *cells]) + " |")
    return lines


def other_run_rows(results: Mapping[str, Any]) -> list[list[str]]:
    """Metrics of a run beside the one in its table, under `OTHER_COLUMNS`."""
    rows = []
    for name in results["last"]["test"]:
        if name != results["metric"]:
            last, selected = (results[kind]["test"][name] for kind in ("last", "selected"))
            figures = (last["mean"], last["std"], last["worst_tenth"], selected["mean"])
            rows.append([f"test {name}", *(number(name, value) for value in figures)])
    return rows


def check_columns(columns: Sequence[str]) -> None:
    """Raise a `ConfigError` for a column that there is not."""
    for name in columns:
        if name not in (*KEYS, "p"):
            raise ConfigError(f'--columns: no column "{name}"; {nearest(name, [*KEYS, "p"])}')


def narrow(rows: Sequence[Row], columns: Sequence[str], tests: Sequence[Paired], reference: str, over: str) -> str:
    """Chosen columns for one column of a paper (booktabs), the best figures in bold, and below what they are.

    `tests` are those of the other rows against the row `reference`, and `over` says over what.
    """
    wanted, titles = [name for name in columns if name != "algorithm" and (name != "p" or tests)], header(rows)
    best = {name: (max if rows[0].higher_is_better else min)(of(row) for row in rows) for name, of in FIGURES.items()}
    by_label = {test.label: test for test in tests}

    def cell(row: Row, name: str) -> str:
        if name == "p":
            return "--" if row.label not in by_label else _latex_p(by_label[row.label])
        text = latex_escape(cells_of(row)[KEYS[name]])
        return rf"\textbf{{{text}}}" if name in best and FIGURES[name](row) == best[name] else text

    heads = ["method", *("$p$" if name == "p" else latex_escape(titles[KEYS[name]]) for name in wanted)]
    body = [[latex_escape(row.label), *(cell(row, name) for name in wanted)] for row in rows]
    head, *lines = (" & ".join(cells) + r" \\" for cells in (heads, *body))
    begin = [r"\begingroup\small\setlength{\tabcolsep}{3pt}", r"\begin{tabular}{@{}l" + "r" * len(wanted) + "@{}}"]
    end = [
        r"\bottomrule",
        r"\end{tabular}",
        rf"\par\smallskip{{\footnotesize {_caption(rows, wanted, reference, over)}}}",
    ]
    return "\n".join([*begin, r"\toprule", head, r"\midrule", *lines, *end, r"\endgroup"]) + "\n"


def _latex_p(test: Paired) -> str:
    """Corrected, with an arrow that says whether the row is above or below the reference."""
    sign = "" if test.better == test.worse else r"$\downarrow$" if test.better > test.worse else r"$\uparrow$"
    return ("$<$0.001" if test.holm < 1e-3 else f"{test.holm:.3f}") + sign


def _caption(rows: Sequence[Row], wanted: Sequence[str], reference: str, over: str) -> str:
    """What the columns of a narrow table are, in LaTeX."""
    seeds = max(len(row.means) for row in rows)
    metric = latex_escape(header(rows)[1].removeprefix("test "))
    words = {
        "test": f"Test {metric}: mean over clients, last round"
        + (rf", $\pm$ spread over {seeds} seeds" if seeds > 1 else ""),
        "selected": "selected: the same in the round selected on validation data",
        "std": "client std: standard deviation over clients",
        "worst": "worst tenth: mean of the tenth of clients with the worst figures",
        "hurt": "hurt: share of clients that are better off alone",
        "up": "up: bytes sent by all clients",
        "p": f"$p$: the row against {latex_escape(reference)}, Wilcoxon's signed ranks over {latex_escape(over)}, "
        rf"two-sided, Holm's correction; $\downarrow$ more clients are worse off than with {latex_escape(reference)}, "
        r"$\uparrow$ better off",
    }
    return "; ".join(words[name] for name in wanted if name in words) + "."


def latex(rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """The table for a paper that uses the package booktabs."""
    head, *body = (" & ".join(map(latex_escape, cells)) + r" \\" for cells in (header(rows), *map(cells_of, rows)))
    lines = [f"% {note}" for note in notes if note]
    lines += [r"\begin{tabular}{l" + "r" * (len(COLUMNS) - 1) + "}", r"\toprule", head, r"\midrule"]
    return "\n".join([*lines, *body, r"\bottomrule", r"\end{tabular}"]) + "\n"


def latex_escape(text: str) -> str:
    special = {c: f"\\{c}" for c in "&%$#_{}"}
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    return "".join(special.get(c, c) for c in text)


def record(row: Row) -> dict[str, Any]:
    """The figures of a row as numbers; None where there is none."""
    figures = {
        "mean": row.last[0],
        "spread": row.last[1],
        "selected_mean": row.selected[0],
        "selected_spread": row.selected[1],
        "client_std": row.client_std,
        "worst_tenth": row.worst_tenth,
        "hurt": row.hurt,
        "up_bytes": row.cost.up,
        "down_bytes": row.cost.down,
        "trips": row.cost.trips,
        "seconds": row.cost.seconds,
    }
    finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    return {"algorithm": row.label, "metric": row.metric, "seeds": len(row.means)} | finite


def comma_separated(rows: Sequence[Row]) -> str:
    """Numbers as CSV; nothing where there is none."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(record(rows[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(record(row) | {"algorithm": escape_formula(row.label)} for row in rows)
    return text.getvalue()


def strict_json(rows: Sequence[Row]) -> str:
    """Numbers as JSON, with the mean over clients of every seed; null where there is none."""
    means = [{str(seed): m if math.isfinite(m) else None for seed, m in row.means.items()} for row in rows]
    others = [{name: m if math.isfinite(m) else None for name, (m, _) in row.others.items()} for row in rows]
    out = [
        record(row) | {"means": by_seed, "others": other}
        for row, by_seed, other in zip(rows, means, others, strict=True)
    ]
    return json.dumps(out, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


METRICS = {"rmse": "RMSE", "mse": "MSE", "mae": "MAE", "auroc": "AUROC", "r2": "R2", "brier": "Brier score"}


def metric_name(metric: str) -> str:
    """As it is written in sentences."""
    return METRICS.get(metric, metric.replace("_", " "))


def number(metric: str, value: float) -> str:
    """Accuracies in percent, other metrics as they are."""
    if math.isnan(value):
        return "-"
    return f"{100 * value:.2f}" if metric == "accuracy" else f"{value:.4g}"


def spread(metric: str, value: float, deviation: float) -> str:
    return number(metric, value) + ("" if math.isnan(deviation) else f" ± {number(metric, deviation)}")


def size(bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if bytes < 1000:
            return f"{bytes:.0f} {unit}" if unit == "B" else f"{bytes:.1f} {unit}"
        bytes /= 1000
    return f"{bytes:.2f} GB"


def private_words(privacy: dict[str, Any]) -> str:
    """What a run hid of single clients."""
    parts = ["secure sums"] if privacy["secure_sum"] else []
    if privacy["clip"]:
        parts.append(f"changes clipped to {privacy['clip']:g}")
    if privacy["noise"] and isinstance(privacy["epsilon"], str):
        parts.append(f"noise {privacy['noise']:g}: epsilon {privacy['epsilon']}")
    elif privacy["noise"]:
        parts.append(
            f"noise {privacy['noise']:g}: epsilon {privacy['epsilon']:.3g} at delta {privacy['delta']:g} (a client "
            f"replaced, fixed cohorts); {privacy['epsilon_add_remove']:.3g} (added or removed, Poisson)"
        )
    return "; ".join(parts)


SUMS = "tables.json"


def write(folder: Path, texts: Mapping[str, str]) -> None:
    write_json(folder / SUMS, {name: write_atomically(folder / name, text.encode()) for name, text in texts.items()})


def read(folder: Path, name: str) -> str:
    """A file as it was written; a folder of an earlier version has no checksums."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise RunError(f"{folder / name}: cannot be read: {error.strerror}") from None
    if (folder / SUMS).exists() and hashlib.sha256(content).hexdigest() != read_json(folder / SUMS)[name]:
        raise RunError(f"{folder / name}: {CHANGED}; the same command writes it again", code="run.damaged")
    return content.decode("utf-8", errors="replace")
