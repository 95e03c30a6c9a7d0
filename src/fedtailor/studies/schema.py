"""The JSON schema of a configuration: the sections' own, with options of algorithms, models and data by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

import tomli_w
from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

from fedtailor.algorithms import algorithms
from fedtailor.core.task import TASKS
from fedtailor.data import SOURCES
from fedtailor.experiments.config import CompareConfig, RunConfig
from fedtailor.experiments.sections import AlgorithmSection, ModelSection, SearchSection
from fedtailor.models import MODELS
from fedtailor.studies.reproduce import Published
from fedtailor.version import __version__

Schema = dict[str, Any]
OWN = {"type": "string", "pattern": ":"}  # "module:Class", of which nothing is known here


def configuration_schema() -> Schema:
    """Of a run or a comparison; of a published table where there are rows."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A configuration of fedtailor {__version__}",
        "type": "object",
        "if": {"required": ["rows"]},
        "then": _published(),
        "else": _run(),
    }


def _run() -> Schema:
    schema, sections = _sections()
    properties = schema["properties"]
    properties["data"] = _named("source", "digits", {n: _of(info.config) for n, info in SOURCES.items()})
    properties["model"] = _named("name", "mlp", _with(sections["model"], _models()))
    properties["algorithm"] = _named("name", "fedrep", _with(sections["algorithm"], _algorithms()))
    listed = _algorithms()
    names = {"anyOf": [_enum(listed), OWN]}
    one = _named(
        "name",
        None,
        {
            n: _closed(p | {"name": {}, "label": {"type": "string"}, "set": {"type": "object"}})
            for n, p in listed.items()
        },
    )
    properties["compare"]["properties"]["algorithms"]["items"] = {"if": {"type": "string"}, "then": names, "else": one}
    return schema


def _published() -> Schema:
    schema = _inlined(Published.model_json_schema())
    values = {"type": "object", "propertyNames": {"enum": sorted(_keys())}}
    common, sections = _sections()
    for name, options in _all_options().items():  # which of them fit is said by rows and columns
        open_section = sections.get(name, {})
        common["properties"][name] = _closed(open_section | options)
    schema["properties"]["common"] = common
    schema["properties"]["scale"]["additionalProperties"] = values
    for part in ("rows", "columns"):
        properties = schema["properties"][part]["items"]["properties"]
        properties["set"] = properties["set"] | values
        properties["by_column"]["items"] = values
    return schema


def _sections() -> tuple[Schema, dict[str, Schema]]:
    """The schema without references; and the declared keys of the sections that take further ones."""
    schema = _inlined(CompareConfig.model_json_schema())
    search = next(kind for kind in schema["properties"]["search"]["anyOf"] if kind.get("type") == "object")
    of_each = {name: _space(options) for name, options in _algorithms().items()}
    labels: Schema = {"type": "object"}  # of rows with a name of their own, whose options are not known here
    rows = {"type": "object", "properties": of_each, "additionalProperties": labels}
    search["properties"] |= {"space": _space(), "algorithms": rows}
    schema["properties"]["search"] = search
    return schema, {name: schema["properties"][name]["properties"] for name in ("model", "algorithm")}


def _named(key: str, default: str | None, variants: Mapping[str, Schema]) -> Schema:
    """A table whose keys depend on the name in it."""
    known = {"anyOf": [_enum(variants), OWN]}
    cases = [{"if": _is(key, name, name == default), "then": variant} for name, variant in variants.items()]
    return {"type": "object", "properties": {key: known}, "required": [] if default else [key], "allOf": cases}


def _is(key: str, name: str, is_default: bool) -> Schema:
    return {"properties": {key: _enum([name])}} | ({} if is_default else {"required": [key]})


def _enum(names: Any) -> Schema:
    """Names are read without regard to case."""
    return {"type": "string", "enum": sorted({form for name in names for form in (name, name.upper(), name.title())})}


def _with(declared: Schema, variants: Mapping[str, Schema]) -> dict[str, Schema]:
    others = {k: v for k, v in declared.items() if k != "name"}
    return {name: _closed({"name": declared["name"]} | others | options) for name, options in variants.items()}


