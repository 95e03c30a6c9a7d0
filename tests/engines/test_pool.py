"""The pool when something goes wrong: a worker is killed, a client fails, the server is interrupted or killed."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor import engines
from fedtailor.core.algorithm import COUNT, MODEL, NUMBER, Algorithm, ReplySpec, on_client
from fedtailor.core.client import Call
from fedtailor.core.context import ClientContext
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Params, Tree
from fedtailor.engines.inprocess import InProcess
from fedtailor.engines.pool import worker
from fedtailor.engines.pool.pool import Pool, RowBook
from fedtailor.engines.pool.shared_memory import Layout, Memory
from fedtailor.errors import ClientError
from tests.contract.test_tape import Taped
from tests.helpers import F64, SOLVER, assert_equal, evaluate, make_data, make_model, run, states


def _flipped(algorithm: Any, model: Any) -> Tensor:
    return model.params["out.weight"].T


@dataclass(frozen=True)
class Fragile(Algorithm):
    """Client `where` does something before it trains, the first time or (`again`) every time."""

    marker: str = ""  # a file that tells that it was done
    what: str = "nothing"
    where: int = 9  # its number of samples
    again: bool = False

    def server_init(self, model: Any) -> Tree:
        return model.params

    def client_init(self, me: ClientContext) -> Tree:
        return {"w": me.model.params, "seen": (0 * me.n).long()}

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        if me.n == self.where and (self.again or (self.marker and not Path(self.marker).exists())):
            if self.marker:
                Path(self.marker).touch()
            match self.what:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "wait":
                    time.sleep(600)
                case "raise":
                    raise ValueError("no such thing")
        v = me.sgd(w, prox=(me.state["w"], 0.1))
        return {"w": v, "seen": me.state["seen"] + 1}, (v, me.n)

    @on_client(sends=(ReplySpec("flipped", _flipped), NUMBER))
    def flipped(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, (me.state["w"]["out.weight"].T, me.n)

    def round(self, fed: Federation, w: Params) -> Params:
        w = fed.mean(*fed.map(self.local, w))
        back, n = fed.map(self.flipped)
        held = fed.gather(back, "flipped").clone()
        w = fed.mean(*fed.map(self.local, w))
        assert torch.equal(held, fed.gather(back, "flipped"))  # a reply is not written over by the next ones
        shift: Tensor = fed.mean(back, n)
        return {k: v + 0.1 * shift.T if k == "out.weight" else v for k, v in w.items()}

    def personal(self, me: ClientContext, w: Params) -> Params:
        return me.state["w"]


def setting(algorithm: Algorithm, model: str = "linear", task: Any = "classification") -> Experiment:
    data = make_data(task)
    return Experiment(algorithm, make_model(model, data), data, SOLVER, seed=3)


@contextmanager
def pooled(algorithm: Algorithm, workers: int = 2, **options: Any) -> Iterator[tuple[Federation, Pool]]:
    pool = Pool(setting(algorithm, **options), workers)
    pool.start()
    yield Federation(pool), pool
    pool.close()


def looped(algorithm: Algorithm, **options: Any) -> Federation:
    engine = InProcess(setting(algorithm, **options))
    engine.start()
    return Federation(engine)


def processes(pool: Pool) -> list[int]:
    return [p.process.pid for p in pool._workers.processes]


def assert_as_loop(fed: Federation, other: Federation, rounds: int = 2) -> None:
    """After some rounds the same bits everywhere."""
    server, wanted = run(fed, rounds), run(other, rounds)
    assert_equal((server, states(fed)), (wanted, states(other)), tolerance=0)
    assert_equal(evaluate(fed, server), evaluate(other, wanted), tolerance=0)
    assert (fed.record.faults, fed.traffic) == (other.record.faults, other.traffic)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_killed_is_replaced_and_its_clients_are_run_again(tmp_path: Path, workers: int) -> None:
    with pooled(Fragile(str(tmp_path / "done"), "kill"), workers) as (fed, pool):
        before = processes(pool)
        assert_as_loop(fed, looped(Fragile()))
        assert len(processes(pool)) == workers
        assert len(set(before) - set(processes(pool))) == 1
        assert (tmp_path / "done").exists()


def once(original: Callable[..., Any], marker: Path, number: int) -> Callable[..., Any]:
    """The function, but in its n-th call among all workers the worker is killed, halfway if it writes."""

    server = os.getpid()

    def wrapped(*args: Any) -> Any:
        for calls in itertools.count():  # two workers never get the same number
            with suppress(FileExistsError):
                (marker.parent / f"call{calls}").touch(exist_ok=False)
                break
        if calls == number and os.getpid() != server:
            if isinstance(args[0], worker.StateRows):
                half = args[0].memory.bytes[args[1] * args[0].layout.size :]
                half[: args[0].layout.size // 2] = 7
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    return wrapped


def test_killed_while_it_writes_a_private_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.StateRows, "write", once(worker.StateRows.write, tmp_path / "x", 4 + 5))
    with pooled(Fragile()) as (fed, _):
        assert_as_loop(fed, looped(Fragile()))
    assert len(list(tmp_path.glob("call*"))) > 9


@pytest.mark.parametrize("number", [0, 9])
def test_killed_on_the_way_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    other = looped(Taped(), task="regression")
    wanted = run(other, 1)
    monkeypatch.setattr(worker, "pull_back", once(worker.pull_back, tmp_path / "x", number))
    with pooled(Taped(), task="regression") as (fed, _):
        assert_equal(run(fed, 1), wanted, tolerance=0)
        assert_equal(states(fed), states(other), tolerance=0)
    assert len(list(tmp_path.glob("call*"))) > 4 * 4  # one way back through four calls of four clients


def test_a_client_that_ends_every_worker_is_left_out(tmp_path: Path) -> None:
    with pooled(Fragile(what="kill", again=True)) as (fed, pool):
        before = states(fed)["ada"]
        server = run(fed, 1)
        assert [(f.client, f.reason) for f in fed.record.faults] == [
            ("ada", "Fragile.local, round 0, client ada: its worker process ended, 3 times")
        ]
        assert_equal(states(fed)["ada"], before, tolerance=0)
        other = looped(Fragile())
        wanted = other.run_round(0, (1, 2, 3), other.engine.experiment.model.params)
        assert_equal(server, wanted, tolerance=0)
        assert len(processes(pool)) == 2


@pytest.mark.parametrize("where", [1, 6, 13])
def test_an_error_of_a_client_is_that_of_loop(where: int) -> None:
    fragile = Fragile(what="raise", where=where, again=True)
    with pooled(fragile) as (fed, _):
        assert_as_loop(fed, looped(fragile))
        assert len(fed.record.faults) == 2
        assert "ValueError: no such thing" in fed.record.faults[0].reason


def test_an_error_of_a_client_tells_where() -> None:
    with pooled(Fragile(what="raise", again=True)) as (_, pool):
        call = Call("local", 0, 0, (pool.experiment.model.params,), (False,))
        (reply,) = pool.call(call, (0,))
        assert isinstance(reply.error, ClientError)
        assert 'raise ValueError("no such thing")' in reply.error.__notes__[0]


@dataclass(frozen=True)
class Refuses(Algorithm):
    """Fails where there is no reply to refuse."""

    start: bool = False

    def client_init(self, me: ClientContext) -> Tree:
        if self.start and me.n == 13:
            raise LookupError("no start")
        return {}

    def personal(self, me: ClientContext, w: Params) -> Params:
        raise ZeroDivisionError("no model")


def test_errors_outside_of_calls_are_raised_as_they_are() -> None:
    with pytest.raises(LookupError, match="no start"), pooled(Refuses(start=True)):
        pass
    with pooled(Refuses()) as (_, pool), pytest.raises(ZeroDivisionError, match="no model"):
        list(pool.evaluate(range(4), 0, {}, ["val"]))


def test_an_interruption_ends_the_round_at_once_and_undoes_it(tmp_path: Path) -> None:
    waits = tmp_path / "done"

    def interrupt(*_: Any) -> None:
        if waits.exists():  # else the client is not there yet
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    with pooled(Fragile(str(waits), "wait")) as (fed, pool):
        before, pids = states(fed), processes(pool)
        old = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
            begun = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                run(fed, 1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        assert time.monotonic() - begun < 500  # of the 600 seconds that the client waits
        assert_equal(states(fed), before, tolerance=0)
        other = looped(Fragile())
        assert_equal(run(fed, 1), run(other, 1), tolerance=0)
        assert set(processes(pool)) != set(pids)


def test_workers_leave_an_interruption_to_the_server() -> None:
    with pooled(Fragile()) as (fed, pool):
        pids = processes(pool)
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        assert_as_loop(fed, looped(Fragile()), rounds=1)
        assert processes(pool) == pids


def test_workers_end_with_the_pool() -> None:
    with pooled(Fragile()) as (_, pool):
        pids = processes(pool)
    assert not any(is_alive(pid) for pid in pids)
    pool = Pool(setting(Fragile()), 2)
    pool.start()
    pids = processes(pool)
    del pool
    assert not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


SCRIPT = """
import sys, torch
from tests.engines.test_pool import Fragile, pooled, processes, run
torch.set_num_threads(2)
big = torch.randn(600, 600)
(big @ big).sum()  # threads that a fork does not have
with pooled(Fragile()) as (fed, pool):
    run(fed, 1)
