"""The DUW paper's data: its own lists of MNIST images, and dogs in the shape of its clients."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtailor.data import load
from fedtailor.data.configs import DuwMnistConfig, StanfordDogsConfig
from fedtailor.errors import DataError


def write_mnist(root: Path) -> None:
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for stem, n in (("train", 60), ("t10k", 20)):
        labels = (np.arange(n) % 10).astype(np.uint8)
        images = np.repeat(np.arange(n, dtype=np.uint8), 784).reshape(n, 28, 28)
        for kind, array in ((f"{stem}-images-idx3", images), (f"{stem}-labels-idx1", labels)):
            head = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
            (folder / f"{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))


def write_lists(root: Path, last: int = 59) -> None:
    (root / "duw").mkdir()
    lists = {f"5clients_env1__{k}": np.arange(k, 50, 5, dtype=np.uint16) for k in range(4)}
    lists["5clients_env1__4"] = np.array([last, 4], np.uint16)
    np.savez(root / "duw" / "mnist_client_indices.npz", **lists)  # type: ignore[arg-type]


def test_mnist_by_the_papers_lists(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_lists(tmp_path)
    data = load(DuwMnistConfig(environment="I", val=0.2), seed=0, root=tmp_path)
    assert data.train.sizes.tolist() == [8, 8, 8, 8, 2]
    assert data.val.sizes.tolist() == [2, 2, 2, 2, 0]
    assert data.test.sizes.tolist() == [4] * 5  # the common test set, a part for each
    seen = torch.cat([part.of(3)[0][:, 0, 0, 0] for part in (data.train, data.val)])
    assert sorted(((seen + 1) / 2 * 255).round().int().tolist()) == list(range(3, 50, 5))
    assert sorted(data.test.y.tolist()) == sorted(list(range(10)) * 2)


def test_at_most_some_training_samples(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_lists(tmp_path)
    whole, some = (
        load(DuwMnistConfig(environment="I", val=0.2, max_train=m), seed=0, root=tmp_path) for m in (None, 3)
    )
    assert some.train.sizes.tolist() == [3, 3, 3, 3, 2]
    assert (some.val.sizes.tolist(), some.test.sizes.tolist()) == (whole.val.sizes.tolist(), [4] * 5)
    for c in range(5):
        kept, everything = ({float(v) for v in data.train.of(c)[0][:, 0, 0, 0]} for data in (some, whole))
        assert kept < everything or c == 4


def test_lists_beyond_mnist_and_absent_ones_are_named(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_lists(tmp_path, last=60)
    with pytest.raises(DataError, match=r"mnist_client_indices\.npz"):
        load(DuwMnistConfig(environment="I"), seed=0, root=tmp_path)
    with pytest.raises(DataError, match="5clients_env2__0"):
        load(DuwMnistConfig(environment="II"), seed=0, root=tmp_path)


def test_dogs_in_the_shape_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "stanford_dogs").mkdir()
    y = np.tile(np.arange(120, dtype=np.uint8), 10)
    features = np.repeat(y[:, None], 3, axis=1)
    np.savez(
        tmp_path / "stanford_dogs" / "dogs_mobilenetv2_u8_100perclass.npz",
        feat_u8=features,
        y=y,
        scale=np.array([0.5], np.float32),
        classes=np.array([f"breed {k}".encode() for k in range(120)]),
    )
    table = {"Size of samples for labels in clients": [[[k, 30] for k in range(60)], [[k, 90] for k in range(120)]]}
    path = tmp_path / "stanford_dogs" / "duw_dogs_5clients_config.json"
    path.write_text(json.dumps(table))
    data = load(StanfordDogsConfig(), seed=1, root=tmp_path)
    assert data.train.sizes.tolist() == [60 * 2, 60 * 6 + 60 * 8]  # 8 of each breed to train on
    assert torch.equal(data.train.x[:, 0], 0.5 * data.train.y.float())
    assert data.test.y.bincount().tolist() == [2] * 120
    assert data.classes[3] == "breed 3"
    path.write_text("[1]")
    with pytest.raises(DataError, match="not a table of samples"):
        load(StanfordDogsConfig(), seed=1, root=tmp_path)


def test_principal_axes_of_dogs_are_those_of_the_training_rows(tmp_path: Path) -> None:
    (tmp_path / "stanford_dogs").mkdir()
    y, random = np.tile(np.arange(120, dtype=np.uint8), 10), np.random.default_rng(0)
    hidden = random.integers(0, 60, (1200, 2))  # four features, of which two say all in training rows
    features = np.stack([hidden[:, 0], hidden[:, 0] * 2, hidden[:, 1], hidden[:, 1]], 1).astype(np.uint8)
    features[960:, 1] = 0
    np.savez(
        tmp_path / "stanford_dogs" / "dogs_mobilenetv2_u8_100perclass.npz",
        feat_u8=features,
        y=y,
        scale=np.array([0.5], np.float32),
        classes=np.array([f"breed {k}".encode() for k in range(120)]),
    )
    table = {"Size of samples for labels in clients": [[[k, 30] for k in range(120)]]}
    (tmp_path / "stanford_dogs" / "duw_dogs_5clients_config.json").write_text(json.dumps(table))
    whole = load(StanfordDogsConfig(), seed=1, root=tmp_path)
    two = load(StanfordDogsConfig(components=2), seed=1, root=tmp_path)
    x = whole.train.x.double().numpy()
    vectors = np.linalg.eigh(x.T @ x)[1]
    for part, name in ((two.train, "train"), (two.test, "test")):
        expected = getattr(whole, name).x.double().numpy() @ vectors[:, [3, 2]]
        assert np.allclose(np.abs(part.x.numpy()), np.abs(expected), atol=1e-3)
    everything = x @ x.T  # two features say all, so that nothing is lost
    assert np.allclose(two.train.x @ two.train.x.T, everything, atol=1e-6 * everything.max())
    assert "features: 2 principal axes of the training rows" in two.notes


@pytest.mark.data
@pytest.mark.parametrize(("environment", "sizes"), [("I", [1042, 1023, 862, 1184, 4459]), ("two", [1760, 5739])])
def test_the_papers_own_lists(environment: str, sizes: list[int]) -> None:
    data = load(DuwMnistConfig(environment=environment), seed=0)  # type: ignore[arg-type]
    assert data.train.sizes.tolist() == sizes
    assert len(data.test.y) == 10_000


@pytest.mark.data
def test_the_dogs() -> None:
    data = load(StanfordDogsConfig(), seed=0)
    assert (len(data.train.y), len(data.test.y), data.shape) == (9600, 2400, (1280,))
    assert data.test.y.bincount().tolist() == [20] * 120
