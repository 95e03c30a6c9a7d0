"""When a reply is not believed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedtailor.core.engine import Reply
from fedtailor.core.trees import Schema, Tree, items, schema, schema_difference, tree_map, wide
from fedtailor.errors import ClientUnreachable


@dataclass(frozen=True)
class Limits:
    """Fewer usable replies, or larger ones, are not used."""

    min_replies: int = 1
    max_norm: float = 1e8

    @property
    def least(self) -> int:
        """Replies without which there is no round."""
        return max(1, self.min_replies)


class Rejected(NamedTuple):
    """A client whose reply cannot be used."""

    client: int
    reason: str
    is_mistake: bool  # in the method: its function raised, or what it sent is not what it declares


def checked(
    reply: Reply, wanted: Schema, positive: list[str], max_norm: float
) -> tuple[tuple[int, ...], Tree, list[Rejected]]:
    """Whose replies can be used, these replies, and the others."""
    if reply.error is not None:
        is_mistake = not isinstance(reply.error, ClientUnreachable)
        return (), None, [Rejected(reply.clients[0], str(reply.error), is_mistake)]
    if wrong := schema_difference(schema(reply.tree, stacked=True), wanted):
        return (), None, [Rejected(c, f"reply {wrong}", True) for c in reply.clients]
    reasons = reply_faults(reply.tree, len(reply.clients), positive, max_norm, reply.norms)
    rejected = [Rejected(c, reason, False) for c, reason in zip(reply.clients, reasons, strict=True) if reason]
    if not rejected:
        return reply.clients, reply.tree, []
    good = [i for i, reason in enumerate(reasons) if not reason]
    return tuple(reply.clients[i] for i in good), tree_map(lambda v: v[good], reply.tree), rejected


def reply_faults(
    stack: Tree, clients: int, positive: list[str], max_norm: float, known: list[float] | None = None
) -> list[str | None]:
    """For each client the reason not to believe its reply, or None; the norms of replies may be `known`."""
    flat = {path: _flat(leaf, clients) for path, leaf in items(stack) if leaf.is_floating_point()}
    if known is None:
        norms = [wide(torch.linalg.vector_norm(v, dim=tuple(range(1, v.dim())))) for v in flat.values()]
        known, counts = _read(norms, [flat[path] for path in positive], clients)
    else:
        counts = _read([], [flat[path] for path in positive], clients)[1]
    reasons: list[str | None] = [None] * clients
    for i in (i for i, norm in enumerate(known) if not norm <= max_norm):  # it tells of what is not finite, too
        wrong = [path for path, v in flat.items() if not bool(torch.isfinite(v[i]).all())]
        large = torch.stack([wide(v[i]).square().sum() for v in flat.values()]).sum().sqrt().item()
        if wrong:
            reasons[i] = f'reply "{wrong[0] or "number"}" is not finite'
        elif large > max_norm:
            reasons[i] = f"reply has norm {large:.3g}, above the limit {max_norm:.3g}"
    for i, least in enumerate(counts):
        if not least > 0:
            reasons[i] = reasons[i] or f"count {least:g} is not positive"
    return reasons


def _read(norms: list[Tensor], counts: list[Tensor], clients: int) -> tuple[list[float], list[float]]:
    """The norm of each client's reply and the least of its counts, in one read off the device."""
    rows = [torch.stack(norms).square().sum(0).sqrt()] if norms else []
    rows += [torch.cat(counts, 1).amin(1).to(rows[0].dtype if rows else counts[0].dtype)] if counts else []
    if not rows:
        return [0.0] * clients, []
    each = torch.stack(rows).tolist()
    return each[0] if norms else [0.0] * clients, each[-1] if counts else []


def _flat(leaf: Tensor, clients: int) -> Tensor:
    """A row per client, but for kernels whose channels come last: these would be copied, and a model is large."""
    return leaf.reshape(clients, -1) if leaf.is_contiguous() or leaf.dim() == 1 else leaf