with pooled(Fragile(what="wait", again=True)) as (fed, pool):
    print(*processes(pool), flush=True)
    run(fed, 1)
"""


def test_workers_end_with_a_server_that_is_killed_and_start_beside_threads() -> None:
    server = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    with server:
        assert server.stdout is not None
        pids = [int(pid) for pid in server.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
        server.kill()
    until = time.monotonic() + 500  # the client that keeps a worker busy waits for 600
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_rows_come_back() -> None:
    with pooled(Fragile()) as (fed, pool):
        run(fed, 2)
        used = pool._where.used
        run(fed, 3)
        assert pool._where.used == used <= 3 * 4
    with pooled(Taped(), task="regression") as (fed, pool):
        rows: list[int] = []
        for number in range(3):
            fed.run_round(number, range(4), fed.engine.experiment.algorithm.server_init(fed.engine.experiment.model))
            rows.append(pool._where.used)
        assert rows == [rows[0]] * 3


def test_rows() -> None:
    rows = RowBook(2)
    rows.begin()
    rows.move(0, rows.fresh(), taping=False)
    rows.move(0, rows.fresh(), taping=False)
    assert rows.now == [3, 1]
    assert rows.fresh() == 2  # of the first call: neither what is there now nor what was there before
    rows.undo([0, 1])
    assert rows.now == [0, 1]
    rows.begin()
    assert {rows.fresh(), rows.fresh()} == {3, 4}


def test_regions_live_as_long_as_what_lies_in_them() -> None:
    memory = Memory()
    first, second = memory.take(100), memory.take(64)
    assert (first.at, second.at) == (0, 128)
    tensor = first.bytes[:8].view(F64)
    del first
    assert memory.take(1).at == 192
    del tensor
    third = memory.take(128)
    assert third.at == 0
    assert memory.take(1).at == 192
    with pytest.raises(MemoryError, match="more than the machine has"):
        memory.take(2**60)


def test_a_tree_lies_as_it_lay() -> None:
    memory = Memory()
    tree: Tree = {
        "b": (torch.arange(6, dtype=F64).reshape(2, 3).T, [torch.tensor(True), None]),
        "a": torch.zeros(2, 0),
        "image": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "wide": torch.tensor([1.0, 2.0]).expand(3, 2),
    }
    layout = Layout.of(tree)
    region = memory.take(layout.size)
    strides = layout.write(tree, region.bytes)
    again = Layout.from_json(layout.json())
    found = again.read(memory.bytes, region.at, strides)
    assert_equal(found, tree, tolerance=0)
    assert found["b"][0].stride() == (1, 3)
    assert found["b"][1][1] is None
    assert found["image"].is_contiguous(memory_format=torch.channels_last)
    assert found["wide"].is_contiguous()
    assert all(place.data_ptr() % 64 == 0 for place in again.places(memory.bytes, region.at))
    assert layout.fits(found)
    assert not layout.fits(found | {"a": torch.zeros(2, 1)})
    assert not layout.fits(found | {"b": list(found["b"])})


def test_one_worker_is_loop() -> None:
    made = setting(Fragile())
    assert isinstance(engines.make("pool", made, workers=1), InProcess)
    pool = engines.make("pool", made, workers=9)
    assert isinstance(pool, Pool)
    assert pool.workers == 4  # not more than clients
    with pytest.raises(RuntimeError, match="start the engine first"):
        pool.get_states()


def test_states_may_be_put_in_without_a_start() -> None:
    other = looped(Fragile())
    run(other, 1)
    pool = Pool(setting(Fragile()), 2)
    pool.set_states(other.engine.get_states())
    fed = Federation(pool)
    assert_equal(states(fed), states(other), tolerance=0)
    server = other.engine.experiment.model.params
    assert_equal(fed.run_round(1, range(4), server), other.run_round(1, range(4), server), tolerance=0)
    with pytest.raises(TypeError, match='private state lacks "state/seen"'):
        pool.set_states({"state": {"w": other.engine.get_states()["state"]["w"]}, "buffers": {}})
    pool.close()
