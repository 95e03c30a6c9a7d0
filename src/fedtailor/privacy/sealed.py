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

from fedtailor.core import codec
from fedtailor.core.algorithm import Algorithm, client_functions, sent_example
from fedtailor.core.client import Call
from fedtailor.core.placed import Placed
from fedtailor.core.random import stream
from fedtailor.core.trees import Tree, items, leaves, rebuild
from fedtailor.errors import ConfigError, RoundAbandoned
from fedtailor.privacy.noise import changed_parts, noisy

if TYPE_CHECKING:
    from fedtailor.core.federation import Federation

INSTEAD = "choose one that only sums replies, such as fedavg, fedrep or ditto"


@dataclass(frozen=True)
class Privacy:
    """What a federation hides."""

    secure_sum: bool = False
    fraction_bits: int = 32  # of the numbers in a secure sum
    clip: float = 0.0
    noise: float = 0.0  # standard deviation of the noise on a sum, as a multiple of clip
    secret_noise: bool = False  # from the operating system, not from the run's seed
    is_sealed: bool = False  # whether replies are closed to the server's program

    @property
    def calls_only(self) -> bool:
        """Whether each client must make its own reply, and not all of them at once."""
        return self.is_sealed or self.clip > 0

    @property
    def option(self) -> str:
        """Which key of the configuration it is that closes replies."""
        return "privacy.noise" if self.noise else "privacy.secure_sum"


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
        found = next(leaf for leaf in leaves(list(args) + list((kwargs or {}).values())) if isinstance(leaf, Leaf))
        found.refuse()


def title(algorithm: Algorithm) -> str:
    """Its name for people."""
    return algorithm.title or type(algorithm).__name__


def seal(fed: Federation, call: Call, rows: Tree) -> Tree:
    """The replies to a call, closed; `rows` is None where they are at the clients."""
    setting, option = fed.engine.setting, fed.privacy.option
    example = sent_example(setting.algorithm, call.function, setting.model)
    sends = client_functions(setting.algorithm)[call.function].sends  # type: ignore[attr-defined]
    clipped = changed_parts(example, call.args, call.placed) if fed.privacy.clip else {}
    each = iter([None] * len(leaves(example)) if rows is None else leaves(rows))

    def closed() -> Iterator[Leaf]:
        for path, leaf in items(example):
            part = int(path.partition("/")[0]) if isinstance(sends, tuple) else 0
            name = (sends[part] if isinstance(sends, tuple) else sends).name
            yield Leaf(title(setting.algorithm), option, call, path, name, leaf, part in clipped, next(each))

    return rebuild(example, closed())


def refuse_tape(fed: Federation) -> None:
    """A tape needs single replies and sends single cotangents."""
    if fed.privacy.is_sealed:
        name = title(fed.engine.setting.algorithm)
        raise ConfigError(f"{fed.privacy.option}: {name} differentiates through its rounds (a tape); {INSTEAD}")


def refuse_look(fed: Federation, what: str) -> None:
    """Looking at single replies is what is to be prevented."""
    if fed.privacy.is_sealed:
        name = title(fed.engine.setting.algorithm)
        raise ConfigError(f'{fed.privacy.option}: {name} looks at single replies ("{what}"); {INSTEAD}')


def total(fed: Federation, x: Placed) -> Tree:
    """`fed.sum` of closed replies."""
    return _summed(fed, x, None, is_mean=False)


def mean(fed: Federation, x: Placed, weight: Placed | None) -> Tree:
    """`fed.mean` of closed replies. With noise every client counts the same, whatever `weight` says."""
    return _summed(fed, x, None if fed.privacy.noise else weight, is_mean=True)


def _summed(fed: Federation, x: Placed, weight: Placed | None, *, is_mean: bool) -> Tree:
    """The sum or mean of closed replies, in double precision until the end; with noise if it is wanted."""
    parts, by = _closed(fed, x), None if weight is None else _closed(fed, weight)[0]
    if not parts:
        return x.tree
    known = set(x.clients if weight is None else weight.clients)  # a client may be lost between two calls
    clients = tuple(c for c in x.clients if c in known)
    if fed.privacy.noise:
        _all_clipped(parts)
    if parts[0].rows is None:
        sums, weights, clients = secure_total(fed, tuple(c for c in clients if c in set(fed.cohort)), parts, by)
    else:
        found = [Placed(x.clients, leaf.rows).of(clients).double() for leaf in parts]
        w = torch.ones(len(clients)) if weight is None or by is None else Placed(weight.clients, by.rows).of(clients)
        sums, weights = [torch.tensordot(w.double(), v, dims=1) for v in found], float(w.double().sum())
    if fed.privacy.noise:
        sums = noisy(sums, fed.privacy.noise * fed.privacy.clip, _noise_stream(fed))
    if is_mean:
        sums = [v / (len(clients) if by is None else weights) for v in sums]
    return rebuild(x.tree, (_typed(v, leaf.example) for v, leaf in zip(sums, parts, strict=True)))


def _typed(v: Tensor, example: Tensor) -> Tensor:
    return (v if example.is_floating_point() else v.round()).to(example.dtype)


def _all_clipped(parts: list[Leaf]) -> None:
    for leaf in parts:
        if not leaf.is_clipped:
            raise ConfigError(
                f'privacy.noise: {leaf.algorithm} sums "{leaf.name}", which is not a new version of what clients were '
                "sent, so it cannot be clipped; choose one whose clients only send models, such as fedavg"
            )


