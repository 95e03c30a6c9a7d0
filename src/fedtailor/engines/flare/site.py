"""The site's half: every message is checked against the site's own policy, recorded, and only then answered.

Private states, the personal model and the record lie in the site's own folder. What the server is told of an error is
its kind; the text, which may hold values of the data, stays in the record.
"""

from __future__ import annotations

import re
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedtailor import __version__, engines
from fedtailor.core import codec
from fedtailor.core.algorithm import client_functions, sent_example
from fedtailor.core.me import Setting
from fedtailor.core.trees import Tree, schema, schema_difference
from fedtailor.data.federated import FederatedData
from fedtailor.data.site import SiteData, load_site
from fedtailor.engines.flare.audit import Audit
from fedtailor.engines.flare.messages import ENVELOPE, PING, data_schema, digest, promise
from fedtailor.engines.flare.policy import GRADIENTS, Policy, Refused
from fedtailor.engines.flare.vault import Vault
from fedtailor.engines.wire import Header
from fedtailor.engines.wire import Site as Client
from fedtailor.errors import ConfigError
from fedtailor.runs.assemble import put_together
from fedtailor.runs.config import RunConfig, parse
from fedtailor.runs.store import read_json, write_json, write_tree

SERVER = "server"  # the only one that may call
KINDS = ("last", "selected")  # personal models that are kept
AUDIT, RUN = "audit.jsonl", "run.json"


class SiteFile(BaseModel):
    """A site's own file: its data, its policy, and where it keeps what is private."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path = Field(default=Path("private"), description="Where private states, models and the record are kept.")
    data: SiteData
    policy: Policy


def read_site(path: Path) -> SiteFile:
    """Read and check a site's file; paths in it are relative to it."""
    try:
        made = SiteFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; fedtailor federation init writes one for each site") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        what = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
        raise ConfigError(f"{path}: {key}: {what}") from None
    base = path.resolve().parent
    data = made.data.model_copy(update={"path": base / made.data.path.expanduser()})
    return made.model_copy(update={"folder": base / made.folder.expanduser(), "data": data})


