"""Derivatives by torch's forward mode, whose rules are loaded with the first of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


@cache
def _load_rules() -> None:
    """Torch scripts its rules when they are first needed, and warns that scripting is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        one = torch.ones((), device="cpu")
        torch.func.jvp(torch.exp, (one,), (one,))


def jacobian(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """All derivatives of a function of a vector, by forward mode: few inputs, many outputs."""
    _load_rules()
    found: Callable[[Tensor], Tensor] = torch.func.jacfwd(function)
    return found


def hessian(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Second derivatives of a number."""
    _load_rules()
    found: Callable[[Tensor], Tensor] = torch.func.hessian(function)
    return found
