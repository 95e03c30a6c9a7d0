"""A call to the cohort: send it, check every reply, and go on without those that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from fedtailor.core import codec
from fedtailor.core.algorithm import reply_example, reply_positive
from fedtailor.core.client import Call
from fedtailor.core.per_client import in_order
from fedtailor.core.record import Fault
from fedtailor.core.reply_validation import Rejected, checked
from fedtailor.core.traffic import bytes_down
from fedtailor.core.trees import Tree, schema
from fedtailor.errors import ClientError, RoundAbandoned

if TYPE_CHECKING:
    from fedtailor.core.federation import Federation


def usable_replies(fed: Federation, call: Call) -> Iterator[tuple[tuple[int, ...], Tree]]:
    """Replies as they come; in the end who did not give a usable one is out of the cohort."""
    experiment, asked = fed.engine.experiment, fed.present
    wanted, positive = schema(None), list[str]()  # a sealed reply stays where it is
    if call.sealed is None:
        wanted = schema(reply_example(experiment.algorithm, call.function, experiment.model))
        positive = reply_positive(experiment.algorithm, call.function)
    rejected: list[Rejected] = []
    errors: dict[int, Exception] = {}
    down, up = bytes_down(call, len(fed.group.mine(asked))), 0
    for reply in fed.engine.call(call, in_turn(fed, taped=call.taped)):
        if reply.error is not None:
            errors[reply.clients[0]] = reply.error
        else:
            up += codec.total_size(call.reply_header, reply.tree, len(reply.clients))
        good, tree, others = checked(reply, wanted, positive, fed.limits.max_norm)
        rejected += others
        del reply  # one at a time
        if good:
            yield good, tree
        del tree
    each_rank = fed.group.all_gather_object([down, up, rejected])
    fed.traffic.down += sum(down for down, _, _ in each_rank)
    fed.traffic.up += sum(up for _, up, _ in each_rank)
    everywhere = [Rejected(*one) for _, _, some in each_rank for one in some]
    leave_out(fed, call, everywhere)
    if len(fed.present) < fed.limits.least or (call.taped and fed.present != asked):
        _abandon(fed, call, asked, everywhere, errors)


def all_replies(fed: Federation, call: Call) -> Tree:
    """The usable replies in the order of the cohort; of those on this rank."""
    parts, experiment = list(usable_replies(fed, call)), fed.engine.experiment
    example = None if call.sealed is not None else reply_example(experiment.algorithm, call.function, experiment.model)
    return in_order(parts, fed.group.mine(fed.present), example)


def in_turn(fed: Federation, *, taped: bool) -> tuple[int, ...]:
    """Those with most samples first: so several processes end together, and sums have one order everywhere.

    Rows of a message are in this order. A tape goes back in that of the cohort.
    """
    clients = fed.present
    if taped:
        return clients
    sizes = dict(zip(clients, fed.engine.experiment.data.train.bounds(clients)[1], strict=True))
    return tuple(sorted(clients, key=lambda c: -sizes[c]))


def leave_out(fed: Federation, call: Call, rejected: Sequence[Rejected]) -> None:
    """Go on without clients whose replies to a call cannot be used."""
    position = {c: i for i, c in enumerate(fed.present)}
    for client, reason, _ in sorted(rejected, key=lambda r: position[r.client]):
        fed.attendance.present = tuple(c for c in fed.present if c != client)
        fed.engine.undo([client])
        fed.record.faults.append(Fault(fed.names[client], call.round, call.function, reason))


def _abandon(
    fed: Federation, call: Call, asked: Sequence[int], rejected: Sequence[Rejected], errors: Mapping[int, Exception]
) -> NoReturn:
    mistakes = sorted((r for r in rejected if r.is_mistake), key=lambda r: asked.index(r.client))
    if mistakes and len(mistakes) == len(asked):  # more rounds would not mend it
        first = mistakes[0]
        where = f"{fed.names[first.client]}, {call.function}: " if first.reason.startswith("reply ") else ""
        raise ClientError(f"every client failed; the first: {where}{first.reason}") from errors.get(first.client)
    needed = "a taped round needs all" if call.taped else f"{fed.limits.min_replies} needed"
    last = fed.record.faults[-1]
    raise RoundAbandoned(
        f"round {fed.round}: {len(fed.present)} of {len(asked)} clients gave a usable reply to {call.function}; "
        f"{needed}; {last.client}: {last.reason}"
    )
