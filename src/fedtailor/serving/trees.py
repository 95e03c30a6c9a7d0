"""Boosted trees as plain arrays: made of scikit-learn's, saved as tensors, and predicted without it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedtailor.errors import RunError
from fedtailor.experiments.store import CHANGED, write_atomically
from fedtailor.serving.described import part_of

NAMES = ("feature", "threshold", "left", "right", "value", "missing_left", "root", "output", "baseline")
DEEPEST = 64
Ensemble = Callable[[Tensor], Tensor]  # trees, or a module that does the same
TREES, ON_TOP, TREES_FOLDER = "trees alone", "trees on the shared model", "trees"


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
        return self.summed(x, self.depth)

    def summed(self, x: Tensor, depth: int) -> Tensor:
        """The same with a depth that is known, as a graph needs it."""
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
        """All arrays by name."""
        return {name: getattr(self, name).contiguous() for name in NAMES}

    def save(self, path: Path) -> None:
        write_atomically(path, save(self.tensors, {"sha256": _digest(self.tensors)}))

    @staticmethod
    def read(path: Path, features: int, outputs: int) -> Trees:
        """What `save` wrote; nodes that lead nowhere are a `RunError`."""
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in NAMES}
                check = (file.metadata() or {}).get("sha256")
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(f"{path}: not boosted trees that fedtailor wrote ({error})") from None
        if check != _digest(tensors):
            raise RunError(f"{path}: {CHANGED}", code="run.damaged")
        return checked(tensors, features, outputs, str(path))


def checked(tensors: Mapping[str, Tensor], features: int, outputs: int, origin: str) -> Trees:
    """Trees of arrays out of a file; nodes that lead nowhere are a `RunError`."""
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


def trees_of(model: Any, outputs: int) -> Trees:
    """The trees of a HistGradientBoosting model on numbers; the logit of two classes becomes that of the second."""
    held: dict[str, list[Any]] = {name: [] for name in NAMES[:6]}
    roots, places, count = [], [], 0
    for stage in model._predictors:
        for output, predictor in enumerate(stage):
            nodes = predictor.nodes
            own = np.arange(len(nodes))
            leaf = nodes["is_leaf"].astype(bool)
            held["feature"].append(np.where(leaf, 0, nodes["feature_idx"]))
            held["threshold"].append(np.where(leaf, 0.0, nodes["num_threshold"]))
            held["left"].append(count + np.where(leaf, own, nodes["left"]))
            held["right"].append(count + np.where(leaf, own, nodes["right"]))
            held["value"].append(np.where(leaf, nodes["value"], 0.0))
            held["missing_left"].append(nodes["missing_go_to_left"])
            roots.append(count)
            places.append(1 if outputs == 2 and len(stage) == 1 else output)
            count += len(nodes)
    baseline = np.zeros(outputs)
    first = np.ravel(model._baseline_prediction)
    baseline[-len(first) :] = first
    arrays = {
        name: torch.from_numpy(np.concatenate(parts).astype(np.float64 if name in ("threshold", "value") else np.int64))
        for name, parts in held.items()
    }
    return Trees(
        **arrays,
        root=torch.tensor(roots, dtype=torch.int64),
        output=torch.tensor(places, dtype=torch.int64),
        baseline=torch.from_numpy(baseline),
    )


@dataclass(frozen=True)
class TreeParts:
    """Trees beside a linear model, and the weight of each part."""

    linear: float
    alone: tuple[float, Ensemble] | None = None
    on_top: tuple[float, Ensemble] | None = None

    @property
    def by_kind(self) -> dict[str, tuple[float, Ensemble]]:
        """Weight and trees of the kinds that there are."""
        parts = {TREES: self.alone, ON_TOP: self.on_top}
        return {kind: part for kind, part in parts.items() if part is not None}

    def mixed(self, x: Tensor, base: Tensor, is_class: bool) -> Tensor:
        """Outputs of all parts together; `base` is what the linear model says."""
        base = base.double().log_softmax(1) if is_class else base.double()
        out = self.linear * base
        for part, above in ((self.alone, None), (self.on_top, base)):
            if part is not None:
                out = out + part[0] * tree_outputs(part[1], x, above, is_class)
        return out


def tree_parts(path: Path, row: dict[str, Any], features: int, outputs: int) -> TreeParts | None:
    """The trees of a site, as the record of a fit names them; none if it is served by a linear model."""
    if not row["trees"]:
        return None
    by_kind: dict[str, tuple[float, Trees]] = {}
    for kind, name in row["trees"].items():
        extra = outputs if kind == ON_TOP else 0
        trees = Trees.read(part_of(path / TREES_FOLDER, name), features + extra, outputs)
        by_kind[kind] = (float(row["parts"][kind]), trees)
    return TreeParts(float(row["parts"].get("linear", 0.0)), by_kind.get(TREES), by_kind.get(ON_TOP))


def inputs_of(x: Tensor, base: Tensor | None) -> Tensor:
    """What trees see: the features and, on top of a shared model, what it says."""
    return x.double() if base is None else torch.cat([x.double(), base.double()], dim=1)


def tree_outputs(trees: Ensemble, x: Tensor, base: Tensor | None, is_class: bool) -> Tensor:
    """Log-probabilities, or numbers, on top of `base` if there is one."""
    out = trees(inputs_of(x, base))
    if is_class:
        return out.log_softmax(1)
    return out if base is None else out + base
