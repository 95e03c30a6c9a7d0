"""Partitions: pure functions of labels, number of clients and seed; each returns one index array per client."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.random import stream
from fedtailor.data.configs import PartitionConfig
from fedtailor.errors import DataError

Indices = NDArray[np.int64]


def iid(samples: int, clients: int, seed: int) -> list[Indices]:
    """Assign all samples in random order; sizes differ by at most one."""
    _check_counts(samples, clients, 1)
    order = stream(seed, "partition", "iid").permutation(samples)
    return [np.sort(part) for part in np.array_split(order, clients)]


def dirichlet(labels: NDArray[np.int64], clients: int, seed: int, alpha: float, min_samples: int = 4) -> list[Indices]:
    """Divide each class over the clients in Dirichlet(alpha) proportions, then top up clients below `min_samples`."""
    _check_counts(len(labels), clients, min_samples)
    _check_alpha(alpha)
    rng = stream(seed, "partition", "dirichlet")
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.rint(_proportions(rng, alpha, clients).cumsum()[:-1] * len(members)).astype(int)
        for part, share in zip(parts, np.split(members, cuts), strict=True):
            part.append(share)
    # shuffled, so that what a large client gives away is not always its last class
    return _top_up([rng.permutation(np.concatenate(part)) for part in parts], min_samples)


def classes(
    labels: NDArray[np.int64], clients: int, seed: int, classes_per_client: int, samples_per_client: int | None = None
) -> list[Indices]:
    """Give every client exactly `classes_per_client` classes and an equal share of each with its other holders."""
    present = np.unique(labels)
    if classes_per_client < 1 or classes_per_client > len(present):
        raise DataError(
            f"data.classes_per_client = {classes_per_client}: must be between 1 and {len(present)}, "
            "the number of classes in the data"
        )
    _check_counts(len(labels), clients, 1)
    rng = stream(seed, "partition", "classes")
    held = _deal_classes(rng, len(present), clients, classes_per_client)
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for k, label in enumerate(present):
        holders = [client for client in range(clients) if k in held[client]]
        if not holders:
            continue
        members = rng.permutation(np.flatnonzero(labels == label))
        if len(members) < len(holders):
            raise DataError(
                f"class {label} has {len(members)} samples for {len(holders)} clients; "
                "lower data.clients or data.classes_per_client"
            )
        for client, share in zip(holders, np.array_split(members, len(holders)), strict=True):
            if samples_per_client is not None:
                wanted = _quota(samples_per_client, classes_per_client, held[client].index(k))
                if wanted > len(share):
                    raise DataError(
                        f"data.samples_per_client = {samples_per_client}: needs {wanted} samples of class {label} "
                        f"per client, but its {len(holders)} clients can have {len(share)} each; lower it"
                    )
                share = share[:wanted]
            parts[client].append(share)
    return [np.sort(np.concatenate(part)) for part in parts]


def quantity(
    samples: int,
    clients: int,
    seed: int,
    sizes: Literal["lognormal", "dirichlet"] = "lognormal",
    sigma: float = 1.0,
    alpha: float = 0.5,
    min_samples: int = 4,
) -> list[Indices]:
    """Deal all samples at random in unequal amounts, log-normal or Dirichlet; nobody gets fewer than `min_samples`."""
    _check_counts(samples, clients, min_samples)
    _check_alpha(alpha)
    rng = stream(seed, "partition", "quantity")
    order = rng.permutation(samples)
    if sizes == "lognormal":
        weights = rng.normal(0.0, sigma, clients)
        shares = np.exp(weights - weights.max())  # the shift keeps a large sigma from overflowing
        shares /= shares.sum()
    else:
        shares = _proportions(rng, alpha, clients)
    cuts = np.rint(shares.cumsum()[:-1] * samples).astype(int)
    return _top_up(np.split(order, cuts), min_samples)


def natural(ids: NDArray[np.int64]) -> list[Indices]:
    """One client per distinct id, in the order of the ids."""
    order = np.argsort(ids, kind="stable")
    _, starts = np.unique(ids[order], return_index=True)
    return np.split(order, starts[1:])


def partition(labels: NDArray[np.int64], config: PartitionConfig, seed: int) -> list[Indices]:
    match config.partition:
        case "iid":
            return iid(len(labels), config.clients, seed)
        case "dirichlet":
            return dirichlet(labels, config.clients, seed, config.alpha, config.min_samples)
        case "classes":
            return classes(labels, config.clients, seed, config.classes_per_client, config.samples_per_client)
        case "quantity":
            return quantity(
                len(labels), config.clients, seed, config.sizes, config.sigma, config.alpha, config.min_samples
            )


def describe(parts: list[Indices], labels: NDArray[np.int64]) -> tuple[str, ...]:
    """Notes on a partition: sizes and classes per client."""
    sizes = [len(part) for part in parts]
    kinds = [len(np.unique(labels[part])) for part in parts]
    notes = [f"samples per client: {_spread(sizes)}", f"classes per client: {_spread(kinds)}"]
    unused = len(labels) - sum(sizes)
    if unused:
        notes.append(f"{unused} of {len(labels)} samples are not assigned to any client")
    return tuple(notes)


def _spread(values: list[int]) -> str:
    return f"min {min(values)}, median {np.median(values):g}, max {max(values)}"


def _check_counts(samples: int, clients: int, min_samples: int) -> None:
    if clients < 1:
        raise DataError(f"data.clients = {clients}: must be at least 1")
    if clients > samples:
        raise DataError(f"data.clients = {clients}: more clients than the {samples} samples; lower it")
    if clients * min_samples > samples:
        raise DataError(
            f"data.clients = {clients}: {samples} samples cannot give each at least {min_samples}; "
            "lower data.clients or data.min_samples"
        )


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < np.inf:
        raise DataError(f"data.alpha = {alpha}: must be above 0 (0.1 is strong skew, 100 almost none)")


def _proportions(rng: np.random.Generator, alpha: float, clients: int) -> NDArray[np.float64]:
    """A Dirichlet draw; if all its numbers underflow, the limit for small alpha: everything to one client."""
    draw = rng.dirichlet(np.full(clients, alpha))
    if not np.isfinite(draw).all() or draw.sum() < 0.5:
        draw = np.zeros(clients)
        draw[rng.integers(clients)] = 1.0
    return draw


def _top_up(parts: list[Indices], min_samples: int) -> list[Indices]:
    """Move samples, one at a time, from the client that is largest at that moment to clients that are short."""
    pools = [part.tolist() for part in parts]
    sizes = np.array([len(pool) for pool in pools])
    for client, pool in enumerate(pools):
        while sizes[client] < min_samples:
            donor = int(sizes.argmax())
            pool.append(pools[donor].pop())
            sizes[client] += 1
            sizes[donor] -= 1
    return [np.sort(np.array(pool, dtype=np.int64)) for pool in pools]


def _deal_classes(rng: np.random.Generator, kinds: int, clients: int, each: int) -> list[list[int]]:
    """Classes of each client, from shuffled decks of all classes, so that every class has about as many clients."""
    deck: list[int] = []
    hands: list[list[int]] = []
    for _ in range(clients):
        hand: list[int] = []
        while len(hand) < each:
            card = next((k for k in deck if k not in hand), None)
            if card is None:
                deck += rng.permutation(kinds).tolist()
            else:
                deck.remove(card)
                hand.append(card)
        hands.append(hand)
    return hands


def _quota(total: int, kinds: int, position: int) -> int:
    return total // kinds + (position < total % kinds)
