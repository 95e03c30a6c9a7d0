"""Models that draw: the same numbers again, on every engine, after a resume, and in a recomputed gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.model import Model
from fedtailor.core.trees import Tree
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import RunFolder
from fedtailor.testing.federations import federate, make_data
from fedtailor.training.solver import Solver
from tests.small import stop_after
from tests.world import plain

TABLES: dict[str, Any] = {
    "rounds": 3,
    "data": {"source": "digits", "clients": 4, "max_samples": 40},
    "model": {"name": "tests.world.plain:Flat"},
    "algorithm": {"name": "fedrep"},
    "local": {"lr": 0.1, "batch_size": 8},
    "checkpoint": {"seconds": 0},
}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    folder = RunFolder.open(path)
    return {f"{c}/{k}": v for c in folder.about["clients"] for k, v in folder.personal(c, "last").items()}


def test_runs_are_equal_on_every_engine_and_when_resumed(tmp_path: Path) -> None:
    for name, engine in {"loop": "loop", "again": "loop", "pool": "pool", "wire": "wire", "vmap": "vmap"}.items():
        config = parse(TABLES | {"federation": {"engine": engine, "workers": 2 if engine == "pool" else 0}})
        runner.start(config, tmp_path / name)
    config = parse(TABLES | {"federation": {"engine": "loop"}})
    with pytest.raises(KeyboardInterrupt):
        runner.start(config, tmp_path / "resumed", listener=stop_after(2))
    runner.resume(tmp_path / "resumed")
    wanted = tensors(tmp_path / "loop")
    for name in ("again", "pool", "wire", "vmap", "resumed"):
        found = tensors(tmp_path / name)
        assert all(torch.equal(found[k], v) for k, v in wanted.items()), name


def test_auto_does_not_stack_what_draws(tmp_path: Path) -> None:
    run = ft.run("fedrep", TABLES, out=tmp_path / "run", progress=False)
    assert run.folder.about["engine"] != "vmap"


def test_the_taped_gradient_is_that_of_finite_differences() -> None:
    data = make_data("regression", outputs=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model(plain.Dropped((4,), 1).double(), head=["out"])
    solver = Solver(lr=0.05, batch_size=4)

    def federated_loss(start: Tree, *, taped: bool) -> tuple[torch.Tensor, Tree]:
        fed = federate(FedAvg(), data, model, "loop", solver)
        fed.attendance.present = fed.attendance.asked = (0, 2, 3)
        watched = fed.tape(start) if taped else start
        replies = fed.map(fed.engine.experiment.algorithm.local, watched)  # type: ignore[attr-defined]
        mean = fed.mean(*replies)
        loss = sum((v.square().sum() for v in mean.values()), torch.zeros((), dtype=torch.float64))
        return loss.detach(), fed.backward(loss) if taped else None

    start = {k: v.clone() for k, v in model.params.items()}
    _, gradient = federated_loss(start, taped=True)
    rng = torch.Generator().manual_seed(1)
    way = {k: torch.randn(v.shape, generator=rng, dtype=v.dtype) for k, v in start.items()}
    step = 1e-6
    ahead, back = (
        federated_loss({k: v + sign * step * way[k] for k, v in start.items()}, taped=False)[0] for sign in (1, -1)
    )
    wanted = (ahead - back) / (2 * step)
    found = sum((gradient[k] * way[k]).sum() for k in start)
    assert torch.isclose(found, wanted, rtol=1e-5), (found, wanted)
