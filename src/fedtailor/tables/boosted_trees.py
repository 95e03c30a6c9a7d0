"""Boosted trees at sites with enough rows: alone, and on top of the shared model. They predict without scikit-learn.

On top, trees see the shared model's outputs beside the features. For numbers they learn the residuals, for counts the
factor by which the shared model's rate is multiplied. They are stored as plain arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from fedtailor.errors import RunError
from fedtailor.experiments.store import CHANGED, part_of, read_json, read_tree, write_atomically, write_json, write_tree

NAMES = ("feature", "threshold", "left", "right", "value", "missing_left", "root", "output", "baseline")
DEEPEST = 64
Ensemble = Callable[[Tensor], Tensor]  # trees, or an equivalent module
TREES, ON_TOP, TREES_FOLDER = "trees alone", "trees on the shared model", "trees"
SHARED = "trees of all sites"
KINDS = (TREES, ON_TOP, SHARED)


@dataclass(frozen=True)
class Trees:
    """Nodes of all trees one after another; a leaf has itself on both sides."""

    feature: Tensor
    threshold: Tensor
    left: Tensor
    right: Tensor
    value: Tensor
    missing_left: Tensor
    root: Tensor  # first node of each tree
    output: Tensor  # to which each tree adds
    baseline: Tensor  # [outputs]

    @cached_property
    def depth(self) -> int:
        """Steps from a root to the deepest leaf."""
        at = self.root.unique()
        for steps in range(DEEPEST):
            at = at[self.left[at] != at]
            if not len(at):
                return steps
            at = torch.cat([self.left[at], self.right[at]]).unique()
        return DEEPEST

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, outputs]: numbers, or logits."""
        if self.compiled is None or x.device.type != "cpu" or x.shape[1] <= self.largest_feature:
            return self.sum_to_depth(x, self.depth)
        rows, none = x.detach().double().numpy(), np.zeros((0, 8), dtype=np.uint32)
        threads = 1 if len(rows) < WORTH_THREADS else torch.get_num_threads()
        places = np.zeros(rows.shape[1], dtype=np.uint32)
        out = np.tile(self.baseline.numpy(), (len(rows), 1))
        for output, tree in zip(self.output.tolist(), self.compiled, strict=True):
            out[:, output] += tree.predict(rows, none, places, threads)
        return torch.from_numpy(out)

    @cached_property
    def largest_feature(self) -> int:
        return int(self.feature.max()) if len(self.feature) else 0

    @cached_property
    def compiled(self) -> list[Any] | None:
        """The trees as scikit-learn predicts them; None where they do not stand one after another, parents first.

        Its code checks nothing: it would follow any node.
        """
        from sklearn.ensemble._hist_gradient_boosting.common import PREDICTOR_RECORD_DTYPE
        from sklearn.ensemble._hist_gradient_boosting.predictor import TreePredictor

        left, right, root = self.left.numpy(), self.right.numpy(), self.root.numpy()
        own, is_leaf = np.arange(len(left)), left == np.arange(len(left))
        ends = np.append(root[1:], len(left))
        if (len(root) and root[0] != 0) or (ends <= root).any() or (is_leaf != (right == own)).any():
            return None
        last = np.repeat(ends, ends - root)
        is_inside = (left > own) & (right > own) & (left < last) & (right < last) & (self.feature.numpy() >= 0)
        if not (is_leaf | is_inside).all():
            return None
        nodes = np.zeros(len(left), dtype=PREDICTOR_RECORD_DTYPE)
        first = np.repeat(root, ends - root)
        nodes["feature_idx"], nodes["num_threshold"] = self.feature.numpy(), self.threshold.numpy()
        nodes["left"], nodes["right"] = left - first, right - first
        nodes["missing_go_to_left"], nodes["is_leaf"] = self.missing_left.numpy() > 0, is_leaf
        nodes["value"] = self.value.numpy()
        none = np.zeros((0, 8), dtype=np.uint32)
        return [TreePredictor(nodes[a:b], none, none) for a, b in zip(root, ends, strict=True)]

    def sum_to_depth(self, x: Tensor, depth: int) -> Tensor:
        """The outputs at a fixed depth, which an exported graph needs."""
        x = x.double()
        at = self.root.expand(x.shape[0], -1).clone()  # [rows, trees]
        for _ in range(depth):
            value = x.gather(1, self.feature[at])
            goes_left = torch.where(value.isnan(), self.missing_left[at] > 0, value <= self.threshold[at])
            at = torch.where(goes_left, self.left[at], self.right[at])
        out = self.baseline.expand(x.shape[0], -1).clone()
        return out.index_add_(1, self.output, self.value[at])

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).contiguous() for name in NAMES}

    def save(self, path: Path) -> None:
        write_atomically(path, save(self.tensors, {"sha256": _digest(self.tensors)}))

    @staticmethod
    def read(path: Path, features: int, outputs: int) -> Trees:
        """Read what `save` wrote; invalid nodes raise a `RunError`."""
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in NAMES}
                check = (file.metadata() or {}).get("sha256")
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(f"{path}: not boosted trees that fedtailor wrote ({error})") from None
        if check != _digest(tensors):
            raise RunError(f"{path}: {CHANGED}", code="run.damaged")
        return validate_trees(tensors, features, outputs, str(path))


