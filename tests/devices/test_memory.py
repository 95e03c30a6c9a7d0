"""A device that is out of memory: smaller stacks with the same result, or a fault that is named."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms import make
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import torch_stream
from fedtailor.core.trees import items
from fedtailor.engines import devices
from fedtailor.engines.choice import stack_size
from fedtailor.engines.inprocess import InProcess
from fedtailor.errors import ClientError, RunError
from fedtailor.experiments import run_state, runner
from tests.contract.test_tape import Taped
from tests.devices import sim
from tests.devices.federations import federation, play, results
from tests.helpers import EVEN_SIZES, F64, SOLVER, assert_equal, everything, make_data, states
from tests.small import config

WIDE = 2000  # so that what a step makes is much more than the model


class Wide(nn.Module):
    """Few parameters and many activations."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        many = torch.tanh(self.out(x)[..., None].expand(*x.shape[:-1], 3, WIDE) * 1.5)
        return many.mean(-1)


def wide(algorithm: str = "fedavg") -> Experiment:
    with torch_stream("wide"):
        model = Model(Wide().to(F64), head=["out"])
    data = make_data(sizes={f"{name}{i}": n for i in range(2) for name, n in EVEN_SIZES.items()})
    return Experiment(make(algorithm, {}), model, data, SOLVER, 3)


def test_a_full_device_halves_the_stack_and_the_result_is_the_same() -> None:
    setting = wide()
    fed = Federation(InProcess(setting, chunk=8))
    fed.engine.start()
    wanted = results(fed, play(fed))
    there = InProcess(setting.on(torch.device("sim:0")), chunk=8)
    there.start()
    fed = Federation(there)
    torch.get_device_module("sim").reset_peak_memory_stats("sim:0")
    begun = sim.in_use()
    with sim.limited(8 * 4 * 3 * WIDE * 8):  # what 8 clients make of a batch of 4, once: several times that is needed
        server = play(fed)
        assert there.chunk in (1, 2)
        assert devices.peak_memory(torch.device("sim:0")) <= begun + 8 * 4 * 3 * WIDE * 8  # type: ignore[operator]
    assert_equal(results(fed, server), wanted)


def test_a_stack_is_as_large_as_a_trial_finds_room_for() -> None:
    setting = wide().on(torch.device("sim:0"))
    assert stack_size(setting) == 8
    with sim.limited(8 * 4 * 3 * WIDE * 8):
        assert stack_size(setting) in (1, 2)


def test_a_client_that_does_not_fit_alone_is_named_with_advice() -> None:
    fed = Federation(InProcess(wide().on(torch.device("sim:0")), chunk=4))
    fed.engine.start()
    setting = fed.engine.experiment
    before = states(fed)
    with sim.limited(2**14), pytest.raises(ClientError, match=r"federation\.chunk.*precision"):
        fed.run_round(1, range(8), setting.algorithm.server_init(setting.model))
    assert all(f.reason.count("sim:0 is out of memory") == 1 for f in fed.record.faults)
    assert {f.client for f in fed.record.faults} == set(setting.data.clients)
    assert_equal(states(fed), before, tolerance=0)
    play(fed_again := Federation(fed.engine), first=1)
    assert not fed_again.record.faults  # with room, it goes on


def test_an_evaluation_for_which_there_is_no_room_ends_the_run_with_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*args: object) -> object:
        raise torch.OutOfMemoryError("sim out of memory")

    monkeypatch.setattr(run_state, "measure", full)
    with pytest.raises(RunError, match=r"^evaluation of round 1: sim:0 is out of memory; .*federation\.chunk.*$"):
        runner.start(config("rounds=2", "federation.device=sim"), tmp_path / "run")


def test_a_tape_gives_up_its_graphs_before_it_gives_up() -> None:
    fed = federation(Taped(), "classification", "cpu", "vmap")
    wanted = play(fed)
    fed = federation(Taped(), "classification", "sim:0", "vmap")
    full = iter([False, False, True])  # in the second of the taped calls
    invoke = fed.engine._invoke  # type: ignore[attr-defined]

    def once(*args: object) -> object:
        if next(full, False):
            raise torch.OutOfMemoryError("sim out of memory")
        return invoke(*args)

    fed.engine._invoke = once  # type: ignore[attr-defined]
    found = play(fed)
    assert fed.engine.recompute  # type: ignore[attr-defined]
    assert_equal(_cpu(found), _cpu(wanted))


def test_groups_may_change_within_a_tape() -> None:
    wanted = play(federation(Taped(), "classification", "cpu", "vmap"))
    fed = federation(Taped(), "classification", "sim:0", "vmap")
    full = iter([False, True])  # in the second call: the first had one stack, now there are two
    fed.engine.recompute = True  # type: ignore[attr-defined]
    invoke = fed.engine._invoke  # type: ignore[attr-defined]

    def once(*args: object) -> object:
        if next(full, False):
            raise torch.OutOfMemoryError("sim out of memory")
        return invoke(*args)

    fed.engine._invoke = once  # type: ignore[attr-defined]
    assert_equal(_cpu(play(fed)), _cpu(wanted))
    assert fed.engine.chunk == 2  # type: ignore[attr-defined]


def _cpu(tree: object) -> dict[str, Tensor]:
    return {path: v.cpu() for path, v in items(tree)}


def test_states_that_do_not_fit_the_device_lie_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation(make("ditto", {}), "classification")
    wanted = results(fed, play(fed))
    fed = federation(make("ditto", {}), "classification", "sim:0", "vmap2")
    monkeypatch.setattr(devices, "has_room", lambda device, size: False)
    fed.engine.states.rows = None  # type: ignore[attr-defined]
    fed.engine.start()
    server = play(fed)
    assert {v.device.type for v in fed.engine.states.rows["state"].values()} == {"cpu"}  # type: ignore[attr-defined]
    found = {path: v.cpu() for path, v in everything(fed, server).items()}
    assert_equal(found, wanted)
