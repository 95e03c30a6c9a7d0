"""`wire`: every message between server and client is bytes. What crosses, and how much, is exact.

A call and a cotangent on its way back are the training traffic, which is counted. Everything else (a round begins, the
tape is read back, undo, evaluate) is a control message: its header has an `op`, and it is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedtailor.aggregation.clip import limit_reply
from fedtailor.aggregation.secure import Secure
from fedtailor.core import border, codec
from fedtailor.core.algorithm import reply_example, reply_positive
from fedtailor.core.client import Call
from fedtailor.core.engine import Evaluated, Reply
from fedtailor.core.experiment import Experiment
from fedtailor.core.reduce import Limits, reply_faults, row
from fedtailor.core.trees import Tree, schema, schema_difference, to_device, tree_map
from fedtailor.engines.inprocess import InProcess
from fedtailor.errors import ClientError, ClientUnreachable, RoundAbandoned

if TYPE_CHECKING:
    from fedtailor.aggregation.member import Member, Party

Header = dict[str, Any]


class Site:
    """A client as a remote one would be: bytes in, bytes out; private state and saved inputs stay inside."""

    def __init__(
        self,
        experiment: Experiment,
        client: int,
        words: Callable[[Exception], str] = str,
        party: Party | None = None,
        cohort: frozenset[str] = frozenset(),
        conceal: Callable[[str], None] | None = None,
    ) -> None:
        self.client = client
        self._party = party  # its part in secure sums; None: a client among others in this process
        self._cohort = cohort  # who may take part in these; empty: whoever is a partner
        self._words = words  # what the server is told of an error
        self._conceal = conceal  # who is told of a fault in place of the server
        self.inside = InProcess(experiment, [client], recompute=True)
        self._calls: dict[int, Call] = {}
        self.sums: Member | None = None  # of this round
        self._controls: dict[str, Callable[[Header, Tree], tuple[Header, Tree]]] = {
            "start": self._start,
            "begin": self._begin,
            "finish": self._finish,
            "undo": self._undo,
            "evaluate": self._evaluate,
        }

    def answer(self, request: bytes) -> bytes:
        """Any message of the server: training (`handle`) or control."""
        op = codec.decode_header(request).get("op")
        if op is None:
            return self.handle(request)
        if op not in self._controls:
            raise LookupError(f'no operation "{op}"')
        return codec.encode(*self._controls[op](*codec.decode(request, _places(self.inside.experiment))))

    def handle(self, request: bytes) -> bytes:
        """Run a call, or pull a cotangent back through one that was taped."""
        header, tree = codec.decode(request, _places(self.inside.experiment))
        if "sum" in header:
            return codec.encode(*self._member().answer(header, tree))
        is_sealed = self.inside.experiment.aggregation.reduction.is_sealed
        if is_sealed and ("function" not in header or header["taped"]):
            return codec.encode({"error": "replies leave this client in secure sums only"}, None)
        if "function" not in header:
            call, tree = self._calls.pop(header["call"]), self._here(tree)
            ((_, args),) = self.inside.pull_back(call.number, [self.client], _add_client_dim(tree))
            return codec.encode(call.reply_header, _drop_client_dim(args, call.placed))
        placed = tuple(header["placed"])
        args = tuple(_add_client_dim(a) if own else a for a, own in zip(self._here(tree), placed, strict=True))
        call = Call(header["function"], header["round"], header["call"], args, placed, header["taped"], is_sealed)
        if call.taped:
            self._calls[call.number] = call
        (reply,) = self.inside.call(call, [self.client])
        wrong = "" if reply.error is None else self._words(reply.error)
        if not wrong and is_sealed:
            wrong = self._unusable(call, reply.tree) or ""
        if wrong and self._conceal is None:
            return codec.encode({"error": wrong}, None)
        own = _first(reply.tree)
        if wrong and self._conceal is not None:
            self._conceal(f"{call.function}: {wrong}; what it sent was limited")
            own = self._limit(call, None if reply.error is not None else own)
        if not is_sealed:
            return codec.encode(call.reply_header, own)
        from fedtailor.aggregation.member import message_digest

        try:
            self._member().keep(call.number, call.function, own, message_digest(call.function, placed, tree))
        except ValueError as error:
            return codec.encode({"error": str(error)}, None)
        return codec.encode(call.reply_header, None)

    def _limit(self, call: Call, reply: Tree) -> Tree:
        """A reply within the bounds of the run; from one that is none, what says as little as possible."""
        experiment = self.inside.experiment
        example = reply_example(experiment.algorithm, call.function, experiment.model)
        sizes = experiment.data.train.bounds([self.client])[1]
        args = tuple(_first(a) if own else a for a, own in zip(call.args, call.placed, strict=True))
        positive = reply_positive(experiment.algorithm, call.function)
        largest = getattr(experiment.aggregation.reduction, "max_norm", Limits.max_norm)
        limited = limit_reply(reply, example, args, call.placed, positive, float(sizes[0]), largest)
        for step in experiment.aggregation.at_client if reply is None else ():
            limited = step.apply(limited, args, call.placed)
        return limited

    def _member(self) -> Member:
        from fedtailor.aggregation.member import Member, Party, SumRules  # needs a package that other runs do without

        self._party = self._party or Party(self.client)
        algorithm, slots = self.inside.experiment.algorithm, self.inside.experiment.aggregation
        if self.sums is None:
            assert isinstance(slots.reduction, Secure)
            bounds = slots.reduction.fraction_bits, slots.reduction.max_norm
            rules = SumRules(algorithm, slots.noise is not None, *bounds, self._cohort)
            self.sums = Member(self._party, rules, self._conceal)
        return self.sums

    def _unusable(self, call: Call, reply: Tree) -> str | None:
        """Why not to let a reply into a secure sum; nobody else can find out."""
        experiment = self.inside.experiment
        wanted = schema(reply_example(experiment.algorithm, call.function, experiment.model))
        if wrong := schema_difference(schema(reply, stacked=True), wanted):
            return f"reply {wrong}"
        assert isinstance(experiment.aggregation.reduction, Secure)
        positive = reply_positive(experiment.algorithm, call.function)
        return reply_faults(reply, 1, positive, experiment.aggregation.reduction.max_norm)[0]

    def _start(self, header: Header, tree: Tree) -> tuple[Header, Tree]:
        self.inside.start()
        return {}, None

    def _begin(self, header: Header, tree: Tree) -> tuple[Header, Tree]:
        self.inside.begin_round(header["round"])
        self._calls.clear()
        self.sums = None
        return {}, None

    def _finish(self, header: Header, tree: Tree) -> tuple[Header, Tree]:
        self.inside.finish_backward()
        return {}, None

    def _undo(self, header: Header, tree: Tree) -> tuple[Header, Tree]:
        self.inside.undo()
        return {}, None

    def _evaluate(self, header: Header, tree: Tree) -> tuple[Header, Tree]:
        server = self._here(tree)
        ((_, metrics, model),) = self.inside.evaluate([self.client], header["round"], server, header["splits"])
        return {}, (_first(metrics), _first(model))

    def _here(self, tree: Tree) -> Tree:
        """What came as bytes, where this client computes."""
        return to_device(tree, self.inside.experiment.device)


class Remote:
    """The server's half of an engine whose clients are reached by messages: `carry` brings them, `begin_round` and
    the two of the states say what there is to tell. Counts the training traffic.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.disbelieved: dict[str, str] = {}  # whose answers to the last evaluation were not used, and why
        self.up = self.down = 0
        self._calls: dict[int, Call] = {}  # taped, waiting for the way back
        self._taped: Sequence[int] = ()  # who has a part of the tape

    def carry(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | OSError]]:
        """Send each client its request; who cannot be reached has an error in place of a reply."""
        raise NotImplementedError

    def exchange(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | OSError]]:
        """The same, counted as training traffic."""
        for client, reply in self._count_traffic(requests):
            self.up += 0 if isinstance(reply, OSError) else len(reply)
            yield client, reply

    def tell(
        self, clients: Iterable[int], header: Header, tree: Tree = None, more: int = 0
    ) -> Iterator[tuple[int, Header, Tree, OSError | None]]:
        """A control message to some clients, and what each of them answered, in so many bytes more than models have."""
        request = codec.encode(header, tree)
        longest = border.longest(tuple(self.experiment.model.params.values()), times=4) + more
        for client, reply in self.carry((c, request) for c in clients):
            if isinstance(reply, OSError):
                yield client, {}, None, reply
            else:
                answer, tree_read = self._read(reply, longest)
                yield client, answer, tree_read, None

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        """One request per client, one reply each."""
        if call.taped:
            self._calls[call.number] = call
        own, longest = any(call.placed), self._longest_reply(call)
        common = b"" if own else codec.encode(call.header, call.args)
        requests = (
            codec.encode(call.header, row(call.args, call.placed, i)) if own else common for i in range(len(clients))
        )
        for client, reply in self._count_traffic(zip(clients, requests, strict=True)):
            if isinstance(reply, OSError):
                yield Reply((client,), error=ClientUnreachable(f"{self._name(client)} cannot be reached: {reply}"))
                continue
            header, tree = self._read(reply, longest)
            wrong = border.error_text(header)
            if not wrong and not call.is_sealed:
                wrong = border.call_fault(self.experiment, call, client, tree)
                wrong = wrong and f"{self._name(client)}: {wrong}"
            if wrong:
                yield Reply((client,), error=ClientError(wrong))
            else:
                self.up += len(reply)
                yield Reply((client,), _add_client_dim(self._here(tree)))

    def pull_back(
        self, number: int, clients: Sequence[int], cotangent: Tree
    ) -> Iterator[tuple[tuple[int, ...], tuple[Tree, ...]]]:
        """Cotangents down, cotangents up; each client computes its own from the inputs it saved."""
        call, self._taped = self._calls.pop(number), clients
        requests = (
            (client, codec.encode(call.reply_header, tree_map(lambda v, i=i: v[i], cotangent)))
            for i, client in enumerate(clients)
        )
        for client, reply in self._count_traffic(requests):
            if isinstance(reply, OSError):
                wrong = f"cannot be reached on the way back of {call.function}: {reply}"
            else:
                own_message = row(call.args, call.placed, clients.index(client))
                header, args = self._read(reply, border.longest(own_message))
                wrong = border.error_text(header) or border.cotangent_fault(args, own_message)
                if wrong:
                    self.distrust(client, wrong)
                    wrong = f"on the way back of {call.function}: {wrong}"
            if isinstance(reply, OSError) or wrong:
                raise RoundAbandoned(f"round {call.round}: {self._name(client)} {wrong}")
            self.up += len(reply)
            own_args = zip(self._here(args), call.placed, strict=True)
            yield (client,), tuple(_add_client_dim(a) if own else a for a, own in own_args)

    def _read(self, message: bytes, longest: int) -> tuple[Header, Tree]:
        """An answer; one that cannot be read is one of an error."""
        try:
            return border.read(message, _places(self.experiment), longest)
        except codec.BrokenMessage as error:
            return {"error": f"its answer {error}"}, None

    def _longest_reply(self, call: Call) -> int:
        example = (
            None if call.is_sealed else reply_example(self.experiment.algorithm, call.function, self.experiment.model)
        )
        return border.longest(example)

    def distrust(self, client: int, why: str) -> None:
        """A client has said what only a lie can be, where a round cannot go on without it."""

    def _count_traffic(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | OSError]]:
        def counted() -> Iterator[tuple[int, bytes]]:
            for client, request in requests:
                self.down += len(request)
                yield client, request

        return self.carry(counted())

    def _here(self, tree: Tree) -> Tree:
        """What came as bytes, where the server computes."""
        return to_device(tree, self.experiment.device)

    def _name(self, client: int) -> str:
        return self.experiment.data.clients[client]

    def finish_backward(self) -> None:
        for client, _, _, gone in self.tell(self._taped, {"op": "finish"}):
            if gone is not None:
                raise RoundAbandoned(f"{self._name(client)} cannot be reached after the way back: {gone}")

    def evaluate(
        self, clients: Sequence[int], round: int, server: Tree, splits: Sequence[str], keep: str = ""
    ) -> Iterator[Evaluated]:
        """Metrics of the personal models, and the models where they may leave; who does not tell is left out."""
        header = {"op": "evaluate", "round": round, "splits": list(splits), "keep": keep}
        self.disbelieved = {}
        more = border.longest(server) + border.PERSONAL
        for client, answer, tree, gone in self.tell(clients, header, server, more):
            if gone is not None or border.error_text(answer):
                continue
            if wrong := border.metrics_fault(self.experiment, tree, splits):
                self.disbelieved[self._name(client)] = wrong
                continue
            tree = self.usable_metrics(client, tree)
            metrics, model = _add_client_dim(self._here(tree))
            yield (client,), metrics, model

    def usable_metrics(self, client: int, tree: Tree) -> Tree:
        """Metrics that have the right form, as they are counted."""
        return tree

    @property
    def everybody(self) -> range:
        return range(len(self.experiment.data.clients))


