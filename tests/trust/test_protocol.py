"""The protocol of secure sums as a state machine, explored to its end: all orders of all messages of a lying server.

Each site is the code that runs, with quick ciphers. Sites answer the server alone, so the states of one site are
explored by themselves, with every word of a partner that the server could want taken as given. That finds what a site
can ever confirm. What the server can open follows: a set of sites is opened if as many of them as the threshold have
confirmed it. No two sets that differ in one site can be opened of the replies of one round: the server may call twice
with the same message, and gets the same replies.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product
from typing import Any

import numpy as np
import pytest
import torch

from fedtailor.aggregation import secure_sum, shamir
from fedtailor.aggregation.member import (
    Asked,
    Member,
    Opened,
    Party,
    SumRules,
    SumTerm,
    join_messages,
    pack,
    rows_of,
    statement,
    transcript,
)
from tests.aggregation.declared import Vectors

TERMS = (SumTerm(0, ("w",)), SumTerm(1, ("w",)))  # two calls with one message
RULES = SumRules(Vectors())
Word = tuple[frozenset[int], frozenset[int]]  # cohort and survivors


def subsets(items: Any, least: int) -> list[tuple[int, ...]]:
    items = sorted(items)
    return list(chain.from_iterable(combinations(items, n) for n in range(least, len(items) + 1)))


class Cipher:
    """Only who has the key gets the text."""

    def __init__(self, key: bytes) -> None:
        self.key = key

    def encrypt(self, nonce: bytes, text: bytes, context: bytes) -> bytes:
        return self.key + text

    def decrypt(self, nonce: bytes, box: bytes, context: bytes) -> bytes:
        if box[: len(self.key)] != self.key:
            raise secure_sum.InvalidTag
        return box[len(self.key) :]


def agreed(private: bytes, public: bytes, purpose: bytes, first: int, second: int, context: bytes) -> bytes:
    return hashlib.sha256(
        b"|".join([*sorted([private, public]), purpose, b"%d %d" % (first, second), context])
    ).digest()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, ciphers and shares that cost nothing; every decision is that of the real code."""
    monkeypatch.setattr(secure_sum, "_shared_key", agreed)
    monkeypatch.setattr(secure_sum, "_expand", lambda seed, length: np.zeros(length, dtype=np.uint64))
    monkeypatch.setattr(secure_sum, "ChaCha20Poly1305", Cipher)
    monkeypatch.setattr(shamir, "split", lambda secret, holders, t, entropy=None: dict.fromkeys(holders, bytes(66)))


def keys_of(site: int) -> secure_sum.Keys:
    return secure_sum.Keys(bytes([site + 1]) * 32, bytes([site + 101]) * 32)


def card_of(site: int) -> bytes:
    keys = keys_of(site)
    return join_messages([keys.encryption + keys.masking])


