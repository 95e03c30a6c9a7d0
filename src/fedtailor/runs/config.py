"""The configuration of a run: TOML in, checked; every key has one default and one sentence, here."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fedtailor.core.environment import Environment
from fedtailor.core.model import BufferPolicy
from fedtailor.core.plausible import Limits
from fedtailor.data import SOURCES, DataConfig
from fedtailor.data.configs import DigitsConfig
from fedtailor.engines import EngineName
from fedtailor.errors import ConfigError, nearest
from fedtailor.local.training import Solver
from fedtailor.privacy.sealed import Privacy

NO_MATTER = ("checkpoint", "tracking")  # sections without an influence on what comes out


class Section(BaseModel):
    """Unknown keys are errors, values never change."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Open(BaseModel):
    """A section whose further keys are the options of what it names; they are checked when that is made."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """The keys beyond the declared ones."""
        return dict(self.model_extra or {})


class AlgorithmSection(Open):
    """Which algorithm, and its hyper-parameters."""

    name: str = Field(
        default="fedrep", description="Algorithm; fedtailor list algorithms shows them and their options."
    )


class ModelSection(Open):
    """Which model, and its options."""

    name: str = Field(default="mlp", description='Model, or an own nn.Module as "package.module:Class".')
    head: tuple[str, ...] = Field(
        default=(), description="Modules of the personal end; the model's own choice if empty."
    )
    buffers: BufferPolicy = Field(
        default="private", description="BatchNorm statistics: each client's own, or averaged."
    )
    prior: Literal["none", "label"] = Field(
        default="none", description="label: add each client's own log label frequencies to the outputs."
    )
    dtype: Literal["float32", "float64"] = Field(default="float32", description="Width of floating-point numbers.")


class LocalSection(Section):
    """How a client takes its local steps, the same for every algorithm."""

    optimizer: Literal["sgd", "adam"] = Field(
        default="sgd", description="Local optimizer, started anew in every round."
    )
    lr: float = Field(default=0.05, gt=0, description="Step size.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Momentum of sgd.")
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay, added to the gradient.")
    clip: float = Field(default=0.0, ge=0, description="Largest norm of a step's gradient; 0 is no limit.")
    batch_size: int = Field(default=32, ge=0, description="Samples per step; 0 is the whole data.")
    augment: Literal["crop-flip"] | None = Field(
        default=None, description="crop-flip: train on images shifted by up to 4 pixels and flipped at random."
    )

    @property
    def solver(self) -> Solver:
        return Solver(**self.model_dump())


class FederationSection(Section):
    """Who takes part in a round, and where clients run."""

    engine: EngineName = Field(
        default="auto", description="loop, vmap, pool or wire; auto picks one of the first three and says why."
    )
    threads: int = Field(
        default=0, ge=0, description="Threads of torch; 0 is all cores for large convolutional models, else one."
    )
    chunk: int = Field(default=0, ge=0, description="Most clients in a stack of vmap; 0 is as many as fit the cache.")
    workers: int = Field(default=0, ge=0, description="Processes of pool and, in long rounds, vmap; 0 is one per core.")
    memory: int = Field(
        default=0,
        ge=0,
        description="MB of private states in memory, more lies on disk; 0 is half of the machine's.",
    )
    clients_per_round: int = Field(default=0, ge=0, description="Clients drawn for each round; 0 is all of them.")
    min_replies: int = Field(default=1, ge=1, description="With fewer usable replies a round is abandoned.")
    max_norm: float = Field(default=1e8, gt=0, description="A reply of larger norm is rejected.")
    timeout: float = Field(default=600.0, gt=0, description="Seconds that the ranks of torchrun wait for each other.")
    deadline: float = Field(default=600.0, gt=0, description="Seconds in which a site of a real federation must reply.")
    silence: float = Field(
        default=10.0, gt=0, description="Seconds without a sign of life after which such a site is away."
    )

    @property
    def budget(self) -> int:
        """Bytes of private states that may be in memory."""
        return self.memory * 2**20 or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

    @property
    def limits(self) -> Limits:
        return Limits(self.min_replies, self.max_norm)


class EnvironmentSection(Section):
    """What makes clients unequal beside their data; a list has one number per client, in the order of their names."""

    epochs: tuple[int, ...] = Field(
        default=(), description="Passes over its data that a client makes for each one asked for; 1 if empty."
    )
    answer: tuple[float, ...] = Field(
        default=(), description="Probability that a client's reply arrives in a round; 1 if empty."
    )
    leave: float = Field(default=0.0, ge=0, lt=1, description="Probability per round that a client leaves for good.")
    speed: tuple[float, ...] = Field(
        default=(), description="Samples that a client works through per unit of time; 1 if empty."
    )
    jitter: float = Field(default=0.0, ge=0, description="Spread of the logarithm of the time that a round takes.")
    deadline: float = Field(default=0.0, ge=0, description="Replies that take longer are missing; 0 is no deadline.")
    missing: Literal["renormalise", "stale"] = Field(
        default="renormalise",
        description="Means are over those who answered; or those who did not count with the model they were sent.",
    )

    def made(self, clients: int, seed: int) -> Environment:
        """For so many clients; refuses tables that do not fit."""
        for name, least, most in (("epochs", 1, 10**6), ("answer", 0.0, 1.0), ("speed", 1e-12, math.inf)):
            table = getattr(self, name)
            if table and len(table) != clients:
                raise ConfigError(f"environment.{name}: {len(table)} numbers for {clients} clients")
            wrong = [v for v in table if not least <= v <= most]
            if wrong:
                raise ConfigError(f"environment.{name}: {wrong[0]:g} is not between {least:g} and {most:g}")
        return Environment(seed=seed, **self.model_dump())


class EvaluationSection(Section):
    """When personal models are measured. Test data is read once, at the end, unless test_curve is set."""

    every: int = Field(default=1, ge=1, description="Rounds between evaluations on validation data.")
    test_curve: bool = Field(
        default=False, description="Also record test metrics at each of them; never used to select."
    )
    unseen: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of the clients that take no part in training; they join at the end and are measured.",
    )
    unseen_epochs: int | None = Field(
        default=None, ge=0, description="Epochs in which they train what is their own; 3 if not given."
    )


class PrivacySection(Section):
    """What is hidden of single clients. Secure sums and noise need algorithms that only sum replies."""

    secure_sum: bool = Field(
        default=False, description="The server sees sums of replies only, by masks; needs the wire engine."
    )
    fraction_bits: int = Field(
        default=32, ge=8, le=52, description="Numbers in a secure sum are multiples of 2 to the minus this."
    )
    clip: float = Field(
        default=0.0, ge=0, description="Largest norm of what a client changes in a message; 0 is no limit."
    )
    noise: float = Field(
        default=0.0, ge=0, description="Standard deviation of noise on sums, in units of clip; all then count the same."
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="Epsilon is told for this delta.")
    secret_noise: bool = Field(
        default=False, description="Noise that the seed does not tell; then a run cannot be repeated exactly."
    )

    def made(self) -> Privacy:
        """Refuses what does not fit together."""
        if self.noise and not self.clip:
            raise ConfigError("privacy.noise: without privacy.clip nothing limits what one client changes")
        is_sealed = self.secure_sum or self.noise > 0
        return Privacy(self.secure_sum, self.fraction_bits, self.clip, self.noise, self.secret_noise, is_sealed)


class CheckpointSection(Section):
    """How often the run can be resumed from."""

    every: int = Field(default=1, ge=1, description="Rounds between checkpoints.")
    seconds: float = Field(default=2.0, ge=0, description="Least seconds between checkpoints.")


class TrackingSection(Section):
    """Trackers that are told about every round; pip install 'fedtailor[trackers]' brings them."""

    tensorboard: bool = Field(default=False, description="Write TensorBoard's event files into the run's folder.")
    mlflow: Path | None = Field(default=None, description="Folder of MLflow's file store to write a run into.")


class RunConfig(Section):
    """One run: one algorithm, one model, one data set, one seed."""

    seed: int = Field(default=0, ge=0, description="All randomness of the run follows from it.")
    rounds: int = Field(default=20, ge=1, description="Rounds of the federation.")
    data: DataConfig = Field(default_factory=DigitsConfig, description="Where the clients' samples come from.")
    model: ModelSection = Field(default_factory=ModelSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    local: LocalSection = Field(default_factory=LocalSection)
    federation: FederationSection = Field(default_factory=FederationSection)
    environment: EnvironmentSection = Field(default_factory=EnvironmentSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    privacy: PrivacySection = Field(default_factory=PrivacySection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    def plain(self) -> dict[str, Any]:
        """Nothing but what TOML and JSON can hold; without keys that have no value and privacy not asked for."""
        tables: dict[str, Any] = json.loads(self.model_dump_json(exclude_none=True))
        if self.privacy == PrivacySection():
            del tables["privacy"]  # a comparison made before there was such a section is still the same
        return tables

    @property
    def task_id(self) -> str:
        """Equal for runs that differ in algorithm, engine and privacy only: these may be compared client by client."""
        rest = {k: v for k, v in self.plain().items() if k not in ("algorithm", "federation", "privacy", *NO_MATTER)}
        rest["clients_per_round"] = self.federation.clients_per_round
        return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


class CompareSection(Section):
    """A grid of runs."""

    name: str = Field(default="compare", description="Name of the folder that holds the runs.")
    algorithms: tuple[str | dict[str, Any], ...] = Field(
        default=("local", "fedavg"), min_length=1, description='Names, or tables such as {name = "ditto", lam = 0.5}.'
    )
    seeds: tuple[int, ...] = Field(
        default=(0,), min_length=1, description="One run of every algorithm for each of them."
    )
    workers: int = Field(default=0, ge=0, description="Runs at the same time; 0 is one per core.")


def dotted(tables: Any) -> Any:
    """Tables within tables as keys with dots: what `--set search.space.local.lr=[0.1]` makes."""
    if not isinstance(tables, dict):
        return tables
    out: dict[str, Any] = {}
    for key, value in tables.items():
        inner = dotted(value)
        out |= {f"{key}.{k}": v for k, v in inner.items()} if isinstance(inner, dict) else {key: inner}
    return out


Space = Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], BeforeValidator(dotted)]  # key -> its values


class SearchSection(Section):
    """Hyper-parameters, searched on validation data before anything is compared."""

    trials: int = Field(default=6, ge=1, description="Settings tried for each algorithm, the same number for all.")
    seed: int = Field(default=1000, ge=0, description="Seed of the search runs, none of those that are compared.")
    rounds: int = Field(default=0, ge=0, description="Rounds of a search run; 0 is as many as are compared.")
    space: Space = Field(
        default_factory=dict, description='Values to try, by key, for all algorithms: "local.lr" = [0.01, 0.1].'
    )
    algorithms: dict[str, Space] = Field(
        default_factory=dict, description="The same for options of one algorithm, by its name or label."
    )


class CompareConfig(RunConfig):
    """What all runs have in common, and the grid."""

    compare: CompareSection = Field(default_factory=CompareSection)
    search: SearchSection | None = Field(default=None, description="How settings are found, if they are searched.")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; fedtailor init writes a commented one") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def with_settings(tables: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The tables with `a.b=value` settings from the command line put in; values are TOML, or else text."""
    out = _copy(tables)
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f'--set {setting}: expected KEY=VALUE, such as "local.lr=0.1"')
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        _put(out, path.strip(), value, f"--set {setting}")
    return out


