"""The site's half: every request is checked against the site's own policy and logged before the reply leaves.

Private states, personal models and the audit log stay in the site's own folder. Of an error the server learns the type;
its text, which may contain values of the data, goes to the audit log.
"""

from __future__ import annotations

import hashlib
import re
import threading
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedtailor.algorithms import PROGRAMS
from fedtailor.core import border, codec
from fedtailor.core.algorithm import client_functions, reply_example
from fedtailor.core.data import FederatedData
from fedtailor.core.experiment import Experiment
from fedtailor.core.trees import Tree, schema, schema_difference, tree_map
from fedtailor.data.files import expand_home
from fedtailor.data.sources.site_data import SiteData, load_site
from fedtailor.engines.wire import Header
from fedtailor.engines.wire import Site as Client
from fedtailor.errors import ConfigError, RunError, UserError, nearest
from fedtailor.experiments.building import assemble
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.experiments.model_description import check_options, refuse_large
from fedtailor.experiments.store import FIT, read_json, read_tree, write_json, write_tree
from fedtailor.flare.approval import APPROVALS, describe_run, require_approval, use_approval
from fedtailor.flare.audit import AuditLog, read_lines
from fedtailor.flare.kits import read_condition
from fedtailor.flare.policy import (
    GRADIENTS,
    Policy,
    PrivacyAccount,
    RequestRate,
    RunNeed,
    RunUsage,
    SiteLedger,
    check_splits,
    find_imprint,
    make_party,
    refuse_private_message,
    round_metrics,
)
from fedtailor.flare.protocol import (
    ENVELOPE,
    PING,
    Refused,
    data_schema,
    digest,
    other_code,
    promise,
    read_request,
    without_unknown,
)
from fedtailor.flare.quotas import SiteQuotas
from fedtailor.flare.revocations import accept_list

if TYPE_CHECKING:
    from fedtailor.aggregation.member import Opened

SERVER = "server"  # the only one that may call
KINDS = ("last", "selected")  # personal models that are kept
AUDIT, RUN, FIT_FOLDER = "audit.jsonl", "run.json", "fit"  # the last two in the folder of a run
STANDING, RECEIPTS = "standing.json", "receipts"
State = Literal["active", "paused", "left"]
UNSAID = "its policy does not allow it"  # where the policy keeps the reason of a refusal at the site
NOT_TAKING_PART = {"paused": "this site is paused by its operator", "left": "this site has left the federation"}


class SiteFile(BaseModel):
    """site.toml: the site's data, its policy, and where its private files are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path = Field(default=Path("private"), description="Private states, personal models and the audit log.")
    kit: Path = Field(default=Path("kit"), description="What the coordinator sent: certificate, key, authority.")
    data: SiteData
    policy: Policy


def read_site(path: Path) -> SiteFile:
    """Read and check a site's file; paths in it are relative to it."""
    try:
        site = SiteFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; fedtailor federation init writes one for each site") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        reason = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
        raise ConfigError(f"{path}: {key}: {reason}") from None
    base = path.resolve().parent
    data = site.data.model_copy(update={"path": base / expand_home(site.data.path)})
    places = {"folder": base / expand_home(site.folder), "kit": base / expand_home(site.kit)}
    return site.model_copy(update=places | {"data": data})


def load_rows(data: SiteData, name: str, seed: int, algorithm: str) -> FederatedData:
    """This site's rows. A fit of tables trains on the validation rows too: it validates by folds."""
    rows = load_site(data, name, seed=seed)
    if algorithm.lower() not in PROGRAMS:
        return rows
    from fedtailor.tables.candidates import all_in_training  # imports what fits of tables need, such as SciPy

    return all_in_training(rows)


def read_participation(folder: Path) -> dict[str, Any]:
    """What the site's operator has decided: `state`, and the runs that were `withdrawn`."""
    path = folder / STANDING
    return dict(read_json(path)) if path.exists() else {"state": "active", "withdrawn": []}


def check_participation(folder: Path, run: str = "") -> None:
    """Refuse any request while the site is paused, has left, or has withdrawn from the run."""
    record = read_participation(folder)
    if record["state"] in NOT_TAKING_PART:
        raise Refused(NOT_TAKING_PART[record["state"]], state=record["state"])
    if run and run in record["withdrawn"]:
        raise Refused(f"this site has withdrawn from the run {run}", state="left")


