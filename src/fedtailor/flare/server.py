"""The server's half: the ordinary rounds over sites that are reached by messages. It never has data.

A private state is kept by its site, by the number of the round after which it was kept; here, and in the checkpoint, a
client's state is that number.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fedtailor import algorithms
from fedtailor.aggregation.dry_run import calls_made
from fedtailor.aggregation.noise import changed_parts
from fedtailor.core import codec
from fedtailor.core.algorithm import COUNT, client_functions
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
from fedtailor.experiments.sections import CheckpointSection
from fedtailor.experiments.store import ABOUT, RunFolder, read_json, write_json
from fedtailor.flare.kits import KIT, REVOKED
from fedtailor.flare.protocol import ENVELOPE, PING, config_for, hello_fault, other_code, promise
from fedtailor.version import __version__

TRIES = 3  # of a request whose connection broke; its number makes that harmless


class Link(Protocol):
    """What carries bytes to a site and back; an `OSError` when that fails, a `TimeoutError` when it takes too long."""

    sites: tuple[str, ...]

    def send(self, site: str, request: bytes, seconds: float) -> bytes: ...


class SiteRpc:
    """Who does not answer is away at once, and asked no more until a sign of life comes back."""

    def __init__(self, link: Link, deadline: float, silence: float) -> None:
        self.link = link
        self.deadline = deadline
        self.silence = silence
        self.away: dict[str, str] = {}
        self._out = set[str]()  # refused or never there: not looked for again
        self._session = secrets.token_bytes(16)
        self._numbers = dict.fromkeys(link.sites, PING)
        self._probes: dict[str, Future[Any]] = {}
        self.behind = set[str]()  # whose reply a call did not wait for
        self.late: dict[str, bytes] = {}  # such replies, since they have come

    def ask(self, requests: Iterable[tuple[str, bytes]], goal: int = 0) -> dict[str, bytes | OSError]:
        """Every site its request, all at the same time; with a goal not waiting for more replies than that."""
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
            self.away[site] = f"does not answer ({error})"
            return error

    def _leave_behind(self, site: str, future: Future[Any], goal: int) -> OSError:
        """A site that still computes is away until it has answered; then it begins the next round with the others."""
        self.away[site] = f"is late: {goal} replies close the round"
        self._probes[site] = future
        self.behind.add(site)
        return TimeoutError(self.away[site])

    def ping(self, site: str) -> bytes:
        """A sign of life, or an `OSError`."""
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

    def leave_out(self, site: str, why: str) -> None:
        """A site that takes no part, whatever it answers."""
        self.away[site] = why
        self._out.add(site)

    def wait_for_late(self) -> None:
        """Wait for those who are late: at the end of a run everybody gets a model."""
        wait([self._probes[site] for site in self.away if site in self._probes], timeout=self.deadline)
        self.take_back()

    def take_back(self) -> None:
        """Take back who answers again; does not wait."""
        for site in set(self.away) - self._out:
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


def in_thread(work: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    """A future of a thread that does not keep the process alive: a lost call may be waited for until its deadline."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


CONDITION = ("version", "now", "free", "certificate_ends")
PRESENCE_EVERY = 5.0  # seconds


