"""A user's function as a source: `data.source = "my.module:load"`, called with the seed and its options."""

from __future__ import annotations

import inspect
from pathlib import Path

from fedtailor.core.data import FederatedData
from fedtailor.data.configs import OwnConfig
from fedtailor.errors import DataError, nearest
from fedtailor.plugins import import_object


def load(config: OwnConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    """Call the function with the seed and the configured options."""
    function, options = import_object("data.source", config.load), dict(config.model_extra or {})
    if not callable(function):
        raise DataError(f'data.source: "{config.load}" is not a function load(seed, **options)')
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in options:
        if key not in parameters and not takes_any:
            raise DataError(
                f'data.{key}: "{config.load}" has no option "{key}"; {nearest(key, set(parameters) - {"seed"})}'
            )
    data = function(seed=seed, **options)
    if not isinstance(data, FederatedData):
        raise DataError(f'data.source: "{config.load}" returned a {type(data).__name__}, not a FederatedData')
    return data
