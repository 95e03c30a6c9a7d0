"""What server and sites say to each other: the envelope and the form of requests, and what both must agree on."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.algorithm import client_functions, declared_sums, reply_example
from fedtailor.core.data import FederatedData
from fedtailor.core.experiment import Experiment
from fedtailor.core.random import STREAMS
from fedtailor.core.trees import Tree, items, schema
from fedtailor.errors import UserError
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.user_code import names
from fedtailor.version import __version__


class Refused(UserError):
    """A site refuses a request; the text says which rule it breaks. `state` is what it says of itself, if anything."""

    def __init__(self, message: str = "", *, state: str = "") -> None:
        super().__init__(message)
        self.state = state


PROTOCOL = 1  # raised when what server and sites say, or what they compute from it, changes; versions need not be equal
ENVELOPE = struct.Struct(">16sQ")  # the server's session, and the number of the request
PING = 0  # the number of a request for a sign of life, which may come at any time


def data_schema(data: FederatedData) -> dict[str, Any]:
    """What all sites must have in common; beside the number of samples it is all that the server learns of the data."""
    return {
        "task": data.task,
        "x": {path: _sample_form(v) for path, v in items(data.train.first(1))},
        "y": _sample_form(data.train.y),
        "outputs": data.outputs,
        "classes": list(data.classes),
        "features": list(data.features),
    }


def _sample_form(v: Tensor) -> list[Any]:
    """Shape and type of a sample; floating-point numbers get the precision of the model later."""
    return [list(v.shape[1:]), "float32" if v.is_floating_point() else str(v.dtype).removeprefix("torch.")]


def promise(experiment: Experiment) -> dict[str, Any]:
    """What server and site must agree on: algorithm, options, what may leave and which sums it may enter."""
    algorithm = experiment.algorithm
    sends = {
        name: {path: [list(shape), str(dtype)] for path, (shape, dtype) in schema(example).items()}
        for name in sorted(client_functions(algorithm))
        for example in [reply_example(algorithm, name, experiment.model)]
    }
    options = {f.name: getattr(algorithm, f.name) for f in fields(algorithm)}
    contract = {"protocol": PROTOCOL, "streams": STREAMS, "algorithm": algorithm.title}
    contract |= {"options": options, "sends": sends}
    contract["sums"] = declared_sums(algorithm)
    reduction = experiment.aggregation.reduction
    contract["bounds"] = asdict(reduction) if reduction.is_sealed and is_dataclass(reduction) else {}
    plain: dict[str, Any] = json.loads(json.dumps(contract, default=str))
    return plain


def digest(value: Any, digits: int = 16) -> str:
    """A hash of a JSON value: short, to be shown; where somebody could look for two with the same, of 64 digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:digits]


def other_code(config: RunConfig) -> list[str]:
    """Code that a configuration names as "module:name", beside algorithm and model; a policy must list it."""
    named = {key: name for key, name in names(config).items() if key not in ("algorithm.name", "model.name")}
    return sorted(set(named.values()))


def config_for(config: RunConfig, client: int) -> dict[str, Any]:
    """The configuration of a run for one site, without the parts on other sites."""
    epochs = config.environment.epochs
    plain = config.plain()
    plain["federation"] = {"threads": config.federation.threads, "max_norm": config.federation.max_norm}
    plain["environment"] = {"epochs": [epochs[client]]} if epochs else {}
    return plain


def unset_keys(config: RunConfig) -> list[str]:
    """Keys of a configuration that have their default: a site of an earlier version may not know them."""
    return sorted(
        f"{name}.{key}"
        for name, section in config
        if isinstance(section, BaseModel)
        for key, field in type(section).model_fields.items()
        if getattr(section, key) == field.get_default(call_default_factory=True)
    )


def without_unknown(config: dict[str, Any], unset: Sequence[str]) -> dict[str, Any]:
    """A server's configuration without keys that this version lacks and that the server has left at their default."""
    known = dict(config)
    for name, section in RunConfig():
        if isinstance(config.get(name), dict) and isinstance(section, BaseModel) and name != "algorithm":
            lacks = {key for key in config[name] if key not in type(section).model_fields and f"{name}.{key}" in unset}
            known[name] = {key: value for key, value in config[name].items() if key not in lacks}
    return known


Whole = Annotated[int, Field(ge=0, le=2**31)]
Round = Annotated[int, Field(ge=-(2**31), le=2**31)]  # rounds of preparation come before 1
Text = Annotated[str, Field(max_length=200)]
Places = Annotated[list[Whole], Field(max_length=100_000)]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Operation(_Form):
    op: Text


class HelloRequest(_Operation):
    protocol: Whole
    version: Text
    run: Text
    algorithm: Text
    model: Text
    rounds: Whole
    seed: Annotated[int, Field(ge=0, le=2**63)]
    code: Annotated[list[Text], Field(max_length=100)] = []
    submitter: Text = ""  # who asks for the run, as the server has been told
    revoked: dict[str, Any] = {}  # the authority's signed list, if there is one


class StartRequest(_Operation):
    config: dict[str, Any]
    client: Whole
    about: dict[str, Any] = Field(alias="schema")
    promise: dict[str, Any]
    first: Round
    unset: Annotated[list[Text], Field(max_length=10_000)] = []  # keys of config with the server's default
    cohort: Annotated[list[Text], Field(max_length=100_000)] = []  # names, where there are secure sums


