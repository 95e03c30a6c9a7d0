"""Forecasting: windows of each meter's own past, cut in time, scaled by training hours only."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtailor.core.data import FederatedData
from fedtailor.data import load
from fedtailor.data.configs import ElectricityConfig
from fedtailor.errors import DataError

HOURS, METERS = 100, 6


@pytest.fixture
def root(tmp_path: Path) -> Path:
    series = np.random.default_rng(0).integers(1, 500, size=(HOURS, METERS))
    lines = ["date," + ",".join(map(str, range(METERS)))]
    lines += [f"hour {t}," + ",".join(map(str, row)) for t, row in enumerate(series)]
    (tmp_path / "electricity").mkdir()
    (tmp_path / "electricity" / "ecl_203clients_1000h.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    np.save(tmp_path / "series.npy", series)
    return tmp_path


def read(root: Path, **options: Any) -> FederatedData:
    return load(ElectricityConfig(**options), seed=0, root=root)


def test_windows_are_the_hours_before_the_target(root: Path) -> None:
    data = read(root, window=4)
    series = np.load(root / "series.npy")
    scaled = (series - series[:81].mean(0)) / series[:81].std(0)  # 90 hours before the test, 9 of them validation
    assert data.clients == tuple(f"meter-{i}" for i in range(METERS))
    for rows, first, last in ((data.train, 4, 81), (data.val, 81, 90), (data.test, 90, 100)):
        for meter in range(METERS):
            x, y = rows.of(meter)
            assert len(x) == last - first
            for k, hour in enumerate(range(first, last)):
                wanted = torch.from_numpy(scaled[hour - 4 : hour, meter])
                torch.testing.assert_close(x[k], wanted)
                torch.testing.assert_close(y[k, 0], torch.tensor(scaled[hour, meter]))


def test_distinct_meters_are_chosen_the_same_way_each_time(root: Path) -> None:
    some = read(root, clients=3)
    assert len(set(some.clients)) == 3
    assert some.clients == read(root, clients=3).clients
    assert set(read(root, clients=2).clients) < set(some.clients)
    assert "3 of 6 meters: the most distinct" in some.notes[0]


def test_loads_between_0_and_1_by_training_hours(root: Path) -> None:
    data = read(root, window=4, scale="unit")
    series = np.load(root / "series.npy")
    low, high = series[:81].min(0), series[:81].max(0)
    for meter in range(METERS):
        x, y = data.train.of(meter)
        assert (float(torch.cat([x[0], y[:, 0]]).min()), float(torch.cat([x[0], y[:, 0]]).max())) == (0, 1)
        wanted = (series[90:, meter] - low[meter]) / (high[meter] - low[meter])  # may lie outside
        torch.testing.assert_close(data.test.of(meter)[1][:, 0], torch.from_numpy(wanted))


def test_distinct_meters_by_their_places_in_a_plane(tmp_path: Path) -> None:
    """Three kinds of series in random order: one meter of each kind is chosen, in every run."""
    rng, hours = np.random.default_rng(1), np.arange(HOURS)
    shapes = [np.sin(hours / 4), np.cos(hours / 9), (hours % 11) / 5]
    series = np.stack([100 + 40 * shapes[i % 3] + rng.normal(size=HOURS) for i in range(12)], axis=1)
    (tmp_path / "electricity").mkdir()
    lines = ["date," + ",".join(map(str, range(12)))]
    lines += [f"hour {t}," + ",".join(map(str, row)) for t, row in enumerate(series)]
    path = tmp_path / "electricity" / "ecl_203clients_1000h.csv.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    some = read(tmp_path, clients=3, scale="unit", distinct="tsne")
    assert {int(name.removeprefix("meter-")) % 3 for name in some.clients} == {0, 1, 2}
    assert some.clients == read(tmp_path, clients=3, scale="unit", distinct="tsne").clients
    assert "by t-SNE" in some.notes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"clients": 7}, "data.clients = 7: there are only 6 meters"), ({"window": 95}, "data.window = 95")],
)
def test_what_cannot_be_is_refused(root: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(root, **options)


def test_damaged_files_are_named(root: Path) -> None:
    path = root / "electricity" / "ecl_203clients_1000h.csv.gz"
    text = gzip.decompress(path.read_bytes()).decode().splitlines()
    path.write_bytes(gzip.compress("\n".join([*text[:5], "hour,1,2,x,4,5,6", *text[6:]]).encode()))
    with pytest.raises(DataError, match=r"ecl_203clients_1000h\.csv\.gz"):
        read(root)
    path.unlink()
    with pytest.raises(DataError, match="ecl_203clients_1000h"):
        read(root)


@pytest.mark.data
def test_real_meters() -> None:
    data = load(ElectricityConfig(), seed=0)
    assert (len(data.clients), data.train.sizes.tolist()[0], data.test.sizes.tolist()[0]) == (203, 807, 100)
    assert abs(float(data.train.y.mean())) < 0.05
