"""Boosted trees at sites with enough rows: alone, and on top of what the shared model says.

On top, trees see the shared model's outputs beside the features. For numbers they learn what is left of the target, for
counts the factor by which the shared model's rate is to be multiplied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from fedtailor.experiments.store import read_json, read_tree, write_json, write_tree
from fedtailor.serving.trees import Trees, checked, inputs_of, tree_outputs, trees_of

KEPT = "kept-"
ENOUGH = 120  # rows of a site
FEWEST = 10  # rows of the second most frequent class, or with a count above 0
WORTH_THREADS = 10_000  # rows from which on threads are faster than their own upkeep; below, up to six times slower
MOST = 20_000  # rows that a fold's trees learn from; what is delivered learns from all


def worth_it(y: Tensor, is_class: bool) -> bool:
    """Whether a site has enough rows for trees."""
    if len(y) < ENOUGH:
        return False
    if y.dim() == 2 and not y.is_floating_point():
        return int((y > 0).sum()) >= FEWEST
    return not is_class or (len(np.bincount(y.numpy())) > 1 and int(np.sort(np.bincount(y.numpy()))[-2]) >= FEWEST)


def boosted(x: Tensor, y: Tensor, base: Tensor | None, outputs: int, is_class: bool, seed: int) -> Trees:
    """Trees for one site; `base` are the shared model's outputs for these rows, from other rows."""
    threads = 1 if len(x) < WORTH_THREADS else None  # None: as many as there are
    with threadpool_limits(threads, user_api="openmp"):
        return _grown(x, y, base, outputs, is_class, seed)


def _grown(x: Tensor, y: Tensor, base: Tensor | None, outputs: int, is_class: bool, seed: int) -> Trees:
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
        return spread_out(trees_of(model, len(classes)), classes, outputs)
    if not y.is_floating_point():  # counts
        rates = np.ones(rows) if base is None else base[:, 0].exp().numpy()
        model = kind(loss="poisson", **options).fit(inputs, y[:, 0].numpy() / rates, sample_weight=rates)
        return trees_of(model, 1)
    wanted = y[:, 0] if base is None else y[:, 0] - base[:, 0]
    return trees_of(kind(**options).fit(inputs, wanted.numpy()), 1)


def spread_out(trees: Trees, classes: NDArray[np.int64], outputs: int) -> Trees:
    """The trees of a site that lacks classes, for all classes; those it lacks are unlikely, not impossible."""
    at = torch.from_numpy(classes)
    baseline = torch.full((outputs,), float(trees.baseline.min()) - 5.0, dtype=torch.float64, device="cpu")
    baseline[at] = trees.baseline
    return replace(trees, output=at[trees.output], baseline=baseline)


def kept_or_grown(
    folder: Path,
    rows: tuple[Tensor, Tensor],
    folds: NDArray[np.int64],
    base: Tensor | None,
    outputs: int,
    is_class: bool,
    seed: int,
    check: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Trees]:
    """Out-of-fold outputs and trees of one site; the same rows are not trained on twice, they are kept in `folder`."""
    x, y = rows
    inputs = x.shape[1] + (0 if base is None else base.shape[1])
    digest = hashlib.blake2b(f"{version('scikit-learn')} {outputs} {is_class} {seed}".encode(), digest_size=12)
    for part in (x, y, *([] if base is None else [base]), torch.from_numpy(folds)):
        digest.update(f"|{part.dtype}|{list(part.shape)}|".encode() + part.contiguous().numpy().tobytes())
    entry = folder / f"{KEPT}{digest.hexdigest()}.json"
    if entry.exists():
        tensors = read_tree(folder, read_json(entry))
        return tensors.pop("out of fold"), checked(tensors, inputs, outputs, str(entry))
    out_of_fold = cross_fitted(x, y, base, folds, outputs, is_class, seed, check)
    trees = boosted(x, y, base, outputs, is_class, seed)
    write_json(entry, write_tree(entry.with_suffix(".safetensors"), {"out of fold": out_of_fold} | trees.tensors))
    return out_of_fold, trees


def cross_fitted(
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
        trees = boosted(x[rest], y[rest], None if base is None else base[rest], outputs, is_class, seed)
        out[held] = tree_outputs(trees, x[held], None if base is None else base[held], is_class)
        check()
    return out
