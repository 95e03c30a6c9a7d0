"""Electricity loads (ECL): each meter forecasts its next hour from the hours before it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.core.data import FederatedData, Rows
from fedtailor.data.configs import ElectricityConfig
from fedtailor.data.download import data_root, locate
from fedtailor.data.files import read_bytes
from fedtailor.data.splits import starts
from fedtailor.errors import DataError

Floats = NDArray[np.float64]
FILE = "electricity/ecl_203clients_1000h.csv.gz"
DAY = 24


def load(config: ElectricityConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    """Windows of each meter's series, split in time: training before validation before test."""
    path = locate(data_root(root), FILE, config.source)
    names, series = _parse(path, read_bytes(path))
    hours = len(series)
    if hours - config.window < 10:
        raise DataError(f"data.window = {config.window}: {path.name} has only {hours} hours; lower it")
    test_from = hours - round(config.test * hours)
    val_from = test_from - round(config.val * test_from)
    chosen = _choose(series[:val_from], config.clients)
    mean, sd = series[:val_from].mean(0), series[:val_from].std(0)
    scaled = ((series - mean) / np.where(sd > 0, sd, 1.0))[:, chosen]
    how = "all" if len(chosen) == len(names) else "the most distinct daily profiles"
    return FederatedData(
        name="electricity",
        task="regression",
        clients=tuple(f"meter-{names[i]}" for i in chosen),
        train=_windows(scaled, config.window, config.window, val_from),
        val=_windows(scaled, config.window, val_from, test_from),
        test=_windows(scaled, config.window, test_from, hours),
        outputs=1,
        features=tuple(f"lag {k}" for k in range(config.window, 0, -1)),
        notes=(
            f"{len(chosen)} of {len(names)} meters: {how}",
            f"{hours} hours, split in time: training to hour {val_from}, validation to {test_from}, then test",
            "loads are scaled by mean and standard deviation of each meter's training hours; errors are in these units",
        ),
    )


def _parse(path: Path, content: bytes) -> tuple[list[str], Floats]:
    lines = content.decode("utf-8", "replace").splitlines()
    names = lines[0].split(",")[1:]
    try:
        series = np.array([[float(v) for v in line.split(",")[1:]] for line in lines[1:]])
    except ValueError as error:
        raise DataError(f"{path}: {error}; fetch the file again") from None
    if series.shape != (len(lines) - 1, len(names)) or not np.isfinite(series).all():
        raise DataError(f"{path}: lines of different length or missing values; fetch the file again")
    return names, series


def _choose(series: Floats, clients: int) -> list[int]:
    """All meters, or by farthest-point sampling of their daily profiles."""
    if clients == 0 or clients == series.shape[1]:
        return list(range(series.shape[1]))
    if clients > series.shape[1]:
        raise DataError(f"data.clients = {clients}: there are only {series.shape[1]} meters")
    days = len(series) // DAY
    profile = series[: days * DAY].reshape(days, DAY, -1).mean(0)
    profile = (profile - profile.mean(0)) / np.where(profile.std(0) > 0, profile.std(0), 1.0)
    chosen = [int(((profile - profile.mean(1, keepdims=True)) ** 2).sum(0).argmax())]
    while len(chosen) < clients:
        distance = ((profile[:, :, None] - profile[:, None, chosen]) ** 2).sum(0).min(1)
        chosen.append(int(distance.argmax()))
    return sorted(chosen)


def _windows(scaled: Floats, window: int, first: int, last: int) -> Rows:
    """Each meter's targets at hours first..last - 1, with the `window` hours before each."""
    hours = np.arange(first, last)
    x = scaled[hours[:, None] + np.arange(-window, 0)]  # [hours, window, meters]
    meters = scaled.shape[1]
    return Rows(
        torch.from_numpy(np.ascontiguousarray(x.transpose(2, 0, 1)).reshape(-1, window)),
        torch.from_numpy(np.ascontiguousarray(scaled[hours].T).reshape(-1, 1)),
        starts([len(hours)] * meters),
    )
