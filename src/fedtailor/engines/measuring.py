"""How long a round takes on a device, stacked and one by one: measured once for each model and device, and kept."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

import torch

from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.engines.inprocess import InProcess
from fedtailor.engines.vmap import fitting

MOST = 16  # clients of the measurement


def round_seconds(experiment: Experiment, clients: int) -> tuple[float, float]:
    """Of one round of at most so many clients: one by one, and stacked."""
    file = _folder() / f"{_key(experiment, clients)}.json"
    with suppress(OSError, ValueError, TypeError):
        alone, stacked = json.loads(file.read_text(encoding="utf-8"))
        return float(alone), float(stacked)
    cohort = range(min(clients, MOST, len(experiment.data.clients)))
    figures = tuple(_measured(experiment, cohort, chunk) for chunk in (0, fitting(experiment)))
    _keep(file, figures)
    return figures[0], figures[1]


def _measured(experiment: Experiment, cohort: range, chunk: int) -> float:
    """The second of two rounds: in the first, a device prepares its kernels."""
    engine = InProcess(experiment, range(len(experiment.data.clients)), chunk=chunk)
    engine.start()
    fed, server = Federation(engine), experiment.algorithm.server_init(experiment.model)
    seconds = 0.0
    for _ in range(2):
        begun = time.perf_counter()
        fed.run_round(1, cohort, server)
        torch.accelerator.synchronize(experiment.device)
        seconds = time.perf_counter() - begun
    return seconds


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedtailor" / "measured"


def _keep(file: Path, figures: tuple[float, ...]) -> None:
    with suppress(OSError):  # a cache that cannot be written is none
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(figures), encoding="utf-8")


def _key(experiment: Experiment, clients: int) -> str:
    """What the time depends on: the model and its steps, the clients, the device and torch."""
    module = torch.get_device_module(experiment.device)
    name = module.get_device_name(experiment.device) if hasattr(module, "get_device_name") else experiment.device.type
    shapes = [(k, list(v.shape), str(v.dtype)) for k, v in experiment.model.params.items()]
    sizes = [int(n) for n in experiment.data.train.sizes[:MOST]]
    what = [shapes, repr(experiment.solver), repr(experiment.algorithm), list(experiment.data.shape), sizes]
    text = json.dumps([*what, min(clients, MOST), name, torch.__version__])
    return hashlib.sha256(text.encode()).hexdigest()[:20]
