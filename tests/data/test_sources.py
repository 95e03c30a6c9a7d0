"""Sources: canonical files are read as they are, damage is named, and the made-up task is the paper's."""

from __future__ import annotations

import gzip
import re
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from fedtailor.core.data import FederatedData
from fedtailor.data import SOURCES, DataConfig, files, load
from fedtailor.data.configs import (
    Cifar10Config,
    DigitsConfig,
    ElectricityConfig,
    FashionMnistConfig,
    HeartDiseaseConfig,
    MnistConfig,
    PolynomialConfig,
    QmnistConfig,
)
from fedtailor.data.sources.polynomial import coefficients
from fedtailor.errors import DataError

ADAPTER: TypeAdapter[Any] = TypeAdapter(DataConfig)


def idx(array: np.ndarray) -> bytes:
    code = {"uint8": 0x08, "int32": 0x0C}[array.dtype.name]
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_mnist(root: Path, folder: str = "MNIST", train: int = 60, test: int = 20) -> Path:
    """Small files in MNIST's format: every pixel of image i is i, its label i modulo 10."""
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    for stem, count in (("train", train), ("t10k", test)):
        images = np.repeat(np.arange(count, dtype=np.uint8), 16).reshape(count, 4, 4)
        (raw / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (raw / f"{stem}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.arange(count, dtype=np.uint8) % 10)))
    return raw


def write_qmnist(root: Path, train: int = 60, test: int = 30) -> Path:
    """Writer of image i is i // 15 (train) and 100 + i // 10 (test, with rows beyond MNIST's)."""
    raw = root / "QMNIST" / "raw"
    raw.mkdir(parents=True)
    for stem, count, first, each in (("train", train, 0, 15), ("test", test, 100, 10)):
        table = np.zeros((count, 8), dtype=np.int32)
        table[:, 0] = np.arange(count) % 10
        table[:, 2] = first + np.arange(count) // each
        (raw / f"qmnist-{stem}-labels-idx2-int.gz").write_bytes(gzip.compress(idx(table)))
    return raw


def everything(data: FederatedData) -> tuple[torch.Tensor, torch.Tensor]:
    parts = (data.train, data.val, data.test)
    return torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])


def test_every_source_is_in_the_union_and_described() -> None:
    for name, info in SOURCES.items():
        assert info.config.model_fields["source"].default == name
        assert info.description
        needed = {
            "folder": {"path": "x", "target": "y"},
            "saved": {"path": "x"},
            "own": {"load": "a:b"},
            "pfllib": {"path": "x"},
            "image-folder": {"path": "x"},
            "image-masks": {"path": "x"},
            "text": {"path": "x"},
        }.get(name, {})
        assert type(ADAPTER.validate_python({"source": name, **needed})) is info.config
        assert all(field.description for field in info.config.model_fields.values())


def test_unknown_keys_are_errors() -> None:
    with pytest.raises(ValidationError, match="alhpa"):
        ADAPTER.validate_python({"source": "digits", "alhpa": 1.0})


def test_listing_sources_imports_nothing_heavy() -> None:
    code = "import sys, fedtailor.data; print([m for m in ('torch', 'polars', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_digits() -> None:
    data = load(DigitsConfig(clients=5), seed=0)
    x, y = everything(data)
    assert x.shape == (1797, 1, 8, 8)
    assert x.dtype == torch.float32
    assert (x.min().item(), x.max().item()) == (0.0, 1.0)
    assert torch.bincount(y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert len(data.clients) == 5
    assert data.outputs == len(data.classes) == 10


def test_the_seed_decides_everything() -> None:
    first, again, other = (load(DigitsConfig(), seed=seed) for seed in (3, 3, 4))
    assert first.train.x.equal(again.train.x)
    assert first.notes == again.notes
    assert not first.train.starts.equal(other.train.starts)


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "classes", "quantity"])
def test_each_partition_by_configuration(partition: str) -> None:
    data = load(DigitsConfig(partition=partition, clients=6, classes_per_client=2), seed=0)  # type: ignore[arg-type]
    kinds = [len(data.train.of(i)[1].unique()) for i in range(6)]
    assert (kinds == [2] * 6) == (partition == "classes")
    assert len(everything(data)[0]) == 1797
    assert data.notes[0] == f"partition: {partition}"


