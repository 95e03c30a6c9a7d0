"""Parts of a module whose activations are not kept for the backward pass but computed again in it.

Chen et al., 2016. In a federation a module gets its parameters for one call only, so that each part remembers those
that it was called with. What it draws, such as dropout, it draws again. Within torch.func.grad and its like, which know
no such parts, activations are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch._C import _functorch
from torch.nn.utils import stateless
from torch.utils.checkpoint import checkpoint

from fedtailor.errors import ConfigError, nearest


class Recomputed:
    """In place of the `forward` of a part."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part

    def __call__(self, *args: Any, **named: Any) -> Any:
        part, forward = self.part, type(self.part).forward
        if not torch.is_grad_enabled() or _in_transform():
            return forward(part, *args, **named)
        tensors = dict(part.named_parameters()) | dict(part.named_buffers())

        def run(*args: Any, **named: Any) -> Any:
            with stateless._reparametrize_module(part, tensors):
                return forward(part, *args, **named)

        return checkpoint(run, *args, use_reentrant=False, **named)


def _in_transform() -> bool:
    kinds = [level.key() for level in _functorch.get_interpreter_stack() or ()]
    return any(kind != _functorch.TransformType.Vmap for kind in kinds)


def recompute(module: nn.Module, parts: Sequence[str]) -> None:
    """Change the module: modules of these names, which may be globs, keep no activations."""
    names = {name: part for name, part in module.named_modules() if name}
    chosen: list[str] = []
    for pattern in parts:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(f'model.checkpoint: the model has no part "{pattern}"; {nearest(pattern, names)}')
        chosen += matching
    for name in chosen:
        if any(name.startswith(f"{other}.") for other in chosen):
            continue  # within a part that is computed again as a whole
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in names[name].modules()):
            raise ConfigError(f'model.checkpoint: "{name}" has BatchNorm, whose statistics would count twice')
        names[name].forward = Recomputed(names[name])