class SiteService:
    """Answers the server of one job. Requests are numbered: one that is repeated or late changes nothing."""

    def __init__(self, site: SiteFile, name: str) -> None:
        self.name = name
        self.site = site
        self.audit = Audit(site.folder / AUDIT)
        self._lock = threading.Lock()
        self._session = b""
        self._last, self._reply = 0, b""
        self._run = ""
        self._data: FederatedData | None = None
        self._setting: Setting | None = None
        self._client: Client | None = None
        self._vault: Vault | None = None
        self._round: int | None = None
        self._at: int | None = None  # the round whose kept state the client started from
        self._changed = False  # since then
        self._ops: dict[str, tuple[Callable[[Header, bytes], bytes], set[str]]] = {
            "hello": (self._hello, {"op", "version", "run", "algorithm", "model", "rounds", "seed"}),
            "start": (self._start, {"op", "config", "client", "schema", "promise", "first"}),
            "restore": (self._restore, {"op", "kept"}),
            "begin": (self._begin, {"op", "round", "kept", "needed"}),
            "keep": (self._keep, {"op", "round"}),
            "finish": (self._pass_on, {"op"}),
            "evaluate": (self._evaluate, {"op", "round", "splits", "keep"}),
        }

    def answer(self, caller: str, request: bytes) -> bytes:
        """One request of a caller. Never raises: an exception would carry its text to the server."""
        session, number = ENVELOPE.unpack_from(request)
        message = request[ENVELOPE.size :]
        if caller != SERVER:
            return self._refusal(message, f'"{caller}" called; only the server may', caller=caller)
        if number == PING:
            return b""
        with self._lock:
            if not self._session and number == PING + 1:  # a late request of an earlier server begins no session
                self._session = session
            if session != self._session:
                return self._refusal(message, "the request is of another session", number=number)
            if number == self._last:
                return self._reply
            if number < self._last:
                return self._refusal(message, f"request {number} is late, {self._last} was answered", number=number)
            self._last, self._reply = number, self._answered(number, message)
            return self._reply

    def _answered(self, number: int, message: bytes) -> bytes:
        text: dict[str, str] = {}
        try:
            reply = self._do(message)
        except Refused as why:
            return self._refusal(message, str(why), run=self._run, number=number)
        except Exception as error:
            reply = codec.encode({"error": f"{self.name}: {type(error).__name__}; its record says more"}, None)
            text = {"text": str(error)}
        self.audit.write(message, reply, run=self._run, number=number, **text)
        return reply

    def _refusal(self, message: bytes, why: str, **about: Any) -> bytes:
        reply = codec.encode({"refused": why, "error": f"{self.name} refuses: {why}"}, None)
        try:
            self.audit.write(message, reply, **about)
        except Exception:  # not even a message
            self.audit.line(about | {"refused": why, "bytes": len(message)})
        return reply

    def _do(self, message: bytes) -> bytes:
        header = codec.decode_header(message)
        op = header.get("op")
        if op is None:
            return self._train(header, message)
        if op not in self._ops:
            raise Refused(f'no operation "{op}"')
        do, known = self._ops[op]
        if strange := sorted(set(header) - known):
            raise Refused(f'{op} with "{strange[0]}" is not known here')
        if op not in ("hello", "start") and self._client is None:
            raise Refused(f"{op} before a run was started")
        return do(header, message)

    def _hello(self, header: Header, message: bytes) -> bytes:
        if header["version"] != __version__:
            raise Refused(f"the server runs fedtailor {header['version']}, this site {__version__}")
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}", header["run"]):
            raise Refused(f'"{header["run"]}" cannot be the name of a run')
        self._run = header["run"]
        self._data = load_site(self.site.data, self.name, seed=header["seed"])
        samples = int(self._data.train.sizes[0])
        self.site.policy.check_run(header["algorithm"], header["model"], header["rounds"], samples)
        return codec.encode({"samples": samples, "schema": data_schema(self._data)}, None)

    def _start(self, header: Header, message: bytes) -> bytes:
        if self._data is None:
            raise Refused("start before hello")
        config: RunConfig = parse(header["config"])
        policy, samples = self.site.policy, int(self._data.train.sizes[0])
        policy.check_run(config.algorithm.name, config.model.name, config.rounds, samples)  # as it was in hello?
        if header["schema"] != data_schema(self._data):
            raise Refused("the server describes other data than this site has")
        setting = put_together(config, self._data)
        policy.check_sends(setting.algorithm)
        policy.check_sums(is_sealed=setting.is_sealed)
        mine, theirs = promise(setting), header["promise"]
        for part in mine:
            if mine[part] != theirs.get(part):
                raise Refused(
                    f"the server's {part} is not this site's: {digest(theirs.get(part))}, {digest(mine[part])}"
                )
        folder = self.site.folder / self._run
        self._vault = Vault(folder / "states")
        identity = {"promise": digest(mine), "config": header["config"]}
        if not (folder / RUN).exists():
            write_json(folder / RUN, identity)
        elif read_json(folder / RUN) != identity:
            raise Refused(f"a run {self._run} of another configuration is kept here")
        torch.set_num_threads(config.federation.threads or engines.threads(setting))
        self._setting = setting
        self._client = Client(setting, 0, self._kind_of, header["client"], max(2, policy.sums_of))
        self._client.inside.start()
        self._at, self._changed = header["first"], False
        if self._at not in self._vault.rounds():
            self._vault.keep(self._at, self._client.inside.get_states())
        return codec.encode({"kept": self._vault.rounds()}, None)

    def _go_to(self, round: int) -> None:
        """The private state as it was kept after a round."""
        assert self._client is not None
        assert self._vault is not None
        if self._changed or self._at != round:
            self._client.inside.set_states(self._vault.read(round))
            self._at, self._changed = round, False

    def _restore(self, header: Header, message: bytes) -> bytes:
        self._go_to(header["kept"])
        return codec.encode({}, None)

    def _begin(self, header: Header, message: bytes) -> bytes:
        assert self._client is not None
        assert self._vault is not None
        self.site.policy.check_round(header["round"])
        self._go_to(header["kept"])
        self._vault.forget_but({header["kept"], *header["needed"]})
        self._round = header["round"]
        return self._client.answer(message)

    def _keep(self, header: Header, message: bytes) -> bytes:
        assert self._client is not None
        assert self._vault is not None
        if header["round"] != self._round:
            raise Refused(f"round {header['round']} is not the one that was begun ({self._round})")
        if self._changed:
            self._vault.keep(header["round"], self._client.inside.get_states())
            self._at, self._changed = header["round"], False
        return codec.encode({"kept": self._at}, None)

    def _pass_on(self, header: Header, message: bytes) -> bytes:
        assert self._client is not None
        return self._client.answer(message)

    def _evaluate(self, header: Header, message: bytes) -> bytes:
        if not self.site.policy.metrics:
            raise Refused("the policy does not let metrics out")
        kind = header["keep"]
        if kind and kind not in KINDS:
            raise Refused(f'"{kind}" is no kind of personal model')
        answer, (metrics, model) = codec.decode(self._pass_on(header, message))
        if kind:
            self._keep_personal(kind, header["round"], model)
        return codec.encode(answer, (metrics, {}))

    def _keep_personal(self, kind: str, round: int, model: Tree) -> None:
        assert self._data is not None
        folder = self.site.folder / self._run / "personal"
        entry = write_tree(folder / f"{kind}.safetensors", model)
        about = {"round": round, "classes": list(self._data.classes), "features": list(self._data.features)}
        write_json(folder / f"{kind}.json", entry | about)

    def _train(self, header: Header, message: bytes) -> bytes:
        """A call, a cotangent or a step of a secure sum: of this round, declared, and answered by what is declared."""
        if self._client is None or self._setting is None:
            raise Refused("a call before a run was started")
        if header["round"] != self._round:
            raise Refused(f"round {header['round']} is not the one that was begun ({self._round})")
        if "sum" in header:
            if not self._setting.is_sealed:
                raise Refused("a secure sum in a run without them")
            return self._client.handle(message)  # of replies that were declared when they were made
        function, algorithm = header.get("function"), self._setting.algorithm
        if function is not None and function not in client_functions(algorithm):
            raise Refused(f'"{function}" is not a client function of {algorithm.title}')
        if (function is None or header["taped"]) and GRADIENTS not in self.site.policy.sends:
            raise Refused(f'a taped call sends "{GRADIENTS}", which the policy does not let out')
        self._changed = True
        reply = self._client.handle(message)
        answer, tree = codec.decode(reply)
        if function is not None and "error" not in answer:
            declared = None if self._setting.is_sealed else sent_example(algorithm, function, self._setting.model)
            wrong = schema_difference(schema(tree), schema(declared))
            if wrong:
                raise Refused(f"the reply of {function} {wrong}; it does not leave")
        return reply

    def _kind_of(self, error: Exception) -> str:
        """What happened and where; the error's own text, which may hold values of the data, goes to the record."""
        self.audit.line({"run": self._run, "text": str(error)})
        kind = type(error.__cause__ or error).__name__
        return f"{str(error).partition(f': {kind}: ')[0]}: {kind}; the site's record says more"
