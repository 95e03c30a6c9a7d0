"""`pool`: worker processes, one per core and of one thread each; what they share lies in shared memory.

A worker reads the private state of a client in one row of that memory and writes the next one into another. The server
notes which row counts, once the answer is there. So a worker can be lost at any moment: its clients are run again, from
the same inputs and to the same bits. To bring back a private state is to note the old row.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.client import Call, initial
from fedtailor.core.me import Setting
from fedtailor.core.placed import outline
from fedtailor.core.states import refuse_other
from fedtailor.core.trees import Params, Tree, leaves, rebuild, schema, tree_map
from fedtailor.engines.books import Rows
from fedtailor.engines.crew import LIVES, Answer, Crew, Process, one_thread
from fedtailor.engines.inprocess import Reply
from fedtailor.engines.shared import Layout, Memory, Region, lying
from fedtailor.engines.worker import Spot, Task, Worker
from fedtailor.errors import ClientError, ConfigError, RoundAbandoned, RunError


@dataclass(frozen=True)
class _Message:
    """A tree in shared memory, and how a worker finds it."""

    found: dict[str, Any]
    region: Region  # the memory is the message's as long as this is held


@dataclass
class _Taped:
    """A taped call, as it must be known to run it again."""

    call: Call
    message: _Message
    tasks: dict[int, Task]
    owners: dict[int, Process] = field(default_factory=dict)  # who holds the graph


class Pool:
    """The server's side: hands out clients, most costly first, and puts the replies together in the cohort's order."""

    def __init__(self, setting: Setting, workers: int, chunk: int = 0) -> None:
        if not hasattr(os, "fork"):
            raise ConfigError("federation.engine: pool needs fork, which this system does not have; use loop or vmap")
        self.setting = setting
        self.workers = max(1, min(workers, len(setting.data.clients)))
        self.chunk = chunk  # clients that a worker stacks; 0: one after the other
        self._clients = range(len(setting.data.clients))
        self._costs = (setting.data.train.sizes + 1).tolist()
        self._crew: Crew | None = None
        self._where = Rows(len(self._clients))
        self._tape = 0  # workers drop the graphs of another one
        self._taped: dict[int, _Taped] = {}
        self._cotangents: dict[int, Spot] = {}
        self._grads: dict[int, Spot] = {}
        self._model: Layout | None = None  # of a personal model

    def start(self) -> None:
        """Give every client its first state."""
        with one_thread():
            state, buffers = initial(self.setting, [0], is_stacked=False)
        self._open({"state": state, "buffers": buffers})
        for task, answer in self._work({"do": "start"}, [Task(c, target=c) for c in self._clients]):
            if answer.found is None:
                raise RunError(f"first state of client {self._lost(task.client)}")

    def close(self) -> None:
        """End the workers; they start again when they are needed."""
        if self._crew is not None:
            self._crew.close()

    def get_states(self) -> Tree:
        """Everything private, stacked in the order of clients; a copy."""
        kept = self._inside.kept
        stacks, now = kept.all_places(self._inside.rows.bytes, self._where.used), torch.tensor(self._where.now)
        return rebuild(kept.tree, (stack[now] for stack in stacks))

    def set_states(self, rows: Tree) -> None:
        """Put saved states back."""
        if self._crew is None:
            self._open(tree_map(lambda v: v[0].clone(), rows))
        kept = self._inside.kept
        refuse_other(schema(rows, stacked=True), schema(kept.tree))
        self._workers.settle()
        self._forget()
        self._where = Rows(len(self._clients))
        for place, leaf in zip(kept.all_places(self._inside.rows.bytes, len(self._clients)), leaves(rows), strict=True):
            place.copy_(leaf)

    def begin_round(self, round: int) -> dict[int, str]:
        """Forget tapes and gradients; what is written from here on can be undone. Nobody is ever away here."""
        self._forget()
        return {}

    def end_round(self, clients: Sequence[int]) -> dict[int, str]:
        """Nothing is ever lost here."""
        return {}

    def saved(self, states: Sequence[Tree]) -> None:
        """Everything is here as long as the process is."""

    def _forget(self) -> None:
        self._where.drop([spot[0] for spots in (self._cotangents, self._grads) for spot in spots.values()])
        self._cotangents, self._grads = {}, {}
        self._forget_tape()
        self._where.begin()

    def finish_backward(self) -> None:
        """The tape is read back: what has reached the private states is now `me.grad`."""
        self._where.drop([spot[0] for spot in self._grads.values()])
        self._grads, self._cotangents = self._cotangents, {}
        self._forget_tape()

    def _forget_tape(self) -> None:
        self._taped = {}
        self._tape += 1
        self._where.forget_tape()

    def undo(self, clients: Sequence[int] | None = None) -> None:
        """Bring back the private states before this round, of all or of some clients."""
        self._where.undo(list(self._where.before) if clients is None else clients)

    def together(self, clients: Sequence[int]) -> Tree | None:
        """Clients are not in one process here."""
        return None

    def keep_together(self, clients: Sequence[int], state: Tree, held: Tree) -> None:
        """Never asked for."""
        raise NotImplementedError

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        """Run a call at every client; the replies come in the order of `clients`."""
        inside, where = self._inside, self._where
        message = self._put(call.args)
        layout = Layout.of(inside.reply_layout(call.function).tree, len(clients))
        region = inside.regions.take(layout.size)
        tasks = [Task(c, i, where.now[c], where.fresh(), self._grads.get(c)) for i, c in enumerate(clients)]
        taped = _Taped(call, message, {task.client: task for task in tasks})
        if call.taped:
            self._taped[call.number] = taped
        request = {"do": "call", "call": call.header, "message": message.found, "rows": len(tasks), "reply": region.at}
        answers: dict[int, Answer] = {}
        unused = {task.target for task in tasks}
        try:
            for task, answer in self._work(request, tasks):
                answers[task.client] = answer
                if answer.owner is not None:
                    taped.owners[task.client] = answer.owner
                if answer.found is not None and "error" not in answer.found and not answer.found["same"]:
                    where.move(task.client, task.target, taping=bool(self._taped))
                    unused.remove(task.target)
        finally:
            where.drop(list(unused))
        places = layout.places(region.bytes)
        for first, last, usual in _spans([_is_usual(answers[c]) for c in clients]):
            if usual:
                norms = [answers[c].found.get("norm") for c in clients[first:last]]
                stack = rebuild(layout.tree, (p[first:last] for p in places))
                yield Reply(tuple(clients[first:last]), stack, norms=None if None in norms else norms)
                continue
            for at in range(first, last):
                yield self._reply(call, clients[at], answers[clients[at]], layout.tree, [p[at] for p in places])

    def exchange(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | OSError]]:
        """Never asked for: clients on one machine have nothing to hide from it."""
        raise NotImplementedError

    def _reply(self, call: Call, client: int, answer: Answer, tree: Tree, places: Sequence[Tensor]) -> Reply:
        """Of a client that failed, or whose reply does not lie as declared."""
        if answer.found is None:
            name = type(self.setting.algorithm).__name__
            lost = f"{name}.{call.function}, round {call.round}, client {self._lost(client)}"
            return Reply((client,), error=ClientError(lost))
        if "error" in answer.found:
            error = ClientError(answer.found["error"])
            error.add_note(answer.found["trace"])
            return Reply((client,), error=error)
        if answer.apart is not None:
            reply = codec.decode(answer.apart)[1]
        else:
            reply = rebuild(tree, iter(lying(places, answer.found["strides"])))
        return Reply((client,), tree_map(lambda v: v[None], reply))

    def pull_back(
        self, number: int, clients: Sequence[int], cotangent: Tree
    ) -> Iterator[tuple[tuple[int, ...], tuple[Tree, ...]]]:
        """Cotangents of a taped call's arguments, client by client; who ran one has what is needed to go back."""
        inside, where, taped = self._inside, self._where, self._taped.pop(number)
        call, position = taped.call, {c: i for i, c in enumerate(clients)}
        down = self._put(cotangent)
        layout = Layout.of(outline(call.args, call.placed), len(clients))
        region = inside.regions.take(layout.size)
        tasks = [
            task._replace(target=where.fresh(), cotangent=self._cotangents.get(c), back=position[c])
            for c, task in taped.tasks.items()
        ]
        request = {
            "do": "pull back",
            "call": call.header,
            "message": taped.message.found,
            "cotangent": down.found,
            "back": layout.json() | {"at": region.at},
        }
        answers: dict[int, Answer] = {}
        unused = {task.target for task in tasks}
        try:
            for task, answer in self._work(request, tasks, owners=taped.owners):
                if answer.found is None:
                    raise RoundAbandoned(
                        f"round {call.round}: on the way back of {call.function}, client {self._lost(task.client)}"
                    )
                answers[task.client] = answer
                if task.cotangent is not None:
                    where.drop([task.cotangent[0]])
                self._cotangents[task.client] = task.target, answer.found["state"]
                unused.remove(task.target)
        finally:
            where.drop(list(unused))
        places = layout.places(region.bytes)
        for c in taped.tasks:
            mine = lying([p[position[c]] for p in places], answers[c].found["args"])
            args = zip(rebuild(layout.tree, iter(mine)), call.placed, strict=True)
            yield (c,), tuple(tree_map(lambda v: v[None], arg) if own else arg for arg, own in args)

    def evaluate(
        self, clients: Sequence[int], round: int, server: Tree, splits: Sequence[str], keep: str = ""
    ) -> Iterator[tuple[tuple[int, ...], dict[str, dict[str, Tensor]], Params]]:
        """Metrics of the personal models, and the models, client by client as they are done."""
        message = self._put(server)
        request = {"do": "evaluate", "message": message.found, "round": round, "splits": list(splits)}
        tasks = [Task(c, source=self._where.now[c]) for c in clients]
        first = 1 if self._model is None else 0  # tells how a personal model looks
        for some in (tasks[:first], tasks[first:]):
            yield from self._evaluated(request, some)

    def _evaluated(
        self, request: dict[str, Any], tasks: list[Task]
    ) -> Iterator[tuple[tuple[int, ...], dict[str, dict[str, Tensor]], Params]]:
        layout, regions = self._model, self._inside.regions
        places: dict[int, Region] = {}

        def with_place(task: Task) -> Task:
            """Only when it is handed out: the models of all clients may be more than fits."""
            if layout is None:
                return task
            places[task.client] = regions.take(layout.size)
            return task._replace(at=places[task.client].at)

        request = request | {"model": None if layout is None else layout.json()}
        for task, answer in self._work(request, tasks, prepare=with_place):
            place = places.pop(task.client, None)
            if answer.found is None:
                raise RunError(f"evaluation of client {self._lost(task.client)}")
            if answer.apart is not None:
                model = codec.decode(answer.apart)[1]
                self._model = self._model or Layout.of(model)
            else:
                assert layout is not None
                assert place is not None
                model = layout.read(place.bytes, strides=answer.found["strides"])
            metrics = {
                split: {k: torch.tensor([v], dtype=torch.float64) for k, v in found.items()}
                for split, found in answer.found["metrics"].items()
            }
            yield (task.client,), metrics, tree_map(lambda v: v[None], model)

    def _lost(self, client: int) -> str:
        return f"{self.setting.data.clients[client]}: its worker process ended, {LIVES} times"

    @property
    def _workers(self) -> Crew:
        if self._crew is None:
            raise RuntimeError("the clients have no states yet: start the engine first")
        return self._crew

    @property
    def _inside(self) -> Worker:
        """What the workers were forked with, in this process."""
        return self._workers.worker

    def _open(self, example: Tree) -> None:
        """Memory for states like `example`; it must be there before the workers are."""
        self.close()
        kept = Layout.of(example)
        self._where = Rows(len(self._clients))
        worker = Worker(self.setting, Memory(4 * len(self._clients) * kept.size), Memory(), kept, self.chunk)
        self._crew = Crew(worker, self.workers, self._costs)

    def _put(self, tree: Tree) -> _Message:
        self._workers.settle()
        layout = Layout.of(tree)
        region = self._inside.regions.take(layout.size)
        return _Message(layout.json() | {"at": region.at, "strides": layout.write(tree, region.bytes)}, region)

    def _work(self, request: dict[str, Any], tasks: Sequence[Task], **options: Any) -> Iterator[tuple[Task, Answer]]:
        return self._workers.work(request | {"tape": self._tape}, tasks, **options)


def _is_usual(answer: Answer) -> bool:
    """Whether a reply lies as it was declared."""
    return answer.found is not None and not any(answer.found.get("strides", (True,)))


def _spans(kinds: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    """First and last + 1 of each stretch of equal values, and the value."""
    first = 0
    for last in range(1, len(kinds) + 1):
        if last == len(kinds) or kinds[last] != kinds[first]:
            yield first, last, kinds[first]
            first = last