class Wire(Remote):
    """All sites in this process. Only the states that a checkpoint saves are taken directly from them."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self.sites = [Site(experiment, c) for c in self.everybody]

    def carry(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | OSError]]:
        """One site after the other."""
        for client, request in requests:
            try:
                yield client, self.sites[client].answer(request)
            except OSError as gone:
                yield client, gone

    def start(self) -> None:
        for _ in self.tell(self.everybody, {"op": "start"}):
            pass

    def begin_round(self, round: int) -> dict[int, str]:
        """A new round at every client; returns who is away, and why."""
        self._calls.clear()
        answers = self.tell(self.everybody, {"op": "begin", "round": round})
        return {client: str(gone) for client, _, _, gone in answers if gone is not None}

    def close(self) -> None:
        """All sites are in this process."""

    def undo(self, clients: Sequence[int] | None = None) -> None:
        for _ in self.tell(self.everybody if clients is None else clients, {"op": "undo"}):
            pass

    def get_states(self) -> Tree:
        each = [site.inside.get_states() for site in self.sites]
        return tree_map(lambda *rows: torch.cat(rows), *each)

    def set_states(self, rows: Tree) -> None:
        for client, site in enumerate(self.sites):
            site.inside.set_states(tree_map(lambda v, c=client: v[c : c + 1], rows))


def _places(experiment: Experiment) -> int:
    """The longest vector that a message may have: a model twice over."""
    return 2 * sum(v.numel() for v in experiment.model.params.values())


def _add_client_dim(tree: Tree) -> Tree:
    return tree_map(lambda v: v[None], tree)


def _first(tree: Tree) -> Tree:
    return tree_map(lambda v: v[0], tree)


def _drop_client_dim(args: tuple[Tree, ...], placed: tuple[bool, ...]) -> tuple[Tree, ...]:
    return tuple(_first(a) if own else a for a, own in zip(args, placed, strict=True))
