"""A client's part in secure sums: it keeps its replies, answers the steps of a sum, and refuses what would open one.

What all clients of a sum must agree on is hashed into one transcript: the run with its configuration, the round, all
calls of it that they have answered, the term, the rules of the run's sums, and everybody's keys. Keys are derived from
it, so
clients that were told different things cannot open anything together. Before the last step every client signs the
transcript and who is counted, and opens nothing without the same word from as many as the threshold.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.aggregation import secure_sum
from fedtailor.aggregation.identity import Identity
from fedtailor.aggregation.secure_sum import Dealt, Masked
from fedtailor.core.algorithm import Algorithm, declared_sums, is_declared_sum
from fedtailor.core.trees import Tree, items

ADVERT = 2 * secure_sum.KEY
LONGEST = 65_536  # bytes of a card: keys, certificate, signature


@dataclass(frozen=True)
class SumTerm:
    """What of a client's replies enters a sum, times its weight if one is named; the weight then is the last number."""

    call: int
    paths: tuple[str, ...]
    weight: str | None = None  # path of another leaf of the same reply

    @property
    def header(self) -> dict[str, Any]:
        return {"call": self.call, "paths": list(self.paths), "weight": self.weight}

    @staticmethod
    def read(header: Mapping[str, Any]) -> SumTerm:
        return SumTerm(header["call"], tuple(header["paths"]), header["weight"])


@dataclass(frozen=True)
class Asked:
    """What a sum is of, before anybody's keys are known."""

    run: str
    round: int
    number: int
    term: SumTerm
    history: str  # a hash of all messages that were answered in the round, up to that of the term's call
    rules: str  # a hash of what is fixed as the run begins, `SumRules.digest`

    @property
    def text(self) -> bytes:
        return json.dumps([self.run, self.round, self.number, self.term.header, self.history, self.rules]).encode()


@dataclass(frozen=True)
class SumRules:
    """What bounds every sum of a run. No request can change it: it is fixed as the run begins."""

    algorithm: Algorithm
    all_count_the_same: bool = False  # as with noise on sums
    fraction_bits: int = 32
    max_norm: float = math.inf
    cohort: frozenset[str] = frozenset()  # who may take part; empty: whoever is a partner

    @property
    def digest(self) -> str:
        """A hash that all clients of a sum must have in common."""
        sums = declared_sums(self.algorithm), self.all_count_the_same
        text = json.dumps([*sums, self.fraction_bits, self.max_norm, sorted(self.cohort)])
        return hashlib.sha256(text.encode()).hexdigest()


def transcript(asked: Asked, cards: Mapping[int, bytes]) -> bytes:
    """One hash over all that the clients of a sum must have been told alike."""
    digest = hashlib.sha256(b"fedtailor secure sum|" + asked.text)
    for client in sorted(cards):
        digest.update(b"|%d|%d|" % (client, len(cards[client])) + cards[client])
    return digest.digest()


def statement(kind: bytes, text: bytes, clients: Iterable[int] = ()) -> bytes:
    return b"fedtailor %s|%s|%s" % (kind, json.dumps(sorted(clients)).encode(), hashlib.sha256(text).digest())


