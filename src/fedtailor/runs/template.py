"""A configuration to begin with."""

from __future__ import annotations

from typing import Any

import tomli_w
from pydantic import BaseModel

from fedtailor.runs.config import RunConfig


def template(kind: type[RunConfig] = RunConfig) -> str:
    """A commented configuration with every key at its default."""
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
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    return tomli_w.dumps({"v": list(value) if isinstance(value, tuple) else value}).removeprefix("v = ").rstrip()
