"""Mixed-effects boosting by sums: trees that all sites share, on what a mixed model leaves at each of them.

As Sigrist, J. Mach. Learn. Res. 23, 2022, for the model: an effect of the features that all sites share, and random
effects of each site. Trees are grown level by level by Newton boosting on histograms. A site sends, for each node,
feature and bin, the sums of its rows' gradients and curvatures and their number; scikit-learn finds the best splits of
the sums over sites. The trees of all rows and those without each fold grow side by side: every exchange serves all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.numerics.blending import ROUNDING

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MARKS = np.linspace(-6.0, 6.0, 481)  # of standardised features, between which histograms are summed
BINS = 64
RATE, DEPTH, MOST_TREES, PATIENCE = 0.1, 5, 300, 15
FEWEST_IN_LEAF, RIDGE, LEAST_CURVATURE = 20, 1.0, 1e-3
FEWEST_ROWS = 200  # of all sites
FARTHEST = 4.0  # of a leaf's step, in logits or logarithms of rates
LEAVES, SPLITS = 2**DEPTH, 2**DEPTH - 1
FAR = 1e300  # in place of an edge that is not there
NO_SPLIT = -1  # the feature of a node that is a leaf, or is not there


def boosted_outputs(outputs: int) -> int:
    """Of two classes the logit of the second is boosted."""
    return 1 if outputs == 2 else outputs


def count_marks(x: Floats) -> Floats:
    """Rows of each feature between the marks [features, marks - 1]."""
    inside = x.clip(MARKS[0], MARKS[-1])
    return np.stack([np.histogram(column, MARKS)[0] for column in inside.T]).astype(np.float64)


def edges_of_counts(counts: Floats) -> list[Floats]:
    """Of each feature where its bins end, from a histogram over the rows of all sites."""
    edges = []
    for own in counts:
        used = np.flatnonzero(own)
        shares = np.cumsum(own) / max(float(own.sum()), 1.0)
        at = used if len(used) <= BINS else np.unique(np.searchsorted(shares, np.arange(1, BINS) / BINS))
        edges.append(MARKS[1:][at[at < used[-1]]])
    return edges


def binned(x: Floats, edges: list[Floats]) -> NDArray[np.uint8]:
    """The bin of every value [rows, features]."""
    columns = [np.searchsorted(edge, x[:, j]).astype(np.uint8) for j, edge in enumerate(edges)]
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


def count_trees(first: float, grow: Callable[[bool], float]) -> int:
    """How many trees have the least loss out of fold. `grow` adds one to every part, told whether those before it are
    the best so far, and returns the loss."""
    best, at = first, 0
    for count in range(1, MOST_TREES + 1):
        now = grow(at == count - 1)
        if now < best - ROUNDING * abs(best):
            best, at = now, count
        elif count - at >= PATIENCE:
            break
    return at


# at a site


def histograms(
    bins: NDArray[np.uint8], scores: Floats, y: NDArray[Any], is_class: bool, node: Ints, rows: Floats, nodes: int
) -> Floats:
    """Sums of gradients and curvatures, and rows, by part, output, node, feature and bin.

    scores: [parts, rows, outputs]. node: [parts, outputs, rows], `nodes` or more where a row is in none. rows: [parts,
    rows], 1 where a row counts.
    """
    from sklearn.ensemble._hist_gradient_boosting.histogram import HistogramBuilder

    parts, _, outputs = scores.shape
    out = np.zeros((parts, outputs, nodes, bins.shape[1], BINS, 3))
    for part in range(parts):
        both = [v.astype(np.float32) for v in derivatives(scores[part], y, is_class)]
        for output in range(outputs):
            gradients, curvatures = (np.ascontiguousarray(v[:, output]) for v in both)
            builder = HistogramBuilder(bins, BINS + 1, gradients, curvatures, False, 1)
            for at in range(nodes):
                inside = np.flatnonzero((node[part, output] == at) & (rows[part] > 0)).astype(np.uint32)
                if len(inside):
                    found = np.asarray(builder.compute_histograms_brute(inside, None))[:, :BINS]
                    names = ("sum_gradients", "sum_hessians", "count")
                    out[part, output, at] = np.stack([found[name] for name in names], axis=-1)
    return out


def descend(bins: NDArray[np.uint8], node: Ints, feature: Ints, threshold: Ints) -> Ints:
    """The nodes of rows one level down, by the splits [parts, outputs, nodes]; a leaf's rows go to its first child."""
    parts, outputs, rows = node.shape
    p, o = np.arange(parts)[:, None, None], np.arange(outputs)[None, :, None]
    at, limit = feature[p, o, node], threshold[p, o, node]
    values = bins[np.arange(rows)[None, None, :], at.clip(min=0)]
    return 2 * node + ((at != NO_SPLIT) & (values > limit))


# at the server


@dataclass
class _Node:
    """A node that may be split: its sums, and its value."""

    rows: int
    gradients: float
    curvatures: float
    value: float


