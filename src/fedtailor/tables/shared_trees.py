"""Boosted trees that all sites share, on what a mixed model leaves: mixed-effects boosting.

As Sigrist, J. Mach. Learn. Res. 23, 2022, for the model: an effect of the features that all sites share, and random
effects of each site. Trees are grown by Newton boosting on histograms: every split depends on sums over sites alone, of
gradients and curvatures by node, feature and bin. Here, where the sites of a fit are in one process, scikit-learn adds
them up; bins come from summed histograms. How many trees there are is settled by folds, all of which are boosted side
by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from fedtailor.numerics.blending import ROUNDING, SURELY, row_losses
from fedtailor.tables.boosted_trees import Trees, join_trees

Floats = NDArray[np.float64]
MARKS = np.linspace(-6.0, 6.0, 481)  # of standardised features, between which histograms are summed
BINS = 64
RATE, DEPTH, MOST_TREES, PATIENCE = 0.1, 5, 300, 15
FEWEST_IN_LEAF, RIDGE, LEAST_CURVATURE = 20, 1.0, 1e-3
FEWEST_ROWS = 200  # of all sites
MOST_ROWS = 200_000  # that trees are grown on; evenly spaced at every site
FARTHEST = 4.0  # of a leaf's step, in logits or logarithms of rates


@dataclass(frozen=True)
class SharedTrees:
    """Trees of all rows, and their outputs for every row by trees grown without its fold."""

    trees: Trees
    out_of_fold: Tensor  # [rows, outputs]; NaN where there is no fold


def bin_edges(x: Tensor) -> list[Floats]:
    """Of each feature where its bins end, from a histogram over the rows of all sites."""
    values, edges = x.double().numpy(), []
    for column in values.T:
        counts = np.histogram(column.clip(MARKS[0], MARKS[-1]), MARKS)[0]
        used = np.flatnonzero(counts)
        shares = np.cumsum(counts) / max(int(counts.sum()), 1)
        at = used if len(used) <= BINS else np.unique(np.searchsorted(shares, np.arange(1, BINS) / BINS))
        edges.append(MARKS[1:][at[at < used[-1]]])
    return edges


def binned(x: Tensor, edges: list[Floats]) -> NDArray[np.uint8]:
    """The bin of every value [rows, features]."""
    values = x.double().numpy()
    columns = [np.searchsorted(edge, values[:, j]).astype(np.uint8) for j, edge in enumerate(edges)]
    return np.asfortranarray(np.stack(columns, axis=1))


def derivatives(scores: Floats, y: NDArray[Any], is_class: bool) -> tuple[Floats, Floats]:
    """Gradient and curvature of every row's loss by its scores [rows, boosted outputs]."""
    if is_class and scores.shape[1] == 1:
        p = 1 / (1 + np.exp(-scores))
        return p - y[:, None], p * (1 - p)
    if is_class:
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        return p - np.eye(p.shape[1])[y], p * (1 - p)
    if y.dtype.kind in "iu":
        rate = np.exp(np.minimum(scores, 30.0))
        return rate - y, rate
    return scores - y, np.ones_like(scores)


class _Boosting:
    """The trees of one part of the rows, which grow one after another."""

    def __init__(self, bins: NDArray[np.uint8], scores: Floats, y: NDArray[Any], grown: NDArray[np.intp]) -> None:
        self.bins, self.scores, self.y, self.grown = bins, scores, y, grown
        self.own = np.asfortranarray(bins[grown])
        self.trees: list[tuple[int, Any]] = []

    def grow(self, edges: list[Floats], is_class: bool, threads: int) -> None:
        """One more tree for each output."""
        from sklearn.ensemble._hist_gradient_boosting.grower import TreeGrower

        gradients, curvatures = derivatives(self.scores[self.grown], self.y[self.grown], is_class)
        for output in range(self.scores.shape[1]):
            grower = TreeGrower(
                self.own,
                np.ascontiguousarray(gradients[:, output], dtype=np.float32),
                np.ascontiguousarray(curvatures[:, output], dtype=np.float32),
                max_depth=DEPTH,
                min_samples_leaf=FEWEST_IN_LEAF,
                min_hessian_to_split=LEAST_CURVATURE,
                l2_regularization=RIDGE,
                n_bins=BINS + 1,
                n_bins_non_missing=np.array([len(edge) + 1 for edge in edges], dtype=np.uint32),
                shrinkage=RATE,
                n_threads=threads,
            )
            grower.grow()
            tree = grower.make_predictor(edges)
            tree.nodes["value"] = np.clip(tree.nodes["value"], -RATE * FARTHEST, RATE * FARTHEST)
            self.trees.append((output, tree))
            self.scores[:, output] += tree.predict_binned(self.bins, BINS, threads)


