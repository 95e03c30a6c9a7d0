"""Secure sums: replies stay at their clients, and the server sees declared sums only.

This is the server's half; `member` is the client's, `secure_sum` the mathematics.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.aggregation.accountant import INSTALL
from fedtailor.core import border, codec
from fedtailor.core.algorithm import is_declared_sum, reply_part
from fedtailor.core.engine import Carrying
from fedtailor.core.federation import Federation
from fedtailor.core.reduce import INSTEAD, Call, Limits, PerClient, Rejected, at_path
from fedtailor.core.trees import Tree, items, rebuild
from fedtailor.errors import ConfigError, RoundAbandoned

BOX = 2 * 66 + 16  # bytes of two shares, encrypted
Request = tuple[int, dict[str, Any], Tree]


@dataclass(frozen=True)
class Secure:
    """A reduction in which each sum is opened by all clients together, and no reply leaves its client alone."""

    fraction_bits: int = 32  # of the fixed-point numbers in a sum
    max_norm: float = Limits.max_norm  # of a reply; fixed as a run begins

    hides = "privacy.secure_sum"
    is_sealed = True

    def sum(self, fed: Federation, x: PerClient, weight: PerClient | None) -> tuple[Tree, Tensor]:
        """Sums in fixed point, and the sum of the weights or the number of clients."""
        example, paths, by = declared_sum(fed, x, weight)
        known = set(fed.present) & set(x.clients if weight is None else weight.clients)
        clients = tuple(c for c in x.clients if c in known)  # a client may be lost between two calls
        assert x.call is not None
        if not paths:
            return example, fed.model.like.new_tensor(len(clients), dtype=torch.int64)
        examples = [leaf for _, leaf in items(example)]
        sums, weights, counted = secure_total(fed, self.fraction_bits, clients, x.call, paths, by, examples)
        total = rebuild(example, (_as_type(v, leaf) for v, leaf in zip(sums, examples, strict=True)))
        return total, fed.model.like.new_tensor(counted if by is None else weights, dtype=torch.float64)

    def refuse_tape(self, title: str) -> None:
        """That single replies are hidden says it all."""

    def check(self, experiment: Any) -> None:
        """Raise a `ConfigError` if what it needs is not installed."""
        try:
            import cryptography  # noqa: F401
        except ImportError:
            raise ConfigError(f"{self.hides}: the package cryptography is missing; {INSTALL}") from None


def declared_sum(fed: Federation, x: PerClient, weight: PerClient | None) -> tuple[Tree, list[str], str | None]:
    """What a sum of `x` looks like, the paths of its leaves and of the weight; refuses a sum that is not declared."""
    key, algorithm = Secure.hides, fed.engine.experiment.algorithm
    if x.call is None or (weight is not None and (weight.call is None or weight.call.number != x.call.number)):
        raise ConfigError(f"{key}: {fed.title} chooses a weight for each client; {INSTEAD}")
    example = at_path(x.example, x.path)
    paths = [path for path, _ in items(example, "/".join(map(str, x.path)))]
    by = None if weight is None else "/".join(map(str, weight.path))
    same = fed.engine.experiment.aggregation.noise is not None
    for path in paths:
        if not is_declared_sum(algorithm, x.call.function, path, by, all_count_the_same=same):
            name = reply_part(algorithm, x.call.function, path).name
            how, write = "", "summed()"
            if by is not None:
                how = f' weighted by "{reply_part(algorithm, x.call.function, by).name}"'
                write = "weighted_by(...)"
            raise ConfigError(
                f'{key}: {fed.title} sums "{name}"{how}, which {x.call.function} does not declare; '
                f"append .{write} to it in @on_client(sends=...)"
            )
    return example, paths, by


def _as_type(v: Tensor, example: Tensor) -> Tensor:
    return (v if example.is_floating_point() else v.round()).to(example)


def secure_total(
    fed: Federation,
    fraction_bits: int,
    clients: Sequence[int],
    call: Call,
    paths: Sequence[str],
    by: str | None,
    examples: Sequence[Tensor],
) -> tuple[list[Tensor], float, int]:
    """The sums of leaves times weights, of the weights, and over how many clients.

    A client that is lost before its masked vector has arrived is left out of the sum and of the round.
    """
    from fedtailor.aggregation import secure_sum
    from fedtailor.aggregation.member import LONGEST, SumTerm, as_bytes, is_card, pack, rows_of, split_messages

    term = SumTerm(call.number, tuple(paths), by)
    sizes = [v.numel() for v in examples]
    length = sum(sizes) + (by is not None)
    asked = _Steps(fed, call)

    ask = ((c, {"term": term.header}, None) for c in clients)
    cards = {c: as_bytes(v[None])[0] for c, v in asked.step("keys", ask, torch.uint8, (LONGEST,), is_most=True)}
    cards = asked.without_others(cards, {c: card for c, card in cards.items() if not is_card(card)}, "no keys")
    everybody = sorted(cards)
    threshold = secure_sum.least(len(everybody))  # as every client has it
    needed = max(threshold, min(fed.limits.min_replies, len(everybody)))
    asked.need(everybody, needed)
    about = {"clients": everybody}
    deck = pack(cards[c] for c in everybody)
    dealt = {
        c: dict(zip([o for o in everybody if o != c], as_bytes(v), strict=True))
        for c, v in asked.step("deal", ((c, about, deck) for c in everybody), torch.uint8, (len(everybody) - 1, BOX))
    }
    said = Counter(str(asked.said[c].get("transcript", "")) for c in dealt)
    agreed = said.most_common(1)[0][0] if said else ""  # sites agree, or nothing can be opened
    others = {c: text for c in dealt if (text := str(asked.said[c].get("transcript", ""))) != agreed}
    dealt = asked.without_others(dealt, others, "was told another thing than the others")
    dealers = sorted(dealt)
    asked.need(dealers, needed)
    if not re.fullmatch("[0-9a-f]{64}", agreed):
        raise RoundAbandoned(f"round {fed.round}: no transcript of a secure sum")
    context = bytes.fromhex(agreed)

    def inbox(c: int) -> tuple[int, dict[str, Any], Tree]:
        others = [o for o in dealers if o != c]
        return c, {"dealers": others}, rows_of(dealt[o][c] for o in others)

    vectors = {
        c: v.numpy().view(np.uint64) for c, v in asked.step("mask", (inbox(c) for c in dealers), torch.int64, (length,))
    }
    survivors = sorted(vectors)
    asked.need(survivors, needed)

    # who is lost from here on is part of the sum: the others can open it
    counted = ((c, {"survivors": survivors}, None) for c in survivors)
    words = {
        c: as_bytes(v[None])[0]
        for c, v in asked.step("confirm", counted, torch.uint8, (LONGEST,), is_last=True, is_most=True)
    }
    signers = sorted(words)
    asked.need(signers, needed)
    opening = ((c, {"signers": signers}, pack(words[s] for s in signers)) for c in signers)
    revealed = {
        c: dict(zip(dealers, as_bytes(v), strict=True))
        for c, v in asked.step("reveal", opening, torch.uint8, (len(dealers), secure_sum.SHARE), is_last=True)
    }
    asked.need(revealed, needed)
    try:
        adverts = {c: split_messages(card)[0] for c, card in cards.items()}
        total = secure_sum.open_sum(adverts, dealers, vectors, revealed, threshold, context)
    except ValueError as error:
        raise RoundAbandoned(f"round {fed.round}: a secure sum cannot be opened: {error}") from None
    numbers = torch.from_numpy(secure_sum.decode_fixed_point(total, fraction_bits))
    samples = sum(fed.engine.experiment.data.train.bounds(survivors)[1])
    is_bounded = by is not None and not reply_part(fed.engine.experiment.algorithm, call.function, by).is_free
    if is_bounded and not 0 <= float(numbers[-1]) <= samples * (1 + border.ROUNDING):
        why = f"its clients count {float(numbers[-1]):.6g} samples, and have {samples}"
        raise RoundAbandoned(f"round {fed.round}: a secure sum over {call.function}: {why}")
    flat = numbers if by is None else numbers[:-1]
    sums = [v.reshape(example.shape) for v, example in zip(flat.split(sizes), examples, strict=True)]
    return sums, float(numbers[-1]), len(survivors)


def _has_shape(tensor: Tensor, shape: tuple[int, ...], is_most: bool) -> bool:
    if is_most:
        return tensor.dim() == len(shape) and all(n <= m for n, m in zip(tensor.shape, shape, strict=True))
    return tuple(tensor.shape) == shape


def _read_step(reply: bytes, longest: int) -> tuple[dict[str, Any], Tree, str]:
    """Header and tensor of an answer to a step, and what is wrong with it."""
    try:
        header, tree = border.read(reply, codec.PLACES, longest)
    except codec.BrokenMessage as error:
        return {}, None, f"its answer {error}"
    return header, tree, border.error_text(header)


class _Steps:
    """Sends the steps of one secure sum and counts them; who does not answer is left out of the round."""

    def __init__(self, fed: Federation, call: Call) -> None:
        self.fed, self.call = fed, call
        fed.sums.secure += 1
        self.number = fed.sums.secure
        self.trouble = ""
        self.said: dict[int, dict[str, Any]] = {}  # what each answered last, beside its tensor

    def step(
        self,
        name: str,
        requests: Iterable[Request],
        dtype: torch.dtype,
        shape: tuple[int, ...],
        *,
        is_last: bool = False,
        is_most: bool = False,  # the shape is the largest, not the only one
    ) -> Iterator[tuple[int, Tensor]]:
        fed, head = self.fed, {"round": self.fed.round, "sum": self.number, "step": name}
        fed.traffic.trips += 1

        def counted() -> Iterator[tuple[int, bytes]]:
            for client, header, tree in requests:
                message = codec.encode(head | header, tree)
                fed.traffic.down += len(message)
                yield client, message

        assert isinstance(fed.engine, Carrying)
        for client, reply in fed.engine.exchange(counted()):
            if isinstance(reply, OSError):
                reason = f"cannot be reached: {reply}"
            else:
                fed.traffic.up += len(reply)
                header, tree, reason = _read_step(reply, border.SPARE + math.prod(shape) * dtype.itemsize)
                if not reason and isinstance(tree, Tensor) and tree.dtype == dtype and _has_shape(tree, shape, is_most):
                    self.said[client] = header
                    yield client, tree
                    continue
                reason = f"secure sum: {reason or 'a reply of the wrong form'}"
            self.trouble = f"; {fed.names[client]}: {reason}"
            if not is_last:
                fed.leave_out(self.call, [Rejected(client, reason, is_mistake=False)])

    def without_others(self, answers: dict[int, Any], wrong: Iterable[int], reason: str) -> dict[int, Any]:
        """The answers without those of clients that are left out of the round."""
        out = set(wrong)
        for client in sorted(out):
            self.trouble = f"; {self.fed.names[client]}: secure sum: {reason}"
            self.fed.leave_out(self.call, [Rejected(client, f"secure sum: {reason}", is_mistake=False)])
        return {client: answer for client, answer in answers.items() if client not in out}

    def need(self, clients: Iterable[int], threshold: int) -> None:
        """Go on only with enough clients that the sum can be opened and is more than one reply."""
        if (n := len(list(clients))) < threshold:
            raise RoundAbandoned(
                f"round {self.fed.round}: {n} clients are left of a secure sum over {self.call.function}, "
                f"{threshold} needed{self.trouble}"
            )
