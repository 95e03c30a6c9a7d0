"""Clients in this process: one after the other (`loop`, the reference that other engines must equal), or stacked, so
that one tensor operation serves many (`vmap`, for many small clients and dense models). The same text, the same tapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fedtailor.core.client import Call, Outcome, initial, invoke, personal, pull_back
from fedtailor.core.engine import Evaluated, Reply
from fedtailor.core.experiment import Experiment
from fedtailor.core.random import Draws
from fedtailor.core.trees import Params, Tree, changed_leaves, detach, tree_map
from fedtailor.engines import devices, machine
from fedtailor.engines.disk import Disk
from fedtailor.engines.states import States
from fedtailor.errors import ClientError
from fedtailor.metrics.evaluation import evaluate


@dataclass(frozen=True)
class _Group:
    """Clients that run together: one on its own, or a stack."""

    clients: tuple[int, ...]
    is_stacked: bool

    def unstack(self, stack: Tree) -> Tree:
        """The trees of a client on its own have no client dimension."""
        return stack if self.is_stacked else tree_map(lambda v: v[0], stack)

    def stack(self, tree: Tree) -> Tree:
        return tree if self.is_stacked else tree_map(lambda v: v[None], tree)


@dataclass(frozen=True)
class _Taped:
    call: Call
    group: _Group
    outcome: Outcome | None  # None: run the call again from its inputs when the cotangents come
    state: Tree
    buffers: Params
    grad: Tree


class InProcess:
    """Runs calls for groups of clients and keeps their private states and their part of a tape."""

    def __init__(
        self,
        experiment: Experiment,
        clients: Sequence[int] | None = None,
        *,
        chunk: int = 0,
        recompute: bool = False,
        disk: Disk | None = None,
    ) -> None:
        self.experiment = experiment
        self.chunk = chunk  # clients per stack; 0: one after the other, unstacked
        self.recompute = recompute
        self.clients = tuple(range(len(experiment.data.clients)) if clients is None else clients)  # None: all
        self.states = States(self.clients, disk, experiment.device)
        self._draws = False  # the method or the model uses global generators, which a stack cannot
        self._tape: dict[int, list[_Taped]] = {}
        self._cotangents: dict[tuple[int, ...], Tree] = {}
        self._grads: dict[tuple[int, ...], Tree] = {}

    def start(self) -> None:
        for group in self.groups(self.clients):
            self._start(group)

    def _start(self, group: _Group) -> None:
        try:
            state, buffers = initial(self.experiment, group.clients, is_stacked=group.is_stacked)
        except Exception as error:
            if not group.is_stacked:
                raise
            self._note_randomness(error)
            parts = self._split(group, error)
        else:
            self.states.create(group.clients, group.stack({"state": state, "buffers": buffers}))
            return
        for part in parts:
            self._start(part)

    def close(self) -> None:
        """Drop all tapes and gradients."""
        self._forget()

    def get_states(self) -> Tree:
        """Everything private, stacked in the order of `clients`."""
        return self.states.rows

    def set_states(self, rows: Tree) -> None:
        self.states.create(self.clients, rows)
        self._forget()

    def groups(self, clients: Sequence[int]) -> Iterator[_Group]:
        if self.chunk and not self._draws:
            return (_Group(some, True) for some in group_clients(self.experiment, clients, self.chunk))
        return (_Group((c,), False) for c in clients)

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        """Run a call at every client; states change, replies come back group by group."""
        position = {c: i for i, c in enumerate(clients)}
        for group in self.groups(clients):
            yield from self._call_group(call, group, [position[c] for c in group.clients])
            machine.trim_after_client(self.experiment.model.nbytes)

    def _call_group(self, call: Call, group: _Group, rows: list[int]) -> Iterator[Reply]:
        held = self.states.read(group.clients)
        mine, grad = group.unstack(held), group.unstack(self._grad_of(group.clients))
        call = _with_rows(call, group, rows)
        try:
            outcome = self._invoke(call, group, mine["state"], mine["buffers"], grad)
            kept = group.stack(detach({"state": outcome.state, "buffers": outcome.buffers}))
            self.states.check(kept)
            refuse_infinite(changed_leaves(kept, held))
            self.states.write(group.clients, kept, held)
        except Exception as error:
            if not (group.is_stacked or self._has_graphs(error)):
                yield Reply(group.clients, error=client_error(self.experiment, call, group.clients[0], error))
                return
            self._note_randomness(error)
            outcome, parts = None, self._split(group, error)
        if outcome is None:  # the error, and what it held of memory, is gone
            del held, mine, grad
            yield from self._call_each_part(call, group, parts)
            return
        if call.taped:
            saved = None if self.recompute else outcome
            taped = _Taped(call, group, saved, mine["state"], mine["buffers"], grad)
            self._tape.setdefault(call.number, []).append(taped)
        reply = Reply(group.clients, group.stack(detach(outcome.reply)))
        del outcome, kept  # a model is large
        yield reply

    def _call_each_part(self, call: Call, group: _Group, parts: Sequence[_Group]) -> Iterator[Reply]:
        """A call to the clients of a group that did not get through as a whole."""
        devices.empty_cache(self.experiment.device)
        position = {c: i for i, c in enumerate(group.clients)}
        for part in parts:
            rows = [position[c] for c in part.clients]
            own = replace(call, args=_rows(call, rows)) if group.is_stacked else _with_client_dim(call)
            yield from self._call_group(own, part, list(range(len(rows))))

    def _split(self, group: _Group, error: Exception) -> list[_Group]:
        """How to retry a group: as it is without graphs, in halves, or one by one.

        When memory ran out, with less of it; otherwise to find the client with the error, so that others do not suffer.
        """
        if self._has_graphs(error):
            self.recompute = True
            self._tape = {n: [replace(one, outcome=None) for one in taped] for n, taped in self._tape.items()}
            return [group]
        if not devices.is_full(error) or len(group.clients) == 1:
            return _one_by_one(group)
        half = (len(group.clients) + 1) // 2
        self.chunk = min(self.chunk, half)
        return [_Group(some, True) for some in (group.clients[:half], group.clients[half:])]

    def _has_graphs(self, error: Exception) -> bool:
        """Whether memory is out while a tape holds graphs that could be made again."""
        return devices.is_full(error) and bool(self._tape) and not self.recompute

    def _note_randomness(self, error: Exception) -> None:
        self._draws = self._draws or isinstance(error, Draws) or "randomness" in str(error)

    def _invoke(self, call: Call, group: _Group, state: Tree, buffers: Params, grad: Tree) -> Outcome:
        return invoke(self.experiment, group.clients, call, state, buffers, grad, is_stacked=group.is_stacked)

    def stacked_states(self, clients: Sequence[int]) -> Tree | None:
        """The private states of `clients` as one stack; None if clients run one after the other or have buffers."""
        model = self.experiment.model
        if not self.chunk or model.private_buffers or model.architectures is not None:
            return None
        held = self.states.all_rows(clients) or self.states.read(clients)
        return held["state"]

    def commit_stacked_states(self, clients: Sequence[int], state: Tree, held: Tree) -> None:
        """Keep what was computed on the stack `held` of `stacked_states`."""
        if self.states.all_rows(clients) is None:
            self.states.write(clients, {"state": state, "buffers": {}}, {"state": held, "buffers": {}})
        else:
            self.states.take_over({"state": state, "buffers": {}})

    def pull_back(
        self, number: int, clients: Sequence[int], cotangent: Tree
    ) -> Iterator[tuple[tuple[int, ...], tuple[Tree, ...]]]:
        """Cotangents of a taped call's arguments from those of its replies (rows as `clients`), group by group.

        An argument that was the same for all has the sum over the group; a placed one has a row per client. The
        cotangents of the private state stay here, for the call before it.
        """
        position = {c: i for i, c in enumerate(clients)}
        for taped in self._tape.pop(number):
            group, members = taped.group, taped.group.clients
            rows = [position[c] for c in members]
            outcome = taped.outcome or self._invoke(taped.call, group, taped.state, taped.buffers, taped.grad)
            mine = group.unstack(tree_map(lambda v, rows=rows: v[rows], cotangent))
            state, args = pull_back(outcome, group.unstack(self._cotangent_of(members)), mine)
            self._cotangents[members] = group.stack(state)
            placed = zip(args, taped.call.placed, strict=True)
            yield members, tuple(group.stack(arg) if own else arg for arg, own in placed)

    def _cotangent_of(self, members: tuple[int, ...]) -> Tree:
        """Of the private states after a call; in the call after it, groups may have been others."""
        if not self._cotangents or members in self._cotangents:
            return self._cotangents.pop(members, None)
        rows = {
            c: tree_map(lambda v, i=i: v[i : i + 1], t) for g, t in self._cotangents.items() for i, c in enumerate(g)
        }
        own = [rows.pop(c) for c in members if c in rows]
        self._cotangents = {(c,): row for c, row in rows.items()}
        return tree_map(lambda *parts: torch.cat(parts), *own) if own else None

    def finish_backward(self) -> None:
        """The tape is read back: what has reached the private states is now `me.grad`."""
        self._grads, self._cotangents, self._tape = self._cotangents, {}, {}

    def begin_round(self, round: int) -> dict[int, str]:
        """Forget tapes and gradients; what is written from here on can be undone. Nobody is ever away here."""
        self._forget()
        return {}

    def _forget(self) -> None:
        self.states.begin()
        self._tape, self._cotangents, self._grads = {}, {}, {}

    def undo(self, clients: Sequence[int] | None = None) -> None:
        """Bring back the private states before this round, of all or of some clients."""
        self.states.undo(clients)

    def evaluate(
        self, clients: Sequence[int], round: int, server: Tree, splits: Sequence[str], keep: str = ""
    ) -> Iterator[Evaluated]:
        """Per group the metrics of the personal models, and the models, stacked."""
        for group in self.groups(clients):
            yield from self._evaluate(group, round, server, splits)

    def _evaluate(self, group: _Group, round: int, server: Tree, splits: Sequence[str]) -> Iterator[Evaluated]:
        held, stacks = group.unstack(self.states.read(group.clients)), group.is_stacked
        try:
            mine = held["state"], held["buffers"], server
            model = personal(self.experiment, group.clients, round, *mine, is_stacked=stacks)
            metrics = evaluate(self.experiment, group.clients, model, splits, is_stacked=stacks)
        except Exception as error:
            if not stacks:
                raise
            self._note_randomness(error)
            parts = self._split(group, error)
        else:
            yield group.clients, metrics, group.stack(model)
            return
        for part in parts:
            yield from self._evaluate(part, round, server, splits)

    def _grad_of(self, clients: tuple[int, ...]) -> Tree:
        if not self._grads or clients in self._grads:
            return self._grads.get(clients)
        grads = {c: tree_map(lambda v, i=i: v[i], tree) for g, tree in self._grads.items() for i, c in enumerate(g)}
        return tree_map(lambda *rows: torch.stack(rows), *(grads[c] for c in clients)) if grads else None


def _one_by_one(group: _Group) -> list[_Group]:
    return [_Group((c,), False) for c in group.clients]


def _with_client_dim(call: Call) -> Call:
    """The call of a client on its own, as it was before `_with_rows`."""
    args = zip(call.args, call.placed, strict=True)
    return replace(call, args=tuple(tree_map(lambda v: v[None], arg) if placed else arg for arg, placed in args))


def _rows(call: Call, rows: list[int]) -> tuple[Tree, ...]:
    return tuple(
        tree_map(lambda v: v[rows], arg) if placed else arg for arg, placed in zip(call.args, call.placed, strict=True)
    )


def _with_rows(call: Call, group: _Group, rows: list[int]) -> Call:
    args = zip(_rows(call, rows), call.placed, strict=True)
    return replace(call, args=tuple(group.unstack(arg) if placed else arg for arg, placed in args))


def group_clients(experiment: Experiment, clients: Sequence[int], chunk: int) -> Iterator[tuple[int, ...]]:
    """Clients to be stacked, of similar size, so that little is padded.

    Where what a model says of a sample depends on the others in its batch, padding would count: then of equal size.
    Clients of different architectures are never in one stack.
    """
    if experiment.by_architecture:
        for name, own in experiment.by_architecture.items():
            yield from group_clients(own, [c for c in clients if experiment.architecture(c) == name], chunk)
        return
    splits = ("train", "val", "test") if experiment.mixing.in_prediction else ("train",)
    alike = any(experiment.mixing)
    sizes = {
        c: each
        for c, *each in zip(clients, *(getattr(experiment.data, s).bounds(clients)[1] for s in splits), strict=True)
    }
    in_order = sorted(clients, key=lambda c: (sizes[c], c))
    group: list[int] = []
    for c in in_order:
        if group and (len(group) == chunk or (alike and sizes[c] != sizes[group[0]])):
            yield tuple(group)
            group = []
        group.append(c)
    if group:
        yield tuple(group)


def client_error(experiment: Experiment, call: Call, client: int, error: Exception) -> ClientError:
    name = type(experiment.algorithm).__name__
    where = f"{name}.{call.function}, client {experiment.data.clients[client]}, round {call.round}"
    what = f"{type(error).__name__}: {error}"
    if devices.is_full(error):
        what = f"{experiment.device} is out of memory; {devices.ADVICE} ({str(error).splitlines()[0]})"
    explanation = ClientError(f"{where}: {what}")
    explanation.__cause__ = error
    return explanation


def refuse_infinite(state: Sequence[torch.Tensor | None]) -> None:
    """Leaves of a private state that is not to be kept are an error."""
    floating = [v for v in state if v is not None and v.is_floating_point()]
    # a finite norm, which is cheaper, has finite entries only; that of large ones may overflow
    if floating and not (_are_finite(torch._foreach_norm(floating)) or all(bool(v.isfinite().all()) for v in floating)):
        raise FloatingPointError("private state contains NaN or Inf")


def _are_finite(norms: Sequence[torch.Tensor]) -> bool:
    """In one read off the device."""
    return bool(torch.stack([v.to(norms[0].dtype) for v in norms]).isfinite().all())
