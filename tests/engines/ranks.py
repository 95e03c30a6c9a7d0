"""What every rank of tests/engines/test_torchrun.py does: the same federations on all ranks and, for comparison, alone.

Run by torchrun: python -m torch.distributed.run ... -m tests.engines.ranks ENGINE PART...
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor import engines
from fedtailor.core.algorithm import COUNT, MODEL, NUMBER, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.environment import Environment
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.process_group import SINGLE_PROCESS, ProcessGroup
from fedtailor.core.reduce import Limits
from fedtailor.core.trees import Params, Tree, items, tree_map
from fedtailor.engines.ranks import Group, Sharded, join, leave
from fedtailor.errors import ClientError, ConfigError, RoundAbandoned, RunError
from fedtailor.experiments import runner
from fedtailor.experiments.run_state import measure
from fedtailor.testing.contract import tolerance
from tests.contract.test_tape import SOLVERS, Passing, Taped
from tests.core.test_federation import ANYWHERE, ONE_BY_ONE, Faulty, Loses
from tests.helpers import EVEN_SIZES, F64, SOLVER, assert_equal, brief, make_data, make_model, usual, variants

ALL = (0, 1, 2, 3)
COHORTS = (ALL, (2, 0), (1, 3), ALL)  # with two ranks, one of them has nobody


class Watched:
    """The ranks, with a check that the server came to the same numbers on all of them, to the last bit."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def broadcast(self, tree: Tree) -> Tree:
        digest = hashlib.sha256()
        for path, v in items(tree):
            digest.update(path.encode() + v.contiguous().numpy().tobytes())
        assert len(set(self._group.all_gather_object(digest.hexdigest()))) == 1, "the server differs between ranks"
        return self._group.broadcast(tree)


