"""One round, from who arrives to who has lost its new state; again without those, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedtailor.core.engine import is_losing
from fedtailor.core.record import Attendance, Fault
from fedtailor.core.trees import Tree, leaves
from fedtailor.errors import RoundAbandoned

if TYPE_CHECKING:
    from fedtailor.core.federation import Federation


def run(fed: Federation, round: int, cohort: Sequence[int], server: Tree) -> Tree:
    """The server's state after the round; when it is abandoned everything is as before."""
    here = fed.attendance = Attendance(round, tuple(cohort), tuple(cohort))
    if round > 0:  # a preparing round has several exchanges, each with failures of its own
        here.present = arriving(fed, 0, here.present)
        if not here.present:
            return server  # nobody answered: everything is as before
    missed, is_first = here.missed, True
    while True:
        fed.begin_attempt()
        here.missed = list(missed)
        _go_without(fed, fed.engine.begin_round(round), "begin")
        new, lost = _attempt(fed, server)
        if not lost:
            if round > 0:
                fed.sums.commit()
            return new
        fed.engine.undo()  # their replies are in `new`, their new states are nowhere: again without them
        if fed.sums.secure:  # a second sum, of the same replies but theirs, would show theirs
            fed.record.faults += [Fault(fed.names[c], round, "end", why) for c, why in lost.items()]
            names = ", ".join(fed.names[c] for c in lost)
            raise RoundAbandoned(f"round {round}: lost after their replies were summed: {names}")
        if not is_first or len(fed.present) - len(lost) >= fed.limits.least:
            _go_without(fed, lost, "end")
        is_first = False  # too few would be left: once more with all, for they may just have gone


def _attempt(fed: Federation, server: Tree) -> tuple[Tree, dict[int, str]]:
    """The new state of the server, and whose new private state is lost."""
    versions = [v._version for v in leaves(server)]
    try:
        new = fed.play(server)
        _refuse_written(fed, server, versions)
        engine = fed.engine
        return new, engine.end_round(fed.present) if is_losing(engine) else {}
    except BaseException as error:
        fed.engine.undo()
        if isinstance(error, RoundAbandoned):  # the run goes on, from the state before
            _refuse_written(fed, server, versions)
        raise


def _refuse_written(fed: Federation, server: Tree, versions: list[int]) -> None:
    if versions != [v._version for v in leaves(server)]:
        name = type(fed.engine.experiment.algorithm).__name__
        raise TypeError(f"{name}.round changes the state of the server in place; return a new tree")


def _go_without(fed: Federation, clients: Mapping[int, str], when: str) -> None:
    """Go on without clients that are away, if enough are left."""
    if not clients:
        return
    here = fed.attendance
    fed.record.faults += [Fault(fed.names[c], here.round, when, clients[c]) for c in here.present if c in clients]
    here.present = tuple(c for c in here.present if c not in clients)
    if len(here.present) < fed.limits.least:
        raise RoundAbandoned(f"round {here.round}: only {len(here.present)} of {len(here.asked)} clients are available")


def arriving(fed: Federation, exchange: int, clients: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `clients` whose replies arrive in an exchange of the round."""
    environment = fed.environment
    if not environment.fails:
        return clients
    samples = fed.engine.experiment.data.train.bounds(clients)[1]
    arrived = environment.answers(fed.round, exchange, clients, samples)
    fed.attendance.missed.append(tuple(c for c in clients if c not in set(arrived)))
    return arrived