class LastSeen:
    """When each site was last heard of, and how it is, in a file beside the run, for operators."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sites: dict[str, dict[str, Any]] = {}
        self._written = 0.0

    def note_hello(self, greetings: dict[str, Header]) -> None:
        """What sites say of themselves as a job begins; only what is known is kept of it."""
        now = time.time()
        for site, about in greetings.items():
            condition = about.pop("condition", None)
            known = condition if isinstance(condition, dict) else {}
            known = {k: v for k in CONDITION if isinstance(v := known.get(k), str | int | float)}
            self.sites[site] = known | {"asked": now, "seen": now}

    def note_round(self, away: dict[str, str]) -> None:
        """Who answered as a round began, and why others did not; written every few seconds."""
        now = time.time()
        for site, why in away.items():
            about = self.sites.setdefault(site, {})
            about["away"] = why[:200]
            if not why:
                about["seen"] = now
        if now - self._written > PRESENCE_EVERY:
            self._written = now
            write_json(self.path, self.sites)


@dataclass(frozen=True)
class LateReply:
    """A reply that has come, to a call of an earlier round; its site has kept the state after it."""

    call: Call
    reply: Tree


@dataclass
class LateReplies:
    """Of each client at most one."""

    power: float
    sent: dict[int, Call] = field(default_factory=dict)  # to those who are late
    come: dict[int, LateReply] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)  # in this round: client -> rounds late

    def state(self, client: int, kept_round: int) -> int:
        """The round whose state a client goes on from."""
        return self.come[client].call.round if client in self.come else kept_round

    def replies(self, call: Call, clients: Sequence[int]) -> dict[int, Tree]:
        """LateReply replies of some of these clients, as replies to this call."""
        self.used = {c: call.round - self.come[c].call.round for c in clients if c in self.come}
        if call.number and (self.come or self.sent):
            raise ConfigError(f'federation.late = "buffer": {call.function} is a second question in round {call.round}')
        return {c: rebase(self.come[c], call, self.power) for c in clients if c in self.come}

    def commit(self) -> None:
        """The round has ended with them."""
        self.come = {c: late for c, late in self.come.items() if c not in self.used}


def rebase(late: LateReply, call: Call, power: float) -> Tree:
    """Parts that are new versions of what was sent, as changes of what is sent now; the others as they are."""
    weight = (1 + call.round - late.call.round) ** -power
    parts = list(late.reply) if isinstance(late.reply, tuple) else [late.reply]
    for i, j in changed_parts(late.reply, late.call.args, late.call.placed).items():
        change = tree_map(torch.sub, parts[i], late.call.args[j])
        parts[i] = tree_map(lambda now, moved: now + weight * moved, call.args[j], change)
    return tuple(parts) if isinstance(late.reply, tuple) else parts[0]


def check_late_replies(experiment: Experiment) -> None:
    """Refuse methods of which a late reply cannot be counted."""
    algorithm = experiment.algorithm
    name = algorithm.title or type(algorithm).__name__
    calls = calls_made(experiment)
    if sum(len(ways) for ways in calls.values()) != 1 or any(True in way for ways in calls.values() for way in ways):
        raise ConfigError(f'federation.late = "buffer": {name} asks more than one thing, or each client its own')
    if experiment.model.has_common_statistics:
        raise ConfigError('federation.late = "buffer": variances may become negative; set model.buffers = "private"')
    (function,) = calls
    sends = client_functions(algorithm)[function].sends  # type: ignore[attr-defined]
    for spec in sends if isinstance(sends, tuple) else (sends,):
        if spec is not None and spec != COUNT and not spec.is_model:
            raise ConfigError(f'federation.late = "buffer": {name} sends "{spec.name}", which is no model to average')


ROSTER, SITES = "federation.json", "sites.json"


class FlareEngine(Remote):
    """Sites over lines. A site that is away misses the round; when it is back it goes on from what it kept last."""

    def __init__(
        self, experiment: Experiment, config: RunConfig, lines: SiteRpc, schema: dict[str, Any], last_seen: LastSeen
    ) -> None:
        super().__init__(experiment)
        self.last_seen = last_seen
        self.config = config
        self.lines = lines
        self.schema = schema
        self.first = -experiment.algorithm.preparation
        self._kept_rounds = [self.first for _ in self.everybody]
        self._needed: list[set[int]] = [set() for _ in self.everybody]
        self._round = self.first
        self._goal = 0  # replies that close a call
        self._buffer = LateReplies(config.federation.staleness) if config.federation.late == "buffer" else None

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        """As ever; but a round may close before the slowest have answered, who then count in a later one."""
        late = self._buffer.replies(call, clients) if self._buffer is not None else {}
        for client, tree in late.items():
            yield Reply((client,), tree_map(lambda v: v[None], tree))
        goal, others = self.config.federation.goal, [c for c in clients if c not in late]
        self._goal = goal and max(1, goal - len(late))
        yield from super().call(call, others)
        self._goal = 0
        if self._buffer is not None:
            self._buffer.sent |= {c: call for c in others if self._name(c) in self.lines.behind}

    @property
    def counted_late(self) -> dict[str, int]:
        """Of the last round: by how many rounds replies were late that it counted."""
        return {} if self._buffer is None else {self._name(c): late for c, late in self._buffer.used.items()}

    def _take_late(self) -> None:
        """Replies that have come since: their sites keep the state after them, and they wait to be counted."""
        late, self.lines.late = self.lines.late, {}
        if self._buffer is None:
            return
        self._buffer.used = {}
        for client in [c for c in self._buffer.sent if self._name(c) in late]:
            call, reply = self._buffer.sent.pop(client), late[self._name(client)]
            if "error" in _header(reply):
                continue
            keep = {client: {"op": "keep", "round": call.round}}
            ((_, answer, wrong),) = self._tell_each(keep)
            if not wrong and answer.get("kept") == call.round:
                self._buffer.come[client] = LateReply(call, self._here(self._read(reply)[1]))

    def carry(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | OSError]]:
        """All sites at the same time."""
        by_name = {self._name(client): (client, request) for client, request in requests}
        replies = self.lines.ask(((name, request) for name, (_, request) in by_name.items()), self._goal)
        for name, (client, _) in by_name.items():
            yield client, replies[name]

    def _tell_each(self, headers: dict[int, Header]) -> Iterator[tuple[int, Header, str]]:
        """To each its own; and what is wrong, if it did not answer or refused."""
        for client, reply in self.carry((c, codec.encode(header, None)) for c, header in headers.items()):
            answer = {} if isinstance(reply, OSError) else _header(reply)
            wrong = self.lines.away[self._name(client)] if isinstance(reply, OSError) else answer.get("error", "")
            yield client, answer, wrong

    def start(self) -> None:
        """Every site makes ready; who refuses takes no part."""
        contract = promise(self.experiment)
        header = {"op": "start", "schema": self.schema, "promise": contract, "first": self.first}
        headers = {c: header | {"client": c, "config": config_for(self.config, c)} for c in self.everybody}
        for client, _, wrong in self._tell_each(headers):
            if wrong:
                self._leave_out(client, wrong)

    def _leave_out(self, client: int, wrong: str) -> None:
        if self._name(client) not in self.lines.away:  # it answered, and what it said is final
            self.lines.leave_out(self._name(client), wrong)

    def begin_round(self, round: int) -> dict[int, str]:
        """A new round at every site that is there, from the state it kept last; waits while there are too few."""
        self._calls.clear()
        self._round = round
        self.lines.take_back()
        self._take_late()
        until = time.monotonic() + self.lines.deadline
        away = self._begin(round, self.everybody)
        self.last_seen.note_round(
            {self._name(c): "" for c in self.everybody} | {self._name(c): w for c, w in away.items()}
        )
        least = 2 if self.experiment.aggregation.reduction.is_sealed else 1
        while len(self.everybody) - len(away) < max(least, self.config.federation.min_replies):
            if time.monotonic() > until:
                why = "; ".join(f"{self._name(c)} {wrong}" for c, wrong in away.items())
                raise RetryableError(f"round {round}: too few sites are available: {why}")
            time.sleep(min(1.0, self.lines.silence / 4))
            self.lines.take_back()
            self._take_late()
            away = self._begin(round, list(away))
        return away

    def _begin(self, round: int, clients: Iterable[int]) -> dict[int, str]:
        rounds = {
            c: self._kept_rounds[c] if self._buffer is None else self._buffer.state(c, self._kept_rounds[c])
            for c in clients
        }
        headers = {
            c: {"op": "begin", "round": round, "kept": rounds[c], "needed": sorted(self._needed[c])} for c in clients
        }
        return {c: wrong for c, _, wrong in self._tell_each(headers) if wrong}

    def end_round(self, clients: Sequence[int]) -> dict[int, str]:
        """Every site keeps its new state on its disk; returns whose is lost. The server keeps its own only after it."""
        answers = list(self._tell_each({c: {"op": "keep", "round": self._round} for c in clients}))
        lost = {client: wrong for client, _, wrong in answers if wrong}
        lost |= {
            c: "did not say what it kept" for c, a, wrong in answers if not wrong and type(a.get("kept")) is not int
        }
        if not lost:
            for client, answer, _ in answers:
                self._kept_rounds[client] = answer["kept"]
            if self._buffer is not None:
                self._buffer.commit()
        return lost

    def evaluate(
        self, clients: Sequence[int], round: int, server: Tree, splits: Sequence[str], keep: str = ""
    ) -> Iterator[Evaluated]:
        """As ever; where models are kept, the late ones are waited for."""
        if keep and self.config.federation.goal:
            away = set(self.lines.away)
            self.lines.wait_for_late()
            names = away - set(self.lines.away)
            self.undo([c for c in self.everybody if self._name(c) in names])  # what they computed late does not count
        return super().evaluate(clients, round, server, splits, keep)

    def undo(self, clients: Sequence[int] | None = None) -> None:
        """Sites go back to what they kept last; who cannot be reached does so when its next round begins."""
        chosen = self.everybody if clients is None else clients
        for _ in self._tell_each({c: {"op": "restore", "kept": self._kept_rounds[c]} for c in chosen}):
            pass

    def get_states(self) -> Tree:
        """For each client the round whose state it kept last."""
        return {"kept": torch.tensor(self._kept_rounds, device="cpu")}

    def set_states(self, rows: Tree) -> None:
        """Every site goes back to what it kept then."""
        self._kept_rounds = self._kept_of_all(rows)
        for client, _, wrong in self._tell_each(
            {c: {"op": "restore", "kept": k} for c, k in enumerate(self._kept_rounds)}
        ):
            if wrong:
                self._leave_out(client, wrong)

    def close(self) -> None:
        """Sites go on by themselves; the job that this engine is part of ends them."""

    def saved(self, states: Sequence[Tree]) -> None:
        """Sites may forget, when the next round begins, what no checkpoint needs."""
        every = [self._kept_of_all(tree) for tree in states]
        self._needed = [{rounds[client] for rounds in every} for client in self.everybody]

    def _kept_of_all(self, rows: Tree) -> list[int]:
        """One that was not there yet then is at its start."""
        rounds: list[int] = rows["kept"].tolist()
        return rounds + [self.first] * (len(self.everybody) - len(rounds))


def coordinate(link: Link, config: RunConfig, name: str, root: Path, listener: runner.Listener | None) -> RunFolder:
    """A run of this name over the sites of a link; goes on from the checkpoint in `root`, if there is one."""
    config = config.model_copy(update={"checkpoint": CheckpointSection(every=1, seconds=0)})
    if config.evaluation.unseen is not None:
        raise ConfigError("evaluation.unseen: not in a federation of sites; onboard a newcomer instead")
    if config.federation.goal and (config.privacy.secure_sum or config.federation.goal < config.federation.min_replies):
        raise ConfigError("federation.goal: not with secure sums, and not below federation.min_replies")
    if config.federation.late == "buffer" and not config.federation.goal:
        raise ConfigError('federation.late = "buffer": needs federation.goal, the replies that close a round')
    path = root / name
    lines = SiteRpc(link, config.federation.deadline, config.federation.silence)
    old = read_json(path / ROSTER) if (path / ROSTER).exists() else None
    roster = old or {"run": f"{name}-{secrets.token_hex(4)}", "clients": [], "samples": [], "schema": None}
    for site in _revoked_names(root.parent):
        if site in link.sites:
            lines.leave_out(site, "its certificate was revoked")
    last_seen = LastSeen(path / SITES)
    greetings = _hello(lines, config, roster["run"])
    last_seen.note_hello(greetings)
    roster = _enroll(roster, greetings, lines, config)
    for client in roster["clients"]:
        if client not in link.sites:
            lines.leave_out(client, "is not connected")
    write_json(path / ROSTER, roster)
    experiment = assemble(config, data_without_rows(roster))
    if config.federation.late == "buffer":
        check_late_replies(experiment)
    torch.set_num_threads(config.federation.threads or 1)
    if old is not None and old["clients"] != roster["clients"] and (path / ABOUT).exists():
        members = {"clients": roster["clients"], "train_samples": roster["samples"]}
        write_json(path / ABOUT, RunFolder(path).about | members)
    engine = FlareEngine(experiment, config, lines, roster["schema"], last_seen)
    return runner.train_on(engine, "flare", config, path, listener)


def _revoked_names(folder: Path) -> list[str]:
    """Sites that may still connect, for FLARE knows no list of revoked certificates, and are not asked anything."""
    if not (folder / REVOKED).exists():
        return []
    from fedtailor.aggregation.identity import AUTHORITY, read_revocations

    authority = folder / KIT / "startup" / AUTHORITY
    return read_revocations(folder / REVOKED, authority.read_bytes() if authority.exists() else b"")["names"]


def _hello(lines: SiteRpc, config: RunConfig, run: str) -> dict[str, Header]:
    """What each site tells of itself; who refuses is left out, by name."""
    header = {
        "op": "hello",
        "version": __version__,
        "run": run,
        "algorithm": config.algorithm.name,
        "model": config.model.name,
        "rounds": config.rounds,
        "seed": config.seed,
        "code": other_code(config),
    }
    message = codec.encode(header, None)
    greetings = {}
    for site, reply in lines.ask((site, message) for site in sorted(lines.link.sites)).items():
        if isinstance(reply, OSError):
            lines.leave_out(site, f"did not say hello: {reply}")
            continue
        greetings[site] = _header(reply)
        if "error" in greetings[site]:
            lines.leave_out(site, greetings.pop(site)["error"])
        elif wrong := hello_fault(greetings[site]):
            lines.leave_out(site, f"its hello has no usable {wrong}")
            del greetings[site]
    return greetings


def _header(reply: bytes) -> Header:
    """What a site says; bytes that are no message are an error of that site."""
    try:
        return codec.decode_header(reply)
    except codec.BrokenMessage as error:
        return {"error": f"its answer {error}"}


def _enroll(roster: Header, greetings: dict[str, Header], lines: SiteRpc, config: RunConfig) -> Header:
    """The clients of a run: those of before in their order, then who came; who does not fit is left out, by name."""
    clients, samples = list(roster["clients"]), list(roster["samples"])
    schema = roster["schema"]
    begun = bool(clients)
    # what a job names is imported only after a site, by its own policy, has taken part in it
    fixed = begun and (
        algorithms.make(config.algorithm.name, config.algorithm.options).by_client or config.environment.epochs
    )
    for site, about in sorted(greetings.items()):
        schema = schema or about["schema"]
        if about["schema"] != schema:
            part = next(k for k in schema if about["schema"].get(k) != schema[k])
            lines.leave_out(site, f"its {part} is {about['schema'].get(part)}, not {schema[part]}")
        elif site in clients:
            had = samples[clients.index(site)]
            if about["samples"] != had:
                lines.leave_out(site, f"has {about['samples']} training samples; it had {had} when it joined")
        elif begun and fixed:
            lines.leave_out(site, f"{config.algorithm.name} has numbers for each client: nobody can join a running one")
        else:
            clients.append(site)
            samples.append(about["samples"])
    if not clients:
        why = "; ".join(f"{site}: {reason}" for site, reason in lines.away.items()) or "no site is connected"
        raise RunError(f"no site takes part: {why}")
    return roster | {"clients": clients, "samples": samples, "schema": schema}


def _two_rows(form: list[Any]) -> Tensor:
    shape, dtype = form
    return torch.zeros(2, *shape, dtype=getattr(torch, dtype), device="cpu")


def data_without_rows(roster: Header) -> FederatedData:
    """The data as the server knows it: who there is, how many samples each has, and what one looks like."""
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
