"""The server's half: the usual rounds, over sites that are reached by messages. It never has data.

Each site stores its private state on its own disk under the number of the round. For the server, and in its checkpoint,
a client's state is that number.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fedtailor import algorithms
from fedtailor.aggregation.dry_run import calls_made
from fedtailor.aggregation.noise import changed_parts
from fedtailor.core import border, codec
from fedtailor.core.algorithm import COUNT, client_functions, reply_example
from fedtailor.core.client import Call
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.engine import Evaluated, Reply
from fedtailor.core.experiment import Experiment
from fedtailor.core.trees import Tree, tree_map
from fedtailor.data.splits import starts
from fedtailor.engines.wire import Header, Remote
from fedtailor.errors import ConfigError, RetryableError, RunError
from fedtailor.experiments import runner
from fedtailor.experiments.building import assemble
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.model_description import refuse_large
from fedtailor.experiments.sections import CheckpointSection
from fedtailor.experiments.store import ABOUT, CONFIG, RunFolder, read_json, write_json
from fedtailor.flare.background import in_thread
from fedtailor.flare.kits import KIT
from fedtailor.flare.participation import (
    ABANDONED,
    EXPELLED,
    LATE,
    NOT_ASKED,
    REFUSED,
    REJECTED,
    SAID,
    SILENT,
    SITES,
    TOOK_PART,
    WAITING,
    Attended,
    Participation,
)
from fedtailor.flare.protocol import ENVELOPE, PING, PROTOCOL, config_for, hello_fault, other_code, promise, unset_keys
from fedtailor.flare.revocations import read_list, revoked_in
from fedtailor.version import __version__

ROSTER = "federation.json"  # in the folder of a run
TRIES = 3  # of a request whose connection broke; its number makes repeating it harmless
LONGEST_HEADER = 2**24  # bytes of an answer that has no tensors
MOST_NUMBERS = 2**30  # of a model, whose sizes follow from what sites say of their data
ASK_AGAIN = 5.0  # seconds between two questions whether a person has approved the run
SPOILED = 2  # rounds that are abandoned for a site's answers, until the run goes on without it


class Link(Protocol):
    """Carries bytes to a site and back; raises an `OSError` if that fails, a `TimeoutError` if it takes too long."""

    sites: tuple[str, ...]

    def send(self, site: str, request: bytes, seconds: float) -> bytes: ...

    def limit(self, most: int) -> None:
        """No answer has more bytes: a longer one need not be received."""


class SiteRpc:
    """Calls of sites. A site that does not answer is away, and is only pinged until it answers again."""

    def __init__(self, link: Link, deadline: float, silence: float) -> None:
        self.link = link
        self.deadline = deadline
        self.silence = silence
        self.away: dict[str, str] = {}  # site -> why
        self.states: dict[str, str] = {}  # of sites that are away, in the words of `participation`
        self.out = set[str]()  # left out for good: not pinged again
        self._session = secrets.token_bytes(16)
        self._numbers = dict.fromkeys(link.sites, PING)
        self._probes: dict[str, Future[Any]] = {}
        self.behind = set[str]()  # sites whose reply a call did not wait for
        self.late: dict[str, bytes] = {}  # their replies, once they have arrived

    def ask(self, requests: Iterable[tuple[str, bytes]], goal: int = 0) -> dict[str, bytes | OSError]:
        """Send the requests all at once and collect the replies; with a goal, return after that many replies."""
        replies: dict[str, bytes | OSError] = {}
        waiting: dict[Future[Any], str] = {}
        for site, message in requests:
            if site in self.away:
                replies[site] = ConnectionError(self.away[site])
            else:
                self._numbers[site] += 1
                waiting[in_thread(self._send, site, self._numbers[site], message)] = site
        pings: dict[str, Future[Any]] = {}
        while waiting:
            done, _ = wait(waiting, timeout=self.silence / 2, return_when=FIRST_COMPLETED)
            for future in done:
                site = waiting.pop(future)
                replies[site] = self._result(site, future)
            if goal and sum(isinstance(reply, bytes) for reply in replies.values()) >= goal:
                return replies | {site: self._leave_behind(site, future, goal) for future, site in waiting.items()}
            if done:
                continue
            for future, site in list(waiting.items()):  # a long computation, or nobody there?
                if site not in pings:
                    pings[site] = in_thread(self.ping, site)
                elif pings[site].done() and isinstance(error := self._result(site, pings.pop(site)), OSError):
                    replies[site] = error
                    del waiting[future]
        return replies

    def _result(self, site: str, future: Future[Any]) -> bytes | OSError:
        try:
            reply: bytes = future.result()
            return reply
        except OSError as error:
            self.away[site], self.states[site] = f"does not answer ({error})", SILENT
            return error

    def _leave_behind(self, site: str, future: Future[Any], goal: int) -> OSError:
        """A site that still computes is away until it answers; it takes part again from the next round on."""
        self.away[site], self.states[site] = f"is late: {goal} replies close the round", LATE
        self._probes[site] = future
        self.behind.add(site)
        return TimeoutError(self.away[site])

    def ping(self, site: str) -> bytes:
        """Ask for a sign of life; raises an `OSError` without one."""
        return self.link.send(site, ENVELOPE.pack(self._session, PING), self.silence)

    def _send(self, site: str, number: int, message: bytes) -> bytes:
        request, until = ENVELOPE.pack(self._session, number) + message, time.monotonic() + self.deadline
        for attempt in range(TRIES):
            try:
                return self.link.send(site, request, max(0.1, until - time.monotonic()))
            except TimeoutError:
                raise
            except OSError:
                if attempt + 1 == TRIES:
                    raise
                time.sleep(0.2)
        raise AssertionError

    def is_out(self, site: str) -> bool:
        """Whether it is left out for good."""
        return site in self.out

    def leave_out(self, site: str, why: str, state: str = REFUSED) -> None:
        """Exclude a site for good, whatever it answers later."""
        self.away[site], self.states[site] = why, state
        self.out.add(site)

    def absences(self) -> dict[str, Attended]:
        return {site: Attended(self.states[site], why) for site, why in self.away.items()}

    def wait_for_late(self) -> None:
        """Wait for late sites, so that at the end of a run every site gets a model."""
        wait([self._probes[site] for site in self.away if site in self._probes], timeout=self.deadline)
        self.take_back()

    def take_back(self) -> None:
        """Take back sites that answer again, and ping the others; does not wait."""
        for site in set(self.away) - self.out:
            probe = self._probes.get(site)
            if probe is not None and not probe.done():
                continue
            is_back, was_behind = probe is not None and probe.exception() is None, site in self.behind
            self.behind.discard(site)
            if probe is not None and is_back:
                del self.away[site], self._probes[site]
                if was_behind:
                    self.late[site] = probe.result()
            else:
                self._probes[site] = in_thread(self.ping, site)


@dataclass(frozen=True)
class LateReply:
    """A reply to a call of an earlier round; its site has stored the state after it."""

    call: Call
    reply: Tree


@dataclass
class LateReplies:
    """Replies that arrive after their round has closed, at most one per client (FedBuff: Nguyen et al., AISTATS 2022).

    A late reply moved the model that it was sent; the current model is moved by as much, times (1 + rounds late) to the
    power of -`federation.staleness`.
    """

    power: float
    awaited: dict[int, Call] = field(default_factory=dict)  # by client
    arrived: dict[int, LateReply] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)  # in this round: client -> rounds late

    def state_round(self, client: int, kept_round: int) -> int:
        return self.arrived[client].call.round if client in self.arrived else kept_round

    def rebase_all(self, call: Call, clients: Sequence[int]) -> dict[int, Tree]:
        self.counted = {c: call.round - self.arrived[c].call.round for c in clients if c in self.arrived}
        if call.number and (self.arrived or self.awaited):
            raise ConfigError(f'federation.late = "buffer": {call.function} is a second call in round {call.round}')
        return {c: rebase(self.arrived[c], call, self.power) for c in clients if c in self.arrived}

    def commit(self) -> None:
        """Drop the replies that this round counted."""
        self.arrived = {c: late for c, late in self.arrived.items() if c not in self.counted}


def rebase(late: LateReply, call: Call, power: float) -> Tree:
    """Apply the changes of model parts to what is sent now; other parts stay as they are."""
    weight = (1 + call.round - late.call.round) ** -power
    parts = list(late.reply) if isinstance(late.reply, tuple) else [late.reply]
    for i, j in changed_parts(late.reply, late.call.args, late.call.placed).items():
        change = tree_map(torch.sub, parts[i], late.call.args[j])
        parts[i] = tree_map(lambda now, moved: now + weight * moved, call.args[j], change)
    return tuple(parts) if isinstance(late.reply, tuple) else parts[0]


def check_late_replies(experiment: Experiment) -> None:
    """Refuse methods whose late replies cannot be counted."""
    algorithm = experiment.algorithm
    name = algorithm.title or type(algorithm).__name__
    calls = calls_made(experiment)
    if sum(len(ways) for ways in calls.values()) != 1 or any(True in way for ways in calls.values() for way in ways):
        raise ConfigError(f'federation.late = "buffer": {name} makes several calls per round, or one for each client')
    if experiment.model.has_common_statistics:
        raise ConfigError('federation.late = "buffer": variances may become negative; set model.buffers = "private"')
    (function,) = calls
    sends = client_functions(algorithm)[function].sends  # type: ignore[attr-defined]
    for spec in sends if isinstance(sends, tuple) else (sends,):
        if spec is not None and spec != COUNT and not spec.is_model:
            raise ConfigError(f'federation.late = "buffer": {name} sends "{spec.name}", which is not a model')


class FlareEngine(Remote):
    """The engine `flare`. A site that is away misses the round, and continues from the state that it stored last."""

    def __init__(
        self,
        experiment: Experiment,
        config: RunConfig,
        rpc: SiteRpc,
        schema: dict[str, Any],
        participation: Participation,
        needed: int = 0,
        least: int = 1,
        revocations: Callable[[], dict[str, list[str]]] = lambda: {"names": []},
    ) -> None:
        super().__init__(experiment)
        self.participation = participation
        self.needed = needed  # sites without which the run does not begin
        self.least = least  # and no later round
        self.revocations = revocations  # asked in every round
        self.config = config
        self.rpc = rpc
        self.schema = schema
        self.first = -experiment.algorithm.preparation
        self._kept_rounds = [self.first for _ in self.everybody]
        self._needed: list[set[int]] = [set() for _ in self.everybody]
        self._begun: list[set[int]] = [set() for _ in self.everybody]  # rounds that this engine began at each site
        self._round = self.first
        self._goal = 0  # number of replies that closes a call; 0: all
        self._late = LateReplies(config.federation.staleness)
        self._spoiled = Counter[int]()  # rounds that were abandoned for a client's answers
        self._refusals: dict[str, Attended] = {}  # of this round, by sites that answer
        self._asked = set[int]()  # clients that were called in this round

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        """One reply per client; with `federation.goal`, late ones of earlier rounds first, and none of slow clients."""
        late = self._late.rebase_all(call, clients)
        for client, tree in late.items():
            yield Reply((client,), tree_map(lambda v: v[None], tree))
        goal, others = self.config.federation.goal, [c for c in clients if c not in late]
        self._goal = goal and max(1, goal - len(late))
        self._asked.update(clients)
        yield from super().call(call, others)
        self._goal = 0
        if self.config.federation.late == "buffer":
            self._late.awaited |= {c: call for c in others if self._name(c) in self.rpc.behind}

    @property
    def counted_late(self) -> dict[str, int]:
        """The late replies that the last round counted: site -> rounds late."""
        return {self._name(c): late for c, late in self._late.counted.items()}

    def _take_late(self) -> None:
        """Collect late replies that have arrived, once their sites have stored the state after them."""
        late, self.rpc.late = self.rpc.late, {}
        self._late.counted = {}
        for client in [c for c in self._late.awaited if self._name(c) in late]:
            call, reply = self._late.awaited.pop(client), late[self._name(client)]
            header, tree = self._read(reply, self._longest_reply(call))
            if border.error_text(header):
                continue
            if wrong := border.call_fault(self.experiment, call, client, tree, self.config.federation.limits):
                self._leave_out(client, f"its late reply: {wrong}")
                continue
            ((_, answer, wrong),) = self._tell_each({client: {"op": "keep", "round": call.round}})
            if not wrong and answer.get("kept") == call.round:
                self._late.arrived[client] = LateReply(call, self._here(tree))

    def carry(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | OSError]]:
        """Send to all clients at once."""
        by_name = {self._name(client): (client, request) for client, request in requests}
        replies = self.rpc.ask(((name, request) for name, (_, request) in by_name.items()), self._goal)
        for name, (client, _) in by_name.items():
            yield client, replies[name]

    def _tell_each(self, headers: dict[int, Header]) -> Iterator[tuple[int, Header, str]]:
        """Send each client its header; yields the answer, and the reason if it did not answer or refused."""
        for client, reply in self.carry((c, codec.encode(header, None)) for c, header in headers.items()):
            answer = {} if isinstance(reply, OSError) else _header(reply)
            wrong = self.rpc.away[self._name(client)] if isinstance(reply, OSError) else border.error_text(answer)
            yield client, answer, wrong

    def start(self) -> None:
        """Start the run at every site; one that refuses is left out of the run."""
        contract = promise(self.experiment)
        header = {"op": "start", "schema": self.schema, "promise": contract, "first": self.first}
        header["unset"] = unset_keys(self.config)
        if self.experiment.aggregation.reduction.is_sealed:
            header["cohort"] = sorted(self.experiment.data.clients)
        headers = {c: header | {"client": c, "config": config_for(self.config, c)} for c in self.everybody}
        until = time.monotonic() + self.rpc.deadline
        while headers:
            waiting = {}
            for client, answer, wrong in self._tell_each(headers):
                if wrong and _state(answer) == WAITING and time.monotonic() < until:
                    waiting[client] = headers[client]
                elif wrong:
                    self._leave_out(client, wrong, _state(answer))
            if headers := waiting:  # people take longer: a run that is submitted again asks again
                time.sleep(min(ASK_AGAIN, self.rpc.silence / 2))
        if self.needed:
            self.participation.note_round(1, self.rpc.absences())
        _refuse_few(self.rpc, sum(self._name(c) not in self.rpc.away for c in self.everybody), self.needed)

    def _leave_out(self, client: int, wrong: str, state: str = REFUSED) -> None:
        if self._name(client) not in self.rpc.away:  # it answered: its refusal is final
            self.rpc.leave_out(self._name(client), wrong, state)

    def begin_round(self, round: int) -> dict[int, str]:
        """Begin a round at every site that answers, from its stored state; waits while there are too few."""
        self._calls.clear()
        self._round = round
        self._refusals, self._asked = {}, set()
        for name in set(self.revocations()["names"]) - self.rpc.out:
            self.rpc.leave_out(name, "its certificate was revoked", EXPELLED)
        self.rpc.take_back()
        self._take_late()
        until = time.monotonic() + self.rpc.deadline
        away = self._begin(round, self.everybody)
        self.participation.note_seen({self._name(c): away.get(c, "") for c in self.everybody})
        least = max(self.least, 2 if self.experiment.aggregation.reduction.is_sealed else 1)
        while len(self.everybody) - len(away) < max(least, self.config.federation.min_replies):
            if time.monotonic() > until:
                why = "; ".join(f"{self._name(c)} {wrong}" for c, wrong in away.items())
                raise RetryableError(f"round {round}: too few sites are available: {why}")
            time.sleep(min(1.0, self.rpc.silence / 4))
            self.rpc.take_back()
            self._take_late()
            away = self._begin(round, list(away))
        return away

    def _begin(self, round: int, clients: Iterable[int]) -> dict[int, str]:
        rounds = {c: self._late.state_round(c, self._kept_rounds[c]) for c in clients}
        headers = {
            c: {"op": "begin", "round": round, "kept": rounds[c], "needed": sorted(self._needed[c])} for c in clients
        }
        away = {}
        for client, answer, wrong in self._tell_each(headers):
            if wrong:
                away[client] = wrong
                if answer:
                    self._refusals[self._name(client)] = Attended(_state(answer), wrong)
            else:
                self._refusals.pop(self._name(client), None)
        for client in headers.keys() - away:
            self._begun[client].add(round)
        return away

    def end_round(self, clients: Sequence[int]) -> dict[int, str]:
        """Let every site store its new state; returns whose is lost. The server writes its checkpoint after that."""
        answers = list(self._tell_each({c: {"op": "keep", "round": self._round} for c in clients}))
        unsure = "did not confirm that it stored its state"
        lost = {c: wrong or unsure for c, answer, wrong in answers if wrong or not self._is_kept(c, answer)}
        if not lost:
            for client, answer, _ in answers:
                self._kept_rounds[client] = answer["kept"]
            self._late.commit()
            self._note_round(clients)
        return lost

    def _note_round(self, clients: Sequence[int], why: str = "") -> None:
        """Record what each site did in this round: whose replies counted, or `why` none did."""
        there, absent = {self._name(c) for c in clients}, self.rpc.absences()
        asked = {self._name(c) for c in self._asked}
        attended = {}
        for name in self.participation.sites:
            if name in absent:
                attended[name] = absent[name]
            elif name in self._refusals:
                attended[name] = self._refusals[name]
            elif why:
                attended[name] = Attended(ABANDONED, why)
            elif name in there:
                attended[name] = Attended(TOOK_PART)
            elif name in asked:
                attended[name] = Attended(REJECTED, "its reply could not be used")
            else:
                attended[name] = Attended(NOT_ASKED)
        self.participation.note_round(self._round, attended)

    def _is_kept(self, client: int, answer: Header) -> bool:
        """Whether a site has stored the state of this round, or still has that of before, which did not change."""
        kept = answer.get("kept")
        before = self._late.state_round(client, self._kept_rounds[client])
        return type(kept) is int and kept in (self._round, before)

    def distrust(self, client: int, why: str) -> None:
        """Go on without a site for good."""
        self.rpc.leave_out(self._name(client), why)

    def blame(self, clients: Sequence[int], why: str) -> None:
        """A site that answers, and has spoiled several rounds, is left out if enough others are there."""
        self._note_round((), why)
        self._spoiled.update(c for c in clients if self._name(c) not in self.rpc.away)
        there = [c for c in self.everybody if not self.rpc.is_out(self._name(c))]
        least = max(3 if self.experiment.aggregation.reduction.is_sealed else 1, self.config.federation.min_replies)
        spoilers = [c for c in there if self._spoiled[c] >= SPOILED]
        if 2 * len(spoilers) < len(there) and len(there) - len(spoilers) >= least:
            for client in spoilers:
                self._leave_out(client, f"spoiled {self._spoiled[client]} rounds; the last: {why}")

    def evaluate(
        self, clients: Sequence[int], round: int, server: Tree, splits: Sequence[str], keep: str = ""
    ) -> Iterator[Evaluated]:
        """Metrics and models of the clients; where models are kept, late sites are waited for.

        Sites answer for rounds only that began there: one that was away begins the round now.
        """
        if keep and self.config.federation.goal:
            away = set(self.rpc.away)
            self.rpc.wait_for_late()
            names = away - set(self.rpc.away)
            self.undo([c for c in self.everybody if self._name(c) in names])  # their late computation does not count
        self._begin(round, [c for c in clients if round not in self._begun[c]])
        return super().evaluate(clients, round, server, splits, keep)

    def usable_metrics(self, client: int, tree: Tree) -> Tree:
        """Without what is infinite, which is recorded."""
        usable, wrong = border.infinite_metrics(tree)
        if wrong:
            self.disbelieved[self._name(client)] = wrong
        return usable

    def undo(self, clients: Sequence[int] | None = None) -> None:
        """Return sites to their stored state; a site that cannot be reached returns when its next round begins."""
        chosen = self.everybody if clients is None else clients
        for _ in self._tell_each({c: {"op": "restore", "kept": self._kept_rounds[c]} for c in chosen}):
            pass

    def get_states(self) -> Tree:
        """The round of each client's stored state."""
        return {"kept": torch.tensor(self._kept_rounds, device="cpu")}

    def set_states(self, rows: Tree) -> None:
        """Return every site to the state of that round."""
        self._kept_rounds = self._kept_of_all(rows)
        for client, _, wrong in self._tell_each(
            {c: {"op": "restore", "kept": k} for c, k in enumerate(self._kept_rounds)}
        ):
            if wrong:
                self._leave_out(client, wrong)

    def close(self) -> None:
        """Nothing to close: the job that this engine is part of ends the sites."""

    def saved(self, states: Sequence[Tree]) -> None:
        """Let sites delete, when the next round begins, states that no checkpoint needs."""
        every = [self._kept_of_all(tree) for tree in states]
        self._needed = [{rounds[client] for rounds in every} for client in self.everybody]

    def _kept_of_all(self, rows: Tree) -> list[int]:
        """The stored round of each client; a client that joined later is at its start."""
        rounds: list[int] = rows["kept"].tolist()
        return rounds + [self.first] * (len(self.everybody) - len(rounds))


