"""School: every school a client, scores between 0 and 1, columns standardised by its own training rows."""

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat  # type: ignore[import-untyped]

from fedtailor.data import load
from fedtailor.data.configs import SchoolConfig
from fedtailor.data.sources.school import read_schools
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
def test_cells_of_any_type(tmp_path: Path, packed: bool) -> None:
    x, y = np.empty((1, 2), object), np.empty((1, 2), object)
    x[0] = [np.arange(6, dtype=np.uint8).reshape(3, 2), np.ones((1, 2), np.float32)]
    y[0] = [np.array([[1], [70], [2]], np.int16), np.array([[3.0]])]
    savemat(tmp_path / "c.mat", {"X": x, "Y": y, "other": np.eye(2), "text": "words"}, do_compression=packed)
    tables = read_schools(tmp_path / "c.mat")
    assert [(a.dtype, a.tolist(), b.tolist()) for a, b in tables] == [
        (np.float64, [[0, 1], [2, 3], [4, 5]], [1, 70, 2]),
        (np.float64, [[1, 1]], [3]),
    ]


@pytest.mark.parametrize(
    "seed", sorted((Path(__file__).parent / "damaged_mat").iterdir(), key=str), ids=lambda p: p.name
)
def test_files_that_end_the_process_or_its_memory_in_scipy_are_refused(seed: Path) -> None:
    with pytest.raises(DataError, match=seed.name):
        read_schools(seed)
