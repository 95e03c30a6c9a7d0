"""Mixed shifts: every client differs in what its name says, and in nothing else."""

from __future__ import annotations

import pytest
import torch

from fedtailor.core.data import FederatedData
from fedtailor.data import load
from fedtailor.data.configs import MixedShiftsConfig
from fedtailor.data.sources.images import image_pool
from fedtailor.data.sources.mixed_shifts import KINDS, TRANSFORMS, kind_of, transformed
from fedtailor.errors import DataError
from fedtailor.testing.known_kinds import KnownKinds, parts_of
from tests.helpers import federate, make_model, run, states


def made(seed: int = 3, clients: int = 14, samples: int = 100) -> FederatedData:
    return load(MixedShiftsConfig(images="digits", clients=clients, samples=samples), seed=seed)


def digits() -> dict[bytes, int]:
    pool = image_pool("digits", "all", None)  # type: ignore[arg-type]
    x, y = pool.convert(torch.arange(len(pool.labels)).numpy())
    return {v.numpy().tobytes(): int(label) for v, label in zip(x, y, strict=True)}


def test_kinds_come_in_turn_and_are_in_the_names() -> None:
    data = made()
    assert [kind_of(client) for client in data.clients] == [*KINDS, *KINDS]


def test_clients_differ_in_what_their_kind_says_and_in_nothing_else() -> None:
    data, known = made(), digits()
    for i, client in enumerate(data.clients):
        kind = kind_of(client)
        rows = [getattr(data, s).of(i) for s in ("train", "val", "test")]
        samples = [(v.numpy().tobytes(), int(k)) for x, y in rows for v, k in zip(x, y, strict=True)]
        pairs = {(known[v], k) for v, k in samples if v in known}
        if "inputs" in kind:
            assert len(pairs) <= 1  # at most a digit that looks the same when it is turned
        elif "labels" in kind:
            assert all(a != b for a, b in pairs)
            assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs) > 7
        else:
            assert all(a == b for a, b in pairs)
        sizes = [len(y) for _, y in rows]
        assert sizes == ([9, 2, 25] if "few" in kind else [60, 15, 25])
        if "few" not in kind:
            most = max(torch.cat([y for _, y in rows]).bincount(minlength=10).tolist())
            assert most > 30 if "classes" in kind else most < 25


def test_permutations_are_each_client_s_own() -> None:
    data, known = made(clients=28, samples=60), digits()
    maps = set()
    for i, client in enumerate(data.clients):
        if kind_of(client) == ("labels",):
            x, y = data.train.of(i)
            maps.add(tuple(sorted({(known[v.numpy().tobytes()], int(k)) for v, k in zip(x, y, strict=True)})))
    assert len(maps) == 4


def test_transforms_keep_the_range_and_change_the_image() -> None:
    pool = image_pool("digits", "all", None)  # type: ignore[arg-type]
    x, _ = pool.convert(torch.arange(20).numpy())
    colour = torch.rand(4, 3, 8, 8)
    for transform in TRANSFORMS:
        for images in (x, colour):
            out = transformed(images, transform, pool)
            assert out.shape == images.shape
            assert 0 <= float(out.min()) <= float(out.max()) <= 1
            assert not out.equal(images)
    assert transformed(colour, "recoloured", pool)[:, 1].equal(colour[:, 0])


def test_the_seed_decides() -> None:
    assert made().train.x.equal(made().train.x)
    assert not made().train.x.equal(made(seed=4).train.x)


def test_more_images_than_there_are_are_refused() -> None:
    with pytest.raises(DataError, match=r"1797 images"):
        made(clients=30)


def test_the_oracle_shares_what_does_not_differ() -> None:
    data = load(MixedShiftsConfig(images="digits", clients=7, samples=100), seed=3, dtype=torch.float64)
    model = make_model("mlp", data)
    fed = federate(KnownKinds(), data, model, "loop")
    run(fed, 1)
    part_of = parts_of(model)
    first, head = (next(k for k, part in part_of.items() if part == name) for name in ("first layers", "head"))
    shares = {name: own["state"]["share"] for name, own in states(fed).items()}
    for name, share in shares.items():
        assert float(share[part_of[first]]) == float("inputs" not in kind_of(name))
        assert float(share[part_of[head]]) == float(not {"labels", "classes"} & set(kind_of(name)))
