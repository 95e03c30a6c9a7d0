"""PFLlib's folders: what numpy pickled is read without unpickling, and nothing in it is ever run."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtailor.data import load
from fedtailor.data.configs import PFLlibConfig
from fedtailor.data.pickled_arrays import read_dict
from fedtailor.errors import DataError


def write(file: Path, **content: Any) -> None:
    """As PFLlib's save_file does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        np.savez_compressed(stream, data=content)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three clients of unequal size."""
    rng = np.random.default_rng(0)
    for client, size in enumerate((40, 24, 12)):
        for kind, share in (("train", size), ("test", size // 3)):
            x = rng.normal(size=(share, 1, 4, 4)).astype(np.float32) + client
            write(tmp_path / "MNIST" / kind / f"{client}.npz", x=x, y=rng.integers(0, 5, share))
    return tmp_path / "MNIST"


@pytest.mark.parametrize("kind", ["<f4", ">f8", "<i8", "u1", "?", "<f2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_those_that_were_saved(tmp_path: Path, kind: str, order: Any) -> None:
    x = np.asarray(np.arange(24).reshape(2, 3, 4), dtype=kind, order=order)
    y = np.arange(300)[::2]
    write(tmp_path / "a.npz", x=x, y=y, empty=np.zeros((0, 3)), more=[1, -70000, 2.5, None, True, "text", b"bytes"])
    found = read_dict(tmp_path / "a.npz")
    assert found["x"].dtype == x.dtype
    np.testing.assert_array_equal(found["x"], x)
    np.testing.assert_array_equal(found["y"], y)
    assert found["empty"].shape == (0, 3)
    assert found["more"] == [1, -70000, 2.5, None, True, "text", b"bytes"]


class Evil:
    """Unpickled, it would run a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("hidden", [Evil(), [Evil()], {"x": Evil()}, np.array([Evil()], dtype=object), print, Path])
def test_what_would_run_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a.npz"), x=hidden, y=np.zeros(3))
    with pytest.raises(DataError, match=r"a\.npz: holds .*(system|print|Path), which is not read"):
        read_dict(Path("a.npz"))
    assert not Path("ran").exists()


def test_a_small_file_does_not_grow(tmp_path: Path) -> None:
    doubled: list[Any] = [1]
    for _ in range(60):
        doubled = [doubled, doubled]
    itself: list[Any] = []
    itself.append(itself)
    write(tmp_path / "a.npz", x=doubled, y=itself)
    found = read_dict(tmp_path / "a.npz")
    assert found["x"][0] is found["x"][1]
    assert found["y"] == [None]


def test_damaged_files_are_errors_of_one_line(tmp_path: Path) -> None:
    write(tmp_path / "a.npz", x=np.zeros(3), y=np.zeros(3))
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        content = archive.read("data.npy")
    for cut in (len(content) - 1, len(content) // 2, 130, 20, 3):
        with zipfile.ZipFile(tmp_path / "cut.npz", "w") as archive:
            archive.writestr("data.npy", content[:cut])
        with pytest.raises(DataError, match=r"cut\.npz"):
            read_dict(tmp_path / "cut.npz")
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    with zipfile.ZipFile(tmp_path / "plain.npz", "w") as archive:
        archive.writestr("data.npy", buffer.getvalue())
    with pytest.raises(DataError, match="where a dictionary is expected"):
        read_dict(tmp_path / "plain.npz")


def test_clients_keep_their_test_data_and_validation_comes_from_training(folder: Path) -> None:
    data = load(PFLlibConfig(path=folder, val=0.25), seed=0)
    assert data.clients == ("client-00", "client-01", "client-02")
    assert data.train.sizes.tolist() == [30, 18, 9]
    assert data.val.sizes.tolist() == [10, 6, 3]
    assert data.test.sizes.tolist() == [13, 8, 4]
    assert (data.shape, data.outputs) == ((1, 4, 4), 5)
    stored = read_dict(folder / "test" / "1.npz")
    np.testing.assert_array_equal(data.test.of(1)[0].numpy(), stored["x"])
    whole = read_dict(folder / "train" / "2.npz")["x"].reshape(12, -1)
    parts = np.concatenate([data.train.of(2)[0].numpy(), data.val.of(2)[0].numpy()]).reshape(12, -1)
    assert sorted(map(tuple, whole)) == sorted(map(tuple, parts))


def test_what_is_missing_is_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DataError, match=r"no train/\*\.npz"):
        load(PFLlibConfig(path=tmp_path), seed=0)
    write(folder / "train" / "1.npz", x=[[1, 2], [3]], y=np.zeros(2, dtype=int))
    with pytest.raises(DataError, match=r"1\.npz.*must be arrays"):
        load(PFLlibConfig(path=folder), seed=0)
