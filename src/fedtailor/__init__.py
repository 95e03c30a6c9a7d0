"""fedtailor: personalized federated learning that learns what each client should share.

import fedtailor as ft; ft.fit gives each site of your own data a personal model, ft.run trains one algorithm.
Authors of a method find all they need here too: from fedtailor import Algorithm, on_client, MODEL, COUNT.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedtailor.version import __version__ as __version__

if TYPE_CHECKING:
    from fedtailor.algorithms import register as register
    from fedtailor.api import advise as advise
    from fedtailor.api import compare as compare
    from fedtailor.api import fit as fit
    from fedtailor.api import load as load
    from fedtailor.api import run as run
    from fedtailor.core.algorithm import BODY as BODY
    from fedtailor.core.algorithm import COUNT as COUNT
    from fedtailor.core.algorithm import HEAD as HEAD
    from fedtailor.core.algorithm import MODEL as MODEL
    from fedtailor.core.algorithm import NUMBER as NUMBER
    from fedtailor.core.algorithm import Algorithm as Algorithm
    from fedtailor.core.algorithm import ReplySpec as ReplySpec
    from fedtailor.core.algorithm import common as common
    from fedtailor.core.algorithm import on_client as on_client
    from fedtailor.core.context import ClientContext as ClientContext
    from fedtailor.core.data import FederatedData as FederatedData
    from fedtailor.core.data import Rows as Rows
    from fedtailor.core.federation import Federation as Federation
    from fedtailor.core.model import Model as Model
    from fedtailor.core.trees import Params as Params
    from fedtailor.core.trees import Tree as Tree
    from fedtailor.data.federated import federated as federated
    from fedtailor.data.mapped_arrays import MappedArray as MappedArray
    from fedtailor.inference.statistical_model import anova as anova
    from fedtailor.inference.statistical_model import model as model

_PUBLIC = {  # by module: torch is imported by the first use
    "fedtailor.api": ("advise", "compare", "fit", "load", "run"),
    "fedtailor.algorithms": ("register",),
    "fedtailor.inference.statistical_model": ("anova", "model"),
    "fedtailor.data.federated": ("federated",),
    "fedtailor.data.mapped_arrays": ("MappedArray",),
    "fedtailor.core.algorithm": (
        *("Algorithm", "ReplySpec", "on_client", "common"),
        *("MODEL", "BODY", "HEAD", "COUNT", "NUMBER"),
    ),
    "fedtailor.core.context": ("ClientContext",),
    "fedtailor.core.federation": ("Federation",),
    "fedtailor.core.model": ("Model",),
    "fedtailor.core.data": ("FederatedData", "Rows"),
    "fedtailor.core.trees": ("Params", "Tree"),
}


__all__ = sorted(name for names in _PUBLIC.values() for name in names)


def __getattr__(name: str) -> Any:
    for module, names in _PUBLIC.items():
        if name in names:
            if module in (
                "fedtailor.api",
                "fedtailor.inference.statistical_model",
            ):  # threads that spin while they wait are slow on busy cores
                os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
            return getattr(import_module(module), name)
    if name[:1].isupper():
        from fedtailor.algorithms import algorithms

        for kind in algorithms().values():
            if kind.__name__ == name:
                return kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
