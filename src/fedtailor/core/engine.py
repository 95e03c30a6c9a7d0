"""Where clients run: the protocol that every engine has, what only some can do, and the replies they bring.

What only some engines can do are protocols of their own, asked for with isinstance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from fedtailor.core.experiment import Experiment
from fedtailor.core.reduce import Call, Reply
from fedtailor.core.trees import Params, Tree

Metrics = dict[str, dict[str, Tensor]]  # split -> metric -> one number per client
Evaluated = tuple[tuple[int, ...], Metrics, Params]  # a group of clients, its metrics, its models stacked


class Engine(Protocol):
    """Where the clients are."""

    experiment: Experiment

    def start(self) -> None:
        """Give every client its first state."""

    def close(self) -> None:
        """Let go of processes and memory; an engine that is closed may be started again."""

    def begin_round(self, round: int) -> dict[int, str]:
        """What is written from here on can be undone; returns who is away, and why."""

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        """Run a call and bring the replies: in the order of `clients`, or in groups whose order depends on no clock."""

    def undo(self, clients: Sequence[int] | None = None) -> None:
        """Bring back the private states before this round, of all or of some clients."""

    def evaluate(
        self, clients: Sequence[int], round: int, server: Tree, splits: Sequence[str], keep: str = ""
    ) -> Iterator[Evaluated]:
        """Metrics of the personal models, and the models; sites keep theirs as `keep`."""

    def get_states(self) -> Tree:
        """Everything private, stacked in the order of clients."""

    def set_states(self, rows: Tree) -> None:
        """Put saved states back."""


@runtime_checkable
class Taping(Protocol):
    """Can go back through its calls."""

    def pull_back(
        self, number: int, clients: Sequence[int], cotangent: Tree
    ) -> Iterator[tuple[tuple[int, ...], tuple[Tree, ...]]]:
        """Cotangents of a taped call's arguments from those of its replies (rows as `clients`), group by group."""

    def finish_backward(self) -> None:
        """The tape is read back: what has reached the private states is now `me.grad`."""


@runtime_checkable
class Stacking(Protocol):
    """Has the private states of clients as one stack, in this process."""

    def stacked_states(self, clients: Sequence[int]) -> Tree | None:
        """Those of `clients`; None if they run one after the other or have buffers."""

    def commit_stacked_states(self, clients: Sequence[int], state: Tree, held: Tree) -> None:
        """Keep what was computed on the stack `held`."""


@runtime_checkable
class Carrying(Protocol):
    """Reaches its clients by bytes only."""

    def exchange(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | OSError]]:
        """Send each client its request; who cannot be reached has an error in place of a reply."""


@runtime_checkable
class Losing(Protocol):
    """Its clients keep their states themselves, and may lose them."""

    def end_round(self, clients: Sequence[int]) -> dict[int, str]:
        """Let clients keep their new states; returns whose is lost, and why."""

    def saved(self, states: Sequence[Tree]) -> None:
        """States that a checkpoint has; sites may forget the others."""


@runtime_checkable
class Blaming(Protocol):
    """Its clients can spoil round after round; it goes on without them."""

    def blame(self, clients: Sequence[int], why: str) -> None:
        """A round was abandoned, and replies of these clients could not be used in it."""


def is_stacking(engine: Engine) -> TypeGuard[Stacking]:
    """As isinstance, which takes a tenth of a millisecond for a protocol, and is asked in every round."""
    return _can(type(engine), Stacking)


def is_losing(engine: Engine) -> TypeGuard[Losing]:
    """The same for `Losing`."""
    return _can(type(engine), Losing)


@lru_cache(maxsize=64)
def _can(kind: type, capability: type) -> bool:
    return issubclass(kind, capability)