class GrowingTree:
    """A tree that grows by the sums over sites of one level after the other."""

    def __init__(self, edges: list[Floats]) -> None:
        from sklearn.ensemble._hist_gradient_boosting.splitting import Splitter

        features = len(edges)
        none = np.zeros(features, dtype=np.uint8)
        self.splitter = Splitter(
            X_binned=np.zeros((1, features), dtype=np.uint8, order="F"),
            n_bins_non_missing=np.array([len(edge) + 1 for edge in edges], dtype=np.uint32),
            missing_values_bin_idx=BINS,
            has_missing_values=none,
            is_categorical=none,
            monotonic_cst=np.zeros(features, dtype=np.int8),
            l2_regularization=RIDGE,
            min_hessian_to_split=LEAST_CURVATURE,
            min_samples_leaf=FEWEST_IN_LEAF,
            min_gain_to_split=0.0,
            hessians_are_constant=False,
            n_threads=1,
        )
        self.feature = np.full(SPLITS, NO_SPLIT, dtype=np.int64)  # of all levels, one after the other
        self.threshold = np.zeros(SPLITS, dtype=np.int64)
        self.is_left_larger = np.zeros(SPLITS, dtype=bool)
        self.values = np.zeros(LEAVES)  # of the deepest level; a leaf above it is its first descendant there
        self.nodes: dict[int, _Node] | None = None  # of this level, that are open

    def split(self, level: int, sums: Floats) -> tuple[Ints, Ints]:
        """Split the open nodes of a level by their sums [nodes, features, bins, 3]; what was split, and where."""
        from sklearn.ensemble._hist_gradient_boosting.common import HISTOGRAM_DTYPE

        if self.nodes is None:
            root = sums[0, 0].sum(0)
            self.nodes = {0: _Node(round(root[2]), root[0], root[1], 0.0)}
        first, below = 2**level - 1, dict[int, _Node]()
        for at, node in self.nodes.items():
            found = None
            if node.rows >= 2 * FEWEST_IN_LEAF and node.curvatures >= LEAST_CURVATURE:
                held = np.zeros((sums.shape[1], BINS + 1), dtype=HISTOGRAM_DTYPE)
                held["sum_gradients"][:, :BINS], held["sum_hessians"][:, :BINS] = sums[at, ..., 0], sums[at, ..., 1]
                held["count"][:, :BINS] = np.rint(sums[at, ..., 2]).clip(min=0)
                found = self.splitter.find_node_split(node.rows, held, node.gradients, node.curvatures, node.value)
            if found is None or found.gain <= 0:
                self._end(level, at, node.value)
                continue
            self.feature[first + at], self.threshold[first + at] = found.feature_idx, found.bin_idx
            left = _Node(found.n_samples_left, found.sum_gradient_left, found.sum_hessian_left, found.value_left)
            right = _Node(found.n_samples_right, found.sum_gradient_right, found.sum_hessian_right, found.value_right)
            self.is_left_larger[first + at] = left.rows > right.rows
            for child, own in ((2 * at, left), (2 * at + 1, right)):
                if level + 1 == DEPTH:
                    self._end(DEPTH, child, own.value)
                else:
                    below[child] = own
        self.nodes = below
        return self.feature[first : 2 * first + 1], self.threshold[first : 2 * first + 1]

    def _end(self, level: int, at: int, value: float) -> None:
        self.values[at << (DEPTH - level)] = np.clip(RATE * value, -RATE * FARTHEST, RATE * FARTHEST)


NODE = np.dtype(
    [(name, "f8") for name in ("num_threshold", "value")]
    + [(name, "i8") for name in ("feature_idx", "left", "right", "missing_go_to_left", "is_leaf")]
)


def nodes_of(feature: Ints, threshold: Floats, is_left_larger: NDArray[Any], values: Floats) -> NDArray[Any]:
    """The nodes of a tree, parents first, with the fields of scikit-learn's."""
    out: list[tuple[Any, ...]] = []

    def add(level: int, at: int) -> int:
        own, place = len(out), 2**level - 1 + at
        out.append((0.0, 0.0, 0, 0, 0, 0, 1))
        if level == DEPTH or feature[place] == NO_SPLIT:
            out[own] = (0.0, float(values[at << (DEPTH - level)]), 0, 0, 0, 0, 1)
        else:
            left, right = add(level + 1, 2 * at), add(level + 1, 2 * at + 1)
            out[own] = (float(threshold[place]), 0.0, int(feature[place]), left, right, int(is_left_larger[place]), 0)
        return own

    add(0, 0)
    return np.array(out, dtype=NODE)


def held_scores(scores: Tensor, fold: Tensor) -> Tensor:
    """Of every row the scores [rows, outputs] of the part [parts, rows, outputs] that was grown without its fold."""
    return scores[(fold + 1).clamp(min=0), torch.arange(scores.shape[1], device=scores.device)]


def outputs_of(scores: Tensor, is_class: bool) -> Tensor:
    """Log-probabilities, logarithms of rates, or numbers."""
    if not is_class:
        return scores
    both = torch.cat([torch.zeros_like(scores), scores], dim=1) if scores.shape[1] == 1 else scores
    return both.log_softmax(1)