@dataclass(frozen=True)
class Mixed(Algorithm):
    """Every way from clients to server and back, on a tape."""

    def server_init(self, model: Model) -> Tree:
        return {"w": model.params, "lr": torch.tensor([0.1, 0.2, 0.15, 0.05], dtype=F64)}

    def client_init(self, me: ClientContext) -> Tree:
        return {"log_mu": -1 + 0.1 * me.n}

    @on_client(sends=(MODEL, COUNT, NUMBER))
    def train(self, me: ClientContext, w: Params, lr: Tensor) -> tuple[Tree, Tree]:
        own = me.sgd(w, prox=(w, me.state["log_mu"].exp()), lr=lr)
        return me.state, (own, me.n, me.loss(own, "train"))

    @on_client(sends=NUMBER)
    def judge(self, me: ClientContext, w: Params, mine: Params, number: Tensor) -> tuple[Tree, Tree]:
        return me.state, me.loss(w, "val") + number * me.loss(mine, "train") * me.state["log_mu"]

    @on_client(sends=ReplySpec("gradient", lambda algorithm, model: {"log_mu": torch.zeros((), dtype=F64)}))
    def reveal(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, me.grad

    def round(self, fed: Federation, server: Tree) -> Tree:
        watched = fed.tape(server)
        lr = watched["lr"][list(fed.cohort)]
        models, n, loss = fed.map(self.train, watched["w"], fed.scatter(lr))
        with torch.no_grad():
            fed.report(seen=fed.gather(loss, "losses").sum())  # looked at before it is needed with its graph
        rows = fed.gather(loss, "losses")
        weight = fed.scatter(torch.softmax(-rows, 0) * fed.gather(n, "counts"))
        w = fed.mean(models, weight)  # weights of the server, that depend on single replies
        plain, weighted = fed.mean(models), fed.mean(loss, n)
        near = fed.scatter(
            {k: w[k] + 0.1 * v for k, v in fed.gather(models, "models").items()}
        )  # a row of each goes back to it
        told = fed.map(self.judge, plain, near, loss)
        outer = fed.sum(told) * weighted + rows.square().sum() + sum(v.sum() for v in w.values()) * fed.sum(weight)
        gradient = fed.backward(outer)
        return {"loss": outer, "gradient": gradient, "private": fed.gather(fed.map(self.reveal), "gradients")}


@dataclass(frozen=True)
class Case:
    """Rounds of one algorithm on one small task."""

    name: str
    algorithm: Algorithm
    cohorts: Sequence[tuple[int, ...]]
    task: dict[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    environment: Environment = field(default_factory=Environment)
    first: Tree = None  # the server's first state, if not the algorithm's own; and then that of every round

    def federation(self, ranks: ProcessGroup, engine: str) -> Federation:
        """On `ranks`; or in this process, one client after the other."""
        task = dict(self.task)
        model, solver = task.pop("model", "mlp"), task.pop("solver", SOLVER)
        data = make_data(**task)
        setting = Experiment(self.algorithm, make_model(model, data), data, solver, 3, self.environment)
        made = engines.make("loop", setting) if ranks is SINGLE_PROCESS else Sharded(setting, engine, 64, ranks)
        made.start()
        return Federation(made, self.limits, ranks)

    def outcome(self, ranks: ProcessGroup, engine: str) -> tuple[Tree, dict[str, Any]]:
        """All that the rounds come to: numbers, and what must be equal to the letter."""
        fed = self.federation(ranks, engine)
        setting, reports, said = fed.engine.experiment, [], []
        server = setting.algorithm.server_init(setting.model) if self.first is None else self.first
        for round, cohort in enumerate(self.cohorts):
            try:
                server = fed.run_round(round, cohort, server if self.first is None else self.first)
            except (RoundAbandoned, ClientError) as error:
                said.append(f"{type(error).__name__}: {error}")
            reports.append({k: torch.tensor(v) for k, v in fed.record.reported.items()})
        clients = range(len(setting.data.clients))
        states = ranks.gather_to_root(fed.engine.get_states(), clients)
        numbers = {"server": server, "reports": reports, "states": states}
        if type(setting.algorithm).personal is not Algorithm.personal:
            models: dict[int, Params] = {}
            metrics = measure(fed.engine, 9, server, ["train", "val", "test"], models.__setitem__)
            rows = tree_map(lambda *each: torch.stack(each), *(models[c] for c in sorted(models))) if models else None
            numbers["models"] = ranks.gather_to_root(rows, clients)
            numbers["metrics"] = [torch.tensor(v, dtype=F64) for by_name in metrics.values() for v in by_name.values()]
        words = {
            "traffic": asdict(fed.traffic),
            "faults": fed.record.faults,
            "seen": sorted(fed.record.gathered),
            "said": said,
        }
        return numbers, words


def all_algorithms(engine: str) -> Iterator[Case]:
    """Every registered algorithm; on stacks, those that look at single replies or use a tape."""
    some = {"cfl", "duw-fednova", "fedadp", "fedpac", "fedrep", "fedselect", "learn2pfed", "learn2pfed-net"}
    for name, algorithm in variants().items():
        if name in some or (engine == "loop" and ":" not in name):
            yield Case(name, brief(algorithm), COHORTS, usual(algorithm))


def tapes(engine: str) -> Iterator[Case]:
    """Derivatives by the server's values and by private states, through every operation."""
    for cohort in (ALL, (3, 0, 2), (0, 2), (1,)):
        yield Case(f"mixed {cohort}", Mixed(), [cohort])
        start = torch.tensor(1.5, dtype=F64)
        yield Case(f"passing {cohort}", Passing(), [cohort], {"model": "linear"}, first=start)
    linear = {"model": "linear", "solver": SOLVERS["momentum"], "task": "regression"}
    yield Case("taped", Taped(), [ALL], linear)
    yield Case("taped, one lost", Taped(loses=True), [ALL, ALL], linear)
    yield Case("taped, BatchNorm", Taped(), [ALL], {"model": "normed", "sizes": EVEN_SIZES})


def faults(engine: str) -> Iterator[Case]:
    """Clients that fail on one rank are left out, and known, on all."""
    linear = {"model": "linear"}
    for fault in [*ANYWHERE, *(ONE_BY_ONE if engine == "loop" else ())]:
        for below in (8, 100) if fault in ("nan", "raise") else (8,):  # bo and cy, or everybody
            cohorts = [ALL, (1, 2), ALL]
            yield Case(f"{fault} below {below}", Faulty(fault, below=below), cohorts, linear, Limits(min_replies=2))
    for way in ("message", "mean"):
        yield Case(f"loses, {way}", Loses(way), [ALL], linear)
    unsure = Environment(answer=(0.5, 0.6, 0.7, 0.5), missing="stale", seed=2)
    for name in ("fedavg", "fednova", "duw-fedavg", "duw-fednova"):
        yield Case(f"{name}, stale", variants()[name], [ALL, ALL, (2, 1), (0, 3), ALL], environment=unsure)


def few(engine: str) -> Iterator[Case]:
    """Fewer clients than ranks."""
    for name in ("fedrep", "fedselect", "cfl"):
        yield Case(f"{name}, one client", variants()[name], [(0,), (0,)], {"names": ("ada",)})


PARTS: dict[str, Callable[[str], Iterator[Case]]] = {
    "algorithms": all_algorithms,
    "tapes": tapes,
    "faults": faults,
    "few": few,
}


def words_arrive(ranks: ProcessGroup) -> None:
    """Long and short texts, and the mistake of one rank as that of all."""
    for length in (0, 200, 5000):
        said = {"rank": ranks.rank, "text": "ä" * (length * ranks.rank)}
        assert ranks.all_gather_object(said) == [{"rank": r, "text": "ä" * (length * r)} for r in range(ranks.count)]

    def mistaken() -> None:
        if ranks.rank == 1:
            raise ConfigError("no such thing")

    wanted = "no such thing" if ranks.rank == 1 else "rank 1: no such thing"
    with pytest.raises(ConfigError if ranks.rank == 1 else RunError, match=f"^{wanted}$"):
        ranks.agreed(mistaken)
    assert ranks.agreed(lambda: ranks.rank) == ranks.rank


def threads() -> int:
    """Of this process."""
    return len(os.listdir("/proc/self/task"))


def main(engine: str, parts: Sequence[str]) -> int:
    """How many cases differ; a part that is a folder of a run is resumed."""
    before = threads()
    ranks = join(120)
    assert isinstance(ranks, Group)
    words_arrive(ranks)
    wrong = done = 0
    for part in parts:
        if part not in PARTS:
            runner.resume(Path(part), ranks=ranks)
            continue
        for case in PARTS[part](engine):
            numbers, words = case.outcome(Watched(ranks), engine)
            done += 1
            if ranks.rank:
                continue
            try:
                wanted = case.outcome(SINGLE_PROCESS, engine)
                if not case.algorithm.settles:  # else rounding may add an exchange
                    assert words == wanted[1], f"{words}\n{wanted[1]}"
                assert_equal(numbers, wanted[0], tolerance(case.algorithm))
            except Exception:
                wrong += 1
                print(f"{part}: {case.name}\n{traceback.format_exc(limit=-1)}", flush=True)
    if ranks.rank == 0:
        print(f"{done} cases on {ranks.count} ranks, {wrong} wrong", flush=True)
    leave(ranks)
    # a thread of gloo that lives on may free a tensor while Python ends, and that aborts the process
    assert threads() == before, f"{threads()} threads, {before} before the ranks came together"
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1], sys.argv[2:])))