def with_values(tables: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with the value of each key such as "local.lr" put in."""
    out = _copy(tables)
    for path, value in values.items():
        _put(out, path, value, path)
    return out


def _copy(tables: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(tables, default=str))


def _put(table: dict[str, Any], path: str, value: Any, origin: str) -> None:
    *parents, last = path.split(".")
    for key in parents:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f'{origin}: "{key}" is not a table')
    table[last] = value


def parse(tables: dict[str, Any], kind: type[RunConfig] = RunConfig, origin: str = "config") -> Any:
    """A checked configuration; the first thing wrong is a `ConfigError` that names its key."""
    tables = dict(tables)
    _check_finite(tables, origin)
    if isinstance(data := tables.get("data"), dict):
        tables["data"] = {"source": "digits"} | data
    for section, key in (("data", "path"), ("tracking", "mlflow")):  # a run must be resumable from any folder
        table = tables.get(section)
        if isinstance(table, dict) and not isinstance(path := table.get(key), bool | None):
            tables[section] = table | {key: str(Path(str(path)).expanduser().resolve())}
    try:
        return kind.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {_explain(error, kind)}") from None


def _check_finite(tables: dict[str, Any], origin: str) -> None:
    """JSON, and with it the record of a run, has no infinity."""
    for key, value in dotted(tables).items():
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{origin}: {key} = {number}: must be a finite number")


def _explain(error: ValidationError, kind: type[BaseModel]) -> str:
    """The first thing wrong, in one line with the key as it stands in the file."""
    first = error.errors()[0]
    model: type[BaseModel] = kind
    path: list[str] = []
    for part in map(str, first["loc"]):
        if path == ["data"] and part in SOURCES:  # pydantic names the chosen source; the file does not
            model = SOURCES[part].config
            continue
        path.append(part)
        field = model.model_fields.get(part)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))  # it may be optional
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), model)
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        return f'unknown key "{key}"; {nearest(path[-1], model.model_fields)}'
    if first["type"] == "union_tag_invalid":
        tag = str(first["ctx"]["tag"])
        return f'data.source: no data source "{tag}"; {nearest(tag, SOURCES)}'
    if first["type"] == "missing":
        return f"{key}: not given; {model.model_fields[path[-1]].description}"
    if first["type"] in ("tuple_type", "list_type"):
        listed = _as_list(first["input"])
        told = f"{key} = {first['input']!r}: Input should be a valid list such as {listed}"
        return f"{told}; from a shell: --set {shlex.quote(f'{key}={listed}')}"
    return f"{key} = {first['input']!r}: {first['msg']}"


def _as_list(given: Any) -> str:
    """What was probably meant: a shell takes the quotes away from ["id"], and leaves [id]."""
    if not isinstance(given, str):
        return json.dumps([given], default=str)
    parts = [part.strip(" \"'") for part in given.strip(" []").split(",")]
    return json.dumps([int(part) if part.isdecimal() else part for part in parts])
