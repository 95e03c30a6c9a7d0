"""Federations whose server sees sums only: equal results, nothing single in its memory, clients that are lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtailor.aggregation.dry_run import rehearse
from fedtailor.aggregation.member import (
    Member,
    Party,
    SumRules,
    SumTerm,
    join_messages,
    pack,
    split_messages,
)
from fedtailor.aggregation.secure import Secure
from fedtailor.core import codec
from fedtailor.core.algorithm import NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.reduce import Aggregation
from fedtailor.core.trees import Tree, items
from fedtailor.engines.wire import Site, Wire
from fedtailor.errors import ConfigError, RoundAbandoned
from tests.aggregation.declared import Vectors
from tests.helpers import assert_equal, everything, federate, make_data, make_model, run, states, usual, variants

VARIANTS = variants()
LEARN2PFED = ("paper", "released", "warm")
LOOKS = {
    "cfl": 'CFL looks at single replies ("cluster of each client")',
    "duw-fedavg": 'DUW-FedAvg looks at single replies ("model of each client")',
    "duw-fedavg:paper": 'DUW-FedAvg looks at single replies ("model of each client")',
    "duw-fednova": 'DUW-FedNova looks at single replies ("model of each client")',
    "duw-fednova:paper": 'DUW-FedNova looks at single replies ("model of each client")',
    "fedadp": 'FedAdp looks at single replies ("models")',
    "fedamp": 'FedAMP looks at single replies ("model of each client")',
    "fedamp:heuristic": 'FedAMP looks at single replies ("model of each client")',
    "fedfa": 'FedFa looks at single replies ("training accuracies")',
    "fedfomo": 'FedFomo looks at single replies ("model of each client")',
    "fedl2p": "FedL2P differentiates through its rounds (a tape)",
    "fedlaw": 'FedLAW looks at single replies ("model of each client")',
    "fedpac": 'FedPAC looks at single replies ("class means of each client")',
    "fedselect": 'FedSelect looks at single replies ("mask of each client")',
    "fedselect:paper": 'FedSelect looks at single replies ("mask of each client")',
    "fedselect:released": 'FedSelect looks at single replies ("mask of each client")',
    "mocha": 'MOCHA looks at single replies ("dual variables of each client")',
    "pefll": "PeFLL differentiates through its rounds (a tape)",
    "pfedhn": 'pFedHN looks at single replies ("embedding of each client")',
    "pfedla": 'pFedLA looks at single replies ("model of each client")',
    "pfedla:exact": "pFedLA differentiates through its rounds (a tape)",
    "tailor": "Tailor differentiates through its rounds (a tape)",
    "learn2pfed": "Learn2pFed differentiates through its rounds (a tape)",
    **{f"learn2pfed:{preset}": "Learn2pFed differentiates through its rounds (a tape)" for preset in LEARN2PFED},
    "learn2pfed-head": "Learn2pFed-Head differentiates through its rounds (a tape)",
    "learn2pfed-head:paper": "Learn2pFed-Head differentiates through its rounds (a tape)",
    "fedcac": 'FedCAC looks at single replies ("model of each client")',
    "fedtgp": 'FedTGP looks at single replies ("class means of each client")',
}
SUMS = [name for name in VARIANTS if name not in LOOKS]
RATIOS = (
    "empiricalbayes",
    "mixedmodel",
    "mixedlogit",
    "mixedpoisson",
)  # divide a sum by a sum where both go to 0: half of the 46 bits are left
PLAIN = ("fedavg", "fedprox", "fedper", "fedrep", "fedbabu", "ditto", "lg-fedavg")


def federation(algorithm: str | Algorithm, *, is_secure: bool = True, fraction_bits: int = 32) -> Federation:
    made = VARIANTS[algorithm] if isinstance(algorithm, str) else algorithm
    case = usual(made)
    model = case.pop("model", "mlp")
    data = make_data(**case)
    fed = federate(made, data, make_model(model, data), "wire")
    if is_secure:
        assert isinstance(fed.engine, Wire)
        setting = fed.engine.experiment = replace(fed.engine.experiment, aggregation=privacy(fraction_bits))
        for site in fed.engine.sites:
            site.inside.experiment = setting
    return fed


def privacy(fraction_bits: int = 32) -> Aggregation:
    return Aggregation(reduction=Secure(fraction_bits))


@pytest.mark.parametrize("algorithm", PLAIN)
def test_results_are_those_of_plain_sums(algorithm: str) -> None:
    secure, plain = federation(algorithm), federation(algorithm, is_secure=False)
    found, wanted = everything(secure, run(secure)), everything(plain, run(plain))
    # a weighted sum is off by 4 halves of 2**-32 at most, its mean by that over 29 samples; training carries it on
    assert_equal(found, wanted, 1e-9)
    assert secure.record.gathered == set()


@pytest.mark.parametrize("algorithm", SUMS)
def test_every_algorithm_that_only_sums_can_do_without_replies(algorithm: str) -> None:
    secure, plain = federation(algorithm, fraction_bits=46), federation(algorithm, is_secure=False)
    rounds, tolerance = (1, 2.0**-23) if algorithm in RATIOS else (2, 1e-9)
    assert_equal(everything(secure, run(secure, rounds)), everything(plain, run(plain, rounds)), tolerance)
    assert isinstance(secure.engine, Wire)
    assert (secure.traffic.up, secure.traffic.down) == (secure.engine.up, secure.engine.down)
    rehearse(secure.engine.experiment)


@pytest.mark.parametrize("algorithm", LOOKS)
def test_the_others_are_refused_before_and_in_the_first_round(algorithm: str) -> None:
    fed = federation(algorithm)
    for attempt in (lambda: rehearse(fed.engine.experiment), lambda: run(fed)):
        with pytest.raises(ConfigError) as refused:
            attempt()
        assert f"privacy.secure_sum: {LOOKS[algorithm]}; choose one that only sums" in str(refused.value)


def test_the_server_never_holds_a_single_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    crossed: list[bytes] = []
    kept: list[dict[str, Tensor]] = []
    record(monkeypatch, crossed, kept)
    fed = federation("fedavg")
    server = fed.engine.experiment.model.params
    known = np.concatenate([v.numpy().ravel() for v in server.values()])
    fed.run_round(0, range(4), server)
    memory = b"".join(crossed)
    assert len(kept) == 4
    for reply in kept:
        n = reply["1"].item()
        for path, leaf in items(reply):
            values = leaf.numpy().ravel()
            assert values.tobytes() not in memory or path == "1"
            for value in values[~np.isin(values, known)] if leaf.dim() else []:
                assert value.tobytes() not in memory
                for weighted in (value, value * n):  # as it enters the sum
                    encoded = np.int64(np.rint(weighted * 2**32)).tobytes()
                    assert encoded not in memory
    replies = [codec.decode(message)[1] for message in crossed[1::2]]
    assert [v for v in replies if v is not None and v.is_floating_point()] == []


def test_masked_replies_are_other_numbers_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Tensor]] = []
    ends = []
    for _ in range(2):
        crossed: list[bytes] = []
        with monkeypatch.context() as patch:
            record(patch, crossed, [])
            ends.append(run(federation("fedrep"), 1))
        trees = (codec.decode(message)[1] for message in crossed[1::2])
        seen.append([v for v in trees if v is not None and v.dtype == torch.int64])
    assert_equal(ends[0], ends[1], 0.0)
    assert [len(vectors) for vectors in seen] == [4, 4]
    for one, other in zip(*seen, strict=True):
        assert not torch.isin(one, other).any()
        assert one.double().abs().mean() > 2**60  # plain ones are below 2**32 * 13 samples * weights of about 1


def record(patch: pytest.MonkeyPatch, crossed: list[bytes], kept: list[dict[str, Tensor]]) -> None:
    """All bytes that the server sends and gets, in turn, and the replies that stay."""
    handle, keep = Site.handle, Member.keep

    def recording(self: Site, request: bytes) -> bytes:
        reply = handle(self, request)
        crossed.extend((request, reply))
        return reply

    def keeping(self: Member, call: int, function: str, reply: Tree, message: str = "") -> None:
        kept.append(dict(items(reply)))
        keep(self, call, function, reply, message)

    patch.setattr(Site, "handle", recording)
    patch.setattr(Member, "keep", keeping)


def lose(patch: pytest.MonkeyPatch, is_lost: Callable[[int, dict[str, Any]], bool]) -> None:
    """Clients that cannot be reached for some messages."""
    handle = Site.handle

    def failing(self: Site, request: bytes) -> bytes:
        if is_lost(self.client, codec.decode(request)[0]):
            raise ConnectionResetError("gone")
        return handle(self, request)

    patch.setattr(Site, "handle", failing)


@pytest.mark.parametrize("step", ["keys", "deal", "mask"])
def test_the_sum_of_the_others_is_exact_when_one_is_lost(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = federation("ditto", is_secure=False)
    end = run(wanted, 1, cohort=[0, 1, 3])
    secure = federation("ditto")
    lose(monkeypatch, lambda client, header: client == 2 and header.get("step") == step)
    assert_equal(run(secure, 1), end, 1e-9)
    assert secure.cohort == (0, 1, 3)
    assert [(f.client, f.reason) for f in secure.record.faults] == [("cy", "cannot be reached: gone")]
    assert_equal(states(secure), states(wanted), 0.0)  # cy's is as before the round


def test_who_is_lost_after_its_vector_arrived_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = federation("ditto", is_secure=False)
    wanted = everything(plain, run(plain, 1))
    secure = federation("ditto")
    lose(monkeypatch, lambda client, header: client == 2 and header.get("step") == "reveal")
    assert_equal(everything(secure, run(secure, 1)), wanted, 1e-9)
    assert secure.cohort == (0, 1, 2, 3)


@pytest.mark.parametrize("step", ["keys", "deal", "mask", "reveal"])
def test_below_the_threshold_the_round_is_abandoned(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secure = federation("ditto")
    before = states(secure)
    lost = (0, 1, 2) if step == "keys" else (1, 2)  # the threshold is over those who have sent keys
    lose(monkeypatch, lambda client, header: client in lost and header.get("step") == step)
    with pytest.raises(RoundAbandoned, match=r"[12].*[23].*cy"):
        run(secure, 1)
    assert_equal(states(secure), before, 0.0)


def test_who_is_lost_after_the_sums_were_opened_ends_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second sum, without its reply, would tell what that was."""
    for secure in (federation("ditto"), federation("ditto", is_secure=False)):
        before = states(secure)
        lost = iter([{1: "connection lost"}])
        losing = {"end_round": lambda _, clients, lost=lost: next(lost, {}), "saved": lambda _, states: None}
        kind = type(secure.engine)
        monkeypatch.setattr(secure.engine, "__class__", type("Losing", (kind,), losing))  # what it can do is its type's
        if not secure.engine.experiment.aggregation.reduction.is_sealed:  # the server knows every reply anyway
            run(secure, 1)
            assert secure.cohort == (0, 2, 3)
            continue
        with pytest.raises(RoundAbandoned, match="summed: bo"):
            run(secure, 1)
        assert_equal(states(secure), before, 0.0)
        assert [(fault.client, fault.reason) for fault in secure.record.faults] == [("bo", "connection lost")]


