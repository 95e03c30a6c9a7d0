"""What a module changes when it is called: buffers, which clients keep apart, or something that nobody could."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtailor.core.random import seeded
from fedtailor.core.trees import Tree, leaves, tree_map
from fedtailor.errors import ConfigError

WARM_START = "warm_start"  # a buffer of this name holds where the solve of each sample of a batch begins, then its end
OURS = frozenset(vars(nn.Module())) | {"forward"}  # of every module


class BufferChanges(NamedTuple):
    """The buffers that a forward pass in training changes, by name."""

    counted: frozenset[str]  # not floating point, such as counters and masks
    rebound: frozenset[str]  # replaced by new tensors


def refuse_types(module: nn.Module, dtype: torch.dtype) -> None:
    """Fail if a parameter has a type in which it would not be trained: complex, or narrower or wider than `dtype`."""
    for name, value in module.named_parameters():
        if value.is_complex():
            raise ConfigError(
                f'model.name: "{name}" is complex; hold it as real numbers with a last dimension of 2, and use '
                "torch.view_as_complex in forward"
            )
        if value.dtype in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f'model.name: "{name}" is {value.dtype}; make it torch.float32, and for lower precision set '
                'local.precision = "bfloat16"'
            )
        if value.is_floating_point() and value.dtype.itemsize > dtype.itemsize:
            raise ConfigError(f'model.name: "{name}" is {value.dtype} and model.dtype {dtype}; set model.dtype wider')


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with floating-point numbers of another width; complex buffers stay complex."""

    def convert(value: Tensor) -> Tensor:
        return value.to(dtype.to_complex()) if value.is_complex() else value.to(dtype)

    return module._apply(lambda v: convert(v) if v.is_floating_point() or v.is_complex() else v)


def buffer_changes(module: nn.Module, x: Tree, known: frozenset[str]) -> BufferChanges:
    """Found by trial, on two samples or more. What would not stay with its client is a `ConfigError` with its name.

    Refused are changes in evaluation, of parameters, of a buffer's shape or type, and of what is no buffer, such as one
    that is not among the `known` ones, those of the module before it was ever called.
    """
    mode, kept = module.training, _always_evaluating(module)
    try:
        return _changes(module, x, kept, known)
    finally:
        _set_mode(module, mode, kept)


def _changes(module: nn.Module, x: Tree, kept: list[nn.Module], known: frozenset[str]) -> BufferChanges:
    before = {k: v for k, v in module.named_buffers() if k.rpartition(".")[2] != WARM_START}
    first = _pass(module, before, x, kept, training=True)
    noted = _attributes(module)
    _pass(module, before, _other_samples(x), kept, training=True)  # what is kept of them must not reach the next pass
    again = _pass(module, before, x, kept, training=True)
    for name in first.after:
        _refuse_other_form(name, before[name], first.after[name])
    if (attribute := _what_changed(noted, _attributes(module))) is not None:
        raise ConfigError(
            f'model.name: forward changes "{attribute}", which all clients would share; register it as a buffer, and '
            "change it only if self.training"
        )
    if not _are_close(first.outputs, again.outputs):
        raise ConfigError(
            f"model.name: {type(module).__name__} gives other outputs for the same samples, buffers and random numbers:"
            " it keeps something outside of its buffers, which all clients would share; register it as a buffer"
        )
    read = _pass(module, before, x, kept, training=False)
    for name in sorted(read.changed):
        if not _are_close(read.after[name], before[name]):
            raise ConfigError(
                f'model.name: forward changes the buffer "{name}" in evaluation, so that a prediction would depend on '
                "those before it; change it only if self.training"
            )
    if new := [k for k, _ in module.named_buffers() if k not in known]:
        raise ConfigError(f'model.name: forward makes the buffer "{new[0]}"; make it in __init__, with its shape')
    changed = {k for k in first.changed | again.changed if not before[k].is_floating_point()}
    if complex_one := sorted(k for k in changed if before[k].is_complex()):
        raise ConfigError(f'model.name: forward changes the complex buffer "{complex_one[0]}"; hold it as real numbers')
    return BufferChanges(frozenset(changed), first.rebound | again.rebound)


def _other_samples(x: Tree) -> Tree:
    return tree_map(lambda v: v / 2 + 0.25 if v.is_floating_point() else v[:1].expand_as(v), x)


class _Pass(NamedTuple):
    outputs: Tree
    after: dict[str, Tensor]
    changed: frozenset[str]
    rebound: frozenset[str]


def _pass(module: nn.Module, buffers: dict[str, Tensor], x: Tree, kept: list[nn.Module], *, training: bool) -> _Pass:
    """A forward pass on copies of all buffers."""
    given = {k: v.detach().clone() for k, v in buffers.items()}
    after, versions = dict(given), {k: (v, v._version) for k, v in module.named_parameters()}
    _set_mode(module, training, kept)
    args, named = ((), x) if isinstance(x, dict) else ((x,), {})
    with torch.no_grad(), seeded("module state"):
        outputs = torch.func.functional_call(module, after, args, named)
    for name, (value, version) in versions.items():
        if value._version != version:
            raise ConfigError(
                f'model.name: forward changes the parameter "{name}" in place; compute with a changed copy of it'
            )
    rebound = frozenset(k for k, v in after.items() if v is not given[k])
    written = frozenset(k for k, v in given.items() if v._version or not torch.equal(v, buffers[k]))
    return _Pass(
        tree_map(lambda v: v.clone() if isinstance(v, Tensor) else None, plain_outputs(outputs)),
        after,
        rebound | written,
        rebound,
    )


def plain_outputs(outputs: Any) -> Tree:
    """What a task is given of the outputs of a module: of an object with `logits`, these."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    return dict(outputs) if isinstance(outputs, dict) else outputs


def _always_evaluating(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if not m.training] if module.training else []


def _set_mode(module: nn.Module, training: bool, kept: list[nn.Module]) -> None:
    module.train(training)
    for part in kept:
        part.eval()


def _refuse_other_form(name: str, before: Tensor, after: Tensor) -> None:
    if not isinstance(after, Tensor) or (before.shape, before.dtype) != (after.shape, after.dtype):
        form = f"{after.dtype} {list(after.shape)}" if isinstance(after, Tensor) else type(after).__name__
        raise ConfigError(
            f'model.name: forward makes of the buffer "{name}", {before.dtype} {list(before.shape)}, {form}; '
            "it must keep its shape and type"
        )


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers and tensors that are neither parameters nor buffers, by name; of tensors, which one and its version."""
    return dict(_items(module))


def _items(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            if key in OURS:
                continue
            name = f"{prefix}.{key}" if prefix else key
            if isinstance(value, bool | int | float):
                yield name, value
            elif isinstance(value, Tensor):
                yield name, (id(value), value._version)
            elif isinstance(value, list | dict | set):
                yield name, len(value)


def _what_changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if isinstance(old, tuple) and isinstance(new, tuple):
            if old[0] == new[0] and old[1] != new[1]:  # written in place; a new tensor may be a note of the last pass
                return name
        elif old != new and not (isinstance(old, tuple) or isinstance(new, tuple)):
            return name
    return None


def _are_close(a: Tree, b: Tree) -> bool:
    pairs = list(zip(leaves(a), leaves(b), strict=True))
    return all(
        torch.allclose(u, v, rtol=1e-4, atol=1e-6, equal_nan=True) if u.is_floating_point() else torch.equal(u, v)
        for u, v in pairs
    )