class Explored:
    """One site, and everything that a server can say to it."""

    def __init__(self, me: int, sites: int, sums: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.me, self.sites, self.sums = me, range(sites), range(1, sums + 1)
        self.messages: dict[tuple[Any, ...], tuple[dict[str, Any], Any]] = {}
        monkeypatch.setattr(secure_sum, "advertise", lambda: (keys_of(me), split_card(me)))
        self.states = 0
        self.histories = {call: kept.history for call, kept in self._fresh(Party(me))._replies.items()}
        self.words = self._explore()

    def _moves(self) -> Iterator[tuple[Any, ...]]:
        yield ("begin",)
        cohorts = [c for c in subsets(self.sites, 2) if self.me in c]
        for number in self.sums:
            yield from (("keys", number, term) for term in TERMS)
            for cohort in cohorts:
                yield ("deal", number, cohort)
                for dealers in subsets(set(cohort) - {self.me}, 1):
                    yield ("mask", number, cohort, dealers)
                for survivors in subsets(cohort, 1):
                    yield ("confirm", number, cohort, survivors)
                    yield ("reveal", number, cohort, survivors)

    def _explore(self) -> set[frozenset[Word]]:
        """Breadth first over states; returns the sets of words that the site can give, with all that it opened."""
        first = self._fresh(Party(self.me))
        waiting, seen = deque([(first, frozenset[Word]())]), {self._key(first, frozenset())}
        given: set[frozenset[Word]] = set()
        moves, fitting = list(self._moves()), dict[tuple[str, ...], list[tuple[Any, ...]]]()
        while waiting:
            member, words = waiting.popleft()
            given.add(words)
            at = tuple(type(member._stages.get(n, "")).__name__ for n in self.sums)
            if at not in fitting:
                fitting[at] = [m for m in moves if len(m) == 1 or self._could_be(member, m[0], m[1])]
            for move in fitting[at]:
                after, word = self._after(member, move)
                more = words | {word} if word else words
                if (key := self._key(after, more)) not in seen:
                    seen.add(key)
                    waiting.append((after, more))
        self.states = len(seen)
        return given

    def _fresh(self, party: Party) -> Member:
        member = Member(party, RULES)
        for term in TERMS:
            member.keep(term.call, "local", {"w": torch.zeros(1, dtype=torch.float64)}, "message")
        return member

    def _key(self, member: Member, words: frozenset[Word]) -> Any:
        opened = member.party.opened
        stages = tuple(_named(member._stages.get(n, "not begun")) for n in self.sums)
        return stages, frozenset(member._begun), opened.round, opened.cohort, words

    def _after(self, member: Member, move: tuple[Any, ...]) -> tuple[Member, Word | None]:
        """The site after a message, and its word if that was one."""
        step, *rest = move
        number = rest[0] if rest else 0
        opened = Opened(member.party.opened.round, member.party.opened.cohort)
        after = Member(replace(member.party, opened=opened), RULES)
        after._replies = member._replies
        if step == "begin":
            return after, None
        after._stages, after._begun = dict(member._stages), set(member._begun)  # what is in them does not change
        term = self._term(member, number)
        if (move, term) not in self.messages:
            self.messages[move, term] = self._message(term, step, *rest)
        header, tree = self.messages[move, term]
        answer, _ = after.answer({"round": 1, "sum": number, "step": step} | header, tree)
        if step == "confirm" and "error" not in answer:
            stage = after._stages[number]
            return after, (frozenset(stage.dealt.names), stage.survivors)
        return after, None

    def _term(self, member: Member, number: int) -> SumTerm:
        """What a sum that has begun is of."""
        stage = member._stages.get(number)
        asked = stage[1] if isinstance(stage, tuple) else getattr(getattr(stage, "dealt", stage), "asked", None)
        return asked.term if asked is not None else TERMS[0]

    def _could_be(self, member: Member, step: str, number: int) -> bool:
        """Whether a message is not of another step, and so refused whatever it holds."""
        stage = type(member._stages[number]).__name__ if number in member._stages else "none"
        return stage == {"keys": "none", "deal": "tuple", "mask": "_Dealt"}.get(step, "_Masked")

    def _message(
        self, term: SumTerm, step: str, number: int, cohort: Any = (), chosen: Any = ()
    ) -> tuple[dict[str, Any], Any]:
        """What the server says; every box and word of a partner that it names is a good one."""
        if step == "keys":
            return {"term": cohort.header}, None
        cards = {c: card_of(c) for c in cohort}
        context = transcript(Asked("", 1, number, term, self.histories[term.call], RULES.digest), cards)
        if step == "deal":
            return {"clients": list(cohort)}, pack(cards[c] for c in cohort)
        if step == "mask":
            pairs = {d: agreed(keys_of(d).encryption, self._public(), b"shares", d, self.me, context) for d in chosen}
            return {"dealers": list(chosen)}, rows_of(key + bytes(132) for key in pairs.values())
        if step == "confirm":
            return {"survivors": list(chosen)}, None
        word = hashlib.sha256(statement(b"survivors", context, chosen)).digest()
        return {"signers": list(chosen)}, pack(word for _ in chosen)

    def _public(self) -> bytes:
        return secure_sum._public(keys_of(self.me).encryption)


def _named(stage: Any) -> Any:
    """A stage by what may matter later on."""
    kind = type(stage).__name__
    if kind == "tuple":
        return kind, stage[1].term.call
    if kind == "_Dealt":
        return kind, stage.asked.term.call, frozenset(stage.names)
    if kind == "_Masked":
        about = stage.dealt
        return kind, about.asked.term.call, frozenset(about.names), frozenset(stage.state.shares), stage.survivors
    return stage if stage in (None, "not begun") else kind


def split_card(site: int) -> bytes:
    return card_of(site)[4:]


def two_openings(sites: int) -> tuple[set[frozenset[int]], Any]:
    """What can be opened if each site confirms one set, and two sets that differ in one site, if there are such."""
    choices = [[None, *(frozenset(u) for u in subsets(range(sites), 2) if me in u)] for me in range(sites)]
    found = set[frozenset[int]]()
    for given in product(*choices):
        opened = {
            survivors
            for survivors in {u for u in given if u is not None}
            for cohort in map(frozenset, subsets(range(sites), 2))
            if survivors <= cohort and sum(u == survivors for u in given) >= secure_sum.least(len(cohort))
        }
        for a, b in combinations(opened, 2):
            if len(a ^ b) == 1:
                return found, (a, b)
        found |= opened
    return found, None


@pytest.mark.parametrize(("sites", "sums", "least_states"), [(2, 2, 110), (3, 2, 2500), (4, 1, 1600)])
def test_t10_no_two_openings_differ_in_one_site(
    sites: int, sums: int, least_states: int, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_sum, "_public", lambda private: private)
    site = Explored(0, sites, sums, monkeypatch)  # sums side by side; and the round begun as often as it likes
    assert site.states >= least_states
    assert not several(site)  # a site confirms one set of survivors, ever
    confirmed = {word for words in site.words for word in words}
    assert {word for word in confirmed if len(word[1]) == sites} == {(frozenset(range(sites)),) * 2}  # and it can
    # by symmetry every site can confirm what the first can: one set of survivors each, of any cohort around it
    found, attack = two_openings(sites)
    assert attack is None
    assert frozenset(range(sites)) in found


def several(site: Explored) -> bool:
    """Whether a site can be brought to confirm two sets of survivors in one round."""
    return any(len({survivors for _, survivors in words}) > 1 for words in site.words)


def shrinks(self: Opened, round: int, names: Any) -> None:
    """A site that finds a sum over fewer of the same sites harmless."""
    cohort = frozenset(names)
    if self.round == round and not cohort <= self.cohort:
        raise ValueError("summed over other clients before")
    self.round, self.cohort = round, cohort


@pytest.mark.parametrize("claim", [lambda self, round, names: None, shrinks], ids=["forgets", "allows fewer"])
def test_t10_the_exploration_finds_an_attack_where_there_is_one(
    claim: Any, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_sum, "_public", lambda private: private)
    monkeypatch.setattr(Opened, "claim", claim)
    assert several(Explored(0, 3, 1, monkeypatch))


def test_t10_half_of_the_sites_are_too_few_to_open_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_sum, "least", lambda clients: max(1, clients // 2))
    assert two_openings(4)[1] is not None
