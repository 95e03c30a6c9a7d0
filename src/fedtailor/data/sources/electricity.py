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
    offset, unit, scaling = _scale(series[:val_from], config.scale)
    scaled = (series - offset) / np.where(unit > 0, unit, 1.0)
    chosen = _choose(series[:val_from], scaled[:val_from], config)
    scaled = scaled[:, chosen]
    by = "the most distinct daily profiles" if config.distinct == "profile" else "the most distinct by t-SNE"
    how = "all" if len(chosen) == len(names) else by
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
            f"loads are scaled {scaling} of each meter's training hours; errors are in these units",
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


def _scale(known: Floats, scale: str) -> tuple[Floats, Floats, str]:
    """What is subtracted from each meter's series and by what it is divided, and that in words."""
    if scale == "unit":
        return known.min(0), known.max(0) - known.min(0), "to 0..1 by minimum and maximum"
    return known.mean(0), known.std(0), "by mean and standard deviation"


def _choose(known: Floats, scaled: Floats, config: ElectricityConfig) -> list[int]:
    """All meters, or by farthest-point sampling of their daily profiles, or of their places by t-SNE."""
    meters = known.shape[1]
    if config.clients in (0, meters):
        return list(range(meters))
    if config.clients > meters:
        raise DataError(f"data.clients = {config.clients}: there are only {meters} meters")
    if config.distinct == "tsne":
        points = _places(scaled)
    else:
        days = len(known) // DAY
        profile = known[: days * DAY].reshape(days, DAY, -1).mean(0)
        points = (profile - profile.mean(0)) / np.where(profile.std(0) > 0, profile.std(0), 1.0)
    chosen = [int(((points - points.mean(1, keepdims=True)) ** 2).sum(0).argmax())]
    while len(chosen) < config.clients:
        distance = ((points[:, :, None] - points[:, None, chosen]) ** 2).sum(0).min(1)
        chosen.append(int(distance.argmax()))
    return sorted(chosen)


def _places(scaled: Floats) -> Floats:
    """Places of meters in the plane [2, meters] by t-SNE of their scaled training hours; the same in every run."""
    from sklearn.manifold import TSNE  # a second to import

    meters = scaled.shape[1]
    embedding = TSNE(perplexity=min(30.0, (meters - 1) / 3), init="pca", random_state=0, n_jobs=1)
    return np.asarray(embedding.fit_transform(np.ascontiguousarray(scaled.T)), np.float64).T


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