def _noise_stream(fed: Federation) -> np.random.Generator:
    """The randomness of the next noisy sum, which is counted."""
    number = fed.noisy_sums[fed.round] = fed.noisy_sums.get(fed.round, 0) + 1
    if fed.privacy.secret_noise:
        return np.random.default_rng()
    return stream(fed.engine.setting.seed, fed.round, number, "noise")


def _closed(fed: Federation, x: Placed) -> list[Leaf]:
    """The leaves of closed replies; what the server made itself was made from what it should not see."""
    found: list[Leaf] = []
    for leaf in leaves(x.tree):
        if not isinstance(leaf, Leaf):
            name = title(fed.engine.setting.algorithm)
            raise ConfigError(f"{fed.privacy.option}: {name} chooses a weight for each client; {INSTEAD}")
        found.append(leaf)
    return found


def secure_total(
    fed: Federation, clients: Sequence[int], parts: list[Leaf], by: Leaf | None
) -> tuple[list[Tensor], float, tuple[int, ...]]:
    """The server's half of a secure sum: sums of the leaves times weights, of the weights, and over which clients.

    A client that is lost before its masked vector has arrived is left out of the sum and of the round.
    """
    from fedtailor.privacy import secure_sum
    from fedtailor.privacy.member import Term, as_bytes, context_of, rows_of

    term = Term(parts[0].call.number, tuple(p.path for p in parts), None if by is None else (by.call.number, by.path))
    sizes = [p.example.numel() for p in parts]
    length = sum(sizes) + (by is not None)
    asked = _Steps(fed, parts[0].call)

    adverts = {
        c: as_bytes(v[None])[0]
        for c, v in asked.step("keys", ((c, {"term": term.header}, None) for c in clients), torch.uint8, (64,))
    }
    everybody = sorted(adverts)
    threshold = max(secure_sum.least(len(everybody)), min(fed.limits.min_replies, len(everybody)))
    asked.need(everybody, threshold)
    context = context_of(fed.round, asked.number, term, everybody, threshold)

    about = {"clients": everybody, "threshold": threshold}
    cards = rows_of(adverts[c] for c in everybody)
    dealt = {
        c: dict(zip([o for o in everybody if o != c], as_bytes(v), strict=True))
        for c, v in asked.step("deal", ((c, about, cards) for c in everybody), torch.uint8, (len(everybody) - 1, BOX))
    }
    dealers = sorted(dealt)
    asked.need(dealers, threshold)

    def inbox(c: int) -> tuple[int, dict[str, Any], Tree]:
        others = [o for o in dealers if o != c]
        header = {"dealers": others, "fraction_bits": fed.privacy.fraction_bits}
        return c, header, rows_of(dealt[o][c] for o in others)

    vectors = {
        c: v.numpy().view(np.uint64) for c, v in asked.step("mask", (inbox(c) for c in dealers), torch.int64, (length,))
    }
    survivors = sorted(vectors)
    asked.need(survivors, threshold)

    # who is lost from here on is part of the sum: the others can open it
    opening = ((c, {"survivors": survivors}, None) for c in survivors)
    revealed = {
        c: dict(zip(dealers, as_bytes(v), strict=True))
        for c, v in asked.step("reveal", opening, torch.uint8, (len(dealers), secure_sum.SHARE), is_last=True)
    }
    asked.need(revealed, threshold)
    try:
        words = secure_sum.opened(adverts, dealers, vectors, revealed, threshold, context)
    except ValueError as error:
        raise RoundAbandoned(f"round {fed.round}: a secure sum cannot be opened: {error}") from None
    numbers = torch.from_numpy(secure_sum.decoded(words, fed.privacy.fraction_bits))
    flat = numbers if by is None else numbers[:-1]
    sums = [v.reshape(p.example.shape) for v, p in zip(flat.split(sizes), parts, strict=True)]
    return sums, float(numbers[-1]), tuple(survivors)


BOX = 2 * 66 + 16  # bytes of two shares, encrypted
Request = tuple[int, dict[str, Any], Tree]


class _Steps:
    """Sends the steps of one secure sum and counts them; who does not answer is left out of the round."""

    def __init__(self, fed: Federation, call: Call) -> None:
        self.fed, self.call = fed, call
        self.number = fed.secure_sums = fed.secure_sums + 1
        self.trouble = ""

    def step(
        self, name: str, requests: Iterable[Request], dtype: torch.dtype, shape: tuple[int, ...], is_last: bool = False
    ) -> Iterator[tuple[int, Tensor]]:
        fed, head = self.fed, {"round": self.fed.round, "sum": self.number, "step": name}
        fed.traffic.trips += 1

        def counted() -> Iterator[tuple[int, bytes]]:
            for client, header, tree in requests:
                message = codec.encode(head | header, tree)
                fed.traffic.down += len(message)
                yield client, message

        for client, reply in fed.engine.exchange(counted()):
            if isinstance(reply, OSError):
                reason = f"cannot be reached: {reply}"
            else:
                fed.traffic.up += len(reply)
                header, tree = codec.decode(reply)
                if isinstance(tree, Tensor) and (tree.dtype, tuple(tree.shape)) == (dtype, shape):
                    yield client, tree
                    continue
                reason = f"secure sum: {header.get('error', 'a reply of the wrong form')}"
            self.trouble = f"; {fed.engine.setting.data.clients[client]}: {reason}"
            if not is_last:
                fed._reject(client, self.call, reason)

    def need(self, clients: Iterable[int], threshold: int) -> None:
        """Go on only with enough clients that the sum can be opened and is more than one reply."""
        if (n := len(list(clients))) < threshold:
            raise RoundAbandoned(
                f"round {self.fed.round}: {n} clients are left of a secure sum over {self.call.function}, "
                f"{threshold} needed{self.trouble}"
            )