def fit_shared_trees(
    x: Tensor,
    y: Tensor,
    bases: list[Tensor],
    folds: NDArray[np.int64],
    site: NDArray[np.int64],
    is_class: bool,
    check: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> SharedTrees | None:
    """Trees on what a mixed model leaves; None where it is not sure, over rows and over sites, that they help out of
    fold: what one large site alone has is not shared.

    bases: outputs of the model for all rows [rows, outputs], trained on all of them and then without each fold.
    """
    parts = [np.ones(len(x), dtype=bool), *(folds != fold for fold in range(int(folds.max()) + 1))]
    edges, outputs = bin_edges(x), bases[0].shape[1]
    bins, is_binary = binned(x, edges), is_class and outputs == 2
    numbers = y.numpy() if is_class else y[:, 0].numpy()[:, None]
    step = -(-len(x) // MOST_ROWS)
    threads = torch.get_num_threads() if len(x) > 20_000 else 1
    made = []
    for base, part in zip(bases, parts, strict=True):
        scores = base.double().numpy()
        scores = scores[:, 1:] - scores[:, :1] if is_binary else scores.copy()
        made.append(_Boosting(bins, np.ascontiguousarray(scores), numbers, np.flatnonzero(part)[::step]))
    held = torch.from_numpy(folds >= 0)
    started = np.stack([part.scores for part in made[1:]])

    def held_scores() -> Tensor:
        out = np.full_like(made[0].scores, np.nan)
        for fold, part in enumerate(made[1:]):
            out[folds == fold] = part.scores[folds == fold]
        return torch.from_numpy(out)

    def losses() -> Tensor:
        scores = held_scores()[held]
        scores = torch.cat([torch.zeros_like(scores), scores], dim=1) if is_binary else scores
        return row_losses(scores.log_softmax(1) if is_class else scores, y[held], is_class)

    first = best_losses = losses()
    best, best_count, best_scores = float(first.sum()), 0, held_scores()
    with threadpool_limits(threads, user_api="openmp"):
        for count in range(1, MOST_TREES + 1):
            for part in made:
                part.grow(edges, is_class, threads)
            check()
            progress(count - 1, MOST_TREES)
            now = losses()
            if float(now.sum()) < best - ROUNDING * abs(best):
                best, best_count, best_scores, best_losses = float(now.sum()), count, held_scores(), now
            elif count - best_count >= PATIENCE:
                break
    progress(MOST_TREES, MOST_TREES)
    gain = first - best_losses
    by_site = torch.zeros(int(site.max()) + 1, dtype=gain.dtype, device="cpu")
    by_site = by_site.index_add_(0, torch.from_numpy(site)[held], gain)
    spread = max(float((v - v.mean()).square().sum().sqrt()) for v in (gain, by_site))
    if not float(gain.sum()) > SURELY * spread:
        return None
    per_step = made[0].scores.shape[1]
    places = [1 if is_binary else output for output, _ in made[0].trees]
    kept = slice(0, best_count * per_step)
    trees = join_trees([tree.nodes for _, tree in made[0].trees[kept]], places[kept], outputs)
    before = np.full_like(best_scores.numpy(), np.nan)
    for fold in range(len(started)):
        before[folds == fold] = started[fold][folds == fold]
    added = best_scores - torch.from_numpy(before)
    return SharedTrees(trees, torch.cat([torch.zeros_like(added), added], dim=1) if is_binary else added)
