"""What a comparison writes for a paper: a table, figures (matplotlib), and tests of whether rows differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.errors import ConfigError
from fedtailor.experiments.store import RunFolder, write_atomically
from fedtailor.studies import significance
from fedtailor.studies.compare import Row
from fedtailor.studies.grid import Cell
from fedtailor.studies.result_tables import check_columns, narrow
from fedtailor.studies.significance import Ranks, groups

WIDTH = 3.3  # inches: a column
KINDS = (".pdf", ".png", ".svg")
BANDS = 8  # rows up to which the spreads of curves can be told apart
LINES = ("-", "--", ":", "-.")  # to distinguish more rows than there are colours


@dataclass(frozen=True)
class Paper:
    latex: Path | None = None
    columns: tuple[str, ...] = ()
    figure: Path | None = None
    ranks: Path | None = None

    @property
    def options(self) -> dict[str, Any]:
        """As given on the command line."""
        return {"latex": self.latex, "figure": self.figure, "ranks": self.ranks}

    def check(self) -> None:
        """Raise `ConfigError` before anything runs if a file could not be written at the end."""
        check_columns(self.columns)
        for path in (self.figure, self.ranks):
            if path is not None:
                check_figure(path)

    def write(self, grid: Sequence[Cell], rows: Sequence[Row], against: str) -> list[str]:
        """Write the files, and return the significance tests in words."""
        blocks = significance.blocks_of(grid)
        tests = [] if blocks is None else significance.against(blocks, against)
        if self.latex is not None:
            reference = against or rows[0].label
            over = "" if blocks is None else f"{blocks.values.shape[1]} clients"
            write_atomically(self.latex, narrow(rows, self.columns, tests, reference, over).encode())
        if self.figure is not None:
            draw_curves(grid, self.figure)
        if self.ranks is not None and blocks is not None and (mean_ranks := significance.ranks(blocks)) is not None:
            draw_ranks(mean_ranks, self.ranks)
        return [] if blocks is None else significance.words(blocks, against)


def check_figure(path: Path) -> None:
    """Raise `ConfigError` if the figure could not be drawn."""
    if path.suffix not in KINDS:
        raise ConfigError(f"{path}: a figure is one of {', '.join(KINDS)}")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{path}: matplotlib is not installed; pip install 'fedtailor[figures]'")


def draw_curves(grid: Sequence[Cell], path: Path) -> None:
    """The metric on validation data by round: mean over clients, then over seeds; the spread over seeds of few rows."""
    figure, axes = _figure(2.6)
    metric, rows = "", list(dict.fromkeys(cell.label for cell in grid))
    for i, label in enumerate(rows):
        each, metric = _curves_of([cell for cell in grid if cell.label == label])
        rounds = sorted(set.intersection(*(set(curve) for curve in each))) if each else []
        if not rounds:
            continue
        values = np.array([[curve[round] for round in rounds] for curve in each])
        values = 100 * values if metric == "accuracy" else values  # as in the table
        mean = values.mean(0)
        (line,) = axes.plot(rounds, mean, LINES[i % len(LINES)], linewidth=1, label=label)
        if len(values) > 1 and len(rows) <= BANDS:
            spread = values.std(0, ddof=1)
            axes.fill_between(rounds, mean - spread, mean + spread, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xlabel("round")
    axes.set_ylabel(f"validation {metric}" + (" (%)" if metric == "accuracy" else ""))
    axes.xaxis.get_major_locator().set_params(integer=True)
    labels = axes.get_legend_handles_labels()[1]
    columns = 3 if max(map(len, labels), default=0) <= 14 else 2
    lines = -(-len(labels) // columns)
    figure.set_figheight(2.1 + 0.16 * lines)  # the axes keep their height, whatever the number of rows
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=7)
    _save(figure, path)


def _curves_of(cells: Sequence[Cell]) -> tuple[list[dict[int, float]], str]:
    """By seed: round -> mean over clients."""
    out, metric = [], ""
    for folder in (RunFolder(cell.folder) for cell in cells):
        if (results := folder.results) is not None:
            metric = results["metric"]
            lines = (line for line in folder.metrics() if "val" in line)
            out.append({line["round"]: float(np.nanmean(np.array(line["val"][metric], float))) for line in lines})
    return out, metric


def draw_ranks(mean_ranks: Ranks, path: Path) -> None:
    """Mean ranks on a line; bars join rows that do not differ significantly."""
    order = sorted(mean_ranks.by_label.items(), key=lambda item: item[1])
    rows, half, joined = len(order), (len(order) + 1) // 2, groups(mean_ranks)
    first = 0.9 + 0.45 * len(joined)  # below the bars
    lower = 0.5 if rows % 2 == 0 else 0.0  # else the two lowest names would look like the ends of one line
    unit = 0.17  # inches: a line of text of 7 points and the space above it
    texts = [f"{label} ({mean:.2f})" for label, mean in order]
    side = 0.2 + 0.052 * max(map(len, texts))  # inches, beside the axis
    length = max(WIDTH - 2 * side, 1.2)
    per_inch = (rows - 1) / length
    figure, axes = _figure(unit * (first + half + lower + 2.2), width=length + 2 * side)
    figure.set_layout_engine("none")
    axes.set_position((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(1 - side * per_inch, rows + side * per_inch)
    axes.set_ylim(-first - half - lower + 0.3, 2.5)
    axes.plot([1, rows], [0, 0], "k-", linewidth=0.8)
    step = next(s for s in (1, 2, 5, 10, 20, 50) if (rows - 1) / s * 0.2 <= length)
    for rank in sorted({1, *range(step, rows + 1, step)} - ({step} if 1 < step < 1 + 0.2 * per_inch else set())):
        axes.plot([rank, rank], [0, 0.2], "k-", linewidth=0.8)
        axes.text(rank, 0.3, str(rank), ha="center", va="bottom", fontsize=7)
    end = min(1 + mean_ranks.critical, rows + side * per_inch)
    axes.plot([1, end], [1.5, 1.5], "k-", linewidth=1.2)
    axes.text((1 + end) / 2, 1.6, f"CD {mean_ranks.critical:.2f}", ha="center", va="bottom", fontsize=7)
    for i, ((_, mean), text) in enumerate(zip(order, texts, strict=True)):
        is_left = i < half
        height = -first - (i if is_left else rows - 1 - i + lower)
        at = 1 - 0.1 * per_inch if is_left else rows + 0.1 * per_inch
        axes.plot([mean, mean, at], [0, height, height], "k-", linewidth=0.6)
        place = {"ha": "right" if is_left else "left", "va": "center", "fontsize": 7}
        axes.text(at + (-0.04 if is_left else 0.04) * per_inch, height, text, **place)
    for i, group in enumerate(joined):
        ends = [mean_ranks.by_label[group[0]] - 0.04 * per_inch, mean_ranks.by_label[group[-1]] + 0.04 * per_inch]
        axes.plot(ends, [-0.5 - 0.45 * i] * 2, "k-", linewidth=2.2, solid_capstyle="butt")
    _save(figure, path)


def _figure(height: float, width: float = WIDTH) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=7)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    no_time = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(path.suffix, {})
    with rc_context({"pdf.fonttype": 42, "svg.hashsalt": "fedtailor"}):
        figure.savefig(path, dpi=300, metadata=no_time)
