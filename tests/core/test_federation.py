"""What the server does with replies: sums, means, and clients that fail or tell nonsense."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.core.algorithm import COUNT, MODEL, NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.process_group import SINGLE_PROCESS
from fedtailor.core.reduce import Limits, PerClient
from fedtailor.core.trees import Params, Tree
from fedtailor.engines.wire import Wire
from fedtailor.errors import ClientError, RoundAbandoned
from tests.helpers import EVERYWHERE, F64, SIZES, assert_equal, federate, make_data, make_model, states


@dataclass(frozen=True)
class Faulty(Algorithm):
    """Two calls; in the second one the clients with fewer than `below` samples do something wrong."""

    fault: str = "none"
    below: float = 2

    def server_init(self, model: Model) -> Params:
        return model.params

    def client_init(self, me: ClientContext) -> Tree:
        return {"v": me.n * torch.ones(2, dtype=me.n.dtype)}

    @on_client(sends=NUMBER)
    def good(self, me: ClientContext) -> tuple[Tree, Tree]:
        return {"v": me.state["v"] + 1}, me.n

    @on_client(sends=(MODEL, COUNT))
    def bad(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        wrong = me.n < self.below
        state, w, n = {"v": me.state["v"] + 10}, {k: v + me.n for k, v in w.items()}, me.n

        def instead(value: float, v: Tensor) -> Tensor:
            return torch.where(wrong, torch.full_like(v, value), v)

        match self.fault:
            case "nan":
                w["out.bias"] = instead(torch.nan, w["out.bias"])
            case "inf":
                w["out.weight"] = instead(torch.inf, w["out.weight"])
            case "norm":
                w["out.bias"] = instead(1e9, w["out.bias"])
            case "zero count":
                n = instead(0.0, n)
            case "negative count":
                n = instead(-3.0, n)
            case "nan count":
                n = instead(torch.nan, n)
            case "state":
                state["v"] = instead(torch.nan, state["v"])
            case "raise":
                torch.linalg.cholesky(instead(-1.0, torch.ones_like(n)).reshape(1, 1))
            case "none":
                pass
            case fault if bool(wrong):  # in a stack all replies are alike: for engines that run clients one by one
                match fault:
                    case "shape":
                        w["out.bias"] = w["out.bias"][:-1]
                    case "extra":
                        w["secret"] = me.state["v"]
                    case "missing":
                        del w["out.bias"]
                    case "dtype":
                        w["out.bias"] = w["out.bias"].float()
                    case "python error":
                        raise KeyError("column")
                    case "state key":
                        state["more"] = n
                    case "state shape":
                        state["v"] = state["v"][:1]
                    case "no pair":
                        return w, n, state  # type: ignore[return-value]
        return state, (w, n)

    def round(self, fed: Federation, w: Params) -> Params:
        fed.map(self.good)
        return fed.mean(*fed.map(self.bad, w))


ANYWHERE = {
    "nan": r'reply "0/out\.bias" is not finite',
    "inf": r'reply "0/out\.weight" is not finite',
    "norm": r"reply has norm 1\.73e\+09, above the limit 1e\+08",
    "zero count": "count 0 is not positive",
    "negative count": "count -3 is not positive",
    "nan count": 'reply "1" is not finite',
    "state": r"Faulty\.bad, client bo, round 0: FloatingPointError: private state contains NaN or Inf",
    "raise": r"Faulty\.bad, client bo, round 0: .*LinAlgError: .*not positive-definite",
}
ONE_BY_ONE = {
    "shape": r'reply "0/out\.bias" has shape \[2\], not \[3\]',
    "extra": 'reply has an undeclared key "0/secret"',
    "missing": r'reply lacks "0/out\.bias"',
    "dtype": r'reply "0/out\.bias" is torch\.float32, not torch\.float64',
    "python error": r"Faulty\.bad, client bo, round 0: KeyError: 'column'",
    "state key": r'Faulty\.bad, client bo, round 0: TypeError: private state has an undeclared key "state/more"',
    "state shape": r'TypeError: private state "state/v" has shape \[1\], not \[2\]; client_init fixes',
    "no pair": r"TypeError: bad must return \(private state, reply\)",
}
FAULTS = [(f, e) for f in ANYWHERE for e in EVERYWHERE] + [(f, e) for f in ONE_BY_ONE for e in ("loop", "pool", "wire")]


def federation(engine: str, algorithm: Algorithm, limits: Limits | None = None) -> Federation:
    data = make_data()
    return federate(algorithm, data, make_model("linear", data), engine, limits=limits)


def one_round(fed: Federation, round: int = 0) -> Any:
    setting = fed.engine.experiment
    return fed.run_round(round, range(4), setting.algorithm.server_init(setting.model))


def moved(fed: Federation, by: float) -> Params:
    return {k: v + by for k, v in fed.engine.experiment.model.params.items()}


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_nobody_fails(engine: str) -> None:
    fed = federation(engine, Faulty())
    assert_equal(one_round(fed), moved(fed, (81 + 1 + 36 + 169) / 29))
    assert fed.record.faults == []
    assert fed.cohort == (0, 1, 2, 3)
    for name, n in SIZES.items():
        assert states(fed)[name]["state"]["v"].tolist() == [n[0] + 11] * 2


@pytest.mark.parametrize(("fault", "engine"), FAULTS)
def test_the_client_at_fault_is_left_out(fault: str, engine: str) -> None:
    fed = federation(engine, Faulty(fault))
    assert_equal(one_round(fed), moved(fed, (81 + 36 + 169) / 28))
    (found,) = fed.record.faults
    assert (found.client, found.round, found.function) == ("bo", 0, "bad")
    assert re.search((ANYWHERE | ONE_BY_ONE)[fault], found.reason), found.reason
    assert fed.cohort == (0, 2, 3)
    after = {name: s["state"]["v"].tolist() for name, s in states(fed).items()}
    assert after == {"ada": [20, 20], "bo": [1, 1], "cy": [17, 17], "di": [24, 24]}


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_a_fault_is_over_with_its_round(engine: str) -> None:
    fed = federation(engine, Faulty("nan"))
    one_round(fed)
    one_round(fed, 1)
    assert [(f.client, f.round) for f in fed.record.faults] == [("bo", 0), ("bo", 1)]
    assert states(fed)["ada"]["state"]["v"].tolist() == [31, 31]
    assert states(fed)["bo"]["state"]["v"].tolist() == [1, 1]


@pytest.mark.parametrize("fault", ["nan", "raise", "state"])
@pytest.mark.parametrize("engine", EVERYWHERE)
def test_too_few_replies(engine: str, fault: str) -> None:
    fed = federation(engine, Faulty(fault, below=8), Limits(min_replies=3))
    before = states(fed)
    with pytest.raises(RoundAbandoned, match=r"\b5\b.*\b2\b.*\b4\b.*\b3\b"):
        one_round(fed, 5)
    assert_equal(states(fed), before, tolerance=0)
    assert sorted(f.client for f in fed.record.faults) == ["bo", "cy"]


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_no_usable_reply_at_all(engine: str) -> None:
    fed = federation(engine, Faulty("nan", below=100))
    before = states(fed)
    with pytest.raises(RoundAbandoned, match="0 of 4 clients"):
        one_round(fed)
    assert_equal(states(fed), before, tolerance=0)


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_everybody_raises(engine: str) -> None:
    fed = federation(engine, Faulty("raise", below=100))
    before = states(fed)
    with pytest.raises(ClientError, match=r"Faulty\.bad.*ada.*\b7\b"):
        one_round(fed, 7)
    assert_equal(states(fed), before, tolerance=0)


@pytest.mark.parametrize("fault", ["state key", "state shape"])
@pytest.mark.parametrize("engine", ["loop", "wire"])
def test_everybody_changes_the_structure_of_the_state(engine: str, fault: str) -> None:
    fed = federation(engine, Faulty(fault, below=100))
    with pytest.raises(ClientError, match=r"TypeError.*client_init"):
        one_round(fed)


@pytest.mark.parametrize("fault", ANYWHERE)
def test_traffic_with_faults_is_the_same_everywhere(fault: str) -> None:
    feds = [federation(engine, Faulty(fault)) for engine in EVERYWHERE]
    for fed in feds:
        one_round(fed)
    assert [fed.traffic for fed in feds] == [feds[0].traffic] * len(EVERYWHERE)
    wire = feds[-1].engine
    assert isinstance(wire, Wire)
    assert (feds[0].traffic.up, feds[0].traffic.down) == (wire.up, wire.down)


@dataclass(frozen=True)
class Loses(Algorithm):
    """Uses replies from before a client was lost: as a message of its own to each, or in a mean with later weights."""

    way: str

    @on_client(sends=NUMBER)
    def first(self, me: ClientContext) -> tuple[Tree, Tree]:
        return {}, 2 * me.n

    @on_client(sends=COUNT)
    def second(self, me: ClientContext) -> tuple[Tree, Tree]:
        return {}, torch.where(me.n < 2, torch.nan, me.n)

    @on_client(sends=NUMBER)
    def third(self, me: ClientContext, mine: Tensor) -> tuple[Tree, Tree]:
        return {}, mine - me.n

    def round(self, fed: Federation, server: Tree) -> Tree:
        x = fed.map(self.first)
        n = fed.map(self.second)
        return fed.gather(fed.map(self.third, x), "third") if self.way == "message" else fed.mean(x, n)


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_replies_from_before_a_loss_as_messages(engine: str) -> None:
    fed = federation(engine, Loses("message"))
    assert one_round(fed).tolist() == [9, 6, 13]


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_replies_from_before_a_loss_in_a_mean(engine: str) -> None:
    fed = federation(engine, Loses("mean"))
    assert float(one_round(fed)) == pytest.approx(2 * (81 + 36 + 169) / 28, rel=1e-14)


@dataclass(frozen=True)
class Renamed(Algorithm):
    """Its state changes its keys, for everybody at once."""

    def client_init(self, me: ClientContext) -> Tree:
        return {"v": me.n}

    @on_client()
    def rename(self, me: ClientContext) -> tuple[Tree, Tree]:
        return {"u": me.n}, None

    def round(self, fed: Federation, server: Tree) -> Tree:
        fed.map(self.rename)
        return server


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_a_state_with_other_keys(engine: str) -> None:
    fed = federation(engine, Renamed())
    with pytest.raises(ClientError, match=r'Renamed\.rename.*"state/v".*client_init'):
        one_round(fed)


@dataclass(frozen=True)
class Unequal(Algorithm):
    """Gives clients first states of different structure."""

    def client_init(self, me: ClientContext) -> Tree:
        return {"v": torch.ones(2 if float(me.n) > 1 else 1, dtype=me.n.dtype)}


def test_first_states_of_different_shape() -> None:
    with pytest.raises((TypeError, ClientError), match="shape"):
        federation("loop", Unequal())


@dataclass(frozen=True)
class Sums(Algorithm):
    """One of everything that the server can do."""

    rows: int = 4

    def client_init(self, me: ClientContext) -> Tree:
        return {"v": me.n}

    @on_client(sends=(NUMBER, COUNT))
    def add(self, me: ClientContext, row: Tensor, all: Tensor) -> tuple[Tree, Tree]:
        return {"v": me.state["v"] + row}, (row * all, me.n)

    def round(self, fed: Federation, server: Tree) -> Tree:
        x, n = fed.map(self.add, fed.scatter(torch.arange(1.0, self.rows + 1, dtype=F64)), torch.tensor(2.0, dtype=F64))
        return {
            "sum": fed.sum(x),
            "mean": fed.mean(x),
            "weighted": fed.mean(x, n),
            "each": fed.gather(x, "products"),
        }


@pytest.mark.parametrize("cohort", [(0, 1, 2, 3), (3, 1, 0, 2)])
@pytest.mark.parametrize("engine", EVERYWHERE)
def test_sum_mean_scatter_gather(engine: str, cohort: tuple[int, ...]) -> None:
    fed = federation(engine, Sums())
    assert fed.record.gathered == set()
    out = fed.run_round(0, cohort, {})
    n = [list(SIZES.values())[c][0] for c in cohort]
    assert float(out["sum"]) == 20
    assert float(out["mean"]) == 5
    assert float(out["weighted"]) == pytest.approx(sum(2 * (i + 1) * m for i, m in enumerate(n)) / 29, rel=1e-14)
    assert out["each"].tolist() == [2, 4, 6, 8]  # in the order of the cohort
    assert fed.record.gathered == {"products"}
    after = [float(states(fed)[list(SIZES)[c]]["state"]["v"]) for c in cohort]
    assert after == [m + i + 1 for i, m in enumerate(n)]


@pytest.mark.parametrize("rows", [3, 5])
def test_scatter_wants_a_row_for_each_client(rows: int) -> None:
    fed = federation("loop", Sums(rows))
    with pytest.raises(ValueError, match=rf"scatter: .* has \[{rows}\], not a row for each of 4 clients"):
        one_round(fed)


def test_rows_of_some_clients() -> None:
    x = PerClient((4, 7, 9), ({"a": torch.tensor([40, 70, 90])}, torch.tensor([4, 7, 9])))
    first, second = x
    assert first["a"].everywhere().tolist() == [40, 70, 90]
    assert second.rows(SINGLE_PROCESS, (9, 4)).tolist() == [9, 4]
    assert x[1].rows(SINGLE_PROCESS, (4, 7, 9)) is x[1].everywhere()


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_a_round_of_the_server_that_raises_is_undone(engine: str) -> None:
    @dataclass(frozen=True)
    class Broken(Algorithm):
        def client_init(self, me: ClientContext) -> Tree:
            return {"v": me.n}

        @on_client()
        def add(self, me: ClientContext) -> tuple[Tree, Tree]:
            return {"v": me.state["v"] + 1}, None

        def round(self, fed: Federation, server: Tree) -> Tree:
            fed.map(self.add)
            fed.map(self.add)
            raise KeyboardInterrupt

    fed = federation(engine, Broken())
    before = states(fed)
    with pytest.raises(KeyboardInterrupt):
        one_round(fed)
    assert_equal(states(fed), before, tolerance=0)
