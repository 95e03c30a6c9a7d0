"""How sums of replies come about: in the open, or (`privacy`) so that the server's program sees sums only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fedtailor.core.trees import Params, Tree, detach

if TYPE_CHECKING:
    from fedtailor.core.client import Call
    from fedtailor.core.federation import Federation
    from fedtailor.core.per_client import PerClient


@dataclass
class SumLog:
    """What lasts of sums: what noise they had, whether a second one may be opened, what server steps remember."""

    noisy: dict[int, int] = field(default_factory=dict)  # by round
    secure: int = 0  # in this round
    moments: dict[str, Tree] = field(default_factory=dict)  # by function and part of its reply
    new_moments: dict[str, Tree] = field(default_factory=dict)  # of this round; they count when it has ended

    def cut(self) -> None:
        """Let no gradient flow further back than here."""
        self.new_moments = {k: detach(v) for k, v in self.new_moments.items()}

    def commit(self) -> None:
        """The round has ended."""
        self.moments = self.moments | self.new_moments


class ServerSteps(Protocol):
    """How a server goes from the model it sent out towards the mean of those that came back."""

    def step(self, sent: Params, mean: Params, memory: Tree) -> tuple[Params, Tree]:
        """The next model and what to remember; `memory` is None at first."""


class Aggregation(Protocol):
    """What happens to replies at the client, on their way, and when they are summed."""

    @property
    def server_steps(self) -> ServerSteps | None:
        """What the server makes of a mean of models; None: the mean is its next model."""

    @property
    def secure_sum(self) -> bool:
        """Whether replies leave a client as terms of secure sums only."""

    @property
    def is_closed(self) -> bool:
        """Whether the server's program may sum replies, but not look at them."""

    @property
    def calls_only(self) -> bool:
        """Whether each client must make its own reply, and not all of them at once."""

    def leaving(self, reply: Tree, args: tuple[Tree, ...], placed: tuple[bool, ...]) -> Tree:
        """A reply as it may leave its client."""

    def closed(self, fed: Federation, call: Call, rows: Tree) -> Tree:
        """Replies as the server's program is given them."""

    def total(self, fed: Federation, x: PerClient) -> Tree:
        """The sum of closed replies."""

    def mean(self, fed: Federation, x: PerClient, weight: PerClient | None) -> Tree:
        """Their mean."""

    def refuse_look(self, fed: Federation, what: str) -> None:
        """Raise a `ConfigError` if single replies may not be looked at."""

    def refuse_tape(self, fed: Federation) -> None:
        """Raise a `ConfigError` if rounds may not be differentiated."""


@dataclass(eq=False)
class InTheOpen:
    """The server's program may look at every reply, and the record says at which it did."""

    server_steps: ServerSteps | None = None

    secure_sum = is_closed = calls_only = False

    def leaving(self, reply: Tree, args: tuple[Tree, ...], placed: tuple[bool, ...]) -> Tree:
        return reply

    def closed(self, fed: Federation, call: Call, rows: Tree) -> Tree:
        return rows

    def total(self, fed: Federation, x: PerClient) -> Tree:
        return fed.weighted_sum(x)[0]

    def mean(self, fed: Federation, x: PerClient, weight: PerClient | None) -> Tree:
        return fed.open_mean(x, weight)

    def refuse_look(self, fed: Federation, what: str) -> None:
        """Everybody may look."""

    def refuse_tape(self, fed: Federation) -> None:
        """A tape may be used."""


IN_THE_OPEN = InTheOpen()
