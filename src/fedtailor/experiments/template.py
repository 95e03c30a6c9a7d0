"""A configuration to begin with."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import tomli_w
from pydantic import BaseModel

from fedtailor.algorithms import algorithms
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.sections import AlgorithmSection, ModelSection
from fedtailor.models import MODELS


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
