"""What a comparison leaves for a paper: a table, figures, and tests of whether rows differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.experiments.store import write_atomically
from fedtailor.report import paper
from fedtailor.studies import significance
from fedtailor.studies.compare import Row
from fedtailor.studies.grid import Cell
from fedtailor.studies.result_tables import check_columns, narrow


@dataclass(frozen=True)
class Paper:
    """Which files are wanted."""

    latex: Path | None = None
    columns: tuple[str, ...] = ()
    figure: Path | None = None
    ranks: Path | None = None

    @property
    def options(self) -> dict[str, Any]:
        """As they were given on the command line."""
        return {"latex": self.latex, "figure": self.figure, "ranks": self.ranks}

    def check(self) -> None:
        """Refuse before anything runs what could not be written at the end."""
        check_columns(self.columns)
        for path in (self.figure, self.ranks):
            if path is not None:
                paper.check(path)

    def write(self, grid: Sequence[Cell], rows: Sequence[Row], against: str) -> list[str]:
        """Write them; returns the tests in words."""
        blocks = significance.blocks_of(grid)
        tests = [] if blocks is None else significance.against(blocks, against)
        if self.latex is not None:
            ps = {test.label: test.holm for test in tests}
            write_atomically(self.latex, narrow(rows, self.columns, ps).encode())
        if self.figure is not None:
            paper.curves(grid, self.figure)
        if self.ranks is not None and blocks is not None and (mean_ranks := significance.ranks(blocks)) is not None:
            paper.critical(mean_ranks, self.ranks)
        return [] if blocks is None else significance.words(blocks, against)
