"""Clients in this process, alone (`loop`) or stacked (`vmap`): the same text, the same tapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fedtailor.core.client import Call, Outcome, evaluate, initial, invoke, personal, pull_back
from fedtailor.core.disk import Disk
from fedtailor.core.me import Setting
from fedtailor.core.states import States, changed
from fedtailor.core.trees import Params, Tree, detach, tree_map
from fedtailor.errors import ClientError


@dataclass(frozen=True)
class Reply:
    """What came back from some clients: a stacked reply, or the error of a single one."""

    clients: tuple[int, ...]
    tree: Tree = None
    error: Exception | None = None
    norms: list[float] | None = None  # of each client's reply, where they are known


@dataclass(frozen=True)
class _Taped:
    call: Call
    clients: tuple[int, ...]
    outcome: Outcome | None  # None: run the call again from its inputs when the cotangents come
    state: Tree
    buffers: Params
    grad: Tree


class InProcess:
    """Runs calls for groups of clients and keeps their private states and their part of a tape."""

    def __init__(
        self,
        setting: Setting,
        clients: Sequence[int],
        *,
        chunk: int = 0,
        recompute: bool = False,
        disk: Disk | None = None,
    ) -> None:
        self.setting = setting
        self.chunk = chunk  # clients per stack; 0: one after the other, unstacked
        self.recompute = recompute
        self.clients = tuple(clients)
        self.states = States(self.clients, disk)
        self._tape: dict[int, list[_Taped]] = {}
        self._cotangents: dict[tuple[int, ...], Tree] = {}
        self._grads: dict[tuple[int, ...], Tree] = {}

    def start(self) -> None:
        """Give every client its first state."""
        for group in self.groups(self.clients):
            state, buffers = initial(self.setting, group, is_stacked=self.chunk > 0)
            self.states.create(group, self._stack({"state": state, "buffers": buffers}))

    def get_states(self) -> Tree:
        """Everything private, stacked in the order of `clients`."""
        return self.states.rows

    def set_states(self, rows: Tree) -> None:
        """Put saved states back."""
        self.states.create(self.clients, rows)
        self._forget()

    def saved(self, states: Sequence[Tree]) -> None:
        """Nothing is kept here beside the current ones."""

    def groups(self, clients: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Clients that run together."""
        return grouped(self.setting, clients, self.chunk) if self.chunk else ((c,) for c in clients)

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        """Run a call at every client; states change, replies come back group by group."""
        position = {c: i for i, c in enumerate(clients)}
        for group in self.groups(clients):
            yield from self._call_group(call, group, [position[c] for c in group])

    def exchange(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | OSError]]:
        """Never asked for: clients in one process have nothing to hide from it."""
        raise NotImplementedError

    def _call_group(self, call: Call, group: tuple[int, ...], rows: list[int]) -> Iterator[Reply]:
        held = self.states.read(group)
        grad = self._grad_of(group)
        mine = self._one(held), self._one(grad), self._rows_of(call, rows)
        try:
            outcome = self._invoke(mine[2], group, mine[0]["state"], mine[0]["buffers"], mine[1])
            kept = self._stack(detach({"state": outcome.state, "buffers": outcome.buffers}))
            self.states.check(kept)
            refuse_infinite(changed(kept, held))
            self.states.write(group, kept, held)
        except Exception as error:
            if len(group) > 1:  # find out whose error it is; the others must not suffer from it
                for c, row in zip(group, rows, strict=True):
                    yield from self._call_group(call, (c,), [row])
            else:
                yield Reply(group, error=explained(self.setting, call, group[0], error))
            return
        if call.taped:
            saved = None if self.recompute else outcome
            taped = _Taped(mine[2], group, saved, mine[0]["state"], mine[0]["buffers"], mine[1])
            self._tape.setdefault(call.number, []).append(taped)
        yield Reply(group, self._stack(detach(outcome.reply)))

    def _invoke(self, call: Call, group: tuple[int, ...], state: Tree, buffers: Params, grad: Tree) -> Outcome:
        return invoke(self.setting, group, call, state, buffers, grad, is_stacked=self.chunk > 0)

    def together(self, clients: Sequence[int]) -> Tree | None:
        """The private states of `clients` as one stack; None if clients run one after the other or have buffers."""
        if not self.chunk or self.setting.model.private_buffers:
            return None
        held = self.states.all_rows(clients) or self.states.read(clients)
        return held["state"]

    def keep_together(self, clients: Sequence[int], state: Tree, held: Tree) -> None:
        """Keep what was computed on the stack `held` of `together`."""
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
            rows = [position[c] for c in taped.clients]
            outcome = taped.outcome or self._invoke(taped.call, taped.clients, taped.state, taped.buffers, taped.grad)
            mine = self._one(tree_map(lambda v, rows=rows: v[rows], cotangent))
            state, args = pull_back(outcome, self._cotangents.pop(taped.clients, None), mine)
            self._cotangents[taped.clients] = state
            placed = zip(args, taped.call.placed, strict=True)
            yield taped.clients, tuple(self._stack(arg) if own else arg for arg, own in placed)

    def finish_backward(self) -> None:
        """The tape is read back: what has reached the private states is now `me.grad`."""
        self._grads = {group: self._stack(tree) for group, tree in self._cotangents.items()}
        self._cotangents = {}
        self._tape = {}

    def begin_round(self, round: int) -> dict[int, str]:
        """Forget tapes and gradients; what is written from here on can be undone. Nobody is ever away here."""
        self._forget()
        return {}

    def end_round(self, clients: Sequence[int]) -> dict[int, str]:
        """Nothing is ever lost here."""
        return {}

    def _forget(self) -> None:
        self.states.begin()
        self._tape, self._cotangents, self._grads = {}, {}, {}

    def undo(self, clients: Sequence[int] | None = None) -> None:
        """Bring back the private states before this round, of all or of some clients."""
        self.states.undo(clients)

    def evaluate(
        self, clients: Sequence[int], round: int, server: Tree, splits: Sequence[str], keep: str = ""
    ) -> Iterator[tuple[tuple[int, ...], dict[str, dict[str, torch.Tensor]], Params]]:
        """Per group the metrics of the personal models, and the models, stacked."""
        stacks = self.chunk > 0
        for group in self.groups(clients):
            held = self._one(self.states.read(group))
            model = personal(self.setting, group, round, held["state"], held["buffers"], server, is_stacked=stacks)
            yield group, evaluate(self.setting, group, model, splits, is_stacked=stacks), self._stack(model)

    def _grad_of(self, group: tuple[int, ...]) -> Tree:
        if not self._grads:
            return None
        if group in self._grads:
            return self._grads[group]
        found = {c: tree_map(lambda v, i=i: v[i], tree) for g, tree in self._grads.items() for i, c in enumerate(g)}
        return tree_map(lambda *rows: torch.stack(rows), *(found[c] for c in group)) if found else None

    def _rows_of(self, call: Call, rows: list[int]) -> Call:
        args = tuple(
            self._one(tree_map(lambda v: v[rows], arg)) if placed else arg
            for arg, placed in zip(call.args, call.placed, strict=True)
        )
        return replace(call, args=args)

    def _one(self, stack: Tree) -> Tree:
        """Without stacking, the trees of a group of one have no client dimension."""
        return stack if self.chunk else tree_map(lambda v: v[0], stack)

    def _stack(self, tree: Tree) -> Tree:
        return tree if self.chunk else tree_map(lambda v: v[None], tree)


