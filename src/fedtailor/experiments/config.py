"""The configuration of a run: TOML in, checked against the sections."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, Field, ValidationError

from fedtailor.data import SOURCES, DataConfig
from fedtailor.data.configs import DigitsConfig
from fedtailor.data.files import expand_home
from fedtailor.errors import ConfigError, nearest
from fedtailor.experiments.sections import (
    RANGE,
    VALUES,
    AggregationSection,
    AlgorithmSection,
    AttackSection,
    CheckpointSection,
    CompareSection,
    EarlyStoppingSection,
    EnvironmentSection,
    EvaluationSection,
    FederationSection,
    LocalSection,
    ModelSection,
    PrivacySection,
    SearchSection,
    Section,
    ServerSection,
    TaskSection,
    TrackingSection,
    dotted,
)

CONFIGS = Path(str(resources.files("fedtailor") / "configs"))  # the demo and the published tables
METHOD = ("algorithm", "server", "federation", "privacy", "aggregation")  # sections that runs on one task may differ in
LATER = ("task", "server", "early_stopping", "privacy", "aggregation", "attack")
NO_MATTER = ("checkpoint", "tracking")  # sections without an influence on what comes out


class RunConfig(Section):
    """One run: one algorithm, one model, one data set, one seed."""

    seed: int = Field(default=0, ge=0, description="Seed of all randomness in the run.")
    rounds: int = Field(default=20, ge=1, description="Communication rounds.")
    data: DataConfig = Field(default_factory=DigitsConfig, description="Where the clients' samples come from.")
    model: ModelSection = Field(default_factory=ModelSection)
    task: TaskSection = Field(default_factory=TaskSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    local: LocalSection = Field(default_factory=LocalSection)
    server: ServerSection = Field(default_factory=ServerSection)
    federation: FederationSection = Field(default_factory=FederationSection)
    environment: EnvironmentSection = Field(default_factory=EnvironmentSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    early_stopping: EarlyStoppingSection = Field(default_factory=EarlyStoppingSection)
    privacy: PrivacySection = Field(default_factory=PrivacySection)
    aggregation: AggregationSection = Field(default_factory=AggregationSection)
    attack: AttackSection = Field(default_factory=AttackSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    def plain(self) -> dict[str, Any]:
        """Nothing but what TOML and JSON can hold; without keys that have no value and privacy not asked for."""
        tables: dict[str, Any] = json.loads(self.model_dump_json(exclude_none=True))
        for name in LATER:  # a comparison made before there was such a section is still the same
            if getattr(self, name) == type(getattr(self, name))():
                del tables[name]
        return tables

    @property
    def task_id(self) -> str:
        """Equal for runs that differ in algorithm, engine, privacy and mean only: they may be compared by client."""
        rest = {k: v for k, v in self.plain().items() if k not in (*METHOD, *NO_MATTER)}
        rest["clients_per_round"] = self.federation.clients_per_round
        if self.federation.sampler != type(self.federation)().sampler:  # older folders have none
            rest["sampler"] = self.federation.sampler
        return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


class CompareConfig(RunConfig):
    """What all runs have in common, and the grid."""

    compare: CompareSection = Field(default_factory=CompareSection)
    search: SearchSection | None = Field(default=None, description="Hyper-parameter search; none by default.")


def read_toml(path: Path) -> dict[str, Any]:
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
        tables["data"] = data = {"source": "digits"} | data
        if ":" in str(data["source"]):
            tables["data"] = data | {"source": "own", "load": str(data["source"])}
    for section, key in (
        ("data", "path"),
        ("data", "tokenizer"),
        ("tracking", "mlflow"),
    ):  # a run must be resumable from any folder
        table = tables.get(section)
        if isinstance(table, dict) and not isinstance(path := table.get(key), bool | None):
            tables[section] = table | {key: str(expand_home(str(path)).resolve())}
    try:
        return kind.model_validate(tables)
    except ValidationError as error:
        code = "config.key" if error.errors()[0]["type"] == "extra_forbidden" else "config.value"
        raise ConfigError(f"{origin}: {_explain(error, kind)}", code=code) from None


def _check_finite(tables: dict[str, Any], origin: str) -> None:
    """JSON, and with it the record of a run, has no infinity."""
    for key, value in dotted(tables).items():
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{origin}: {key} = {number}: must be a finite number", code="config.value")


def _explain(error: ValidationError, kind: type[BaseModel]) -> str:
    """The first thing wrong, in one line with the key as it stands in the file."""
    first = error.errors()[0]
    model: type[BaseModel] = kind
    path: list[str] = []
    for part in map(str, first["loc"]):
        if path == ["data"] and part in SOURCES:  # pydantic names the chosen source; the file does not
            model = SOURCES[part].config
            continue
        if path[:1] == ["search"] and part in (VALUES, RANGE):
            continue
        if path == ["evaluation", "unseen"]:  # pydantic names the kind of value that it tried, a fraction or names
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
        reason = f"{key} = {first['input']!r}: Input should be a valid list such as {listed}"
        return f"{reason}; from a shell: --set {shlex.quote(f'{key}={listed}')}"
    return f"{key} = {first['input']!r}: {first['msg']}"


def _as_list(value: Any) -> str:
    """What was probably meant: a shell takes the quotes away from ["id"], and leaves [id]."""
    if not isinstance(value, str):
        return json.dumps([value], default=str)
    parts = [part.strip(" \"'") for part in value.strip(" []").split(",")]
    return json.dumps([int(part) if part.isdecimal() else part for part in parts])
