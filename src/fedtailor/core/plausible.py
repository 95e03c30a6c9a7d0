"""When a reply is not believed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedtailor.core.trees import Tree, items


@dataclass(frozen=True)
class Limits:
    """Fewer usable replies, or larger ones, are not used."""

    min_replies: int = 1
    max_norm: float = 1e8


def implausible(
    stack: Tree, clients: int, positive: list[str], max_norm: float, known: list[float] | None = None
) -> list[str | None]:
    """For each client the reason not to believe its reply, or None; the norms of replies may be `known`."""
    flat = {path: leaf.reshape(clients, -1) for path, leaf in items(stack) if leaf.is_floating_point()}
    if known is None:
        norms = [torch.linalg.vector_norm(v, dim=1).double() for v in flat.values()]
        norm = torch.stack(norms).square().sum(0).sqrt() if norms else torch.zeros(clients, dtype=torch.float64)
    else:
        norm = torch.tensor(known, dtype=torch.float64)
    reasons: list[str | None] = [None] * clients
    for i in (~(norm <= max_norm)).nonzero()[:, 0].tolist():  # a norm tells of what is not finite, too
        wrong = [path for path, v in flat.items() if not bool(torch.isfinite(v[i]).all())]
        large = torch.stack([v[i].double().square().sum() for v in flat.values()]).sum().sqrt().item()
        if wrong:
            reasons[i] = f'reply "{wrong[0] or "number"}" is not finite'
        elif large > max_norm:
            reasons[i] = f"reply has norm {large:.3g}, above the limit {max_norm:.3g}"
    for path in positive:
        for i in (~(flat[path] > 0).all(1)).nonzero()[:, 0].tolist():
            reasons[i] = reasons[i] or f"count {flat[path][i].item():g} is not positive"
    return reasons
