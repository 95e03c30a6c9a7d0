"""CIFAR-100 from files made here: classes dealt by a partition, or of each superclass some to each client."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedtailor.core.data import FederatedData
from fedtailor.data import load
from fedtailor.data.configs import Cifar100Config
from fedtailor.data.sources.cifar100 import RECORD
from fedtailor.errors import DataError

PER_CLASS = 8


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Class k is the (k // 20)-th of superclass k % 20; the first pixels tell both."""
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for part in ("train", "test"):
        fine = np.tile(np.arange(100), PER_CLASS // 2)
        records = np.zeros((len(fine), RECORD), dtype=np.uint8)
        records[:, 0], records[:, 1] = fine % 20, fine
        records[:, 2], records[:, 3] = fine % 20, fine
        (folder / f"{part}.bin").write_bytes(records.tobytes())
    (folder / "coarse_label_names.txt").write_text("\n".join(f"super{k}" for k in range(20)))
    (folder / "fine_label_names.txt").write_text("\n".join(f"class{k}" for k in range(100)))
    return tmp_path


def of(data: FederatedData, client: int) -> tuple[list[int], list[int], list[int]]:
    """Labels, and what the pixels say: superclass and class."""
    pairs = [rows.of(client) for rows in (data.train, data.val, data.test)]
    x, y = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    pixels = (x[:, 0, 0, :2] * 0.5 + 0.5).mul(255).round().long()
    return y.tolist(), pixels[:, 0].tolist(), pixels[:, 1].tolist()


def test_classes_are_dealt_by_a_partition(root: Path) -> None:
    data = load(Cifar100Config(clients=10, partition="classes", classes_per_client=10), seed=0, root=root)
    assert (data.outputs, data.classes[3], data.shape) == (100, "class3", (3, 32, 32))
    for client in range(10):
        y, _, fine = of(data, client)
        assert y == fine
        assert len(set(y)) == 10


@pytest.mark.parametrize("members", [1, 2])
def test_superclasses_have_other_members_at_each_client(root: Path, members: int) -> None:
    data = load(Cifar100Config(clients=5, members=members), seed=0, root=root)
    assert (data.outputs, data.classes[3]) == (20, "super3")
    found = []
    for client in range(5):
        y, coarse, fine = of(data, client)
        assert y == coarse
        assert set(y) == set(range(20))
        assert len(set(fine)) == 20 * members
        found.append(fine)
    assert sorted(k for fine in found for k in fine) == sorted([*range(100)] * PER_CLASS)  # all, and none twice
    assert len({tuple(sorted(set(fine))) for fine in found}) == 5


def test_mistakes(root: Path) -> None:
    with pytest.raises(DataError, match=r"data\.members: not with"):
        Cifar100Config(members=1, permuted=0.5)
    file = root / "cifar-100-binary" / "test.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"test\.bin.*\b3074\b"):
        load(Cifar100Config(), seed=0, root=root)
    file.write_bytes(bytes([20]) + whole[1:])
    with pytest.raises(DataError, match=r"labels outside 0\.\.19"):
        load(Cifar100Config(), seed=0, root=root)
