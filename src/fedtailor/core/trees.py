"""Trees: nested dicts, tuples and lists of tensors. Messages, replies and states are trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Tree = Any  # Tensor | dict[str, Tree] | tuple[Tree, ...] | list[Tree] | None
Params = dict[str, Tensor]
Schema = dict[str, tuple[tuple[int, ...], torch.dtype]]  # path -> (shape, dtype)


class Ragged(tuple[Tensor, Tensor]):
    """A vector and a length: only its first `length` entries cross a wire, the others arrive as 0 and must be 0.

    Shapes stay fixed, as a stack of clients needs them, while the number of bytes follows the length.
    """


def is_ragged(tree: Tree) -> bool:
    """Whether messages of this shape may differ in length."""
    if isinstance(tree, (Tensor, Ragged)):
        return not isinstance(tree, Tensor)
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return any(is_ragged(part) for part in parts)


def tree_map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `fn` to every leaf, together with the leaves at the same place of `rest`."""
    if isinstance(tree, dict):
        return {k: tree_map(fn, v, *(r[k] for r in rest)) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(tree_map(fn, v, *(r[i] for r in rest)) for i, v in enumerate(tree))
    return None if tree is None else fn(tree, *rest)


def items(tree: Tree, prefix: str = "") -> list[tuple[str, Tensor]]:
    """Leaves with their path, such as `("0/conv1.weight", tensor)`; dict entries in the order of their names."""
    pairs: list[tuple[str, Tensor]] = []
    _collect(tree, prefix, pairs)
    return pairs


def _collect(tree: Tree, path: str, pairs: list[tuple[str, Tensor]]) -> None:
    if isinstance(tree, Tensor):
        pairs.append((path, tree))
    elif isinstance(tree, dict):
        for k in sorted(tree):
            _collect(tree[k], f"{path}/{k}" if path else k, pairs)
    elif isinstance(tree, (tuple, list)):
        for i, v in enumerate(tree):
            _collect(v, f"{path}/{i}" if path else str(i), pairs)
    elif tree is not None:
        pairs.append((path, tree))


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in the order of `items`."""
    leaves_so_far: list[Tensor] = []
    _collect_leaves(tree, leaves_so_far)
    return leaves_so_far


def _collect_leaves(tree: Tree, leaves_so_far: list[Tensor]) -> None:  # without paths: every round asks many times
    if isinstance(tree, Tensor):
        leaves_so_far.append(tree)
    elif isinstance(tree, dict):
        for k in sorted(tree):
            _collect_leaves(tree[k], leaves_so_far)
    elif isinstance(tree, (tuple, list)):
        for v in tree:
            _collect_leaves(v, leaves_so_far)
    elif tree is not None:
        leaves_so_far.append(tree)


def rebuild(tree: Tree, new_leaves: Iterator[Any]) -> Tree:
    """A tree shaped as `tree` with other leaves, taken in the order of `items`."""
    if isinstance(tree, dict):
        parts = {k: rebuild(tree[k], new_leaves) for k in sorted(tree)}
        return {k: parts[k] for k in tree}
    if isinstance(tree, (tuple, list)):
        return type(tree)(rebuild(v, new_leaves) for v in tree)
    return None if tree is None else next(new_leaves)


def flat(tree: Tree, *, stacked: bool = False) -> Tensor:
    """All numbers of a tree in a row, in the order of `items`; of each client if it is stacked."""
    return torch.cat([leaf.flatten(1 if stacked else 0) for leaf in leaves(tree)], dim=-1)


def unflat(numbers: Tensor, like: Tree) -> Tree:
    """The inverse of `flat`: a tree shaped as `like`."""
    parts = numbers.split([leaf.numel() for leaf in leaves(like)])
    return rebuild(like, (part.reshape(leaf.shape) for part, leaf in zip(parts, leaves(like), strict=True)))


def as_tensors(tree: Tree, like: Tensor) -> Tree:
    """The tree with plain numbers turned into 0-d tensors of the type of `like`."""
    return tree_map(lambda v: v if isinstance(v, Tensor) else number(v, like), tree)


def number(value: float | Tensor, like: Tensor) -> Tensor:
    """A number as a tensor of the type of `like`, not rounded on the way."""
    if isinstance(value, Tensor):
        return value.to(like.dtype)
    return torch.full((), value, dtype=like.dtype, device=like.device)  # nothing is copied to a device


def to_device(tree: Tree, device: torch.device) -> Tree:
    """The same values on a device; what lies there already is not copied."""
    return tree_map(lambda v: v.to(device), tree)


def wide(value: Tensor) -> Tensor:
    """The same numbers in double precision, or in the widest that their device has."""
    return value.double() if value.device.type == "cpu" else value.to(widest(value.device))


@lru_cache
def widest(device: torch.device) -> torch.dtype:
    """Apple's devices have no float64."""
    try:
        return torch.empty((), dtype=torch.float64, device=device).dtype
    except TypeError:
        return torch.float32


def detach(tree: Tree) -> Tree:
    """The same values cut off from any gradient graph."""
    return tree_map(Tensor.detach, tree)


def schema(tree: Tree, *, stacked: bool = False) -> Schema:
    """Path -> (shape, dtype); the client dimension of a stacked tree is left out."""
    return {path: (tuple(leaf.shape[1:] if stacked else leaf.shape), leaf.dtype) for path, leaf in items(tree)}


def schema_difference(actual: Schema, wanted: Schema) -> str | None:
    """In words, the first way in which one schema is not the other; None when it is."""
    if missing := sorted(wanted.keys() - actual.keys()):
        return f'lacks "{missing[0]}"'
    if extra := sorted(actual.keys() - wanted.keys()):
        return f'has an undeclared key "{extra[0]}"'
    for path, (shape, dtype) in wanted.items():
        if actual[path][0] != shape:
            return f'"{path}" has shape {list(actual[path][0])}, not {list(shape)}'
        if actual[path][1] != dtype:
            return f'"{path}" is {actual[path][1]}, not {dtype}'
    return None


def changed_leaves(new: Tree, old: Tree) -> list[Tensor | None]:
    """The leaves of `new`, with None for those that are the very tensors of `old`."""
    pairs = zip(leaves(new), leaves(old), strict=True)
    return [None if a.data_ptr() == b.data_ptr() and _form(a) == _form(b) else a for a, b in pairs]


def _form(value: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    return value.shape, value.stride()
