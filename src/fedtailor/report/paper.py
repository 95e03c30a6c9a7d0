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
            ps = {test.label: test.holm for test in tests}
            write_atomically(self.latex, narrow(rows, self.columns, ps).encode())
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
    """The metric on validation data by round: mean over clients, then over seeds, and its spread over seeds."""
    figure, axes = _figure(2.6)
    metric = ""
    for i, label in enumerate(dict.fromkeys(cell.label for cell in grid)):
        each, metric = _curves_of([cell for cell in grid if cell.label == label])
        rounds = sorted(set.intersection(*(set(curve) for curve in each))) if each else []
        if not rounds:
            continue
        values = np.array([[curve[round] for round in rounds] for curve in each])
        mean = values.mean(0)
        (line,) = axes.plot(rounds, mean, LINES[i % len(LINES)], linewidth=1, label=label)
        if len(values) > 1:
            spread = values.std(0, ddof=1)
            axes.fill_between(rounds, mean - spread, mean + spread, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xlabel("round")
    axes.set_ylabel(f"validation {metric}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=7)
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
    first = 0.6 + 0.25 * len(joined)  # below the bars
    figure, axes = _figure(0.6 + 0.2 * (half + first))
    axes.set_axis_off()
    axes.set_xlim(1 - 0.6 * rows, rows + 0.6 * rows)
    axes.set_ylim(-first - half, 2.4)
    axes.plot([1, rows], [0, 0], "k-", linewidth=0.8)
    for rank in range(1, rows + 1):
        axes.plot([rank, rank], [0, 0.15], "k-", linewidth=0.8)
        axes.text(rank, 0.25, str(rank), ha="center", va="bottom", fontsize=7)
    axes.plot([1, 1 + mean_ranks.critical], [1.5, 1.5], "k-", linewidth=1.2)
    axes.text(1 + mean_ranks.critical / 2, 1.6, f"CD {mean_ranks.critical:.2f}", ha="center", va="bottom", fontsize=7)
    for i, (label, mean) in enumerate(order):
        is_left = i < half
        height, end = -first - (i if is_left else rows - 1 - i), 0.9 if is_left else rows + 0.1
        axes.plot([mean, mean, end], [0, height, height], "k-", linewidth=0.6)
        side = {"ha": "right" if is_left else "left", "va": "center", "fontsize": 7}
        axes.text(end + (-0.05 if is_left else 0.05), height, f"{label} ({mean:.2f})", **side)
    for i, group in enumerate(joined):
        ends = [mean_ranks.by_label[group[0]] - 0.05, mean_ranks.by_label[group[-1]] + 0.05]
        axes.plot(ends, [-0.3 - 0.25 * i] * 2, "k-", linewidth=2.2, solid_capstyle="butt")
    _save(figure, path)


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
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
