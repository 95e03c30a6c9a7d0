"""`wire`: every message between server and client is bytes. What crosses, and how much, is exact."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.algorithm import sent_example, sent_positive
from fedtailor.core.client import Call
from fedtailor.core.federation import implausible
from fedtailor.core.me import Setting
from fedtailor.core.trees import Params, Tree, schema, schema_difference, tree_map
from fedtailor.engines.inprocess import InProcess, Reply
from fedtailor.errors import ClientError, RoundAbandoned

if TYPE_CHECKING:
    from fedtailor.privacy.member import Member


class Site:
    """A client as a remote one would be: bytes in, bytes out; private state and saved inputs stay inside."""

    def __init__(self, setting: Setting, client: int) -> None:
        self.client = client
        self.inside = InProcess(setting, [client], recompute=True)
        self._calls: dict[int, Call] = {}
        self.sums: Member | None = None  # of this round

    def handle(self, request: bytes) -> bytes:
        """Run a call, or pull a cotangent back through one that was taped."""
        header, tree = codec.decode(request)
        if "sum" in header:
            return codec.encode(*self._member().answer(header, tree))
        if self.inside.setting.is_sealed and header.get("sealed") is None:
            return codec.encode({"error": "replies leave this client in secure sums only"}, None)
        if "function" not in header:
            call = self._calls.pop(header["call"])
            ((_, args),) = self.inside.pull_back(call.number, [self.client], _stacked(tree))
            return codec.encode(call.reply_header, _unplaced(args, call.placed))
        placed = tuple(header["placed"])
        args = tuple(_stacked(a) if own else a for a, own in zip(tree, placed, strict=True))
        sealed = header.get("sealed")
        call = Call(header["function"], header["round"], header["call"], args, placed, header["taped"], sealed)
        if call.taped:
            self._calls[call.number] = call
        (reply,) = self.inside.call(call, [self.client])
        if reply.error is not None:
            return codec.encode({"error": str(reply.error)}, None)
        if sealed is None:
            return codec.encode(call.reply_header, _first(reply.tree))
        if wrong := self._unusable(call, reply.tree):
            return codec.encode({"error": wrong}, None)
        self._member().keep(call.number, _first(reply.tree))
        return codec.encode(call.reply_header, None)

    def _member(self) -> Member:
        from fedtailor.privacy.member import Member  # needs a package that other runs do without

        self.sums = self.sums or Member(self.client)
        return self.sums

    def _unusable(self, call: Call, reply: Tree) -> str | None:
        """Why not to let a reply into a secure sum; nobody else can find out."""
        setting = self.inside.setting
        wanted = schema(sent_example(setting.algorithm, call.function, setting.model))
        if wrong := schema_difference(schema(reply, stacked=True), wanted):
            return f"reply {wrong}"
        return implausible(reply, 1, sent_positive(setting.algorithm, call.function), call.sealed or 0.0)[0]


class Wire:
    """Server's side of the wire; counts what goes through it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.sites = [Site(setting, c) for c in range(len(setting.data.clients))]
        self.up = self.down = 0

    def start(self) -> None:
        """Give every client its first state."""
        for site in self.sites:
            site.inside.start()

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        """One request per client, one reply each."""
        for row, client in enumerate(clients):
            own = tuple(
                tree_map(lambda v, row=row: v[row], arg) if placed else arg
                for arg, placed in zip(call.args, call.placed, strict=True)
            )
            try:
                header, tree, length = self._exchange(client, codec.encode(call.header, own))
            except OSError as gone:
                yield Reply(
                    (client,), error=ClientError(f"{self.setting.data.clients[client]} cannot be reached: {gone}")
                )
                continue
            if "error" in header:
                yield Reply((client,), error=ClientError(header["error"]))
            else:
                self.up += length
                yield Reply((client,), _stacked(tree))

    def pull_back(
        self, number: int, clients: Sequence[int], cotangent: Tree
    ) -> Iterator[tuple[tuple[int, ...], tuple[Tree, ...]]]:
        """Cotangents down, cotangents up; each client computes its own from the inputs it saved."""
        for row, client in enumerate(clients):
            call = self.sites[client]._calls[number]
            mine = tree_map(lambda v, row=row: v[row], cotangent)
            try:
                _, args, length = self._exchange(client, codec.encode(call.reply_header, mine))
            except OSError as gone:
                name = self.setting.data.clients[client]
                raise RoundAbandoned(
                    f"round {call.round}: {name} cannot be reached on the way back of {call.function}: {gone}"
                ) from gone
            self.up += length
            yield (client,), tuple(_stacked(a) if own else a for a, own in zip(args, call.placed, strict=True))

    def exchange(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | OSError]]:
        """Send each client its request; who cannot be reached has an error in place of a reply."""
        for client, request in requests:
            self.down += len(request)
            try:
                reply = self.sites[client].handle(request)
            except OSError as gone:
                yield client, gone
            else:
                self.up += len(reply)
                yield client, reply

    def _exchange(self, client: int, request: bytes) -> tuple[dict[str, object], Tree, int]:
        self.down += len(request)
        reply = self.sites[client].handle(request)
        return *codec.decode(reply), len(reply)

    def finish_backward(self) -> None:
        """The tape is read back at every client."""
        for site in self.sites:
            site.inside.finish_backward()

    def begin_round(self) -> None:
        """A new round at every client."""
        for site in self.sites:
            site.inside.begin_round()
            site._calls.clear()
            site.sums = None

    def undo(self, clients: Sequence[int] | None = None) -> None:
        """Bring back the private states before this round, of all or of some clients."""
        for site in self.sites if clients is None else [self.sites[c] for c in clients]:
            site.inside.undo()

    def evaluate(
        self, clients: Sequence[int], round: int, server: Tree, splits: Sequence[str]
    ) -> Iterator[tuple[tuple[int, ...], dict[str, dict[str, Tensor]], Params]]:
        """Metrics of the personal models, and the models, one client after the other."""
        for client in clients:
            yield from self.sites[client].inside.evaluate([client], round, server, splits)

    def together(self, clients: Sequence[int]) -> Tree | None:
        """Clients are on their own here."""
        return None

    def keep_together(self, clients: Sequence[int], state: Tree, held: Tree) -> None:
        """Never asked for."""
        raise NotImplementedError

    def get_states(self) -> Tree:
        """Everything private, stacked over all clients."""
        each = [site.inside.get_states() for site in self.sites]
        return tree_map(lambda *rows: torch.cat(rows), *each)

    def set_states(self, rows: Tree) -> None:
        """Put saved states back."""
        for client, site in enumerate(self.sites):
            site.inside.set_states(tree_map(lambda v, c=client: v[c : c + 1], rows))


def _stacked(tree: Tree) -> Tree:
    return tree_map(lambda v: v[None], tree)


def _first(tree: Tree) -> Tree:
    return tree_map(lambda v: v[0], tree)


def _unplaced(args: tuple[Tree, ...], placed: tuple[bool, ...]) -> tuple[Tree, ...]:
    return tuple(_first(a) if own else a for a, own in zip(args, placed, strict=True))
