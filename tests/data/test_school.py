"""School: every school a client, scores between 0 and 1, columns standardised by its own training rows."""

from pathlib import Path

import numpy as np
import pytest
from scipy.io import loadmat, savemat  # type: ignore[import-untyped]

from fedtailor.data import load
from fedtailor.data.configs import SchoolConfig
from fedtailor.data.sources.school import read_cells
from fedtailor.errors import DataError


def write(root: Path, pupils: tuple[int, ...] = (20, 12), columns: int = 4) -> Path:
    rng = np.random.default_rng(0)
    x, y = np.empty((1, len(pupils)), object), np.empty((1, len(pupils)), object)
    for i, n in enumerate(pupils):
        x[0, i] = np.concatenate([rng.normal(size=(n, columns - 1)), np.ones((n, 1))], 1)
        y[0, i] = rng.integers(1, 71, size=(n, 1))
    (root / "school").mkdir()
    savemat(root / "school" / "school.mat", {"X": x, "Y": y})
    return root


def test_every_school_is_a_client(tmp_path: Path) -> None:
    data = load(SchoolConfig(), seed=0, root=write(tmp_path))
    assert data.clients == ("school-0", "school-1")
    assert data.task == "regression"
    assert data.train.x.shape[1] == 3  # without the constant
    assert [int(n) for n in data.test.sizes] == [3, 2]
    assert 0 <= float(data.train.y.min()) <= float(data.train.y.max()) <= 1
    x = data.train.of(0)[0]
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-9)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    savemat(tmp_path / "school" / "school.mat", {"X": np.zeros((2, 2))})
    with pytest.raises(DataError, match=r"school\.mat"):
        load(SchoolConfig(), seed=0, root=tmp_path)


@pytest.mark.data
def test_the_real_file() -> None:
    data = load(SchoolConfig(), seed=0)
    assert len(data.clients) == 139
    assert data.train.x.shape[1] == 27
    assert int(data.train.sizes.sum() + data.val.sizes.sum() + data.test.sizes.sum()) == 15_362


@pytest.mark.parametrize("packed", [True, False])
def test_cells_are_those_that_scipy_reads(tmp_path: Path, packed: bool) -> None:
    rng = np.random.default_rng(0)
    kinds = (np.float64, np.float32, np.uint8, np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64)
    cells = np.empty((1, len(kinds)), object)
    for i, kind in enumerate(kinds):
        cells[0, i] = (100 * rng.random((i, 3))).astype(kind)
    savemat(tmp_path / "c.mat", {"C": cells, "other": np.eye(2), "text": "words"}, do_compression=packed)
    read = read_cells((tmp_path / "c.mat").read_bytes())
    assert list(read) == ["C"]
    for mine, wanted in zip(read["C"], loadmat(tmp_path / "c.mat")["C"][0], strict=True):
        np.testing.assert_array_equal(mine, wanted)
