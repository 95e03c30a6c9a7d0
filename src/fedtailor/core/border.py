"""What a client behind messages sends, checked in one place before anybody uses it.

A client can say anything. What it may not say is a reason not to count it, by name, and never an exception.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.algorithm import doubt_of, may_doubt, reply_example, reply_positive, weight_parts
from fedtailor.core.experiment import Experiment
from fedtailor.core.reduce import Call, Limits, reply_faults
from fedtailor.core.trees import Tree, leaves, schema, schema_difference, tree_map

LONGEST_TEXT = 300  # characters of what a client says in words
SPARE = 2**16  # bytes of a message beside its tensors
TENSOR = 300  # and of the name and the shape of each
PERSONAL = 2**26  # bytes that a personal model may have beside model and server state, such as features of samples
ROUNDING = 1e-5  # of a count in single precision
LARGEST_METRIC = 1e150  # sums of squares of metrics must be finite


def plain_text(value: Any, most: int = LONGEST_TEXT) -> str:
    """Words of a client as one short line without control characters, whatever was sent in their place."""
    if not isinstance(value, str):
        return f"(no text: {type(value).__name__})"
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value[:most])
    return shown[:most] + "..." if len(value) > most or len(shown) > most else shown


def error_text(header: dict[str, Any]) -> str:
    """What a client says went wrong; "" if it says nothing of the kind."""
    return plain_text(header["error"]) or "an error without words" if "error" in header else ""


def read(message: bytes, places: int, longest: int) -> tuple[dict[str, Any], Tree]:
    """Header and tree of an answer; a `BrokenMessage` if it is longer than what it answers can be."""
    if len(message) > longest:
        raise codec.BrokenMessage(f"has {len(message)} bytes, more than the {longest} that it can have")
    return codec.decode(message, places)


def longest(*trees: Tree, times: int = 1) -> int:
    """Bytes that a message with tensors like these may have."""
    each = [leaf for tree in trees for leaf in leaves(tree)]
    return SPARE + times * sum(leaf.numel() * max(leaf.element_size(), 8) + TENSOR for leaf in each)


def call_fault(experiment: Experiment, call: Call, client: int, reply: Tree, limits: Limits | None = None) -> str:
    """Why a reply is not believed, or nothing. Its form, its norm and what is not finite are checked for all engines.

    Here it is what a client could only say in a lie: a count above the samples that it has named, or terms that no
    samples have. With `limits` the others as well.
    """
    algorithm, model = experiment.algorithm, experiment.model
    weights, has_doubts = weight_parts(algorithm, call.function), may_doubt(algorithm, call.function)
    if limits is None and not (weights or has_doubts):
        return ""
    if limits is not None or has_doubts:  # a count alone can be looked up in a reply of any form
        example = reply_example(algorithm, call.function, model)
        if wrong := schema_difference(schema(reply), schema(example)):
            return f"reply {wrong}" if limits is not None else ""
    if limits is not None:
        stack, positive = tree_map(lambda v: v[None], reply), reply_positive(algorithm, call.function)
        if wrong := reply_faults(stack, 1, positive, limits.max_norm)[0]:
            return wrong
    starts = experiment.data.train.starts
    samples = int(starts[client + 1]) - int(starts[client])
    for part in weights:
        for leaf in _numbers(reply, part):
            high = float(leaf.amax())
            if high > samples * (1 + ROUNDING):  # what is below 0 or no number is refused in every engine
                return f"reply counts {high:.6g} samples; the client has {samples}"
    return doubt_of(algorithm, call.function, model, samples, reply)


def _numbers(reply: Tree, part: str) -> list[Tensor]:
    """Tensors of numbers in a part of a reply that may have any form; what is missing is found where all is checked."""
    here = reply[int(part)] if part and isinstance(reply, tuple) and int(part) < len(reply) else None
    of_part = leaves(here if part else reply)
    return [v for v in of_part if isinstance(v, Tensor) and v.numel() and not v.is_complex()]


def metrics_fault(experiment: Experiment, tree: Tree, splits: Sequence[str]) -> str:
    """Why metrics and a model are not believed, or nothing."""
    known = {metric.name: metric for metric in experiment.metrics}
    if not (isinstance(tree, tuple) and len(tree) == 2 and isinstance(tree[0], dict) and set(tree[0]) == set(splits)):
        return "metrics of other splits than were asked for"
    for metrics in tree[0].values():
        if not isinstance(metrics, dict) or set(metrics) != set(known):
            return "other metrics than were asked for"
        for name, value in metrics.items():
            if not (isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()):
                return f'metric "{name}" is no number'
            is_share = known[name].higher_is_better and known[name].worst == 0  # such as an accuracy
            low, high = (0.0, 1 + ROUNDING) if is_share else (-LARGEST_METRIC, LARGEST_METRIC)
            if math.isfinite(float(value)) and not low <= float(value) <= high:
                return f'metric "{name}" is {float(value):.3g}'
    if not isinstance(tree[1], dict):
        return "no model"
    return "" if all(isinstance(v, Tensor) and v.dtype != torch.bool for v in tree[1].values()) else "no model"


def infinite_metrics(tree: Tree) -> tuple[Tree, str]:
    """Metrics of a site with what is infinite as absent, and a word on it: a model that diverged, or a lie.

    A site that says infinity would take the mean of all with it, and no later round could be better.
    """
    found: list[str] = []

    def finite(name: str, value: Tensor) -> Tensor:
        if not value.isinf().any():
            return value
        found.append(name)
        return torch.full_like(value, torch.nan)

    metrics = {split: {name: finite(name, v) for name, v in each.items()} for split, each in tree[0].items()}
    return (metrics, tree[1]), f'metric "{found[0]}" is infinite: its model diverged' if found else ""


def cotangent_fault(args: Tree, message: Tree) -> str:
    """Why the way back of a taped call is not believed, or nothing."""
    if wrong := schema_difference(schema(args), schema(message)):
        return f"cotangent {wrong}"
    return "" if all(bool(v.isfinite().all()) for v in leaves(args)) else "cotangent is not finite"