def test_two_sums_of_the_same_replies_are_over_the_same_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    secure = federation("fednova")  # sums twice before it takes the mean of the models
    lose(monkeypatch, lambda client, header: client == 2 and header.get("step") == "mask" and header["sum"] == 3)
    with pytest.raises(RoundAbandoned, match=r"round 0 .*over other clients"):
        run(secure, 1)


@dataclass(frozen=True)
class Telling(Algorithm):
    """Sends a multiple of the sample count, and no number at the smallest client."""

    factor: float = 1.0
    title: ClassVar[str] = "Telling"

    def server_init(self, model: Any) -> Tree:
        return torch.zeros((), dtype=torch.float64)

    @on_client(sends=NUMBER.summed())
    def tell(self, me: ClientContext, w: Tensor) -> tuple[Tree, Tree]:
        return {}, torch.where(me.n > 1, me.n * self.factor, torch.nan)

    def round(self, fed: Federation, w: Tensor) -> Tensor:
        return fed.sum(fed.map(self.tell, w))


def test_a_reply_that_is_no_number_is_found_by_the_client_itself() -> None:
    fed = federation(Telling())
    assert float(run(fed, 1)) == 9 + 6 + 13
    assert [(f.client, f.reason) for f in fed.record.faults] == [("bo", 'reply "number" is not finite')]


