"""Samples of several parts: every algorithm takes them, the same on every engine, or is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedtailor.core.data import FederatedData
from fedtailor.core.model import Model
from fedtailor.core.random import torch_stream
from fedtailor.errors import ConfigError
from fedtailor.experiments.building import assemble
from fedtailor.experiments.config import parse
from fedtailor.testing.federations import everything, federate, make_data, run
from tests.helpers import brief, suits, variants
from tests.world.plain import TwoInputs

VARIANTS = {name: brief(kind) for name, kind in variants().items() if ":" not in name and suits(kind, {})}


def parted() -> FederatedData:
    """The usual small federation, each sample cut in two."""
    data = make_data()
    cut: dict[str, Any] = {
        s: replace(rows, x={"left": rows.x[:, :1], "right": rows.x[:, 1:]})
        for s, rows in (("train", data.train), ("val", data.val), ("test", data.test))
    }
    return replace(data, **cut)


def model(data: FederatedData) -> Model:
    with torch_stream("initial values"):
        return Model(TwoInputs(data.shape, data.outputs).double(), head=["out"])


@pytest.mark.parametrize("algorithm", [name for name, kind in VARIANTS.items() if not kind.needs_tensor])
def test_engines_agree(algorithm: str) -> None:
    data = parted()
    feds = {e: federate(VARIANTS[algorithm], data, model(data), e) for e in ("loop", "vmap2", "wire")}
    made = {e: everything(fed, run(fed, 1)) for e, fed in feds.items()}
    wanted = made.pop("loop")
    for engine, found in made.items():
        assert found.keys() == wanted.keys()
        for path, value in wanted.items():
            close = torch.allclose(found[path].double(), value.double(), rtol=1e-7, atol=1e-9, equal_nan=True)
            assert close, (engine, path)


@pytest.mark.parametrize("algorithm", sorted({name for name, kind in VARIANTS.items() if kind.needs_tensor}))
def test_others_are_refused_by_name(algorithm: str) -> None:
    config = parse({"algorithm": {"name": algorithm}, "model": {"name": "tests.world.plain:TwoInputs"}})
    with pytest.raises(ConfigError, match="must be one tensor each"):
        assemble(config, parted())
