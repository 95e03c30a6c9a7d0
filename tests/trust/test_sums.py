"""Secure sums with a server that lies: it gets no reply of a single site, whatever it says to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtailor.aggregation import secure_sum
from fedtailor.aggregation.identity import Identity, owners, read_identity
from fedtailor.aggregation.member import (
    Member,
    Opened,
    Party,
    SumRules,
    SumTerm,
    as_bytes,
    join_messages,
    pack,
    rows_of,
    split_messages,
)
from fedtailor.flare.policy import Policy, make_party
from fedtailor.flare.protocol import Refused
from tests.aggregation.declared import Vectors
from tests.flare.sites import Authority

NAMES = ("ada", "bo", "cy", "di")
TERM = SumTerm(0, ("w",)).header
Lie = Callable[[int, dict[str, Any], Any], tuple[dict[str, Any], Any]]


class Refusal(Exception):
    """What a site answered in place of a step."""


class Server:
    """Makes the steps of sums with sites; `lies` may change what each of them is told in a step."""

    def __init__(self, members: Mapping[int, Member], run: str = "run", round: int = 1) -> None:
        self.members, self.run, self.round = members, run, round
        self.lies: dict[str, Lie] = {}

    def ask(self, step: str, number: int, each: Mapping[int, tuple[dict[str, Any], Any]]) -> dict[int, Any]:
        answers = {}
        for client, (header, tree) in each.items():
            if step in self.lies:
                header, tree = self.lies[step](client, dict(header), tree)
            asked = {"round": self.round, "sum": number, "step": step} | header
            answer, reply = self.members[client].answer(asked, tree)
            if "error" in answer:
                raise Refusal(answer["error"])
            answers[client] = (answer, reply)
        return answers

    def total(
        self, cohort: Sequence[int], number: int = 1, lost: Iterable[int] = (), term: dict[str, Any] = TERM
    ) -> list[float]:
        """The sum over a cohort of which some are lost after they have dealt."""
        cohort, threshold = sorted(cohort), secure_sum.least(len(cohort))
        cards = {
            c: bytes(v.numpy())
            for c, (_, v) in self.ask("keys", number, dict.fromkeys(cohort, ({"term": term}, None))).items()
        }
        about = {"clients": cohort}
        dealt = self.ask("deal", number, {c: (about, pack(cards[k] for k in cohort)) for c in cohort})
        boxes = {c: dict(zip([o for o in cohort if o != c], as_bytes(v), strict=True)) for c, (_, v) in dealt.items()}
        alive = [c for c in cohort if c not in set(lost)]

        def inbox(c: int) -> tuple[dict[str, Any], Tensor]:
            others = [o for o in cohort if o != c]
            return {"dealers": others}, rows_of(boxes[o][c] for o in others)

        masked = self.ask("mask", number, {c: inbox(c) for c in alive})
        vectors = {c: v.numpy().view(np.uint64) for c, (_, v) in masked.items()}
        words = self.ask("confirm", number, {c: ({"survivors": alive}, None) for c in alive})
        signed = pack(bytes(words[c][1].numpy()) for c in alive)
        shown = self.ask("reveal", number, {c: ({"signers": alive}, signed) for c in alive})
        shares = {c: dict(zip(cohort, as_bytes(v), strict=True)) for c, (_, v) in shown.items()}
        adverts, context = (
            {c: split_messages(cards[c])[0] for c in cohort},
            bytes.fromhex(dealt[cohort[0]][0]["transcript"]),
        )
        opened = secure_sum.open_sum(adverts, cohort, vectors, shares, threshold, context)
        return secure_sum.decode_fixed_point(opened, 32).tolist()


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def identities(authority: Authority, tmp_path: Path) -> dict[int, Identity]:
    made = {i: read_identity(authority.write_kit(tmp_path / name, name), NAMES) for i, name in enumerate(NAMES)}
    return {i: identity for i, identity in made.items() if identity is not None}


def parties(identities: Mapping[int, Identity], sums_of: int = 2, run: str = "run") -> dict[int, Party]:
    return {i: Party(i, sums_of, identity, run, Opened()) for i, identity in identities.items()}


def begun(parties: Mapping[int, Party], message: Callable[[int], str] = lambda i: "the same") -> dict[int, Member]:
    """A round at every site, after a call that each answered with its number."""
    members = {i: Member(its, SumRules(Vectors())) for i, its in parties.items()}
    for i, member in members.items():
        member.keep(0, "local", {"w": torch.full((3,), float(10**i))}, message(i))
    return members


def test_an_honest_server_gets_the_sum_also_when_one_is_lost(identities: dict[int, Identity]) -> None:
    everybody = parties(identities)
    assert Server(begun(everybody)).total(range(4)) == [1111.0] * 3
    assert Server(begun(everybody), round=2).total(range(4), lost=[1]) == [1101.0] * 3


def test_t7_a_round_begun_twice_is_not_summed_over_fewer_sites(identities: dict[int, Identity]) -> None:
    everybody = parties(identities)
    assert Server(begun(everybody)).total(range(4)) == [1111.0] * 3
    for cohort, lost in ((range(3), ()), (range(4), (3,))):
        with pytest.raises(Refusal, match=r"round 1 .*over other clients"):
            Server(begun(everybody)).total(cohort, lost=lost)
    assert Server(begun(everybody)).total(range(4)) == [1111.0] * 3  # the same sum once more tells nothing new
    assert Server(begun(everybody), round=2).total(range(3)) == [111.0] * 3  # a new round may have a new cohort
    with pytest.raises(Refusal, match=r"\b1\b.*\b2\b"):
        Server(begun(everybody)).total(range(4))


def test_t7_replies_to_the_same_message_are_not_summed_over_fewer_sites(identities: dict[int, Identity]) -> None:
    """The call is made a second time in the round, by another number: its replies are the same."""
    members = begun(parties(identities))
    for i, member in members.items():
        member.keep(1, "local", {"w": torch.full((3,), float(10**i))}, "the same")
    server = Server(members)
    assert server.total(range(4)) == [1111.0] * 3
    assert server.total(range(4), number=2, term=SumTerm(1, ("w",)).header) == [1111.0] * 3
    with pytest.raises(Refusal, match="a sum of call 1 was begun before"):
        server.total(range(3), number=3, term=SumTerm(1, ("w",)).header)
    for i, member in members.items():
        member.keep(2, "local", {"w": torch.full((3,), float(10**i))}, "the same")
    with pytest.raises(Refusal, match=r"round 1 .*over other clients"):
        server.total(range(3), number=4, term=SumTerm(2, ("w",)).header)


def test_t7_a_site_remembers_across_its_processes(authority: Authority, tmp_path: Path) -> None:
    policy = Policy(algorithms=("fedavg",), sends=("model",), sums_of=3, partners=NAMES)
    for name in NAMES:
        authority.write_kit(tmp_path / name / "kit", name)

    def job() -> dict[int, Party]:
        return {i: make_party(tmp_path / n / "kit", policy, n, "run", i, tmp_path / n) for i, n in enumerate(NAMES)}

    assert Server(begun(job())).total(range(4)) == [1111.0] * 3
    with pytest.raises(Refusal, match="over other clients before"):
        Server(begun(job())).total(range(3))


def card(identity: Identity | None, certificate: bytes = b"") -> bytes:
    """Keys that the server made for a partner it invents, signed as well as it can."""
    advert = secure_sum.advertise()[1]
    if identity is None:
        return join_messages([advert])
    return join_messages([advert, certificate or identity.certificate, identity.sign(b"a statement of another kind")])


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ("unsigned", "the keys of client 1 are not signed"),
        ("of another authority", "a partner without a certificate of this federation"),
        ("the server itself", '"localhost" is not among the partners of this site'),
        ("ended", 'the certificate of "bo" is not valid today'),
        ("stolen certificate", 'a key of "bo" is not signed by it'),
        ("nonsense", "a partner without a certificate of this federation"),
    ],
)
def test_t8_invented_partners_are_refused_by_name(
    who: str, why: str, authority: Authority, identities: dict[int, Identity], tmp_path: Path
) -> None:
    def kit(by: Authority, name: str, days: int = 10) -> Identity | None:
        return read_identity(by.write_kit(tmp_path / who / name, name, days), ())

    forged = {
        "unsigned": lambda: card(None),
        "of another authority": lambda: card(kit(Authority(), "bo")),
        "the server itself": lambda: card(kit(authority, "localhost")),
        "ended": lambda: card(kit(authority, "bo", days=-1)),
        "stolen certificate": lambda: card(kit(authority, "localhost"), identities[1].certificate),
        "nonsense": lambda: join_messages([bytes(64), b"x", b"y"]),
    }[who]()
    server = Server({0: begun(parties(identities, sums_of=3))[0]})
    mine = bytes(server.ask("keys", 1, {0: ({"term": TERM}, None)})[0][1].numpy())
    about = {"clients": [0, 1, 2]}
    with pytest.raises(Refusal, match=why):
        server.ask("deal", 1, {0: (about, pack([mine, forged, forged]))})


def test_t8_a_pinned_partner_has_one_certificate(
    authority: Authority, identities: dict[int, Identity], tmp_path: Path
) -> None:
    import hashlib

    pin = hashlib.sha256(identities[1].certificate).hexdigest()
    mine = read_identity(tmp_path / "ada" / "startup", [f"bo sha256:{pin}"])
    assert mine is not None
    assert mine.name_in(identities[1].certificate) == "bo"
    other = read_identity(authority.write_kit(tmp_path / "other", "bo"), ())
    assert other is not None
    with pytest.raises(ValueError, match='"bo"'):
        mine.name_in(other.certificate)


def test_t8_a_man_in_the_middle_is_refused(identities: dict[int, Identity]) -> None:
    server = Server(begun(parties(identities)))

    def swap(client: int, header: dict[str, Any], tree: Tensor) -> tuple[dict[str, Any], Tensor]:
        cards = [split_messages(c) for c in split_messages(bytes(tree.numpy()))]
        cards[1][0] = secure_sum.advertise()[1]  # its own keys in place of bo's
        return header, pack(join_messages(c) for c in cards)

    server.lies["deal"] = swap
    with pytest.raises(Refusal, match='a key of "bo" is not signed by it'):
        server.total(range(4))


def test_t8_keys_serve_one_sum_of_one_round_of_one_run(identities: dict[int, Identity]) -> None:
    for changed in ({"round": 2}, {"run": "another"}, {"number": 2}):
        first = Server(begun(parties(identities)))
        old = {
            c: bytes(v.numpy())
            for c, (_, v) in first.ask("keys", 1, dict.fromkeys(range(4), ({"term": TERM}, None))).items()
        }
        site = Server(
            begun(parties(identities, run=str(changed.get("run", "run")))), round=int(changed.get("round", 1))
        )
        number = int(changed.get("number", 1))
        mine = bytes(site.ask("keys", number, {0: ({"term": TERM}, None)})[0][1].numpy())
        about = {"clients": [0, 1, 2, 3]}
        with pytest.raises(Refusal, match="is not signed by it"):
            site.ask("deal", number, {0: (about, pack([mine, *(old[c] for c in (1, 2, 3))]))})


def test_t9_sites_that_were_told_different_things_open_nothing(identities: dict[int, Identity]) -> None:
    other = Server(begun(parties(identities), lambda i: "for bo alone" if i == 1 else "the same"))
    with pytest.raises(Refusal, match=r"is not signed by it"):  # keys are signed for the message that was answered
        other.total(range(4))

    def another_round(client: int, header: dict[str, Any], tree: Any) -> tuple[dict[str, Any], Any]:
        return header | ({"round": 2} if client == 1 else {}), tree

    def other_survivors(client: int, header: dict[str, Any], tree: Any) -> tuple[dict[str, Any], Any]:
        return header | ({"survivors": [0, 1, 2]} if client == 1 else {}), tree

    for step, lie, why in (
        ("keys", another_round, "is not signed by it"),
        ("confirm", other_survivors, "is not signed by it|confirm who is counted"),
    ):
        server = Server(begun(parties(identities)))
        server.lies[step] = lie
        with pytest.raises(Refusal, match=why):
            server.total(range(4))


def test_t9_no_step_is_made_twice_or_without_the_others_word(identities: dict[int, Identity]) -> None:
    server = Server(begun(parties(identities)))
    taken: list[Any] = []

    def note(client: int, header: dict[str, Any], tree: Any) -> tuple[dict[str, Any], Any]:
        taken.append((header, tree))
        return header, tree

    server.lies["reveal"] = note
    server.total(range(4))
    for step, header, tree in (("reveal", *taken[0]), ("confirm", {"survivors": [0, 1, 2]}, None)):
        with pytest.raises(Refusal, match="sum 1 is not at this step"):
            server.ask(step, 1, {0: (header, tree)})
    alone = Server(begun(parties(identities)))
    alone.lies["reveal"] = lambda client, header, tree: (
        {"signers": [0]},
        pack(split_messages(bytes(tree.numpy()))[:1]),
    )
    with pytest.raises(Refusal, match=r"\b1\b.*\b3\b"):
        alone.total(range(4))


def test_sites_of_one_owner_count_once(identities: dict[int, Identity]) -> None:
    owned = owners([f"{NAMES[0]} of the trust", f"{NAMES[1]} of the trust sha256:00", *NAMES[2:]])
    assert owned == {NAMES[0]: "the trust", NAMES[1]: "the trust"}
    everybody = {i: replace(its, owners=owned) for i, its in parties(identities, sums_of=3).items()}
    assert Server(begun(everybody)).total(range(4)) == [1111.0] * 3
    with pytest.raises(Refusal, match=r"\b2\b.*\b3\b"):
        Server(begun(everybody), round=2).total(range(3))
    with pytest.raises(Refusal, match="a sum of 2 owners"):  # a site that is lost on the way
        Server(begun(everybody), round=3).total(range(4), lost=[3])


def test_a_partner_with_an_owner_is_known_by_its_name(authority: Authority, tmp_path: Path) -> None:
    kit = authority.write_kit(tmp_path / "ada", "ada")
    identity = read_identity(kit, ["ada of A", "bo of A"])
    assert identity is not None
    assert identity.partners == {"ada": "", "bo": ""}


def test_a_policy_of_sums_needs_a_certificate_and_partners(authority: Authority, tmp_path: Path) -> None:
    authority.write_kit(tmp_path / "kit", "ada")
    for kit, partners, name, why in (
        ("none", NAMES, "ada", "there is no certificate to sign keys with"),
        ("kit", (), "ada", "names no partners"),
        ("kit", NAMES, "bo", 'the certificate in kit is of "ada", not of this site'),
    ):
        policy = Policy(algorithms=(), sends=(), sums_of=3, partners=partners)
        with pytest.raises(Refused, match=why):
            make_party(tmp_path / kit, policy, name, "run", 0, tmp_path)