def validate_trees(tensors: Mapping[str, Tensor], features: int, outputs: int, origin: str) -> Trees:
    """Trees from the arrays of a file; invalid nodes raise a `RunError`."""
    if missing := [name for name in NAMES if name not in tensors]:
        raise RunError(f"{origin}: boosted trees without {', '.join(missing)}")
    trees = Trees(**{name: tensors[name] for name in NAMES})
    nodes = len(trees.feature)
    inside = [(trees.feature, features), (trees.output, outputs)]
    inside += [(v, nodes) for v in (trees.left, trees.right, trees.root)]
    whole = all(
        v.dtype == torch.int64 and v.dim() == 1 and (not len(v) or 0 <= int(v.min()) <= int(v.max()) < n)
        for v, n in inside
    )
    sizes = {len(getattr(trees, name)) for name in NAMES[:6]}
    if not whole or len(sizes) != 1 or trees.baseline.shape != (outputs,) or len(trees.root) != len(trees.output):
        raise RunError(f"{origin}: not boosted trees of {features} features and {outputs} outputs")
    return trees


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in tensors.items():
        digest.update(f"|{name}|{value.dtype}|{list(value.shape)}|".encode() + value.numpy().tobytes())
    return digest.hexdigest()


def join_trees(nodes_of_trees: Sequence[Any], outputs_of_trees: Sequence[int], outputs: int) -> Trees:
    """Trees of scikit-learn, by the output to which each adds, without a baseline."""
    held: dict[str, list[Any]] = {name: [] for name in NAMES[:6]}
    roots, count = [], 0
    for nodes in nodes_of_trees:
        own, leaf = np.arange(len(nodes)), nodes["is_leaf"].astype(bool)
        held["feature"].append(np.where(leaf, 0, nodes["feature_idx"]))
        held["threshold"].append(np.where(leaf, 0.0, nodes["num_threshold"]))
        held["left"].append(count + np.where(leaf, own, nodes["left"]))
        held["right"].append(count + np.where(leaf, own, nodes["right"]))
        held["value"].append(np.where(leaf, nodes["value"], 0.0))
        held["missing_left"].append(nodes["missing_go_to_left"])
        roots.append(count)
        count += len(nodes)
    arrays = {
        name: torch.from_numpy(np.concatenate(parts).astype(np.float64 if name in ("threshold", "value") else np.int64))
        for name, parts in held.items()
    }
    return Trees(
        **arrays,
        root=torch.tensor(roots, dtype=torch.int64),
        output=torch.tensor(list(outputs_of_trees), dtype=torch.int64),
        baseline=torch.zeros(outputs, dtype=torch.float64, device="cpu"),
    )