def _closed(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _of(kind: type[BaseModel]) -> Schema:
    return _inlined(kind.model_json_schema())


def _algorithms() -> dict[str, Schema]:
    by_name = {}
    for name, kind in algorithms().items():
        hints = get_type_hints(kind)
        options = {f.name: _kind(hints[f.name], f.default) for f in dataclasses.fields(kind)}
        by_name[name] = options | ({"preset": _enum(kind.presets)} if kind.presets else {})
    return by_name


def _models() -> dict[str, Schema]:
    by_name: dict[str, Schema] = {}
    for name, kind in MODELS.items():
        parameters = inspect.signature(kind).parameters
        by_name[name] = {k: {} for k in parameters if k not in ("shape", "outputs")}
    return by_name


def _kind(annotation: Any, default: Any) -> Schema:
    try:
        schema = _inlined(TypeAdapter(annotation).json_schema())
    except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError):
        return {}
    return schema | ({} if default is dataclasses.MISSING else {"default": default})


def _all_options() -> dict[str, Schema]:
    """Of data, models, algorithms and tasks, whichever they belong to."""
    data: Schema = {key: {} for info in SOURCES.values() for key in info.config.model_fields}
    model: Schema = {key: {} for options in _models().values() for key in options}
    algorithm: Schema = {key: {} for options in _algorithms().values() for key in options}
    task: Schema = {field.name: {} for kind in TASKS.values() for field in dataclasses.fields(kind)}
    return {"data": data, "model": model, "algorithm": algorithm, "task": task}


def _keys() -> set[str]:
    """Every key with its section, as "local.lr"; sections and keys at the top too."""
    keys, options = set(CompareConfig.model_fields), _all_options()
    for name, section in CompareConfig(search=SearchSection()):
        declared = type(section).model_fields if isinstance(section, BaseModel) and name != "data" else ()
        keys |= {f"{name}.{key}" for key in (*declared, *options.get(name, ()))}
    return keys


def _space(options: Iterable[str] = ()) -> Schema:
    """Values to try, by key or option; or, as TOML also writes it, by table and key."""
    values = {"anyOf": [{"type": "array", "minItems": 1}, {"type": "object"}]}
    return {"type": "object", "propertyNames": {"enum": sorted({*_keys(), *options})}, "additionalProperties": values}


def _inlined(schema: Schema) -> Schema:
    """The same without $defs: each reference replaced by what it stands for."""
    definitions = schema.pop("$defs", {})

    def resolve(part: Any) -> Any:
        if isinstance(part, list):
            return [resolve(item) for item in part]
        if not isinstance(part, dict):
            return part
        part = {key: value for key, value in part.items() if key != "discriminator"}
        reference = part.pop("$ref", None)
        out = {key: resolve(value) for key, value in part.items()}
        return out if reference is None else resolve(definitions[reference.rpartition("/")[2]]) | out

    resolved: Schema = resolve(schema)
    return resolved


def template(kind: type[RunConfig] = RunConfig) -> str:
    """A commented configuration with every key at its default; options of model and algorithm as comments."""
    defaults = kind()
    lines = [
        f"{name} = {_toml(getattr(defaults, name))}  # {kind.model_fields[name].description}"
        for name in ("seed", "rounds")
    ]
    for name in kind.model_fields:
        section = getattr(defaults, name)
        if not isinstance(section, BaseModel):
            continue
        lines += ["", f"[{name}]  # {(type(section).__doc__ or '').splitlines()[0]}"]
        fields = type(section).model_fields
        for key, field in sorted(fields.items(), key=lambda item: item[0] != "source"):  # which source comes first
            value = getattr(section, key)
            line = f"{key} = {_toml(value)}" if value is not None else f"# {key} ="
            lines.append(f"{line}  # {field.description}")
        lines += _options(section)
    return "\n".join(lines) + "\n"


def _options(section: BaseModel) -> list[str]:
    """Options of the default model or algorithm; not as keys, because they would be wrong with another name."""
    match section:
        case ModelSection():
            parameters = inspect.signature(MODELS[section.name]).parameters.values()
            options = {p.name: p.default for p in parameters if p.name not in ("shape", "outputs")}
            kind = "models"
        case AlgorithmSection():
            options = {f.name: f.default for f in dataclasses.fields(algorithms()[section.name])}
            kind = "algorithms"
        case _:
            return []
    comment = f"Option of {section.name}; fedtailor list {kind} shows those of others."
    return [f"# {key} = {_toml(value)}  # {comment}" for key, value in options.items()]


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"  # in one line, so that it can be a comment
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip()
