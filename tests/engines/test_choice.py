"""Engines by name, the choice of "auto", and how clients are grouped."""

from typing import Any

import pytest

from fedtailor import engines
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.me import Setting
from fedtailor.engines.inprocess import InProcess
from fedtailor.engines.wire import Wire
from fedtailor.errors import ConfigError
from tests.helpers import EVEN_SIZES, SIZES, SOLVER, make_data, make_model


def setting(model: str = "mlp", **options: Any) -> Setting:
    data = make_data(**options)
    return Setting(FedAvg(), make_model(model, data), data, SOLVER, seed=0)


def test_names() -> None:
    here = [name for name in engines.ENGINES if name != "flare"]
    made = {name: engines.make(name, setting(), chunk=7) for name in here}  # type: ignore[arg-type]
    loop, vmap = made["loop"], made["vmap"]
    assert isinstance(loop, InProcess)
    assert loop.chunk == 0
    assert isinstance(vmap, InProcess)
    assert vmap.chunk == 7
    assert isinstance(made["wire"], Wire)
    with pytest.raises(ConfigError, match="run it with fedtailor federation submit"):
        engines.make("flare", setting())


@pytest.mark.parametrize(
    ("model", "options", "name"),
    [
        ("mlp", {}, "vmap"),
        ("linear", {}, "vmap"),
        ("mlp", {"names": ("ada", "bo", "cy")}, "loop"),
        ("conv", {"shape": (1, 6, 6)}, "loop"),
        ("normed", {}, "loop"),
    ],
)
def test_auto(model: str, options: dict[str, Any], name: str) -> None:
    chosen = setting(model, **options)
    assert engines.choose(chosen) == name
    made = engines.make("auto", chosen)
    assert isinstance(made, InProcess)
    assert bool(made.chunk) == (name == "vmap")


def groups(chunk: int, model: str = "mlp", sizes: Any = SIZES) -> list[tuple[int, ...]]:
    made = setting(model, sizes=sizes)
    return list(InProcess(made, range(4), chunk=chunk).groups([3, 0, 1, 2]))


def test_groups() -> None:
    assert groups(0) == [(3,), (0,), (1,), (2,)]
    assert groups(64) == [(1, 2, 0, 3)]  # by size
    assert groups(2) == [(1, 2), (0, 3)]
    assert groups(3) == [(1, 2, 0), (3,)]


def test_batchnorm_groups_are_of_one_size() -> None:
    assert groups(64, "normed", EVEN_SIZES) == [(2,), (0, 1), (3,)]