def test_permuted_labels_are_a_concept_of_their_own() -> None:
    plain, shifted = (load(DigitsConfig(clients=6, permuted=p), seed=3) for p in (0.0, 0.5))
    assert torch.equal(plain.train.x, shifted.train.x)
    renamed: dict[int, set[int]] = {}
    moved = []
    for i in range(6):
        for split in ("train", "val", "test"):
            before, after = (getattr(d, split).of(i)[1] for d in (plain, shifted))
            if not torch.equal(before, after):
                moved.append(i)
                assert not bool((before == after).any())
                for a, b in zip(before.tolist(), after.tolist(), strict=True):
                    renamed.setdefault(a, set()).add(b)
    assert len(set(moved)) == 3
    assert len(moved) == 9  # in every split of half the clients
    assert all(len(b) == 1 for b in renamed.values())
    assert len(set.union(*renamed.values())) == len(renamed)
    assert shifted.notes[-1].startswith("labels permuted at 3 clients: ")


@pytest.mark.parametrize(("use", "count"), [("all", 80), ("train", 60), ("test", 20)])
@pytest.mark.parametrize("config", [MnistConfig, FashionMnistConfig])
def test_mnist_files(tmp_path: Path, config: type, use: str, count: int) -> None:
    write_mnist(tmp_path, "MNIST" if config is MnistConfig else "FashionMNIST")
    data = load(config(use=use, clients=2, partition="iid"), seed=0, root=tmp_path)
    x, y = everything(data)
    assert x.shape == (count, 1, 4, 4)
    # every pixel of an image tells which one it is, so that labels can be checked against images
    assert torch.equal((x[:, 0, 0, 0] * 0.5 + 0.5).mul(255).round().long() % 10, y)


def test_unpacked_files_do_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_mnist(tmp_path)
    for path in list(raw.iterdir()):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    monkeypatch.setenv("FEDTAILOR_DATA", str(tmp_path))
    assert len(everything(load(MnistConfig(clients=2), seed=0))[0]) == 80


def test_absent_files_are_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDTAILOR_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError) as caught:
        load(MnistConfig(), seed=0)
    message = str(caught.value)
    assert str(tmp_path / ".cache/fedtailor/MNIST/raw/train-images-idx3-ubyte.gz") in message
    assert '"fedtailor download mnist"' in message
    assert "FEDTAILOR_DATA" in message


def test_files_that_cannot_be_fetched_are_not_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"csv\.gz.*FEDTAILOR_DATA"):
        load(ElectricityConfig(), seed=0, root=tmp_path)


def test_few_training_samples_beside_a_large_test() -> None:
    few, fewer, all_of_them = (
        load(DigitsConfig(clients=5, partition="classes", max_train=m), seed=0) for m in (50, 20, None)
    )
    for i in range(5):
        y = few.train.of(i)[1]
        assert len(y) == 50
        assert sorted(abs(n - 25) for n in torch.bincount(y).tolist() if n)[-1] <= 1  # of both classes alike
        sets = [{tuple(x.flatten().tolist()) for x in d.train.of(i)[0]} for d in (fewer, few, all_of_them)]
        assert sets[0] < sets[1] < sets[2]
    assert torch.equal(few.test.x, all_of_them.test.x)
    assert torch.equal(few.val.x, all_of_them.val.x)
    assert "split per client: test 0.25, val 0.1, train on at most 50 of the rest" in few.notes


def damage(raw: Path, file: str, content: bytes) -> str:
    (raw / file).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(MnistConfig(clients=2), seed=0, root=raw.parents[1])
    assert file in str(caught.value)
    return str(caught.value)


def test_damaged_idx_files(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path)
    file = "train-images-idx3-ubyte.gz"
    whole = (raw / file).read_bytes()
    content = gzip.decompress(whole)
    assert "gzip" in damage(raw, file, whole[:-9])
    assert "gzip" in damage(raw, file, b"not gzip at all")
    assert "magic number 00000801" in damage(raw, file, gzip.compress(b"\0\0\x08\x01" + content[4:]))
    assert "magic number" in damage(raw, file, gzip.compress(b"\0\0"))
    assert re.search(r"\b60\b.*\b960\b.*\b959\b", damage(raw, file, gzip.compress(content[:-1])))
    (raw / file).write_bytes(whole)
    labels = "train-labels-idx1-ubyte.gz"
    assert "59 labels for the 60 images" in damage(raw, labels, gzip.compress(idx(np.zeros(59, np.uint8))))
    assert "labels outside 0..9" in damage(raw, labels, gzip.compress(idx(np.full(60, 10, np.uint8))))