def grouped(setting: Setting, clients: Sequence[int], chunk: int) -> Iterator[tuple[int, ...]]:
    """Clients to be stacked, of similar size, so that little is padded."""
    sizes = dict(zip(clients, setting.data.train.bounds(clients)[1], strict=True))
    in_order = sorted(clients, key=lambda c: (sizes[c], c))
    # BatchNorm's batch statistics would see the padding: stack only clients of equal size
    alike = setting.model.batch_statistics
    group: list[int] = []
    for c in in_order:
        if group and (len(group) == chunk or (alike and sizes[c] != sizes[group[0]])):
            yield tuple(group)
            group = []
        group.append(c)
    if group:
        yield tuple(group)


def explained(setting: Setting, call: Call, client: int, error: Exception) -> ClientError:
    """An error of a client function, with where it happened."""
    name = type(setting.algorithm).__name__
    where = f"{name}.{call.function}, client {setting.data.clients[client]}, round {call.round}"
    told = ClientError(f"{where}: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def refuse_infinite(state: Sequence[torch.Tensor | None]) -> None:
    """Leaves of a private state that is not to be kept are an error."""
    floating = [v for v in state if v is not None and v.is_floating_point()]
    # a finite norm, which is cheaper, has finite entries only; that of large ones may overflow
    if not all(bool(torch.linalg.vector_norm(v).isfinite()) or bool(torch.isfinite(v).all()) for v in floating):
        raise FloatingPointError("its private state is no longer finite")
