"""Replies that the server's program cannot look at: they enter sums and means, and nothing else.

With secure sums the rows stay at the clients until a sum is asked for. With noise alone they are here, but closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fedtailor.aggregation.local_noise import LocalNoise
from fedtailor.aggregation.noise import changed_parts, clipped, noisy
from fedtailor.aggregation.robust import RobustMean
from fedtailor.core import codec
from fedtailor.core.aggregation import IN_THE_OPEN, ServerSteps
from fedtailor.core.algorithm import Algorithm, client_functions, reply_example
from fedtailor.core.calling import leave_out
from fedtailor.core.client import Call
from fedtailor.core.engine import Carrying
from fedtailor.core.per_client import PerClient
from fedtailor.core.random import stream
from fedtailor.core.reply_validation import Rejected
from fedtailor.core.trees import Tree, items, leaves, rebuild, wide
from fedtailor.errors import ConfigError, RoundAbandoned

if TYPE_CHECKING:
    from fedtailor.core.federation import Federation

INSTEAD = "choose one that only sums replies, such as fedavg, fedrep or ditto"


@dataclass(frozen=True)
class Privacy:
    """What a federation hides, and how sums come about then."""

    secure_sum: bool = False
    fraction_bits: int = 32  # of the numbers in a secure sum
    clip: float = 0.0
    noise: float = 0.0  # standard deviation of the noise on a sum, as a multiple of clip
    secret_noise: bool = False  # from the operating system, not from the run's seed
    is_closed: bool = False  # whether replies are closed to the server's program
    robust: RobustMean | None = None  # in place of the weighted mean
    is_attacked: bool = False  # some replies are changed on their way
    server_steps: ServerSteps | None = None  # what the server makes of a mean of models
    local: LocalNoise | None = None  # what this client adds of its own accord

    @property
    def calls_only(self) -> bool:
        """Whether each client must make its own reply, and not all of them at once."""
        return self.is_closed or self.clip > 0 or self.robust is not None or self.is_attacked

    @property
    def option(self) -> str:
        """Which key of the configuration it is that closes replies."""
        return "privacy.noise" if self.noise else "privacy.secure_sum"

    def leaving(self, reply: Tree, args: tuple[Tree, ...], placed: tuple[bool, ...]) -> Tree:
        """A reply as it may leave its client."""
        reply = clipped(reply, args, placed, self.clip) if self.clip else reply
        return reply if self.local is None else self.local.added(reply, args, placed)

    def closed(self, fed: Federation, call: Call, rows: Tree) -> Tree:
        """The replies to a call, closed; `rows` is None where they are at the clients."""
        if not self.is_closed:
            return rows
        experiment = fed.engine.experiment
        example = reply_example(experiment.algorithm, call.function, experiment.model)
        sends = client_functions(experiment.algorithm)[call.function].sends  # type: ignore[attr-defined]
        changed = changed_parts(example, call.args, call.placed) if self.clip else {}
        each = iter([None] * len(leaves(example)) if rows is None else leaves(rows))

        who = title(experiment.algorithm)

        def leaves_closed() -> Iterator[Leaf]:
            for path, leaf in items(example):
                part = int(path.partition("/")[0]) if isinstance(sends, tuple) else 0
                name = (sends[part] if isinstance(sends, tuple) else sends).name
                yield Leaf(who, self.option, call, path, name, leaf, part in changed, next(each))

        return rebuild(example, leaves_closed())

    def total(self, fed: Federation, x: PerClient) -> Tree:
        """`fed.sum` of replies."""
        if self.robust is not None:
            return self.robust.total(fed, x)
        return _summed(fed, self, x, None, is_mean=False) if self.is_closed else IN_THE_OPEN.total(fed, x)

    def mean(self, fed: Federation, x: PerClient, weight: PerClient | None) -> Tree:
        """`fed.mean` of replies. With noise every client counts the same, whatever `weight` says."""
        if self.robust is not None:
            return self.robust.mean(fed, x)
        if not self.is_closed:
            return IN_THE_OPEN.mean(fed, x, weight)
        return _summed(fed, self, x, None if self.noise else weight, is_mean=True)

    def refuse_tape(self, fed: Federation) -> None:
        """A tape needs single replies and sends single cotangents."""
        name = title(fed.engine.experiment.algorithm)
        if self.robust is not None:
            raise ConfigError(f"aggregation.mean: {name} differentiates through its rounds, and so through its means")
        if self.is_closed:
            raise ConfigError(f"{self.option}: {name} differentiates through its rounds (a tape); {INSTEAD}")

    def refuse_look(self, fed: Federation, what: str) -> None:
        """Looking at single replies is what is to be prevented."""
        if self.is_closed:
            name = title(fed.engine.experiment.algorithm)
            raise ConfigError(f'{self.option}: {name} looks at single replies ("{what}"); {INSTEAD}')


@dataclass(frozen=True, eq=False)
class Leaf:
    """One tensor of the replies to a call, which the server's program cannot look at. Whatever it tries is refused."""

    algorithm: str
    option: str
    call: Call
    path: str
    name: str  # for people
    example: Tensor
    is_clipped: bool
    rows: Tensor | None  # None: they are at the clients

    def refuse(self) -> NoReturn:
        raise ConfigError(f'{self.option}: {self.algorithm} looks at single replies ("{self.name}"); {INSTEAD}')

    def __getitem__(self, at: Any) -> NoReturn:
        self.refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python itself
            raise AttributeError(name)
        self.refuse()

    @classmethod
    def __torch_function__(cls, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        sealed = next(leaf for leaf in leaves(list(args) + list((kwargs or {}).values())) if isinstance(leaf, Leaf))
        sealed.refuse()


def title(algorithm: Algorithm) -> str:
    """Its name for people."""
    return algorithm.title or type(algorithm).__name__


def _summed(fed: Federation, privacy: Privacy, x: PerClient, weight: PerClient | None, *, is_mean: bool) -> Tree:
    """The sum or mean of closed replies, in double precision until the end; with noise if it is wanted."""
    shape = x.rows(fed.group)
    parts, by = _closed(fed, privacy, x), None if weight is None else _closed(fed, privacy, weight)[0]
    if not parts:
        return shape
    known = set(x.clients if weight is None else weight.clients)  # a client may be lost between two calls
    clients = tuple(c for c in x.clients if c in known)
    if privacy.noise:
        _all_clipped(parts)
    if parts[0].rows is None:
        sums, weights, clients = secure_total(
            fed, privacy, tuple(c for c in clients if c in set(fed.present)), parts, by
        )
    else:
        terms = [wide(PerClient(x.clients, leaf.rows).rows(fed.group, clients)) for leaf in parts]
        w = fed.model.like.new_ones(len(clients))
        if weight is not None and by is not None:
            w = PerClient(weight.clients, by.rows).rows(fed.group, clients)
        sums, weights = [torch.tensordot(wide(w), v, dims=1) for v in terms], float(wide(w).sum())
    if privacy.noise:
        sums = noisy(sums, privacy.noise * privacy.clip, _noise_stream(fed, privacy))
    if is_mean:
        sums = [v / (len(clients) if by is None else weights) for v in sums]
    return rebuild(shape, (_typed(v, leaf.example) for v, leaf in zip(sums, parts, strict=True)))


def _typed(v: Tensor, example: Tensor) -> Tensor:
    return (v if example.is_floating_point() else v.round()).to(example)


def _all_clipped(parts: list[Leaf]) -> None:
    for leaf in parts:
        if not leaf.is_clipped:
            raise ConfigError(
                f'privacy.noise: {leaf.algorithm} sums "{leaf.name}", which is not a new version of what clients were '
                "sent, so it cannot be clipped; choose one whose clients only send models, such as fedavg"
            )


def _noise_stream(fed: Federation, privacy: Privacy) -> np.random.Generator:
    """The randomness of the next noisy sum, which is counted."""
    number = fed.sums.noisy[fed.round] = fed.sums.noisy.get(fed.round, 0) + 1
    if privacy.secret_noise:
        return np.random.default_rng()
    return stream(fed.seed, fed.round, number, "noise")


def _closed(fed: Federation, privacy: Privacy, x: PerClient) -> list[Leaf]:
    """The leaves of closed replies; what the server made itself was made from what it should not see."""
    closed: list[Leaf] = []
    for leaf in leaves(x.rows(fed.group)):
        if not isinstance(leaf, Leaf):
            name = title(fed.engine.experiment.algorithm)
            raise ConfigError(f"{privacy.option}: {name} chooses a weight for each client; {INSTEAD}")
        closed.append(leaf)
    return closed


def secure_total(
    fed: Federation, privacy: Privacy, clients: Sequence[int], parts: list[Leaf], by: Leaf | None
) -> tuple[list[Tensor], float, tuple[int, ...]]:
    """The server's half of a secure sum: sums of the leaves times weights, of the weights, and over which clients.

    A client that is lost before its masked vector has arrived is left out of the sum and of the round.
    """
    from fedtailor.aggregation import secure_sum
    from fedtailor.aggregation.secure_sum_client import LONGEST, Term, as_bytes, packed, rows_of, split

    term = Term(parts[0].call.number, tuple(p.path for p in parts), None if by is None else (by.call.number, by.path))
    sizes = [p.example.numel() for p in parts]
    length = sum(sizes) + (by is not None)
    asked = _Steps(fed, parts[0].call)

    ask = ((c, {"term": term.header}, None) for c in clients)
    cards = {c: as_bytes(v[None])[0] for c, v in asked.step("keys", ask, torch.uint8, (LONGEST,), is_most=True)}
    everybody = sorted(cards)
    threshold = max(secure_sum.least(len(everybody)), min(fed.limits.min_replies, len(everybody)))
    asked.need(everybody, threshold)
    about = {"clients": everybody, "threshold": threshold, "fraction_bits": privacy.fraction_bits}
    deck = packed(cards[c] for c in everybody)
    dealt = {
        c: dict(zip([o for o in everybody if o != c], as_bytes(v), strict=True))
        for c, v in asked.step("deal", ((c, about, deck) for c in everybody), torch.uint8, (len(everybody) - 1, BOX))
    }
    dealers = sorted(dealt)
    asked.need(dealers, threshold)
    context = bytes.fromhex(str(asked.said[dealers[0]].get("transcript", "")))  # sites agree, or nothing can be opened

    def inbox(c: int) -> tuple[int, dict[str, Any], Tree]:
        others = [o for o in dealers if o != c]
        return c, {"dealers": others}, rows_of(dealt[o][c] for o in others)

    vectors = {
        c: v.numpy().view(np.uint64) for c, v in asked.step("mask", (inbox(c) for c in dealers), torch.int64, (length,))
    }
    survivors = sorted(vectors)
    asked.need(survivors, threshold)

    # who is lost from here on is part of the sum: the others can open it
    counted = ((c, {"survivors": survivors}, None) for c in survivors)
    words = {
        c: as_bytes(v[None])[0]
        for c, v in asked.step("confirm", counted, torch.uint8, (LONGEST,), is_last=True, is_most=True)
    }
    signers = sorted(words)
    asked.need(signers, threshold)
    opening = ((c, {"signers": signers}, packed(words[s] for s in signers)) for c in signers)
    revealed = {
        c: dict(zip(dealers, as_bytes(v), strict=True))
        for c, v in asked.step("reveal", opening, torch.uint8, (len(dealers), secure_sum.SHARE), is_last=True)
    }
    asked.need(revealed, threshold)
    try:
        adverts = {c: split(card)[0] for c, card in cards.items()}
        total = secure_sum.opened(adverts, dealers, vectors, revealed, threshold, context)
    except ValueError as error:
        raise RoundAbandoned(f"round {fed.round}: a secure sum cannot be opened: {error}") from None
    numbers = torch.from_numpy(secure_sum.decoded(total, privacy.fraction_bits))
    flat = numbers if by is None else numbers[:-1]
    sums = [v.reshape(p.example.shape) for v, p in zip(flat.split(sizes), parts, strict=True)]
    return sums, float(numbers[-1]), tuple(survivors)


def _has_shape(tensor: Tensor, shape: tuple[int, ...], is_most: bool) -> bool:
    if is_most:
        return tensor.dim() == len(shape) and all(n <= m for n, m in zip(tensor.shape, shape, strict=True))
    return tuple(tensor.shape) == shape


BOX = 2 * 66 + 16  # bytes of two shares, encrypted
Request = tuple[int, dict[str, Any], Tree]


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
                header, tree = codec.decode(reply)
                if isinstance(tree, Tensor) and tree.dtype == dtype and _has_shape(tree, shape, is_most):
                    self.said[client] = header
                    yield client, tree
                    continue
                reason = f"secure sum: {header.get('error', 'a reply of the wrong form')}"
            self.trouble = f"; {fed.names[client]}: {reason}"
            if not is_last:
                leave_out(fed, self.call, [Rejected(client, reason, is_mistake=False)])

    def need(self, clients: Iterable[int], threshold: int) -> None:
        """Go on only with enough clients that the sum can be opened and is more than one reply."""
        if (n := len(list(clients))) < threshold:
            raise RoundAbandoned(
                f"round {self.fed.round}: {n} clients are left of a secure sum over {self.call.function}, "
                f"{threshold} needed{self.trouble}"
            )
