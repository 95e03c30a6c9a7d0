"""Docstrings of public names list their parameters and say what is returned."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fedtailor
from fedtailor import Algorithm, ClientContext, FederatedData, Federation
from fedtailor.api import Personal

CLASSES = (Algorithm, ClientContext, FederatedData, Federation, Personal)


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in fedtailor.__all__:
        if inspect.isfunction(found := getattr(fedtailor, name)):
            yield name, found
    for kind in CLASSES:
        for name, found in vars(kind).items():
            if inspect.isfunction(found) and not name.startswith("_"):
                yield f"{kind.__name__}.{name}", found


def documented(text: str) -> set[str]:
    """The names under Args."""
    found = re.search(r"^Args:\n((?: {4}.*\n|\n)+)", text + "\n", re.MULTILINE)
    return set(re.findall(r"^ {4}(\w+): ", found[1], re.MULTILINE)) if found else set()


@pytest.mark.parametrize(("name", "function"), [pytest.param(n, f, id=n) for n, f in functions()])
def test_parameters_and_results_are_documented(name: str, function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    text = inspect.getdoc(function) or ""
    assert documented(text) == signature.parameters.keys() - {"self"}
    assert ("Returns:" in text) == (
        signature.return_annotation != "None" and bool(signature.parameters.keys() - {"self"})
    )


def test_every_public_name_is_there() -> None:
    assert len(fedtailor.__all__) == len(set(fedtailor.__all__)) > 15
    for name in fedtailor.__all__:
        found = getattr(fedtailor, name)
        assert not inspect.isclass(found) or inspect.getdoc(found), name
