"""What a client's reply changes of the message it was sent, and a limit on the norm of that change."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtailor.core.trees import Tree, items, leaves, rebuild, schema, schema_difference, tree_map, wide


@dataclass(frozen=True)
class Clip:
    """Scales a reply's change down, all parts together, to at most this norm before it leaves the client."""

    norm: float

    def apply(self, reply: Tree, args: tuple[Tree, ...], placed: tuple[bool, ...]) -> Tree:
        """The reply as it may leave; parts that are no new version of an argument stay as they are."""
        which = changed_parts(reply, args, placed)
        if not which:
            return reply
        parts = list(reply) if isinstance(reply, tuple) else [reply]
        moves = {i: tree_map(torch.sub, parts[i], args[j]) for i, j in which.items()}
        norm = torch.stack([wide(v).square().sum() for move in moves.values() for v in leaves(move)]).sum().sqrt()
        scale = (self.norm / norm).clamp(max=1.0)  # a change of 0 gives infinity, and so 1
        for i, j in which.items():
            parts[i] = tree_map(lambda old, move: old + scale.to(move.dtype) * move, args[j], moves[i])
        return tuple(parts) if isinstance(reply, tuple) else parts[0]


def changed_parts(reply: Tree, args: tuple[Tree, ...], placed: tuple[bool, ...]) -> dict[int, int]:
    """Which part of a reply is a new version of which argument: equal keys, shapes and types, each argument once.

    Only arguments that are the same for all clients count. A part is the whole reply if that is not a tuple.
    """
    pairs: dict[int, int] = {}
    for i, part in enumerate(reply if isinstance(reply, tuple) else (reply,)):
        tensors = leaves(part)
        if not any(isinstance(v, Tensor) and v.dim() for v in tensors) or not all(
            isinstance(v, Tensor) and v.is_floating_point() for v in tensors
        ):
            continue
        for j, (arg, own) in enumerate(zip(args, placed, strict=True)):
            if not own and j not in pairs.values() and schema(arg) == schema(part):
                pairs[i] = j
                break
    return pairs


def limit_reply(
    reply: Tree,
    example: Tree,
    args: tuple[Tree, ...],
    placed: tuple[bool, ...],
    positive: list[str],
    count: float,
    largest: float,
) -> Tree:
    """The reply at a norm of at most `largest`. Of one that is None, not as declared or not finite, what says least.

    That is the message where a part is a new version of it, and 0 elsewhere. A site sends this in place of a refusal,
    which would tell the server something of its data; what must be positive is its `count`, which the server knows.
    """
    if reply is None or schema_difference(schema(reply), schema(example)) or not _is_finite(reply):
        parts = list(example) if isinstance(example, tuple) else [example]
        parts = [tree_map(torch.zeros_like, part) for part in parts]
        for i, j in changed_parts(example, args, placed).items():
            parts[i] = tree_map(lambda v: torch.nan_to_num(v, posinf=0.0, neginf=0.0), args[j])
        reply = tuple(parts) if isinstance(example, tuple) else parts[0]
    paths = items(reply)
    free = [v for path, v in paths if path not in positive and v.is_floating_point()]
    norm = math.hypot(*(float(wide(v).norm()) for v in free))
    scale = min(1.0, largest / norm) if norm else 1.0

    def within(path: str, v: Tensor) -> Tensor:
        if path in positive:
            return torch.where(v > 0, v, torch.full_like(v, count))
        return v * scale if v.is_floating_point() and scale < 1 else v

    return rebuild(reply, (within(path, v) for path, v in paths))


def _is_finite(tree: Tree) -> bool:
    return all(bool(v.isfinite().all()) for v in leaves(tree))