def message_digest(function: str, placed: Sequence[bool], args: Sequence[Tree]) -> str:
    """A hash over a call and the part of its message that is the same for all clients."""
    digest = hashlib.sha256(json.dumps([function, list(placed)]).encode())
    for i, (arg, own) in enumerate(zip(args, placed, strict=True)):
        for path, leaf in () if own else items(arg):
            digest.update(f"|{i}|{path}|{leaf.dtype}|{list(leaf.shape)}|".encode())
            digest.update(leaf.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


class Opened:
    """Which clients the replies of the latest round were added up over, and from which private state mine was computed.

    It outlives a round that is begun again, and at a site its process: two sums over different clients, of the same
    replies or of replies to the same message, differ by those of the clients who are in one only; two sums for which
    one client alone began from another state differ by that client's replies.
    """

    def __init__(self, round: int | None = None, cohort: Iterable[str] = (), state: str = "") -> None:
        self.round = round
        self.cohort = frozenset(cohort)
        self.state = state
        self.present = state  # a hash of the state that the current round began from
        self.save: Callable[[Opened], None] = lambda opened: None

    def claim(self, round: int, names: Iterable[str]) -> None:
        """The replies of a round are summed over these clients, or a ValueError says why not."""
        if self.round is not None and round < self.round:
            raise ValueError(f"a sum of round {round}, and round {self.round} was summed before")
        cohort = frozenset(names)
        if round == self.round and cohort != self.cohort:
            raise ValueError(f"replies of round {round} were summed over other clients before")
        if round == self.round and self.present != self.state:
            raise ValueError(f"replies of round {round} were summed from another private state before")
        self.round, self.cohort, self.state = round, cohort, self.present
        self.save(self)


@dataclass(frozen=True)
class Party:
    """Who takes part, and on what conditions."""

    me: int
    sums_of: int = 2  # replies of fewer clients, or owners, are not added up
    identity: Identity | None = None  # None: all clients are in one process, and nothing is signed
    run: str = ""  # its name, and a hash of the configuration that it began with
    opened: Opened = field(default_factory=Opened)
    owners: Mapping[str, str] = field(default_factory=dict)  # of clients; one without is its own

    def refuse_few(self, names: Iterable[str]) -> None:
        """A ValueError if a sum over these clients would be one of too few who could put their replies together."""
        count = len({self.owners.get(name, name) for name in names})
        if count < self.sums_of:
            what = "owners" if self.owners else "clients"
            raise ValueError(f"a sum of {count} {what}; of fewer than {self.sums_of} none is opened here")


@dataclass(frozen=True)
class _Dealt:
    """A sum in which the shares are dealt: the protocol's state, and what was agreed on."""

    state: Dealt
    asked: Asked
    names: dict[int, str]
    certificates: dict[int, bytes]


@dataclass(frozen=True)
class _Masked:
    state: Masked
    dealt: _Dealt
    survivors: frozenset[int] = frozenset()  # that were confirmed


@dataclass(frozen=True)
class _Kept:
    function: str
    reply: dict[str, Tensor]
    history: str


class Member:
    """What one client remembers of the sums of one round. It opens those that its own algorithm declares, each once."""

    def __init__(self, party: Party, rules: SumRules, conceal: Callable[[str], None] | None = None) -> None:
        """`conceal` is told, in place of the server, that a number was limited to the range of a sum."""
        self.party, self.rules, self._conceal = party, rules, conceal
        self._digest = rules.digest
        self._replies: dict[int, _Kept] = {}
        self._history = ""  # a reply depends on all calls before it, by the private state
        self._begun: set[tuple[int, str, str | None]] = set()  # call, leaf and weight
        self._stages: dict[int, Any] = {}

    def keep(self, call: int, function: str, reply: Tree, message: str = "") -> None:
        """A reply that stays here until it is asked for as a term of a sum; `message` is a hash of what it answers."""
        self._history = hashlib.sha256(json.dumps([self._history, call, message]).encode()).hexdigest()
        if call in self._replies:  # it has changed the private state, too
            raise ValueError(f"call {call} was answered before")
        self._replies[call] = _Kept(function, dict(items(reply)), self._history)

    def answer(self, header: dict[str, Any], tree: Tree) -> tuple[dict[str, Any], Tree]:
        """One step of a sum; each can be made once, in order."""
        number, about = header["sum"], {"round": header["round"], "sum": header["sum"]}
        steps = {
            "keys": self._keys,
            "deal": self._deal,
            "mask": self._mask,
            "confirm": self._confirm,
            "reveal": self._reveal,
        }
        try:
            reply = steps[header["step"]](number, header, tree)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return {"error": str(error)}, None
        if isinstance(stage := self._stages.get(number), _Dealt):  # the server opens with it, and can check nothing
            about["transcript"] = stage.state.context.hex()
        return about, reply

    def _keys(self, number: int, header: dict[str, Any], tree: Tree) -> Tensor:
        """Fresh keys; the certificate signs that they are for this sum of this round of this run."""
        if number in self._stages:
            raise ValueError(f"sum {number} was begun before")
        term = SumTerm.read(header["term"])
        self._refuse_undeclared(term)
        history = self._replies[term.call].history
        asked = Asked(self.party.run, header["round"], number, term, history, self._digest)
        keys, advert = secure_sum.advertise()
        self._stages[number] = (keys, asked)
        identity = self.party.identity
        if identity is None:
            return pack([advert])
        signed = identity.sign(statement(b"keys", asked.text + advert, [self.party.me]))
        return pack([advert, identity.certificate, signed])

    def _refuse_undeclared(self, term: SumTerm) -> None:
        """Sums of the same replies that differ in their weights are equations: enough of them give each reply."""
        kept = self._replies.get(term.call)
        for path in (*term.paths, *(() if term.weight is None else (term.weight,))):
            if kept is None or path not in kept.reply:
                raise ValueError(f'no reply "{path}" of call {term.call} is kept here')
        assert kept is not None
        for path in term.paths:
            same = self.rules.all_count_the_same
            if not is_declared_sum(self.rules.algorithm, kept.function, path, term.weight, all_count_the_same=same):
                by = "" if term.weight is None else f' weighted by "{term.weight}"'
                raise ValueError(f'{kept.function} does not declare a sum of "{path}"{by}')
        begun = [(term.call, path, term.weight) for path in term.paths]
        if len(set(begun)) < len(begun) or self._begun & set(begun):
            raise ValueError(f"a sum of call {term.call} was begun before")
        self._begun |= set(begun)

    def _deal(self, number: int, header: dict[str, Any], tree: Tree) -> Tensor:
        """Shares for partners whose certificates and signatures are good; who they are is fixed from here on."""
        keys, asked = self._stage(number, tuple)
        clients = header["clients"]
        cards = dict(zip(clients, unpack(tree), strict=True))
        adverts, names, certificates = {}, {}, {}
        for client, card in cards.items():
            adverts[client], names[client], certificates[client] = self._read(client, card, asked)
        if len(set(names.values())) != len(clients):
            raise ValueError("a partner is named twice")
        if self.party.identity is not None and names.get(self.party.me) != self.party.identity.name:
            raise ValueError("my own place is given to another")
        if self.rules.cohort and (others := sorted(set(names.values()) - self.rules.cohort)):
            raise ValueError(f'"{others[0]}" was not in the run as it began here')
        self.party.refuse_few(names.values())
        threshold, context = secure_sum.least(len(cards)), transcript(asked, cards)
        state, sealed = secure_sum.deal(keys, self.party.me, adverts, threshold, context)
        self._stages[number] = _Dealt(state, asked, names, certificates)
        return rows_of(sealed[c] for c in clients if c != self.party.me)

    def _read(self, client: int, card: bytes, asked: Asked) -> tuple[bytes, str, bytes]:
        """The keys of a partner, who it is, and its certificate."""
        identity, parts = self.party.identity, split_messages(card)
        if len(parts) != (1 if identity is None else 3) or len(parts[0]) != ADVERT:
            raise ValueError(f"the keys of client {client} are not signed")
        if identity is None:
            return parts[0], str(client), b""
        advert, certificate, signature = parts
        about = statement(b"keys", asked.text + advert, [client])
        return advert, identity.check(certificate, signature, about, "a key"), certificate

    def _mask(self, number: int, header: dict[str, Any], tree: Tree) -> Tensor:
        dealt = self._stage(number, _Dealt)
        vector, range_of = self._vector(dealt.asked.term), (self.rules.fraction_bits, len(dealt.names))
        if self._conceal is not None and not secure_sum.is_in_range(vector, *range_of):
            self._conceal("a number was beyond the range of a secure sum and was limited to it")
            vector = secure_sum.limit_to_range(vector, *range_of)
        words = secure_sum.encode_fixed_point(vector, *range_of)
        inbox = dict(zip(header["dealers"], as_bytes(tree), strict=True))
        state, masked = secure_sum.mask(dealt.state, inbox, words)
        self._stages[number] = _Masked(state, dealt)
        return torch.from_numpy(masked.view(np.int64))

    def _confirm(self, number: int, header: dict[str, Any], tree: Tree) -> Tensor:
        """My word on who is counted; it is given once, and for the replies to a call once and for all."""
        masked = self._stage(number, _Masked)
        survivors, dealt = frozenset(header["survivors"]), masked.dealt
        if masked.survivors:
            raise ValueError(f"sum {number} was confirmed before")
        secure_sum.reveal(masked.state, survivors)  # or it says why not
        names = [dealt.names[c] for c in survivors]
        self.party.refuse_few(names)
        self.party.opened.claim(dealt.asked.round, names)
        self._stages[number] = _Masked(masked.state, dealt, survivors)
        word = statement(b"survivors", dealt.state.context, survivors)
        identity = self.party.identity
        return as_tensor(hashlib.sha256(word).digest() if identity is None else identity.sign(word))

    def _reveal(self, number: int, header: dict[str, Any], tree: Tree) -> Tensor:
        """Shares that open the sum, if enough partners have given the same word."""
        masked = self._stage(number, _Masked)
        if not masked.survivors:
            raise ValueError(f"sum {number} is not confirmed")
        word, identity = statement(b"survivors", masked.dealt.state.context, masked.survivors), self.party.identity
        signatures = dict(zip(header["signers"], unpack(tree), strict=True))
        if not signatures.keys() <= masked.survivors or len(signatures) < masked.state.threshold:
            raise ValueError(f"{len(signatures)} clients confirm who is counted, {masked.state.threshold} needed")
        for client, signature in signatures.items():
            if identity is None:
                if signature != hashlib.sha256(word).digest():
                    raise ValueError(f"client {client} confirms other clients than this one")
            else:
                identity.check(masked.dealt.certificates[client], signature, word, "a word on who is counted")
        shares = secure_sum.reveal(masked.state, masked.survivors)
        return rows_of(shares[c] for c in sorted(shares))

    def _stage(self, number: int, kind: type[Any]) -> Any:
        """The state before a step; it is taken, so that no step can be made twice."""
        stage = self._stages.get(number)
        if not isinstance(stage, kind):
            raise ValueError(f"sum {number} is not at this step")
        self._stages[number] = None
        return stage

    def _vector(self, term: SumTerm) -> np.ndarray[Any, np.dtype[np.float64]]:
        reply = self._replies[term.call].reply
        parts = [reply[path].double().flatten() for path in term.paths]
        vector = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device="cpu")
        if term.weight is not None:
            weight = reply[term.weight].double().reshape(1)
            vector = torch.cat([vector * weight, weight])
        return vector.cpu().numpy()


