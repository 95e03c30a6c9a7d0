"""Activations that are computed again: the same numbers, and the same derivatives, on every engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.api import Run
from fedtailor.core.model import Model
from fedtailor.errors import ConfigError
from fedtailor.models.checkpointing import recompute
from tests.world.test_architectures import ENGINES, data

CALLS: Counter[str] = Counter()


class Block(nn.Module):
    """Dense layers with dropout between them; counts how often it runs."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.wide, self.drop, self.narrow = nn.Linear(width, 4 * width), nn.Dropout(drop), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        CALLS["block"] += 1
        return self.narrow(self.drop(torch.tanh(self.wide(x))))


class Stack(nn.Module):
    """Two blocks between two layers."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int, drop: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(shape[0], 6)
        self.blocks = nn.ModuleList(Block(6, drop) for _ in range(2))
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.out = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.out(self.norm(h))


def trained(algorithm: str, engine: str, out: Path, settings: dict[str, Any]) -> Run:
    keys = {"model.name": "tests.world.test_checkpointing:Stack", "local.batch_size": 4, "local.lr": 0.1}
    keys |= {"model.dtype": "float64", "local.momentum": 0.9} | settings
    keys |= {"federation.workers": 2} if engine == "pool" else {}
    return ft.run(algorithm, data(), engine=engine, rounds=2, settings=keys, out=out, progress=False)


def assert_equal(one: Run, other: Run, tolerance: float) -> None:
    for client in one.clients:
        a, b = (run.folder.personal(client, "last") for run in (one, other))
        assert all(torch.allclose(a[k], b[k], atol=tolerance, rtol=0) for k in a)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_recomputed_is_the_same(engine: str, drop: float, tmp_path: Path) -> None:
    usual = trained("fedavg", "loop", tmp_path / "usual", {"model.drop": drop})
    checkpointed = {"model.drop": drop, "model.checkpoint": ["blocks.*"]}
    if engine == "vmap" and not drop:  # the gradient of a stack is taken outside of it
        with pytest.raises(ConfigError, match='engine = "loop"'):
            trained("fedavg", engine, tmp_path / "again", checkpointed)
        return
    again = trained("fedavg", engine, tmp_path / "again", checkpointed)
    assert_equal(usual, again, 1e-12)


@pytest.mark.parametrize("algorithm", ["learn2pfed-net", "fedl2p", "pefll"])
def test_a_tape_goes_through(algorithm: str, tmp_path: Path) -> None:
    plain = {"local.momentum": 0.0, "local.kernels": "off"}
    usual = trained(algorithm, "loop", tmp_path / "usual", plain)
    again = trained(algorithm, "loop", tmp_path / "again", plain | {"model.checkpoint": ["blocks.*"]})
    assert_equal(usual, again, 1e-11)


def kept_bytes(model: Model, x: Tensor) -> int:
    """What a forward pass leaves for the backward pass, beside the parameters."""
    kept: dict[int, int] = {}
    params = {k: v.clone().requires_grad_() for k, v in model.params.items()}
    own = {v.untyped_storage().data_ptr() for v in params.values()}

    def pack(v: Tensor) -> Tensor:
        if v.untyped_storage().data_ptr() not in own:
            kept[v.untyped_storage().data_ptr()] = v.untyped_storage().nbytes()
        return v

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        loss = model(params, x, training=True).sum()
    assert torch.isfinite(loss)
    return sum(kept.values())


def test_blocks_run_twice_and_keep_less() -> None:
    x = torch.randn(64, 4)
    usual, again = Stack((4,), 2), Stack((4,), 2)
    again.load_state_dict(usual.state_dict())
    recompute(again, ["blocks.*"])
    gradients = []
    for module, calls in ((usual, 2), (again, 4)):
        CALLS.clear()
        model = Model(module)
        params = {k: v.clone().requires_grad_() for k, v in model.params.items()}
        loss = model(params, x, training=True).square().mean()
        held = module.first.weight.data.clone()
        module.first.weight.data.fill_(torch.nan)  # what the module holds by itself must not matter
        gradients.append(torch.autograd.grad(loss, list(params.values())))
        module.first.weight.data.copy_(held)
        assert CALLS["block"] == calls
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
    assert kept_bytes(Model(again), x) < 0.7 * kept_bytes(Model(Stack((4,), 2)), x)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model.checkpoint": ["block"]}, 'model.checkpoint: the model has no part "block"; did you mean "blocks"?'),
        ({"model.checkpoint": ["norm"], "model.norm": True}, 'model.checkpoint: "norm" has BatchNorm'),
    ],
)
def test_what_cannot_be_recomputed_is_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        trained("fedavg", "loop", tmp_path / "run", settings)
    assert str(error.value).startswith(said)