def set_participation(folder: Path, state: State) -> None:
    """Takes effect with the next request."""
    write_json(folder / STANDING, read_participation(folder) | {"state": state})


def withdraw(folder: Path, run: str) -> Path:
    """Refuse a run from now on and delete what is stored of it here; returns the path of the receipt."""
    path = folder / run
    if Path(run).name != run or not path.is_dir() or run in (RECEIPTS, APPROVALS):
        known = ", ".join(kept_runs(folder)) or "none"
        raise RunError(f'{folder}: no run "{run}"; there are: {known}')
    record, about = read_participation(folder), _rounds_sent(folder, run)
    withdrawn = sorted({*record["withdrawn"], run})
    write_json(folder / STANDING, record | {"withdrawn": withdrawn})  # before anything is deleted
    deleted = []
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        deleted.append({"file": str(file.relative_to(folder)), "bytes": file.stat().st_size, "sha256": digest})
        file.unlink()
    for inner in sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True):
        inner.rmdir()
    path.rmdir()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    receipt = folder / RECEIPTS / f"{run}.json"
    write_json(receipt, {"run": run, "withdrawn": now, "deleted": deleted} | about)
    return receipt


def kept_runs(folder: Path) -> list[str]:
    """Names of the runs of which this site has files."""
    return sorted(p.name for p in folder.glob("*") if p.is_dir() and p.name not in (RECEIPTS, APPROVALS))


def _rounds_sent(folder: Path, run: str) -> dict[str, Any]:
    """Rounds in which a reply left, by the audit log: what it contributed to a common model cannot be removed."""
    try:
        entries = read_lines(folder / AUDIT)
    except RunError as error:  # a damaged log does not prevent a withdrawal
        return {"rounds": None, "record": str(error)}
    left = [e for e in entries if e.get("run") == run and "refused" not in e and "left" in e]
    return {"rounds": sorted({int(e["round"]) for e in left if e.get("round") is not None})}


