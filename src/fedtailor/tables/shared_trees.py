"""Boosted trees that all sites share, where these are in one process: scikit-learn adds up their sums.

What is grown is what `algorithms._programs.boosting` grows over a federation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from fedtailor.algorithms._programs.boosting import (
    BINS,
    DEPTH,
    FARTHEST,
    FEWEST_IN_LEAF,
    LEAST_CURVATURE,
    MOST_TREES,
    RATE,
    RIDGE,
    Floats,
    binned,
    boosted_outputs,
    count_marks,
    count_trees,
    derivatives,
    edges_of_counts,
    nodes_of,
    outputs_of,
)
from fedtailor.numerics.blending import SURELY, row_losses
from fedtailor.tables.boosted_trees import Trees, join_trees

MOST_ROWS = 200_000  # that trees are grown on; evenly spaced at every site


@dataclass(frozen=True)
class SharedTrees:
    """Trees of all rows, and their outputs for every row by trees grown without its fold."""

    trees: Trees
    out_of_fold: Tensor  # [rows, outputs]; NaN where there is no fold


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
    values, outputs = x.double().numpy(), bases[0].shape[1]
    edges = edges_of_counts(count_marks(values))
    bins, is_binary = binned(values, edges), is_class and outputs == 2
    numbers = y.numpy() if is_class else y[:, 0].numpy()[:, None]
    step = -(-len(x) // MOST_ROWS)
    threads = torch.get_num_threads() if len(x) > 20_000 else 1
    made = []
    for base, part in zip(bases, parts, strict=True):
        scores = base.double().numpy()
        scores = scores[:, 1:] - scores[:, :1] if is_binary else scores.copy()
        made.append(_Boosting(bins, np.ascontiguousarray(scores), numbers, np.flatnonzero(part)[::step]))
    held = torch.from_numpy(folds >= 0)

    def held_out() -> Tensor:
        out = np.full_like(made[0].scores, np.nan)
        for fold, part in enumerate(made[1:]):
            out[folds == fold] = part.scores[folds == fold]
        return torch.from_numpy(out)

    def losses(scores: Tensor) -> Tensor:
        return row_losses(outputs_of(scores[held], is_class), y[held], is_class)

    before = best = held_out()
    first = losses(before)
    done = 0

    def grow(is_best: bool) -> float:
        nonlocal best, done
        best = held_out() if is_best else best
        for part in made:
            part.grow(edges, is_class, threads)
        check()
        done += 1
        progress(done - 1, MOST_TREES)
        return float(losses(held_out()).sum())

    with threadpool_limits(threads, user_api="openmp"):
        best_count = count_trees(float(first.sum()), grow)
    best = held_out() if best_count == done else best
    best_losses = losses(best)
    progress(MOST_TREES, MOST_TREES)
    gain = first - best_losses
    by_site = torch.zeros(int(site.max()) + 1, dtype=gain.dtype, device="cpu")
    by_site = by_site.index_add_(0, torch.from_numpy(site)[held], gain)
    spread = max(float((v - v.mean()).square().sum().sqrt()) for v in (gain, by_site))
    if not float(gain.sum()) > SURELY * spread:
        return None
    per_step = boosted_outputs(outputs)
    places = [1 if is_binary else output for output, _ in made[0].trees]
    kept = slice(0, best_count * per_step)
    trees = join_trees([tree.nodes for _, tree in made[0].trees[kept]], places[kept], outputs)
    added = best - before
    return SharedTrees(trees, torch.cat([torch.zeros_like(added), added], dim=1) if is_binary else added)


def trees_of_state(trees: Mapping[str, Tensor], center: Tensor, spread: Tensor, outputs: int) -> Trees:
    """The trees that a site of a federation keeps, for features and numbers as its rows have them."""
    kept, k = int(trees["count"]), boosted_outputs(outputs)
    features = len(trees["edges"])
    unit = float(spread[features]) if outputs == 1 else 1.0
    feature = trees["feature"][:kept].numpy()
    at = feature.clip(min=0)
    marks = trees["edges"].double().numpy()[at, trees["threshold"][:kept].numpy()]
    marks = marks * spread[:features].numpy()[at] + center[:features].numpy()[at]
    is_left_larger, values = (trees[name][:kept].numpy() for name in ("is_left_larger", "values"))
    nodes = [nodes_of(*tree) for tree in zip(feature, marks, is_left_larger, unit * values, strict=True)]
    return join_trees(nodes, [tree % k + (outputs == 2) for tree in range(kept)], outputs)