def coordinate(
    link: Link,
    config: RunConfig,
    name: str,
    root: Path,
    listener: runner.Listener | None,
    named: Sequence[str] = (),
    least: int = 0,
    submitter: str = "",
) -> RunFolder:
    """Run `name` over the sites of a link, from the checkpoint in `root` if there is one.

    Args:
        named: Sites that are expected: the run begins when all are there, and a round when more than half of them are.
        least: With fewer sites neither begins, in place of that.
        submitter: Who asks for the run, for the people at the sites.
    """
    config = config.model_copy(update={"checkpoint": CheckpointSection(every=1, seconds=0)})
    if config.evaluation.unseen is not None:
        raise ConfigError("evaluation.unseen: not available in a federation of sites; use fedtailor onboard")
    if config.privacy.secure_sum and config.environment.epochs:
        raise ConfigError("environment.epochs: differs by site, and sites of a secure sum must compute the same")
    if config.federation.goal and (config.privacy.secure_sum or config.federation.goal < config.federation.min_replies):
        raise ConfigError("federation.goal: cannot be combined with secure sums, nor be below federation.min_replies")
    if config.federation.late == "buffer" and not config.federation.goal:
        raise ConfigError('federation.late = "buffer": set federation.goal, the number of replies that closes a round')
    path = root / name
    rpc = SiteRpc(link, config.federation.deadline, config.federation.silence)
    has_begun = (path / ROSTER).exists() and (path / CONFIG).exists()
    old = read_json(path / ROSTER) if has_begun else None
    roster = old or {"run": f"{name}-{secrets.token_hex(4)}", "clients": [], "samples": [], "schema": None}
    participation = Participation(path / SITES, {*named, *link.sites, *roster["clients"]})
    revoked = revoked_in(root.parent, root.parent / KIT)["names"]
    for site in participation.sites:
        if site in revoked:
            rpc.leave_out(site, "its certificate was revoked", EXPELLED)
        elif site not in link.sites:
            rpc.leave_out(site, "is not connected", SILENT)
    greetings = _hello(rpc, config, roster["run"], read_list(root.parent), submitter)
    participation.note_hello(greetings)
    for site, theirs in participation.torch_versions().items():
        if site in greetings and _minor(theirs) != _minor(torch.__version__):
            words = "%s computes with torch %s, this server with %s: numbers may differ in their last digits"
            logging.getLogger("fedtailor").warning(words, site, theirs, torch.__version__)
    needed = 0 if has_begun else least or len(named)
    try:
        roster = _enroll(roster, greetings, rpc, config)
        _refuse_few(rpc, len(roster["clients"]), needed)
    finally:
        if not has_begun:
            participation.note_round(1, rpc.absences())
        participation.write()
    write_json(path / ROSTER, roster)
    data = data_without_rows(roster)
    refuse_large(config, data.shape, data.outputs, MOST_NUMBERS, "the form of the sites' data")
    experiment = assemble(config, data)
    if config.federation.late == "buffer":
        check_late_replies(experiment)
    torch.set_num_threads(config.federation.threads or 1)
    if old is not None and old["clients"] != roster["clients"] and (path / ABOUT).exists():
        members = {"clients": roster["clients"], "train_samples": roster["samples"]}
        write_json(path / ABOUT, RunFolder(path).about | members)
    link.limit(longest_answer(experiment))
    revocations = partial(revoked_in, root.parent, root.parent / KIT)
    later = least or (len(named) // 2 + 1 if named else 1)
    engine = FlareEngine(experiment, config, rpc, roster["schema"], participation, needed, later, revocations)
    try:
        limits = replace(config.federation.limits, min_replies=max(config.federation.min_replies, _most(config, later)))
        return runner.train_on(engine, "flare", config, path, listener, limits)
    finally:
        participation.write()


def _most(config: RunConfig, least: int) -> int:
    """So many replies, or as many as there are where a round draws fewer sites."""
    drawn, goal = config.federation.clients_per_round, config.federation.goal
    return min([least, *filter(None, (drawn, goal))])


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _refuse_few(rpc: SiteRpc, there: int, needed: int) -> None:
    """Begin no run without sites that were named, unless somebody has decided so."""
    if there >= needed:
        return
    away = "; ".join(f"{site} is {rpc.states[site]} ({why})" for site, why in sorted(rpc.away.items()))
    fewer = f"; --least {there} begins without" if there else ""
    why = f"begins with {needed} sites; {away}{fewer}"
    raise (RetryableError if {rpc.states[site] for site in rpc.away} == {SILENT} else RunError)(why)


def longest_answer(experiment: Experiment) -> int:
    """Bytes that no answer of a site exceeds: a reply, the way back of a message, a personal model, a header."""
    algorithm, model = experiment.algorithm, experiment.model
    replies = [border.longest(reply_example(algorithm, name, model)) for name in client_functions(algorithm)]
    state = border.longest(model.params, algorithm.server_init(model), times=4)
    return LONGEST_HEADER + max([state, *replies])


def _hello(rpc: SiteRpc, config: RunConfig, run: str, revoked: dict[str, Any], submitter: str) -> dict[str, Header]:
    """What each site reports of itself; a site that refuses is left out."""
    header = {
        "op": "hello",
        "protocol": PROTOCOL,
        "version": __version__,
        "run": run,
        "algorithm": config.algorithm.name,
        "model": config.model.name,
        "rounds": config.rounds,
        "seed": config.seed,
        "code": other_code(config),
        "submitter": submitter,
        "revoked": revoked,
    }
    message = codec.encode(header, None)
    greetings = {}
    for site, reply in rpc.ask((site, message) for site in sorted(rpc.link.sites)).items():
        if isinstance(reply, OSError):
            rpc.leave_out(site, f"did not say hello: {reply}", rpc.states.get(site, SILENT))
            continue
        greetings[site] = _header(reply)
        if wrong := border.error_text(greetings[site]):
            rpc.leave_out(site, wrong, _state(greetings.pop(site)))
        elif wrong := hello_fault(greetings[site]):
            rpc.leave_out(site, f"its hello has no usable {wrong}")
            del greetings[site]
    return greetings


def _state(answer: Header) -> str:
    """Why a site takes no part, as it says itself; it may say that it is paused, or has left."""
    return state if (state := answer.get("state")) in SAID else REFUSED


def _header(reply: bytes) -> Header:
    """The header of a reply; one that cannot be decoded counts as an error of its site."""
    try:
        if len(reply) > LONGEST_HEADER:
            raise codec.BrokenMessage(f"has {len(reply)} bytes")
        return codec.decode_header(reply)
    except codec.BrokenMessage as error:
        return {"error": f"its answer {error}"}


def _enroll(roster: Header, greetings: dict[str, Header], rpc: SiteRpc, config: RunConfig) -> Header:
    """The clients of a run: those of before in their order, then new ones; sites that do not fit are left out."""
    clients, samples = list(roster["clients"]), list(roster["samples"])
    schema: Header = roster["schema"] or _usual_schema(greetings) or {}
    begun = bool(clients)
    # the algorithm is imported only after a site, by its own policy, has accepted its name
    fixed = begun and (
        algorithms.make(config.algorithm.name, config.algorithm.options).by_client or config.environment.epochs
    )
    for site, about in sorted(greetings.items()):
        if about["schema"] != schema:
            part = next(k for k in schema if about["schema"].get(k) != schema[k])
            other, usual = (border.plain_text(str(its.get(part))) for its in (about["schema"], schema))
            rpc.leave_out(site, f"its {part} is {other}, not {usual}")
        elif site in clients:
            had = samples[clients.index(site)]
            if about["samples"] != had:
                rpc.leave_out(site, f"has {about['samples']} training samples; it had {had} when it joined")
        elif begun and fixed:
            rpc.leave_out(site, f"{config.algorithm.name} has numbers for each client: no site can join a running one")
        elif begun and config.privacy.secure_sum:
            rpc.leave_out(site, "the sites of a run with secure sums are fixed as it begins")
        else:
            clients.append(site)
            samples.append(about["samples"])
    if not clients:
        why = "; ".join(f"{site}: {reason}" for site, reason in rpc.away.items()) or "no site is connected"
        raise RunError(f"no site takes part: {why}")
    return roster | {"clients": clients, "samples": samples, "schema": schema}


def _usual_schema(greetings: dict[str, Header]) -> Header | None:
    """What most sites say of the form of their data, so that no single one decides for the others."""
    each = {json.dumps(its["schema"], sort_keys=True): its["schema"] for its in greetings.values()}
    counts = Counter(json.dumps(its["schema"], sort_keys=True) for _, its in sorted(greetings.items()))
    return each[counts.most_common(1)[0][0]] if each else None


def _two_rows(form: list[Any]) -> Tensor:
    shape, dtype = form
    return torch.zeros(2, *shape, dtype=getattr(torch, dtype), device="cpu")


def data_without_rows(roster: Header) -> FederatedData:
    """The data as the server knows it: clients, numbers of samples, and the form of a sample."""
    schema, sizes = roster["schema"], roster["samples"]
    parts = {name: _two_rows(form) for name, form in schema["x"].items()}
    x, y = parts.get("", parts), _two_rows(schema["y"])
    return FederatedData(
        name="sites",
        task=schema["task"],
        clients=tuple(roster["clients"]),
        train=Rows(x, y, starts(sizes), is_here=False),
        val=Rows(x, y, starts([0] * len(sizes)), is_here=False),
        test=Rows(x, y, starts([0] * len(sizes)), is_here=False),
        outputs=schema["outputs"],
        classes=tuple(schema["classes"]),
        features=tuple(schema["features"]),
        notes=("the data is at the sites",),
    )
