"""fedtailor: personalized federated learning that learns what each client should share.

import fedtailor as ft; ft.fit gives each site of your own data a personal model, ft.run trains one algorithm.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedtailor.api import fit as fit
    from fedtailor.api import load as load
    from fedtailor.api import run as run

__version__ = "0.1.0"

_LAZY = ("fit", "load", "run")  # torch is imported by the first use


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module("fedtailor.api"), name)
    if name[:1].isupper():
        from fedtailor.algorithms import algorithms

        for kind in algorithms().values():
            if kind.__name__ == name:
                return kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]