def as_tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def rows_of(messages: Any) -> Tensor:
    rows = [as_tensor(m) for m in messages]
    return torch.stack(rows) if rows else torch.zeros(0, 0, dtype=torch.uint8, device="cpu")


def as_bytes(rows: Tensor) -> list[bytes]:
    """The rows as they were before `rows_of`."""
    return [row.numpy().tobytes() for row in rows]


def join_messages(parts: Iterable[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def split_messages(message: bytes) -> list[bytes]:
    """The messages as they were before `join_messages`."""
    parts, at = [], 0
    while at < len(message):
        end = at + 4 + int.from_bytes(message[at : at + 4], "little")
        if end > len(message):
            raise ValueError("a message that is cut short")
        parts.append(message[at + 4 : end])
        at = end
    return parts


def is_card(message: bytes) -> bool:
    """Whether a message has the form of a client's keys; whose they are, the other clients check."""
    try:
        parts = split_messages(message)
    except ValueError:
        return False
    return len(parts) in (1, 3) and len(parts[0]) == ADVERT


def pack(parts: Iterable[bytes]) -> Tensor:
    """`join_messages`, as a tensor."""
    return as_tensor(join_messages(parts))


def unpack(tree: Tensor) -> list[bytes]:
    """The messages as they were before `pack`."""
    if tree.dtype != torch.uint8 or tree.dim() != 1:
        raise ValueError("a message of the wrong form")
    return split_messages(tree.numpy().tobytes())
