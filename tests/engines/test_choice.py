"""Engines by name, the choice of "auto", and how clients are grouped."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedtailor import engines
from fedtailor.algorithms.ditto import Ditto
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.experiment import Experiment
from fedtailor.engines.choice import STACKED
from fedtailor.engines.disk import Disk
from fedtailor.engines.inprocess import InProcess
from fedtailor.engines.pool.pool import Pool
from fedtailor.engines.wire import Wire
from fedtailor.errors import ConfigError
from fedtailor.models import build
from tests.helpers import EVEN_SIZES, F64, SIZES, SOLVER, make_data, make_model


def setting(model: str = "mlp", **options: Any) -> Experiment:
    data = make_data(**options)
    return Experiment(FedAvg(), make_model(model, data), data, SOLVER, seed=0)


def test_names() -> None:
    here = [name for name in engines.ENGINES if name != "flare"]
    made = {name: engines.make(name, setting(), chunk=7) for name in here}  # type: ignore[arg-type]
    loop, vmap = made["loop"], made["vmap"]
    assert isinstance(loop, InProcess)
    assert loop.chunk == 0
    assert isinstance(vmap, InProcess)
    assert vmap.chunk == 7
    assert isinstance(made["wire"], Wire)
    with pytest.raises(ConfigError, match="fedtailor federation submit"):
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
    assert engines.choose(chosen).name == name
    made = engines.make("auto", chosen)
    assert isinstance(made, InProcess)
    assert bool(made.chunk) == (name == "vmap")


def large(model: str, shape: tuple[int, ...]) -> Experiment:
    data = make_data(shape=shape, sizes={f"c{i}": (200, 1, 1) for i in range(6)})
    return Experiment(FedAvg(), build(model, shape, data.outputs, seed=0, dtype=F64), data, SOLVER, seed=0)


def test_long_rounds_are_spread_over_processes() -> None:
    convolutions, dense = large("cnn", (1, 28, 28)), large("mlp", (2000,))
    assert engines.choose(convolutions, workers=2) == engines.Choice(
        "pool", "a round has 31 billion operations, enough for 2 processes"
    )
    assert engines.choose(convolutions, workers=1) == engines.Choice("loop", "one core")
    assert engines.choose(convolutions, cohort=1, workers=2).name == "loop"
    assert engines.choose(dense, workers=2).name == "vmap"
    stacked = engines.make("vmap", dense, workers=2)
    assert isinstance(stacked, Pool)
    assert stacked.chunk == 3 < STACKED // sum(v.nbytes for v in dense.model.params.values())  # two stacks of six
    alone = engines.make("vmap", dense, workers=1)
    assert isinstance(alone, InProcess)
    assert alone.chunk == 3  # as many on every machine
    assert isinstance(engines.make("vmap", setting(), workers=2), InProcess)  # rounds are short
    assert isinstance(engines.make("vmap", dense, workers=2, disk=Disk(Path(), 10**9)), Pool)
    ditto = replace(dense, algorithm=Ditto())  # with private states, too many for the budget
    kept = engines.make("pool", ditto, workers=2, disk=Disk(Path(), 10**6))
    assert isinstance(kept, InProcess)


def test_operations_of_a_pass() -> None:
    made = large("linear", (50,))
    assert engines.operations(made) == 3 * 2 * 50 * 3 * 200 * 6
    assert engines.operations(made, cohort=2) == 3 * 2 * 50 * 3 * 200 * 2


def groups(chunk: int, model: str = "mlp", sizes: Any = SIZES) -> list[tuple[int, ...]]:
    made = setting(model, sizes=sizes)
    return [group.clients for group in InProcess(made, range(4), chunk=chunk).groups([3, 0, 1, 2])]


def test_groups() -> None:
    assert groups(0) == [(3,), (0,), (1,), (2,)]
    assert groups(64) == [(1, 2, 0, 3)]  # by size
    assert groups(2) == [(1, 2), (0, 3)]
    assert groups(3) == [(1, 2, 0), (3,)]


def test_batchnorm_groups_are_of_one_size() -> None:
    assert groups(64, "normed", EVEN_SIZES) == [(2,), (0, 1), (3,)]


def test_choosing_imports_no_compiler() -> None:
    code = (
        "import sys; from tests.engines.test_choice import large; from fedtailor import engines; "
        "assert engines.operations(large('cnn', (1, 28, 28))) > 3e10; sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
