"""LoRA in any module, by peft: the weights of the module stay as they are, and are neither trained nor sent.

Hu et al., ICLR 2022. A target layer W x becomes W x + alpha / rank B A x. Parameters have peft's names, such as
"encoder.query.lora_A.default.weight".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from fedtailor.core.model import is_under
from fedtailor.errors import ConfigError, nearest

INSTALL = "pip install 'fedtailor[adapters]'"


class AdapterConfig(BaseModel):
    """A small trained part beside layers that stay as they are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["lora"] = Field(default="lora", description="LoRA, by the package peft.")
    rank: int = Field(default=8, ge=1, description="Rank of the update of a layer.")
    alpha: float = Field(default=16.0, gt=0, description="The update is scaled by alpha / rank.")
    targets: tuple[str, ...] = Field(
        default=(), description='Layers, such as "*.query"; empty: dense ones before the head.'
    )
    train: tuple[str, ...] | None = Field(default=None, description="Parts trained as they are; none given: the head.")


def add_lora(module: nn.Module, adapter: AdapterConfig, head: Sequence[str] = ()) -> None:
    """Change the module: only its adapters are trained, and what `adapter.train` names, or else the head."""
    train = head if adapter.train is None else adapter.train
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError(f"model.adapter: the package peft is missing; {INSTALL}") from None
    layers = _targets(module, adapter.targets, (*train, *head))
    also = _parameters(module, train)
    exactly = "|".join(re.escape(name) for name in layers)
    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, lora_dropout=0.0, target_modules=exactly, bias="none")  # type: ignore[arg-type]
    try:
        inject_adapter_in_model(config, module)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"model.adapter: {str(error).splitlines()[0]}") from None
    for parameter in also:
        parameter.requires_grad_(True)
    for part in module.modules():
        # the fused forms of torch read the weights of such layers and pass their adapters by
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0
        elif isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False


def trained_parameters(module: nn.Module) -> list[str]:
    return [name for name, value in module.named_parameters() if value.requires_grad]


def _targets(module: nn.Module, targets: Sequence[str], kept: Sequence[str]) -> list[str]:
    """Names of the layers that get an adapter."""
    names = [name for name, part in module.named_modules() if name and not list(part.children())]
    if not targets:
        dense = [name for name in names if type(module.get_submodule(name)) is nn.Linear]
        layers = [name for name in dense if not any(is_under(name, part) for part in kept)]
        if not layers:
            raise ConfigError("model.adapter: the model has no dense layer before its head; name layers with targets")
        return layers
    for target in targets:
        if not any(is_under(name, target) for name in names):
            raise ConfigError(f'model.adapter: targets: the model has no layer "{target}"; {nearest(target, names)}')
    weighty = [name for name in names if list(module.get_submodule(name).parameters(recurse=False))]
    layers = [name for name in weighty if any(is_under(name, target) for target in targets)]
    for name in layers:
        if isinstance(module.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            raise ConfigError(
                f'model.adapter: targets: "{name}" belongs to nn.MultiheadAttention, which reads its weight without '
                "calling it, so an adapter has no effect; name other layers"
            )
    return layers


def _parameters(module: nn.Module, parts: Sequence[str]) -> list[nn.Parameter]:
    chosen = []
    for part in parts:
        matching = [value for name, value in module.named_parameters() if is_under(name, part)]
        if not matching:
            known = [name for name, _ in module.named_modules() if name]
            raise ConfigError(f'model.adapter: train: the model has no part "{part}"; {nearest(part, known)}')
        chosen += matching
    return chosen