class SiteState:
    """The private states of one run on disk, by round. A state exists once its JSON index is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def rounds(self) -> list[int]:
        return sorted(int(file.stem.removeprefix("state")) for file in self.folder.glob("state*.json"))

    def keep(self, round: int, state: Tree) -> None:
        write_json(self._index(round), write_tree(self._index(round).with_suffix(".safetensors"), state))

    def read(self, round: int) -> Tree:
        if not self._index(round).exists():
            known = ", ".join(map(str, self.rounds())) or "none"
            raise RunError(f"{self.folder}: no private state of round {round}; stored: {known}")
        return read_tree(self.folder, read_json(self._index(round)))

    def digest(self, round: int) -> str:
        """A hash of the state of a round."""
        return str(read_json(self._index(round))["sha256"])

    def forget_but(self, rounds: set[int]) -> None:
        for round in set(self.rounds()) - rounds:
            self._index(round).unlink()
            self._index(round).with_suffix(".safetensors").unlink(missing_ok=True)

    def _index(self, round: int) -> Path:
        return self.folder / f"state{round:+07d}.json"


@dataclass
class SiteJob:
    """A run that was started at this site."""

    experiment: Experiment
    client: Client
    states: SiteState
    spent: RunUsage
    at: int  # the round whose stored state the client continues from
    opened: Opened | None = None  # what secure sums of the run have opened
    changed: bool = False  # since then
    round: int | None = None  # the current one
    is_silent: bool = False  # faults are told to the operator, not to the server

    def go_to(self, round: int) -> None:
        """Load the private state of a round, unless the client has it."""
        if self.changed or self.at != round:
            self.client.inside.set_states(self.states.read(round))
            self.at, self.changed = round, False

    def keep(self, round: int) -> None:
        """Store the private state, if the round changed it."""
        if self.changed:
            self.states.keep(round, self.client.inside.get_states())
            self.at, self.changed = round, False

    def refuse_other_round(self, round: int) -> None:
        if round != self.round:
            raise Refused(f"round {round} was not begun; the current one is {self.round}")


class SiteService:
    """Answers the server of one job. Requests are numbered, so that a repeated or late one changes nothing."""

    def __init__(self, site: SiteFile, name: str) -> None:
        self.name = name
        self.site = site
        self.audit = AuditLog(site.folder / AUDIT)
        self._lock = threading.Lock()
        self._session, self._last, self._reply = b"", PING, b""  # of the server; the last request, the reply to it
        self._run = ""
        self._announced: Header = {}  # by the hello of the run
        self._data: FederatedData | None = None
        self._job: SiteJob | None = None
        self._rate = RequestRate(site.policy.budget.requests_per_minute)
        self._approval = ""  # the request that a person has approved, until the run's first round
        self._quotas = SiteQuotas(site.policy.budget, site.folder)
        self._ops: dict[str, Callable[[Header, bytes], bytes]] = {
            "hello": self._hello,
            "start": self._start,
            "restore": self._restore,
            "begin": self._begin,
            "keep": self._keep,
            "finish": self._pass_on,
            "evaluate": self._evaluate,
        }

    def answer(self, caller: str, request: bytes) -> bytes:
        """Answer a request. Never raises: an exception would carry its text to the server."""
        if len(request) < ENVELOPE.size:
            return self._refuse(request, "the request is shorter than its envelope", caller=caller)
        if len(request) > self.site.policy.budget.message_mb * 10**6:
            return self._refuse(b"", f"a request of {len(request)} bytes is above the limit of the policy")
        session, number = ENVELOPE.unpack_from(request)
        message = request[ENVELOPE.size :]
        if caller != SERVER:
            return self._refuse(message, f'"{caller}" called; only the server may', caller=caller)
        if number == PING:
            return b""
        with self._lock:
            if not self._session and number == PING + 1:  # a late request of an earlier server begins no session
                self._session = session
            if session != self._session:
                return self._refuse(message, "the request is of another session", number=number)
            if number == self._last:
                return self._reply
            if number < self._last:
                return self._refuse(message, f"request {number} is late, {self._last} was answered", number=number)
            self._last, self._reply = number, self._answer_new(number, message)
            return self._reply

    def _answer_new(self, number: int, message: bytes) -> bytes:
        text: dict[str, str] = {}
        try:
            self._quotas.check()
            with self._quotas.computing():
                reply = self._do(message)
            self._quotas.count(len(reply))
        except Refused as why:
            return self._refuse(message, str(why), why.state, run=self._run, number=number)
        except Exception as error:
            kind = "an error" if self._is_silent else type(error).__name__
            reply = codec.encode({"error": f"{self.name}: {kind}; see its audit log"}, None)
            text = {"text": f"{type(error).__name__}: {error}"}
        self.audit.write_message(message, reply, self._places, run=self._run, number=number, **text)
        return reply

    def _refuse(self, message: bytes, why: str, state: str = "", **about: Any) -> bytes:
        told = why if self.site.policy.reasons or state else UNSAID
        reply = codec.encode({"refused": told, "error": f"{self.name} refuses: {told}", "state": state}, None)
        try:
            self.audit.write_message(message, reply, self._places, because=why, **about)
        except Exception:  # the request cannot be read
            self.audit.write_line(about | {"refused": why, "bytes": len(message)})
        return reply

    def _do(self, message: bytes) -> bytes:
        self._rate.count()
        check_participation(self.site.folder, self._run)
        header, tree = read_request(message, self._places)
        op = header.get("op")
        if op is None:
            return self._train(header, message, tree)
        if op not in ("hello", "start") and self._job is None:
            raise Refused(f"{op} before a run was started")
        return self._ops[op](header, message)

    @property
    def _places(self) -> int:
        """The most numbers that a vector of a message may have: two models."""
        return 0 if self._job is None else 2 * sum(v.numel() for v in self._job.experiment.model.params.values())

    def _hello(self, header: Header, message: bytes) -> bytes:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}", header["run"]):
            raise Refused(f'"{header["run"]}" cannot be the name of a run')
        if accept_list(self.site.kit, self.site.kit, header.get("revoked", {})):
            self.audit.write_line({"revoked": header["revoked"]["names"]})
        check_participation(self.site.folder, header["run"])
        self._end_job()
        self._run, self._announced = header["run"], header
        self._data = load_rows(self.site.data, self.name, header["seed"], header["algorithm"])
        samples = int(self._data.train.sizes[0])
        code = header.get("code", [])
        self.site.policy.check_run(header["algorithm"], header["model"], header["rounds"], samples, code)
        about = read_condition(self.site.folder, self.site.kit)
        return codec.encode({"samples": samples, "schema": data_schema(self._data), "condition": about}, None)

    def _start(self, header: Header, message: bytes) -> bytes:
        if self._data is None:
            raise Refused("start before hello")
        config: RunConfig = parse(without_unknown(header["config"], header.get("unset", [])))
        policy, samples = self.site.policy, int(self._data.train.sizes[0])
        policy.check_run(config.algorithm.name, config.model.name, config.rounds, samples, other_code(config))
        announced = {"algorithm": config.algorithm.name, "model": config.model.name, "rounds": config.rounds}
        announced |= {"seed": config.seed, "code": other_code(config)}
        for key, value in announced.items():  # the rows were split, and the policy asked, by what hello said
            if value != self._announced.get(key, []):
                raise Refused(f"the configuration has another {key} than hello")
        own = {"environment.epochs": config.environment.epochs, "model.by_client": config.model.by_client}
        for key in (key for key, value in own.items() if config.privacy.secure_sum and value):
            raise Refused(f"{key} differs by site, and sites of a secure sum must compute the same")
        try:
            check_options(config, "the server's configuration")
        except RunError as error:
            raise Refused(str(error)) from None
        if header["schema"] != data_schema(self._data):
            raise Refused("the server's schema is not that of this site's data")
        try:
            refuse_large(config, self._data.shape, self._data.outputs, policy.budget.parameters)
        except RunError as error:
            raise Refused(str(error)) from None
        experiment = self._account.add_noise(assemble(config, self._data))
        policy.check_sends(experiment.algorithm)
        policy.check_sums(is_sealed=experiment.aggregation.reduction.is_sealed)
        mine, theirs = promise(experiment), header["promise"]
        for part in mine:
            if mine[part] != theirs.get(part):
                raise Refused(
                    f"the server's {part} is not this site's: {digest(theirs.get(part))}, {digest(mine[part])}"
                )
        folder, is_sealed = self.site.folder / self._run, experiment.aggregation.reduction.is_sealed
        if header["first"] != -experiment.algorithm.preparation:
            raise Refused(f"a run of {experiment.algorithm.title} does not begin at round {header['first']}")
        if SiteLedger(policy.budget, self.site.folder).has_limited_too_many:
            raise Refused("this site takes part in no run today; ask its operator")
        states = SiteState(folder / "states")
        cohort = frozenset(header.get("cohort", [])) if is_sealed else frozenset()
        agreed = {part: its for part, its in mine.items() if part != "options"}  # which the configuration has
        identity = {"promise": digest(agreed), "config": config.plain(), "cohort": sorted(cohort)}
        need = RunNeed.of(policy.budget, experiment, config.rounds, has_metrics=policy.sends_metrics)
        if policy.approve == "ask":
            asker = border.plain_text(self._announced.get("submitter", "")) or "the server"
            what = describe_run(config, experiment, self.site, need, asker)
            whole = digest({"config": config.plain(), "promise": mine}, 64)
            what |= {"digest": whole}
            self._approval = require_approval(self.site.folder, self.site.kit, self._run, what)
        if not (folder / RUN).exists():
            need.check(policy.budget)
            SiteLedger(policy.budget, self.site.folder).book(self._run, need)
            write_json(folder / RUN, identity)
        elif not _is_same_run(read_json(folder / RUN), identity):
            raise Refused(f"this site has a run {self._run} with another configuration; choose another --run")
        torch.set_num_threads(config.federation.threads or 1)
        party = None
        if is_sealed:
            # sites that were told other things sum nothing together
            run = digest([self._run, header["config"], header["schema"], mine], 64)
            party = make_party(self.site.kit, policy, self.name, run, header["client"], folder)
        is_silent = is_sealed or policy.budget.privacy.epsilon > 0
        client = Client(experiment, 0, self._describe_error, party, cohort, self._conceal if is_silent else None)
        client.inside.start()
        self._end_job()
        usage, opened = RunUsage(policy.budget, folder, need), None if party is None else party.opened
        self._job = SiteJob(experiment, client, states, usage, header["first"], opened, is_silent=is_silent)
        if header["first"] not in states.rounds():
            states.keep(header["first"], client.inside.get_states())
        return codec.encode({"kept": states.rounds()}, None)

    def _end_job(self) -> None:
        """Another run, or the same one begun again, has what this one has left of its limits."""
        if self._job is not None and self._job.states.folder.exists():  # or the site has withdrawn from it
            self._job.spent.save()
        self._job = None

    @property
    def _is_silent(self) -> bool:
        """Whether errors say nothing to the server: what they depend on is hidden by secure sums or noise."""
        policy = self.site.policy
        is_hidden = policy.sums_of > 0 or policy.budget.privacy.epsilon > 0
        return is_hidden or (self._job is not None and self._job.is_silent)

    def _conceal(self, fault: str) -> None:
        """A fault of a reply goes to the operator in place of the server; too many end the run here."""
        self.audit.write_line({"run": self._run, "limited": fault})
        ledger = SiteLedger(self.site.policy.budget, self.site.folder)
        ledger.count_limited()
        if self._running_job.spent.count_limited() or ledger.has_limited_too_many:
            record = read_participation(self.site.folder)
            withdrawn = sorted({*record["withdrawn"], self._run})
            write_json(self.site.folder / STANDING, record | {"withdrawn": withdrawn})
            self.audit.write_line({"run": self._run, "limited": "too many replies: withdrawn from the run"})

    @property
    def _account(self) -> PrivacyAccount:
        return PrivacyAccount(self.site.policy.budget.privacy, self.site.folder)

    @property
    def round(self) -> int | None:
        """The current round, if a run was started."""
        return None if self._job is None else self._job.round

    @property
    def _running_job(self) -> SiteJob:
        assert self._job is not None
        return self._job

    def _restore(self, header: Header, message: bytes) -> bytes:
        self._running_job.round = None  # a round begins with a state, and goes on with no other
        self._running_job.go_to(header["kept"])
        return codec.encode({}, None)

    def _begin(self, header: Header, message: bytes) -> bytes:
        job = self._running_job
        job.round = None  # until all of this has succeeded
        if self._approval:
            use_approval(self.site.folder, self._approval, self._run)
            self._approval = ""
        job.spent.begin(header["round"])
        job.go_to(header["kept"])
        if job.opened is not None:
            job.opened.present = job.states.digest(header["kept"])
        job.states.forget_but({header["kept"], *header["needed"]})
        reply = job.client.answer(message)
        job.round = header["round"]
        return reply

    def _keep(self, header: Header, message: bytes) -> bytes:
        job = self._running_job
        job.refuse_other_round(header["round"])
        job.keep(header["round"])
        return codec.encode({"kept": job.at}, None)

    def _pass_on(self, header: Header, message: bytes) -> bytes:
        return self._running_job.client.answer(message)

    def _evaluate(self, header: Header, message: bytes) -> bytes:
        kind, policy, job = header["keep"], self.site.policy, self._running_job
        if kind and kind not in KINDS:
            raise Refused(f'"{kind}" is not a kind of personal model')
        policy.check_round(header["round"])
        if not policy.sends_metrics:
            if kind:
                try:
                    self._evaluate_here(header, message)
                except Exception as error:  # it may depend on the data, and no metrics leave
                    self.audit.write_line({"run": self._run, "text": f"{type(error).__name__}: {error}"})
            raise Refused("the policy does not allow metrics to leave")
        if not kind:
            check_splits(policy.budget, job.experiment.data, header["splits"])
            job.spent.count_evaluation(header["round"])
            answer, metrics = self._evaluate_here(header, message)
        else:  # the model stays here whether metrics leave or not
            answer, metrics = self._evaluate_here(header, message)
            check_splits(policy.budget, job.experiment.data, header["splits"])
            job.spent.count_evaluation(header["round"])
        return codec.encode(answer, (round_metrics(policy.budget, metrics), {}))

    def _evaluate_here(self, header: Header, message: bytes) -> tuple[Header, Tree]:
        """Metrics; the model is kept at the site, if it is to be."""
        answer, (metrics, model) = codec.decode(self._pass_on(header, message), self._places)
        if header["keep"]:
            self._keep_personal(header["keep"], header["round"], model)
        return answer, metrics

    def _keep_personal(self, kind: str, round: int, model: Tree) -> None:
        assert self._data is not None
        folder = self.site.folder / self._run / "personal"
        entry = write_tree(folder / f"{kind}.safetensors", model)
        about = {"round": round, "classes": list(self._data.classes), "features": list(self._data.features)}
        about |= {"site": self.name}
        write_json(folder / f"{kind}.json", entry | about)

    def _train(self, header: Header, message: bytes, tree: Tree) -> bytes:
        """Answer a call, a cotangent or a step of a secure sum of the current round, as the algorithm declares it."""
        job = self._job
        if job is None:
            raise Refused("a call before a run was started")
        job.refuse_other_round(header["round"])
        is_sealed = job.experiment.aggregation.reduction.is_sealed
        if "sum" in header:
            if not is_sealed:
                raise Refused("a secure sum in a run without secure sums")
            return job.client.handle(message)  # its replies were checked when they were computed
        function, algorithm = header.get("function"), job.experiment.algorithm
        if function is not None and function not in client_functions(algorithm):
            raise Refused(f'"{function}" is not a client function of {algorithm.title}')
        if (function is None or header["taped"]) and GRADIENTS not in self.site.policy.sends:
            raise Refused(f'a taped call sends "{GRADIENTS}", which the policy does not allow')
        if is_sealed and (function is None or header["taped"]):
            raise Refused("a taped call in a run with secure sums: it would send this site's gradients openly")
        if is_sealed and function is not None:
            refuse_private_message(job.experiment, function, header["placed"])
        if self.site.policy.budget.refuse_imprints and (why := find_imprint(tree)):
            raise Refused(f"the model would read training rows off the reply: {why}")
        job.spent.count_call(header["round"])
        self._account.spend(job.experiment, function, header.get("placed", []), tree, header.get("taped", False))
        job.changed = True
        reply = job.client.handle(message)
        answer, tree = codec.decode(reply, self._places)
        if function is not None and "error" not in answer:
            declared = None if is_sealed else reply_example(algorithm, function, job.experiment.model)
            wrong = schema_difference(schema(tree), schema(declared))
            if wrong:
                raise Refused(f"the reply of {function} {wrong}; it does not leave")
        return reply

    def _describe_error(self, error: Exception) -> str:
        """The type of an error and where it happened, for the server; its text goes to the audit log."""
        self.audit.write_line({"run": self._run, "text": str(error)})
        kind = type(error.__cause__ or error).__name__
        return f"{str(error).partition(f': {kind}: ')[0]}: {kind}; see the site's audit log"


def _is_same_run(stored: dict[str, Any], identity: dict[str, Any]) -> bool:
    """Whether a run goes on. An earlier version may have written fewer keys: the others have their defaults."""
    try:
        return (stored | {"config": parse(stored["config"]).plain()}) == identity
    except (UserError, KeyError):
        return False


def finished_fits(private: Path) -> dict[str, Path]:
    """Folders of the finished fits of tables, by the name of the run, oldest first."""
    from fedtailor.tables.site_fit import is_fit

    ended = [file for file in private.glob("*/personal/last.json") if (file.parents[1] / RUN).exists()]
    ordered = sorted((file.parents[1] for file in ended), key=lambda folder: (folder / RUN).stat().st_mtime)
    return {folder.name: folder for folder in ordered if is_fit(parse(read_json(folder / RUN)["config"]))}


def fit_results(file: Path, run: str = "", metric: str = "") -> tuple[Path, dict[str, Any]]:
    """The folder and the record of a fit at this site, the latest by default; written when first asked for."""
    from fedtailor.tables.site_fit import site_fit

    site = read_site(file)
    known = finished_fits(site.folder)
    chosen = [name for name in known if not run or name == run or name.rpartition("-")[0] == run]
    if not known:
        raise RunError(f"{site.folder}: no finished fit; start one with fedtailor federation fit --admin FOLDER")
    if not chosen:
        raise RunError(f'{site.folder}: no fit "{run}"; {nearest(run, known)}')
    folder = known[chosen[-1]]
    if (folder / FIT_FOLDER / FIT).exists():
        record = read_json(folder / FIT_FOLDER / FIT)
        if not metric or record["metric"] == metric:
            return folder / FIT_FOLDER, dict(record)
    config: RunConfig = parse(read_json(folder / RUN)["config"])
    states = SiteState(folder / "states")
    round = max(states.rounds())
    if round < 1:
        raise RunError(f"{folder}: the fit has not finished yet")
    name = read_json(folder / "personal" / "last.json")["site"]
    data = load_rows(site.data, name, config.seed, config.algorithm.name)
    state = tree_map(lambda v: v[0], states.read(round)["state"])
    return folder / FIT_FOLDER, site_fit(config, data, state, folder / FIT_FOLDER, metric)
