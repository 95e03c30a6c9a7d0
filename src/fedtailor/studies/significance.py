"""Whether rows of a comparison differ by more than chance: paired over clients, corrected for how often it is asked.

Wilcoxon's signed ranks of one row against each other, with Holm's correction; and ranks of all rows, by Friedman's test
and Nemenyi's critical difference (Demsar, JMLR 2006). Pairs are clients: with `data.seed` they are the same in all runs
and each counts once, with its mean over seeds; else each seed deals other clients, and each of them counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

from fedtailor.experiments.store import RESULTS, read_json
from fedtailor.studies.grid import Cell

LEVEL = 0.05


@dataclass(frozen=True)
class Blocks:
    """The same clients under every row; higher is better."""

    labels: tuple[str, ...]
    values: NDArray[np.float64]  # [rows, clients]
    seeds: tuple[int, ...]
    is_pooled: bool  # over seeds that have other clients each


@dataclass(frozen=True)
class Paired:
    label: str
    better: int  # clients for which the reference is better
    worse: int
    p: float  # of Wilcoxon's test, two-sided
    holm: float  # corrected for the number of rows


@dataclass(frozen=True)
class Ranks:
    """Mean ranks, 1 is best, and by how much two must differ."""

    by_label: dict[str, float]
    p: float  # of Friedman's test: that all rows are alike
    critical: float


def blocks_of(grid: Sequence[Cell]) -> Blocks | None:
    """Test figures by row and client, of the seeds that all rows have finished; None without a client in common."""
    labels = tuple(dict.fromkeys(cell.label for cell in grid))
    results = {(c.label, c.seed): read_json(c.folder / RESULTS) for c in grid if (c.folder / RESULTS).exists()}
    seeds = tuple(s for s in dict.fromkeys(c.seed for c in grid) if all((label, s) in results for label in labels))
    if not seeds or len(labels) < 2:
        return None
    metric = results[labels[0], seeds[0]]["metric"]
    sign = 1 if results[labels[0], seeds[0]]["higher_is_better"] else -1
    each = [[results[label, seed]["last"]["clients"][metric] for seed in seeds] for label in labels]
    is_pooled = len(seeds) > 1 and grid[0].config.data.seed is None
    if is_pooled:
        values = np.array([[v for seed in row for v in seed] for row in each], dtype=float)
    else:
        values = np.array([np.mean(np.array(row, dtype=float), axis=0) for row in each])
    values = sign * values[:, np.isfinite(values).all(0)]
    return Blocks(labels, values, seeds, is_pooled) if values.shape[1] else None


def against(blocks: Blocks, label: str = "") -> list[Paired]:
    """Every other row against one: the named, or the first."""
    at = blocks.labels.index(label or blocks.labels[0])
    others = [i for i in range(len(blocks.labels)) if i != at]
    apart = [blocks.values[at] - blocks.values[i] for i in others]
    ps = [signed_ranks(d) for d in apart]
    return [
        Paired(blocks.labels[i], int((d > 0).sum()), int((d < 0).sum()), p, corrected)
        for i, d, p, corrected in zip(others, apart, ps, holm(ps), strict=True)
    ]


def signed_ranks(differences: NDArray[np.float64]) -> float:
    """Wilcoxon's two-sided p: exact for few clients without ties; differences of 0 are ranked, then dropped (Pratt)."""
    if not differences.any():
        return 1.0
    is_plain = bool(differences.all()) and len(set(np.abs(differences))) == len(differences)
    how = "exact" if is_plain and len(differences) <= 50 else "asymptotic"
    return float(stats.wilcoxon(differences, zero_method="pratt", method=how).pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """Corrected for the number of tests: the smallest times all of them, the next times one less, never falling."""
    out, largest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        out[i] = largest
    return out


def ranks(blocks: Blocks) -> Ranks | None:
    """Of three rows or more; None for two, which a paired test compares."""
    rows, clients = blocks.values.shape
    if rows < 3 or clients < 2:
        return None
    each = stats.rankdata(-blocks.values, axis=0)
    means = dict(zip(blocks.labels, each.mean(1).tolist(), strict=True))
    alike = bool((blocks.values == blocks.values[0]).all())
    p = 1.0 if alike else float(stats.friedmanchisquare(*blocks.values).pvalue)
    q = float(stats.studentized_range.ppf(1 - LEVEL, rows, math.inf)) / math.sqrt(2)
    return Ranks(means, p, q * math.sqrt(rows * (rows + 1) / (6 * clients)))


def groups(mean_ranks: Ranks) -> list[tuple[str, ...]]:
    """Largest sets of neighbouring rows that do not differ significantly, best first."""
    rank = mean_ranks.by_label
    order = sorted(rank, key=rank.__getitem__)
    out: list[tuple[str, ...]] = []
    for i, first in enumerate(order):
        last = max(j for j in range(i, len(order)) if rank[order[j]] - rank[first] <= mean_ranks.critical)
        if last > i and (not out or order[last] not in out[-1]):
            out.append(tuple(order[i : last + 1]))
    return out


def words(blocks: Blocks, label: str = "") -> list[str]:
    """Lines of Markdown that stand below a table."""
    name, clients, seeds = label or blocks.labels[0], blocks.values.shape[1], len(blocks.seeds)
    over = f"{clients} clients of {seeds} seeds" if blocks.is_pooled else f"{clients} clients"
    over += f", each with its mean over {seeds} seeds" if seeds > 1 and not blocks.is_pooled else ""
    title = f"{name} against each other row: Wilcoxon's signed ranks over {over};"
    lines = ["", title, "two-sided, with Holm's correction.", ""]
    lines += ["| against | better | worse | p | p (Holm) |", "|---|---:|---:|---:|---:|"]
    for t in against(blocks, label):
        lines.append(f"| {t.label} | {t.better} | {t.worse} | {probability(t.p)} | {probability(t.holm)} |")
    if (mean_ranks := ranks(blocks)) is None:
        return lines
    order = sorted(mean_ranks.by_label.items(), key=lambda item: item[1])
    lines += ["", f"Mean ranks (1 is best), Friedman's p {probability(mean_ranks.p)}:", ""]
    lines += [", ".join(f"{one} {rank:.2f}" for one, rank in order) + ".", ""]
    lines += [f"Ranks that differ by less than {mean_ranks.critical:.2f} are not told apart (Nemenyi, 0.05)."]
    return lines


def probability(p: float) -> str:
    """Three digits, and no zeros that are none."""
    return "< 0.0001" if p < 1e-4 else f"{p:.3g}"
