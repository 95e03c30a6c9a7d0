"""Workers of a pool on two devices of a kind: each keeps to its own."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor import engines
from fedtailor.algorithms import make
from fedtailor.core.federation import Federation
from fedtailor.engines import devices
from fedtailor.engines.pool.pool import Pool
from fedtailor.engines.pool.worker import ClientTask, Worker
from fedtailor.engines.pool.worker_processes import Answer, WorkerProcesses, WorkUnit, _answers
from fedtailor.experiments import runner
from tests.devices import sim
from tests.devices.federations import CASES, experiment, federation, play, results
from tests.devices.test_memory import WIDE, wide
from tests.devices.test_runs import saved
from tests.helpers import assert_equal, everything
from tests.small import config


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes that are spawned find the device: they have the path of this one."""
    sim.for_processes(tmp_path / "packages")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))


@pytest.mark.usefixtures("spawned")
def test_workers_are_spawned_each_on_its_device() -> None:
    units = make("tests.devices.units:Units", {})
    engine = engines.make("pool", experiment(units, CASES["classification"], "sim:0"))
    assert isinstance(engine, Pool)
    assert (engine.workers, engine.chunk) == (2, 2)
    fed = federation(units, "classification")
    wanted = results(fed, play(fed))
    before = sim.allocations(0), sim.allocations(1)
    try:
        engine.start()
        pool = Federation(engine)
        found = everything(pool, play(pool))
    finally:
        engine.close()
    assert (sim.allocations(0), sim.allocations(1)) == before  # this process computes on the host
    own = [f"states/{c}/state/unit" for c in engine.experiment.data.clients]
    assert {float(found.pop(path)) for path in own} == {0.0, 1.0}  # that of the worker, which has used no other
    assert_equal(found, {path: v for path, v in wanted.items() if path not in own})


@pytest.mark.usefixtures("spawned")
def test_a_run_on_both_devices(tmp_path: Path) -> None:
    task = ("rounds=1", "algorithm.name=pfedla", "model.dtype=float64", "federation.engine=pool")
    there = runner.start(config(*task, "federation.device=sim"), tmp_path / "sim")
    assert there.about["device"] == "sim:0"
    assert there.about["chunk"] == 2
    assert there.metrics()[0]["device_memory"] > 0
    assert_equal(saved(there), saved(runner.start(config(*task[:-1], "federation.engine=loop"), tmp_path / "cpu")))


def test_where_there_are_devices_gradients_rule_out_a_fork() -> None:
    torch.ones((), device="cpu").requires_grad_().square().backward()  # autograd has threads for devices now
    assert devices.must_spawn(torch.device("cpu"))
    pool = Pool(experiment(make("fedavg", {}), CASES["classification"]), 1)
    try:
        pool.start()
        fed = Federation(pool)
        found = everything(fed, play(fed))
    finally:
        pool.close()
    fed = federation(make("fedavg", {}), "classification")
    assert_equal(found, everything(fed, play(fed)))


def in_this_process(
    self: WorkerProcesses,
    request: Mapping[str, Any],
    units: Sequence[Sequence[ClientTask]],
    owners: Mapping[int, object] | None = None,
    prepare: Callable[[WorkUnit], WorkUnit] = lambda unit: unit,
    room: object = None,
) -> Iterator[tuple[WorkUnit, list[Answer]]]:
    """In place of `WorkerProcesses.work`: the limit of a device is that of a process."""
    worker: Worker = self.__dict__.setdefault("here", self.worker.on(self.device))
    for unit in (prepare(WorkUnit(number, tuple(tasks))) for number, tasks in enumerate(units)):
        answers, apart = worker.handle(json.loads(json.dumps(dict(request) | {"tasks": list(unit.tasks)})))
        self.peak = max(self.peak, worker.peak_memory or 0)
        yield unit, _answers(json.loads(json.dumps(answers)), apart, None)


def test_a_full_device_halves_the_stacks_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerProcesses, "work", in_this_process)
    fed = Federation(Pool(wide(), 1, 8))
    fed.engine.start()
    wanted = everything(fed, play(fed))
    pool = Pool(wide().on(torch.device("sim:1")), 1, 8)
    pool.start()
    fed = Federation(pool)
    with sim.limited(8 * 4 * 3 * WIDE * 8, unit=1):
        server = play(fed)
        assert pool.chunk in (1, 2)
        assert (pool.peak_memory or 0) > 0
        assert_equal(everything(fed, server), wanted)
    with sim.limited(2**14, unit=1), pytest.raises(Exception, match=r"federation\.chunk"):
        fed.run_round(1, range(8), server)
