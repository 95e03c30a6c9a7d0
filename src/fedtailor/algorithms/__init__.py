"""One file, one paper. Every `Algorithm` defined in a module of this package is found by the registry."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from typing import Any, get_type_hints

from fedtailor.core.algorithm import Algorithm
from fedtailor.errors import ConfigError, nearest
from fedtailor.plugins import import_object

_registered: dict[str, type[Algorithm]] = {}
PROGRAMS = {
    "tablefit": ("fedtailor.algorithms._programs.table_fit", "TableFit"),
    "formulalinear": ("fedtailor.algorithms._programs.linear_mixed", "FormulaLinear"),
    "formulacounts": ("fedtailor.algorithms._programs.laplace_mixed", "FormulaCounts"),
    "formulacox": ("fedtailor.algorithms._programs.stratified_cox", "FormulaCox"),
    "sitemoments": ("fedtailor.algorithms._programs.site_moments", "SiteMoments"),
}
"""Made of several algorithms, not one to list or to compare: known by name, with the module and the class."""


def register(kind: type[Algorithm]) -> type[Algorithm]:
    """Register an algorithm from outside this package under its title in lower case; usable as a decorator.

    Args:
        kind: The class.

    Returns:
        The class itself.
    """
    _registered[_name(kind)] = kind
    return kind


def algorithms() -> dict[str, type[Algorithm]]:
    """Name -> class of every algorithm, names in lower case such as "fedavg+ft"."""
    classes = {}
    for module in pkgutil.iter_modules(__path__):
        for kind in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if (
                isinstance(kind, type)
                and kind.__module__ == f"{__name__}.{module.name}"
                and issubclass(kind, Algorithm)
                and not inspect.isabstract(kind)
            ):
                classes[_name(kind)] = kind
    return dict(sorted((classes | _registered).items()))


def make(name: str, options: dict[str, Any]) -> Algorithm:
    """An algorithm by name, or an own one as "module:Class"; a wrong name, option or value is a `ConfigError`."""
    from pydantic import TypeAdapter, ValidationError

    kind = find(name)
    options = dict(options)
    if (preset := options.pop("preset", None)) is not None:
        if preset not in kind.presets:
            hint = nearest(str(preset), kind.presets)
            raise ConfigError(f'algorithm.preset: no preset "{preset}"; {hint}', code="config.name")
        options = kind.presets[preset] | options
    fields = {f.name: f for f in dataclasses.fields(kind)}
    checked = {}
    for key, value in options.items():
        if key not in fields:
            hint = nearest(key, {"name", *fields})
            title = kind.title or kind.__name__
            raise ConfigError(f'algorithm.{key}: {title} has no option "{key}"; {hint}', code="config.key")
        try:
            checked[key] = TypeAdapter(get_type_hints(kind)[key]).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ConfigError(f"algorithm.{key}: {value!r}: {reason}", code="config.value") from None
    return kind(**checked)


def find(name: str) -> type[Algorithm]:
    """The class that a name stands for, or "module:Class"."""
    if ":" in name:
        kind = import_object("algorithm.name", name)
        if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
            raise ConfigError(f'algorithm.name: "{name}" is not an Algorithm')
        return kind
    if name.lower() in PROGRAMS:
        module, attribute = PROGRAMS[name.lower()]
        program: type[Algorithm] = getattr(importlib.import_module(module), attribute)
        return program
    known = algorithms()
    if name.lower() not in known:
        raise ConfigError(f'algorithm.name: no algorithm "{name}"; {nearest(name.lower(), known)}', code="config.name")
    return known[name.lower()]


def _name(kind: type[Algorithm]) -> str:
    return (kind.title or kind.__name__).lower()