def trees_of(model: Any, outputs: int) -> Trees:
    """The trees of a HistGradientBoosting model on numbers; the logit of two classes becomes that of the second."""
    nodes = [predictor.nodes for stage in model._predictors for predictor in stage]
    places = [
        1 if outputs == 2 and len(stage) == 1 else output for stage in model._predictors for output in range(len(stage))
    ]
    baseline = np.zeros(outputs)
    first = np.ravel(model._baseline_prediction)
    baseline[-len(first) :] = first
    return replace(join_trees(nodes, places, outputs), baseline=torch.from_numpy(baseline))


@dataclass(frozen=True)
class TreeParts:
    """Trees beside a linear model, and the weight of each part; those of all sites are added to the linear model."""

    linear: float
    alone: tuple[float, Ensemble] | None = None
    on_top: tuple[float, Ensemble] | None = None
    shared: tuple[float, Ensemble] | None = None

    @property
    def by_kind(self) -> dict[str, tuple[float, Ensemble]]:
        parts = {TREES: self.alone, ON_TOP: self.on_top, SHARED: self.shared}
        return {kind: part for kind, part in parts.items() if part is not None}

    def mix(self, x: Tensor, base: Tensor, is_class: bool) -> Tensor:
        """Outputs of all parts together; `base`: outputs of the linear model."""
        base = base.double()
        if self.shared is not None:
            base = base + self.shared[0] * self.shared[1](x.double())
        base = base.log_softmax(1) if is_class else base
        out = self.linear * base
        for part, above in ((self.alone, None), (self.on_top, base)):
            if part is not None:
                out = out + part[0] * tree_outputs(part[1], x, above, is_class)
        return out


def tree_parts(path: Path, row: dict[str, Any], features: int, outputs: int, shared: Trees | None) -> TreeParts | None:
    """The trees of a site, as the record of a fit names them; none if it is served by a linear model."""
    weight = float(row.get("shared_trees", 0.0))
    if not row["trees"] and not weight:
        return None
    by_kind: dict[str, tuple[float, Trees]] = {}
    for kind, name in row["trees"].items():
        extra = outputs if kind == ON_TOP else 0
        trees = Trees.read(part_of(path / TREES_FOLDER, name), features + extra, outputs)
        by_kind[kind] = (float(row["parts"][kind]), trees)
    if weight and shared is None:
        raise RunError(f"{path}: names no file of the trees of all sites", code="run.damaged")
    of_all = (weight, shared) if weight and shared is not None else None
    return TreeParts(float(row["parts"].get("linear", 0.0)), by_kind.get(TREES), by_kind.get(ON_TOP), of_all)


def inputs_of(x: Tensor, base: Tensor | None) -> Tensor:
    """The inputs of trees: the features and, on top of a shared model, its outputs."""
    return x.double() if base is None else torch.cat([x.double(), base.double()], dim=1)


def tree_outputs(trees: Ensemble, x: Tensor, base: Tensor | None, is_class: bool) -> Tensor:
    """Log-probabilities, or numbers, on top of `base` if there is one."""
    out = trees(inputs_of(x, base))
    if is_class:
        return out.log_softmax(1)
    return out if base is None else out + base


KEPT = "kept-"
ENOUGH = 120  # rows of a site
FEWEST = 10  # rows of the second most frequent class, or with a count above 0
WORTH_THREADS = 10_000  # rows from which on threads are faster than their own upkeep; below, up to six times slower
MOST = 20_000  # rows that a fold's trees learn from; what is delivered learns from all


def has_enough_rows(y: Tensor, is_class: bool) -> bool:
    """Whether a site has enough rows for trees."""
    if len(y) < ENOUGH:
        return False
    if y.dim() == 2 and not y.is_floating_point():
        return int((y > 0).sum()) >= FEWEST
    return not is_class or (len(np.bincount(y.numpy())) > 1 and int(np.sort(np.bincount(y.numpy()))[-2]) >= FEWEST)


def fit_trees(x: Tensor, y: Tensor, base: Tensor | None, outputs: int, is_class: bool, seed: int) -> Trees:
    """Trees for one site; `base` are the shared model's outputs for these rows, from other rows."""
    threads = 1 if len(x) < WORTH_THREADS else None  # None: as many as there are
    with threadpool_limits(threads, user_api="openmp"):
        return _fit_trees(x, y, base, outputs, is_class, seed)


