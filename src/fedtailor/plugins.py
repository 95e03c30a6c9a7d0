"""What users write themselves is named "package.module:Class" wherever a name of ours may stand."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from fedtailor.errors import ConfigError


def imported(key: str, name: str) -> Any:
    """The object that `name` stands for; modules in the current folder are found too."""
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f'{key}: cannot import "{name}": {error}') from None