def test_cifar_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CIFAR_RECORDS", 20)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for f, stem in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        records = np.zeros((20, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(20) % 10
        records[:, 1] = f  # first pixel of the red plane
        records[:, 1 + 1024] = np.arange(20) % 10  # of the green plane
        (folder / f"{stem}.bin").write_bytes(records.tobytes())
    x, y = everything(load(Cifar10Config(clients=3), seed=0, root=tmp_path))
    pixels = (x * 0.5 + 0.5).mul(255).round().long()
    assert x.shape == (120, 3, 32, 32)
    assert torch.bincount(pixels[:, 0, 0, 0]).tolist() == [20] * 6
    assert torch.equal(pixels[:, 1, 0, 0], y)
    x, _ = everything(load(Cifar10Config(clients=3, use="test"), seed=0, root=tmp_path))
    assert (x[:, 0, 0, 0] * 0.5 + 0.5).mul(255).round().unique().tolist() == [5.0]
    (folder / "data_batch_3.bin").write_bytes(b"\0" * 3073 * 19)
    with pytest.raises(DataError, match=r"data_batch_3.bin.*\b58387\b.*\b61460\b"):
        load(Cifar10Config(), seed=0, root=tmp_path)


def test_qmnist_groups_by_writer(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_qmnist(tmp_path)
    data = load(QmnistConfig(clients=6, min_samples=10), seed=0, root=tmp_path)
    assert data.clients == ("writer-0000", "writer-0001", "writer-0002", "writer-0003", "writer-0100", "writer-0101")
    pixels = (data.train.of(1)[0][:, 0, 0, 0] * 0.5 + 0.5).mul(255).round()
    assert (pixels // 15).unique().tolist() == [1.0]
    picked = load(QmnistConfig(clients=2, min_samples=15), seed=0, root=tmp_path).clients
    assert set(picked) <= {f"writer-000{i}" for i in range(4)}
    assert load(QmnistConfig(clients=2, min_samples=10, use="test"), seed=0, root=tmp_path).clients == (
        "writer-0100",
        "writer-0101",
    )
    with pytest.raises(DataError, match=r"data.clients.*\b5\b.*\b4\b.*\b6\b.*\b11\b"):
        load(QmnistConfig(clients=5, min_samples=11), seed=0, root=tmp_path)


@pytest.mark.parametrize("rows", [59, 61])
def test_qmnist_must_match_mnist(tmp_path: Path, rows: int) -> None:
    write_mnist(tmp_path)
    write_qmnist(tmp_path, train=rows)
    with pytest.raises(DataError, match=r"-labels-idx2-int.gz"):
        load(QmnistConfig(clients=1, min_samples=1), seed=0, root=tmp_path)


def write_heart(root: Path) -> Path:
    folder = root / "heart_disease"
    folder.mkdir()
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        chol = "0" if hospital == "switzerland" else "240"
        lines = [f"{40 + i},{i % 2},{1 + i % 4},120,{chol},0,?,150,0,1.5,2,?,3.0,{i % 3}" for i in range(20)]
        lines[0] = lines[0].replace(",?,3.0,", ",2,3,")
        (folder / f"processed.{hospital}.data").write_text("\n".join(lines) + "\n")
    return folder


def test_heart_disease_files(tmp_path: Path) -> None:
    folder = write_heart(tmp_path)
    data = load(HeartDiseaseConfig(standardise="none"), seed=0, root=tmp_path)
    assert data.clients == ("cleveland", "hungarian", "switzerland", "va")
    assert data.classes == ("absent", "present")
    x, y = everything(data)
    assert torch.bincount(y).tolist() == [28, 52]
    assert {"sex=0", "sex=1", "cp=4", "restecg=missing", "thal=3"} <= set(data.features)
    assert "thal=3.0" not in data.features
    assert x[:, data.features.index("chol")].unique().tolist() == [240.0]  # 0 is missing, filled from the others
    (folder / "processed.va.data").write_text("1,2,3\n")
    with pytest.raises(DataError, match=r"processed.va.data.*\b1\b.*\b14\b"):
        load(HeartDiseaseConfig(), seed=0, root=tmp_path)


PAPER = {
    5: ([58, 172, 278, 233, 256], [3.18, 3.85, 6.98, -5.01, -0.21]),
    10: (
        [30, 89, 143, 120, 132, 108, 113, 139, 41, 80],
        [-5.58, 9.75, 8.88, -9.21, 4.11, 8.50, -6.39, 1.36, 8.31, -9.32],
    ),
}


@pytest.mark.parametrize("clients", [5, 10])
@pytest.mark.parametrize("setting", [1, 2, 3])
def test_sorted_polynomial_is_the_papers(clients: int, setting: Literal[1, 2, 3]) -> None:
    data = load(PolynomialConfig(layout="sorted", clients=clients, setting=setting), seed=42).to(torch.float64)
    sizes, shifts = PAPER[clients]
    assert data.train.sizes.tolist() == sizes
    ends = [data.train.of(i)[0][:, 1] for i in range(clients)]
    assert all(a.max() < b.min() for a, b in pairwise(ends))
    assert data.test.x.equal(data.train.x)
    for i in range(clients):
        truth = torch.tensor([0.0, -6.0, 18.0, -12.0], dtype=torch.float64)
        truth[4 - setting :] += shifts[i]
        x, y = data.test.of(i)
        assert torch.allclose(x @ truth[:, None], y, atol=0.02)  # shifts are printed with two digits


def test_polynomials_can_be_drawn_apart_from_their_noise() -> None:
    one, other, plain = (load(PolynomialConfig(drawn=d), seed=s) for d, s in ((42, 0), (42, 1), (None, 42)))
    assert torch.equal(one.train.x, other.train.x)
    assert torch.equal(one.test.y, plain.test.y)
    assert not torch.equal(one.train.y, other.train.y)


@pytest.mark.parametrize("evaluate", ["in-sample", "fresh"])
def test_iid_polynomial(evaluate: str) -> None:
    config = PolynomialConfig(clients=4, setting=2, evaluate=evaluate)  # type: ignore[arg-type]
    data = load(config, seed=1).to(torch.float64)
    assert data.train.sizes.tolist() == [250] * 4
    assert data.val.sizes.tolist() == [0] * 4
    assert data.test.x.equal(data.train.x) == (evaluate == "in-sample")
    residuals = []
    for i in range(4):
        x, y = data.test.of(i)
        truth = torch.linalg.lstsq(x, y).solution
        assert torch.allclose(x @ truth, y, atol=1e-5)  # no noise: the cubic fits exactly
        assert torch.allclose(truth[:2, 0], torch.tensor([0.0, -6.0], dtype=torch.float64), atol=1e-3)
        assert truth[2, 0].item() - 18 == pytest.approx(truth[3, 0].item() + 12, abs=1e-2)  # the same shift on both
        xs, ys = data.train.of(i)
        residuals.append(ys - xs @ truth)
    assert torch.cat(residuals).std().item() == pytest.approx(0.1, rel=0.1)
    assert any("noise-free" in note for note in data.notes)


def test_true_coefficients() -> None:
    assert coefficients(np.array([1.0, -2.0]), 2).tolist() == [[0, -6, 19, -11], [0, -6, 16, -14]]


def test_polynomial_errors() -> None:
    with pytest.raises(DataError, match=r"data\.evaluate"):
        PolynomialConfig(layout="sorted", evaluate="fresh")
    with pytest.raises(DataError, match=r"data.clients.*\b5\b.*\b4\b"):
        load(PolynomialConfig(clients=5, samples=4), seed=0)
    with pytest.raises(DataError, match=r"data.samples.*\b30\b.*client-\d+"):
        load(PolynomialConfig(clients=30, samples=30, layout="sorted"), seed=0)


@pytest.mark.data
@pytest.mark.parametrize(
    ("config", "shape", "samples"),
    [
        (MnistConfig(max_samples=100), (1, 28, 28), 1000),
        (FashionMnistConfig(use="test"), (1, 28, 28), 10_000),
        (Cifar10Config(use="test", partition="classes"), (3, 32, 32), 10_000),
        (HeartDiseaseConfig(), (30,), 920),
    ],
)
def test_real_data(config: Any, shape: tuple[int, ...], samples: int) -> None:
    data = load(config, seed=0)
    x, y = everything(data)
    assert data.shape == shape
    assert len(x) == len(y) == samples
    assert torch.isfinite(x).all()


@pytest.mark.data
def test_two_classes_and_a_hundred_training_images_each() -> None:
    config = Cifar10Config(partition="classes", classes_per_client=2, samples_per_client=1000, test=0.5, max_train=100)
    data = load(config, seed=0)
    sizes = data.train.sizes.tolist(), data.val.sizes.tolist(), data.test.sizes.tolist()
    assert sizes == ([100] * 10, [100] * 10, [500] * 10)
    for i in range(10):
        counts = torch.bincount(data.train.of(i)[1])
        assert counts[counts > 0].tolist() in ([50, 50], [49, 51], [51, 49])
        assert set(data.test.of(i)[1].tolist()) == set(data.train.of(i)[1].tolist())


@pytest.mark.data
def test_real_writers() -> None:
    everyone = load(QmnistConfig(clients=539 + 297, min_samples=1), seed=0)
    assert len(everything(everyone)[0]) == 70_000
    train = load(QmnistConfig(clients=539, min_samples=19, use="train"), seed=0)
    sizes = train.train.sizes + train.val.sizes + train.test.sizes
    assert (int(sizes.min()), int(sizes.median()), int(sizes.max())) == (19, 116, 131)


@pytest.mark.data
def test_real_heart_disease_can_be_learnt() -> None:
    from sklearn.linear_model import LogisticRegression

    data = load(HeartDiseaseConfig(), seed=0)
    model = LogisticRegression(max_iter=1000).fit(data.train.x.numpy(), data.train.y.numpy())
    assert model.score(data.test.x.numpy(), data.test.y.numpy()) > 0.75
