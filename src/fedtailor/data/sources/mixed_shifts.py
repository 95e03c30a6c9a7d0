"""Clients that differ in *what* differs: labels, inputs, classes or amounts, two of these, or nothing at all.

A client's name begins with its kind, `labels+few-05`, so that a table can be read by kinds. All differences are drawn
for each client alone: no two clients with permuted labels have the same permutation.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import SPLITS, FederatedData
from fedtailor.core.random import stream
from fedtailor.data.configs import MixedShiftsConfig
from fedtailor.data.download import data_root
from fedtailor.data.pools import ImagePool
from fedtailor.data.sources.images import image_pool
from fedtailor.data.splits import Indices, Split, gather, split, split_note
from fedtailor.errors import DataError

KINDS = (  # client i is of kind i modulo 7: as many clients of each
    ("plain",),
    ("labels",),
    ("inputs",),
    ("classes",),
    ("few",),
    ("labels", "few"),
    ("inputs", "classes"),
)
TRANSFORMS = ("inverted", "turned by 90", "recoloured", "turned by 180", "turned by 270")  # in turn


def load(
    config: MixedShiftsConfig, *, seed: int, root: Path | None = None, dtype: torch.dtype = torch.float32
) -> FederatedData:
    """Deal the images, and make each client differ by its kind."""
    pool = replace(image_pool(config.images, config.use, data_root(root)), dtype=dtype)
    width = max(2, len(str(config.clients - 1)))
    clients = tuple(f"{'+'.join(KINDS[i % len(KINDS)])}-{i:0{width}d}" for i in range(config.clients))
    parts = _deal(pool.labels, clients, config, seed)
    cuts = [_cut(pool.labels[part], client, config, seed) for client, part in zip(clients, parts, strict=True)]
    rows = {s: gather(parts, [getattr(cut, s) for cut in cuts], pool.convert) for s in SPLITS}
    notes = [f"{config.samples} images each; kinds in turn: {', '.join('+'.join(kind) for kind in KINDS)}"]
    turned = 0
    for i, client in enumerate(clients):
        if "labels" in kind_of(client):
            cycle = torch.from_numpy(stream(seed, "mixed", "labels", client).permutation(len(pool.classes)))
            renamed = torch.empty_like(cycle)
            renamed[cycle] = cycle.roll(1)  # every label moves
            for own in rows.values():
                y = own.y[own.starts[i] : own.starts[i + 1]]
                y.copy_(renamed[y])
        if "inputs" in kind_of(client):
            transform = TRANSFORMS[turned % len(TRANSFORMS)]
            turned += 1
            notes.append(f"{client}: {transform}")
            for own in rows.values():
                x = own.x[own.starts[i] : own.starts[i + 1]]
                x.copy_(transformed(x, transform, pool))
    return FederatedData(
        name=config.source,
        task="classification",
        clients=clients,
        train=rows["train"],
        val=rows["val"],
        test=rows["test"],
        outputs=len(pool.classes),
        classes=pool.classes,
        notes=(*notes, split_note(config), pool.note),
    )


def kind_of(client: str) -> tuple[str, ...]:
    """In what a client differs, by its name."""
    return tuple(client.rpartition("-")[0].split("+"))


def transformed(x: Tensor, transform: str, pool: ImagePool) -> Tensor:
    """Images as a client with other inputs sees them; grey ones cannot change colour, and are solarised."""
    low, high = -pool.mean / pool.sd, (1 - pool.mean) / pool.sd
    if transform == "inverted":
        return low + high - x
    if transform == "recoloured":
        return x.roll(1, dims=1) if x.shape[1] > 1 else low + (2 * x - low - high).abs()
    return torch.rot90(x, int(transform.rpartition(" ")[2]) // 90, (-2, -1))


def _deal(labels: NDArray[np.int64], clients: tuple[str, ...], config: MixedShiftsConfig, seed: int) -> list[Indices]:
    """Disjoint images for each client: equal classes, or a Dirichlet draw of them, as far as there are images."""
    if config.clients * config.samples > len(labels):
        raise DataError(
            f"data.clients = {config.clients} with data.samples = {config.samples}: there are {len(labels)} images; "
            "lower one of them"
        )
    rng = stream(seed, "mixed", "deal")
    known = np.unique(labels)
    left = [rng.permutation(np.flatnonzero(labels == k)).tolist() for k in known]
    parts = []
    for client in clients:
        shares = np.full(len(known), 1 / len(known))
        if "classes" in kind_of(client):
            shares = rng.dirichlet(np.full(len(known), config.alpha))
        wanted = rng.multinomial(config.samples, shares)
        own = [left[k].pop() for k in range(len(known)) for _ in range(min(wanted[k], len(left[k])))]
        while len(own) < config.samples:  # a class has run out: from the one with most images
            own.append(max(left, key=len).pop())
        parts.append(np.sort(np.array(own, np.int64)))
    return parts


def _cut(labels: NDArray[np.int64], client: str, config: MixedShiftsConfig, seed: int) -> Split:
    """A client with few images has as many test images as the others, for a figure that can be read."""
    cut = split(len(labels), labels, config, seed=seed, client=client)
    if "few" not in kind_of(client):
        return cut
    rng = stream(seed, "mixed", "few", client)

    def some(at: Indices) -> Indices:
        return np.sort(rng.permutation(at)[: max(1, round(config.few * len(at)))])

    return Split(some(cut.train), some(cut.val), cut.test)