def test_a_reply_above_the_norm_is_found_by_the_client_itself() -> None:
    fed = federation(Telling(1e7))
    assert float(run(fed, 1)) == 9e7 + 6e7
    assert fed.record.faults[-1].reason == "reply has norm 1.3e+08, above the limit 1e+08"


def test_numbers_beyond_the_range_are_named() -> None:
    fed = federation(Telling(1e5), fraction_bits=44)
    with pytest.raises(RoundAbandoned, match=r"\b0\b.*\b2\b.*di"):
        run(fed, 1)
    assert fed.record.faults[1].reason == "secure sum: a number is not within ±174763, the range of a secure sum"


def test_a_client_that_seals_its_replies_answers_nothing_else() -> None:
    fed = federation("fedavg", is_secure=False)
    assert isinstance(fed.engine, Wire)
    inside = fed.engine.sites[0].inside
    inside.experiment = replace(inside.experiment, aggregation=privacy())
    run(fed, 1)
    assert [(f.client, f.reason) for f in fed.record.faults] == [
        ("ada", 'reply lacks "0/hidden.0.bias"')  # it has left nothing of it
    ]


def test_a_client_refuses_steps_out_of_order_and_low_thresholds() -> None:
    member = Member(Party(0), SumRules(Vectors()))
    member.keep(0, "local", {"w": torch.ones(3, dtype=torch.float64)})
    term = SumTerm(0, ("w",)).header

    def ask(step: str, **more: Any) -> str:
        tree = more.pop("tree", None)
        return str(member.answer({"round": 1, "sum": 1, "step": step} | more, tree)[0].get("error"))

    assert ask("keys", term=SumTerm(0, ("v",)).header) == 'no reply "v" of call 0 is kept here'
    assert ask("mask", dealers=[]) == "sum 1 is not at this step"
    assert ask("keys", term=term) == "None"
    assert ask("keys", term=term) == "sum 1 was begun before"
    cards = pack(join_messages([bytes([c]) * 64]) for c in range(4))
    given = {"clients": [1, 2, 3], "tree": pack(split_messages(bytes(cards.numpy()))[1:])}
    assert "3 clients" in ask("deal", **given)  # not me
    assert ask("deal", **given) == "sum 1 is not at this step"
    assert "'open'" in ask("open")