class RestoreRequest(_Operation):
    kept: Round


class BeginRequest(_Operation):
    round: Round
    kept: Round
    needed: Annotated[list[Round], Field(max_length=1000)]


class KeepRequest(_Operation):
    round: Round


class EvaluateRequest(_Operation):
    round: Round
    splits: Annotated[list[Literal["train", "val", "test"]], Field(max_length=3)]
    keep: Text


class CallRequest(_Form):
    function: Text
    round: Round
    call: Whole
    placed: Annotated[list[bool], Field(max_length=100)]
    taped: bool


class CotangentRequest(_Form):
    round: Round
    call: Whole


class SumTermFields(_Form):
    call: Whole
    paths: Annotated[list[str], Field(max_length=100_000)]
    weight: str | None


class SumStepRequest(_Form):
    round: Round
    sum: Whole
    step: Literal["keys", "deal", "mask", "confirm", "reveal"]
    term: SumTermFields | None = None
    clients: Places | None = None
    dealers: Places | None = None
    survivors: Places | None = None
    signers: Places | None = None


OPERATIONS: dict[str, type[_Form]] = {
    "hello": HelloRequest,
    "start": StartRequest,
    "restore": RestoreRequest,
    "begin": BeginRequest,
    "keep": KeepRequest,
    "finish": _Operation,
    "evaluate": EvaluateRequest,
}
NEEDED = {
    "keys": {"term"},
    "deal": {"clients"},
    "mask": {"dealers"},
    "confirm": {"survivors"},
    "reveal": {"signers"},
}


def read_request(message: bytes, most: int) -> tuple[dict[str, Any], Tree]:
    """Header and tensors of a request, none with more than `most` numbers; refuses requests of unknown form."""
    try:
        check_request(codec.decode_header(message))
        return codec.decode(message, most)
    except codec.BrokenMessage as error:
        raise Refused(f"the request {error}") from None


def check_request(header: dict[str, Any]) -> None:
    """Refuse a header that is not of the form of its operation. The refusal names the wrong key, not its value."""
    name = header.get("op")
    if name is not None and (not isinstance(name, str) or name not in OPERATIONS):
        raise Refused(f'no operation "{str(name)[:40]}"')
    if name == "hello" and header.get("protocol") != PROTOCOL:
        theirs, version = (str(header.get(key))[:20] for key in ("protocol", "version"))
        raise Refused(
            f"the server speaks protocol {theirs} (fedtailor {version}), this site {PROTOCOL} ({__version__}); "
            "upgrade the older"
        )
    form = OPERATIONS[name] if name is not None else _training_form(header)
    operation = name or form.__name__.removesuffix("Request").lower()
    try:
        form.model_validate(header)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise Refused(f'{operation} with "{key[:40]}" is not known at this site') from None
        raise Refused(f"{operation}: {key[:80]}: {first['msg']}") from None
    if form is SumStepRequest:
        step, present = header["step"], {k for k in SumStepRequest.model_fields if header.get(k) is not None}
        if wrong := sorted((present - {"round", "sum", "step"}) ^ NEEDED[step]):
            raise Refused(f'a secure sum: step "{step}" with or without "{wrong[0]}"')


def _training_form(header: dict[str, Any]) -> type[_Form]:
    if "sum" in header:
        return SumStepRequest
    return CallRequest if "function" in header else CotangentRequest


MOST_SAMPLES, LARGEST = 10**9, 2**24  # of a site, and numbers in one sample
MOST_NAMES, LONGEST_NAME = 100_000, 200  # of classes or features, and characters of each
MOST_PARTS = 100  # of a sample
SCHEMA = ("task", "x", "y", "outputs", "classes", "features")
TYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


def hello_fault(about: dict[str, Any]) -> str:
    """Which part of a site's hello is unusable, or nothing. It decides how its replies count and what is allocated."""
    schema = about.get("schema")
    if type(about.get("samples")) is not int or not 0 < about["samples"] <= MOST_SAMPLES:
        return "number of samples"
    if not isinstance(schema, dict) or set(schema) != set(SCHEMA) or not is_name(schema["task"]):
        return "schema"
    if not isinstance(schema["x"], dict) or not all(map(_is_sample_form, [*schema["x"].values(), schema["y"]])):
        return "form of its samples"
    forms = [*schema["x"].values(), schema["y"]]
    if len(forms) > MOST_PARTS or not all(map(is_name, schema["x"])) or sum(math.prod(f[0]) for f in forms) > LARGEST:
        return "form of its samples"
    if type(schema["outputs"]) is not int or not 0 < schema["outputs"] <= LARGEST:
        return "number of outputs"
    names = (schema["classes"], schema["features"])
    is_named = all(isinstance(these, list) and all(map(is_name, these)) for these in names)
    return "" if is_named and max(map(len, names)) <= MOST_NAMES else "names of classes or features"


def is_name(value: Any) -> bool:
    """Whether it may be shown and stored as the name of a class, a feature or a part of a sample."""
    return isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable()


def _is_sample_form(form: Any) -> bool:
    if not (isinstance(form, list) and len(form) == 2 and isinstance(form[0], list) and form[1] in TYPES):
        return False
    return all(type(size) is int and 0 < size <= LARGEST for size in form[0]) and math.prod(form[0]) <= LARGEST
