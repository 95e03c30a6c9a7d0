"""Regression on cubic polynomials of x in [0, 1] that share all but the highest one to three coefficients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.random import stream
from fedtailor.data.configs import PolynomialConfig
from fedtailor.data.splits import client_names, starts
from fedtailor.errors import DataError

Floats = NDArray[np.float64]
BASE = np.array([0.0, -6.0, 18.0, -12.0])  # of 1, x, x^2, x^3
SHIFT = 10.0  # a client's shift is drawn from U(-10, 10)


def load(config: PolynomialConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    """Generate the data; `root` is not needed."""
    inputs, shifts = _draw(config, seed if config.drawn is None else config.drawn)
    names = client_names(config.clients)
    truth = coefficients(shifts, config.setting)
    noisy, test_inputs = [], inputs
    for i, x in enumerate(inputs):
        noise = stream(seed, "polynomial", i, "noise").normal(0.0, config.noise, len(x))
        noisy.append(_powers(x) @ truth[i] + noise)
    if config.evaluate == "fresh":
        test_inputs = [stream(seed, "polynomial", i, "fresh").random(len(x)) for i, x in enumerate(inputs)]
    where = "the training x" if config.evaluate == "in-sample" else "fresh x ~ U(0, 1)"
    used = sum(map(len, inputs))
    return FederatedData(
        name="polynomial",
        task="regression",
        clients=names,
        train=_rows(inputs, noisy),
        val=_rows([x[:0] for x in inputs], [y[:0] for y in noisy]),
        test=_rows(test_inputs, [_powers(x) @ a for x, a in zip(test_inputs, truth, strict=True)]),
        outputs=1,
        features=("1", "x", "x^2", "x^3"),
        notes=(
            f"layout {config.layout}, setting {config.setting}: {used} of {config.samples} samples used",
            "shifts of the clients: " + ", ".join(f"{b:.2f}" for b in shifts),
            f"training targets have noise N(0, {config.noise}^2); test rows are {where} with noise-free targets",
        ),
    )


def coefficients(shifts: Floats, setting: int) -> Floats:
    """True coefficients [clients, 4]: each client adds its shift to the highest `setting` ones."""
    truth = np.tile(BASE, (len(shifts), 1))
    truth[:, 4 - setting :] += shifts[:, None]
    return truth


def _draw(config: PolynomialConfig, seed: int) -> tuple[list[Floats], Floats]:
    if config.clients > config.samples:
        raise DataError(f"data.clients = {config.clients}: more clients than the {config.samples} samples; lower it")
    if config.layout == "iid":
        each = config.samples // config.clients
        inputs = [stream(seed, "polynomial", i, "x").random(each) for i in range(config.clients)]
        return inputs, stream(seed, "polynomial", "shifts").uniform(-SHIFT, SHIFT, config.clients)
    # numpy's old generator in this order (x, sizes, shifts) gives the data of the Learn2pFed paper with seed 42
    legacy = np.random.RandomState(seed % 2**32)
    x = np.sort(legacy.uniform(0.0, 1.0, config.samples))
    weights = legacy.uniform(0.0, 1.0, config.clients)
    sizes = np.floor(config.samples * weights / weights.sum()).astype(int)
    shifts = legacy.uniform(-SHIFT, SHIFT, config.clients)
    if sizes.min() == 0:
        raise DataError(
            f"data.samples = {config.samples}: {client_names(config.clients)[int(sizes.argmin())]} gets none "
            'in layout "sorted"; raise data.samples or lower data.clients'
        )
    return np.split(x, sizes.cumsum())[:-1], shifts  # samples left over by rounding down are not used


def _powers(x: Floats) -> Floats:
    return np.vander(x, 4, increasing=True)


def _rows(inputs: list[Floats], targets: list[Floats]) -> Rows:
    x = torch.from_numpy(_powers(np.concatenate(inputs)))
    y = torch.from_numpy(np.concatenate(targets))[:, None]
    return Rows(x, y, starts([len(t) for t in targets]))