def _fit_trees(x: Tensor, y: Tensor, base: Tensor | None, outputs: int, is_class: bool, seed: int) -> Trees:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    rows = len(x)
    options: dict[str, Any] = {
        "random_state": seed % 2**32,
        "learning_rate": 0.05 if rows < 2000 else 0.1,
        "max_leaf_nodes": 6 if rows < 500 else 15 if rows < 5000 else 31,
        "min_samples_leaf": 10 if rows < 2000 else 20,
        "l2_regularization": 1.0,
        "max_iter": 100 if rows < 2000 else 300,
        "early_stopping": rows >= 2000,
    }
    inputs = inputs_of(x, base).numpy()
    kind = HistGradientBoostingClassifier if is_class else HistGradientBoostingRegressor
    if is_class:
        classes = np.unique(y.numpy())
        model = kind(**options).fit(inputs, np.searchsorted(classes, y.numpy()))
        return expand_classes(trees_of(model, len(classes)), classes, outputs)
    if not y.is_floating_point():  # counts
        rates = np.ones(rows) if base is None else base[:, 0].exp().numpy()
        model = kind(loss="poisson", **options).fit(inputs, y[:, 0].numpy() / rates, sample_weight=rates)
        return trees_of(model, 1)
    wanted = y[:, 0] if base is None else y[:, 0] - base[:, 0]
    return trees_of(kind(**options).fit(inputs, wanted.numpy()), 1)


def expand_classes(trees: Trees, classes: NDArray[np.int64], outputs: int) -> Trees:
    """The trees of a site without some classes, for all classes; missing ones get a low probability."""
    at = torch.from_numpy(classes)
    baseline = torch.full((outputs,), float(trees.baseline.min()) - 5.0, dtype=torch.float64, device="cpu")
    baseline[at] = trees.baseline
    return replace(trees, output=at[trees.output], baseline=baseline)


def load_or_fit_trees(
    folder: Path,
    rows: tuple[Tensor, Tensor],
    folds: NDArray[np.int64],
    base: Tensor | None,
    outputs: int,
    is_class: bool,
    seed: int,
    check: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Trees]:
    """Out-of-fold outputs and trees of one site; trees of the same rows are read from `folder`."""
    x, y = rows
    inputs = x.shape[1] + (0 if base is None else base.shape[1])
    digest = hashlib.blake2b(f"{version('scikit-learn')} {outputs} {is_class} {seed}".encode(), digest_size=12)
    for part in (x, y, *([] if base is None else [base]), torch.from_numpy(folds)):
        digest.update(f"|{part.dtype}|{list(part.shape)}|".encode() + part.contiguous().numpy().tobytes())
    entry = folder / f"{KEPT}{digest.hexdigest()}.json"
    if entry.exists():
        tensors = read_tree(folder, read_json(entry))
        return tensors.pop("out of fold"), validate_trees(tensors, inputs, outputs, str(entry))
    out_of_fold = cross_fit_trees(x, y, base, folds, outputs, is_class, seed, check)
    trees = fit_trees(x, y, base, outputs, is_class, seed)
    write_json(entry, write_tree(entry.with_suffix(".safetensors"), {"out of fold": out_of_fold} | trees.tensors))
    return out_of_fold, trees


def cross_fit_trees(
    x: Tensor,
    y: Tensor,
    base: Tensor | None,
    folds: NDArray[np.int64],
    outputs: int,
    is_class: bool,
    seed: int,
    check: Callable[[], None] = lambda: None,
) -> Tensor:
    """Out-of-fold outputs of trees at one site; `check` is called after each fold, and may end it by an exception."""
    out = torch.full((len(x), outputs), torch.nan, dtype=torch.float64, device="cpu")
    for fold in np.unique(folds):
        held = torch.from_numpy(folds == fold)
        rest = (~held).nonzero()[:, 0]
        rest = rest[:: -(-len(rest) // MOST)]  # evenly spaced
        trees = fit_trees(x[rest], y[rest], None if base is None else base[rest], outputs, is_class, seed)
        out[held] = tree_outputs(trees, x[held], None if base is None else base[held], is_class)
        check()
    return out
