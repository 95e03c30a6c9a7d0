"""A client's part in secure sums: it keeps its replies, answers the steps of a sum, and refuses what would open one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.trees import Tree, items
from fedtailor.privacy import secure_sum
from fedtailor.privacy.secure_sum import Dealt, Keys, Masked


@dataclass(frozen=True)
class Term:
    """What of a client's replies enters a sum, times its weight if one is named; the weight then is the last number."""

    call: int
    paths: tuple[str, ...]
    weight: tuple[int, str] | None = None  # call and path

    @property
    def header(self) -> dict[str, Any]:
        return {"call": self.call, "paths": list(self.paths), "weight": self.weight and list(self.weight)}

    @staticmethod
    def read(header: Mapping[str, Any]) -> Term:
        weight = header["weight"]
        return Term(header["call"], tuple(header["paths"]), None if weight is None else (weight[0], weight[1]))


def context_of(round: int, number: int, term: Term, clients: Sequence[int], threshold: int) -> bytes:
    """Names a sum. Keys are derived from it, so that a message of another one is of no use."""
    return repr((round, number, term, tuple(clients), threshold)).encode()


class Member:
    """What one client remembers of the sums of one round."""

    def __init__(self, me: int, sums_of: int = 2) -> None:
        self.me = me
        self.sums_of = sums_of
        self._replies: dict[int, dict[str, Tensor]] = {}
        self._terms: dict[int, Term] = {}
        self._stages: dict[int, Keys | Dealt | Masked | None] = {}
        self._counted: dict[int, frozenset[int]] = {}  # by call: whose replies were added up

    def keep(self, call: int, reply: Tree) -> None:
        """A reply that stays here until it is asked for as a term of a sum."""
        self._replies[call] = dict(items(reply))

    def answer(self, header: dict[str, Any], tree: Tree) -> tuple[dict[str, Any], Tree]:
        """One step of a sum; each can be made once, in order."""
        number = header["sum"]
        steps = {"keys": self._keys, "deal": self._deal, "mask": self._mask, "reveal": self._reveal}
        try:
            return {"round": header["round"], "sum": number}, steps[header["step"]](number, header, tree)
        except (ValueError, LookupError, TypeError) as error:
            return {"error": str(error)}, None

    def _keys(self, number: int, header: dict[str, Any], tree: Tree) -> Tensor:
        if number in self._stages:
            raise ValueError(f"sum {number} was begun before")
        self._terms[number] = term = Term.read(header["term"])
        for call, path in [*((term.call, p) for p in term.paths), *([term.weight] if term.weight else [])]:
            if path not in self._replies.get(call, {}):
                raise ValueError(f'no reply "{path}" of call {call} is kept here')
        self._stages[number], advert = secure_sum.advertise()
        return as_tensor(advert)

    def _deal(self, number: int, header: dict[str, Any], tree: Tree) -> Tensor:
        keys = self._stage(number, Keys)
        clients, threshold = header["clients"], header["threshold"]
        context = context_of(header["round"], number, self._terms[number], clients, threshold)
        adverts = dict(zip(clients, as_bytes(tree), strict=True))
        self._stages[number], sealed = secure_sum.deal(keys, self.me, adverts, threshold, context)
        return rows_of(sealed[c] for c in clients if c != self.me)

    def _mask(self, number: int, header: dict[str, Any], tree: Tree) -> Tensor:
        dealt = self._stage(number, Dealt)
        words = secure_sum.encoded(self._vector(number), header["fraction_bits"], len(dealt.adverts))
        self._stages[number], masked = secure_sum.mask(
            dealt, dict(zip(header["dealers"], as_bytes(tree), strict=True)), words
        )
        return torch.from_numpy(masked.view(np.int64))

    def _reveal(self, number: int, header: dict[str, Any], tree: Tree) -> Tensor:
        masked, there, term = self._stage(number, Masked), frozenset(header["survivors"]), self._terms[number]
        for call in {term.call, *(term.weight or ())[:1]}:
            # two sums of the same replies over different clients differ by the replies of those who are in one only
            if self._counted.setdefault(call, there) != there:
                raise ValueError(f"replies to call {call} were summed over other clients before")
        if len(there) < self.sums_of:
            raise ValueError(f"a sum of {len(there)} clients; of fewer than {self.sums_of} none is opened here")
        shares = secure_sum.reveal(masked, there)
        return rows_of(shares[c] for c in sorted(shares))

    def _stage(self, number: int, kind: type[Any]) -> Any:
        """The state before a step; it is taken, so that no step can be made twice."""
        stage = self._stages.get(number)
        if not isinstance(stage, kind):
            raise ValueError(f"sum {number} is not at this step")
        self._stages[number] = None
        return stage

    def _vector(self, number: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        term = self._terms[number]
        parts = [self._replies[term.call][path].double().flatten() for path in term.paths]
        vector = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
        if term.weight is not None:
            weight = self._replies[term.weight[0]][term.weight[1]].double().reshape(1)
            vector = torch.cat([vector * weight, weight])
        return vector.numpy()


def as_tensor(message: bytes) -> Tensor:
    """Bytes as a tensor, which is what messages are made of."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def rows_of(messages: Any) -> Tensor:
    """Messages of equal length as rows."""
    rows = [as_tensor(m) for m in messages]
    return torch.stack(rows) if rows else torch.zeros(0, 0, dtype=torch.uint8)


def as_bytes(rows: Tensor) -> list[bytes]:
    """The rows as they were before `rows_of`."""
    return [row.numpy().tobytes() for row in rows]
