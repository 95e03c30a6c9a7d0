"""A session that called ft.fit and ft.run is as it was before: threads, logging, signals, generators, children."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import sklearn  # noqa: F401  sets variables of the environment when it is imported
import torch
from torch import nn

import fedtailor as ft
from tests.made_sites import make_sites


class Own(nn.Module):
    """A user's own network, with attributes."""

    made: list[Own] = []  # noqa: RUF012

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.out = nn.Linear(4 * 6 * 6, outputs)
        self.made.append(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.conv(x.reshape(-1, 1, 8, 8))).flatten(1))


def session() -> dict[str, Any]:
    """What a notebook would notice."""
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in sorted(logging.root.manager.loggerDict))]
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),  # noqa: NPY002
        "random": random.getstate(),
        "loggers": {log.name: (log.level, list(log.handlers), log.disabled) for log in loggers},
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "folder": Path.cwd(),
        "environment": dict(os.environ),
        "filters": list(warnings.filters),
        "children": [p.pid for p in multiprocessing.active_children()],
        "relu": torch.relu,
        "convolution": nn.Conv2d.forward,
        "linear": nn.Linear.forward,
    }


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_everything_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    frames = {p.stem: pl.read_csv(p) for p in sorted(make_sites(tmp_path / "sites", sites=3, rows=30).iterdir())}
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        ft.fit(frames, target="outcome", algorithm="ditto", rounds=1, out="first")  # imports, and what they log
        before = session()
        ft.fit(frames, target="outcome", algorithm="ditto", rounds=1, out="again")
        after = session()
        assert [k for k in before if after[k] != before[k]] == []
        model = {"name": "tests.silent.test_process:Own", "head": ["out"]}
        task = {"data": {"source": "digits", "clients": 3}, "model": model}
        ft.run("fedrep", task, engine="pool", rounds=1, out="pool", settings={"federation.workers": 2})
        after = session()
        after["loggers"] = {k: after["loggers"][k] for k in before["loggers"]}  # without those of later imports
        assert [k for k in before if after[k] != before[k]] == []
    finally:
        torch.set_num_threads(threads)
    assert child.poll() is None
    used, fresh = list(Own.made), Own((64,), 10)
    assert used
    for module in used:
        assert module.training
        assert set(vars(module)) == set(vars(fresh))
        assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in module.modules())
