"""Workers of a pool on two devices of a kind: each keeps to its own."""

from pathlib import Path

import pytest

from fedtailor import engines
from fedtailor.algorithms import make
from fedtailor.core.federation import Federation
from fedtailor.engines.pool.engine import Pool
from tests.devices import sim
from tests.devices.federations import CASES, experiment, federation, play, results
from tests.helpers import assert_equal, everything


def test_workers_are_spawned_each_on_its_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sim.for_processes(tmp_path / "packages")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))  # a spawned process has the path of this one
    engine = engines.make("pool", experiment(make("tests.devices.units:Units", {}), CASES["classification"], "sim:0"))
    assert isinstance(engine, Pool)
    assert engine.workers == 2
    fed = federation(make("tests.devices.units:Units", {}), "classification")
    wanted = results(fed, play(fed))
    before = sim.allocations(0), sim.allocations(1)
    try:
        engine.start()
        pool = Federation(engine)
        server = play(pool)
        found = everything(pool, server)
    finally:
        engine.close()
    assert (sim.allocations(0), sim.allocations(1)) == before  # this process computes on the host
    units = [float(found.pop(f"states/{c}/state/unit")) for c in engine.experiment.data.clients]
    assert set(units) == {0.0, 1.0}  # each client saw the unit of its worker, and memory of no other
    for c in engine.experiment.data.clients:
        wanted.pop(f"states/{c}/state/unit")
    assert_equal(found, wanted)
