"""The section on the model, and on clients that have another one."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import Field, ValidationError

from fedtailor.core.model import BufferPolicy
from fedtailor.errors import ConfigError, nearest
from fedtailor.experiments.sections import OpenSection
from fedtailor.models.adapters import AdapterConfig

SAME = ("buffers", "prior", "dtype")  # for all clients


class ModelSection(OpenSection):
    """Which model, and its options."""

    name: str = Field(default="mlp", description='Model, or an own nn.Module as "package.module:Class".')
    head: tuple[str, ...] = Field(
        default=(), description="Modules of the personal head, or globs; empty: the model's default."
    )
    adapter: AdapterConfig | None = Field(default=None, description="Adapters to train instead of the weights.")
    buffers: BufferPolicy = Field(
        default="private", description="BatchNorm statistics: private to each client, or averaged (mean)."
    )
    prior: Literal["none", "label"] = Field(
        default="none", description="label: add each client's log label frequencies to its logits."
    )
    dtype: Literal["float32", "float64"] = Field(default="float32", description="Floating-point precision.")
    checkpoint: tuple[str, ...] | None = Field(
        default=None,
        description="Gradient checkpointing: parts, or globs, whose activations are recomputed to save memory.",
    )
    by_client: dict[str, dict[str, Any]] | None = Field(
        default=None,
        description="Clients with a different model, by name or glob: its name, head, adapter, checkpoint and options.",
    )

    def at(self, client: str) -> ModelSection:
        """The model of a client: the first entry of `by_client` that has its name, else this one."""
        own = next((v for name, v in (self.by_client or {}).items() if fnmatchcase(client, name)), None)
        base = self.model_dump(exclude={"by_client"}, exclude_none=True)
        if own is None:
            return ModelSection(**base)
        for key in own.keys() & {*SAME, "by_client"}:
            raise ConfigError(f'model.by_client: "{key}" is the same for all clients; set model.{key}')
        if "name" in own:  # options of one model mean nothing to another
            base = {k: base[k] for k in SAME}
        try:
            return ModelSection(**(base | own))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(f'model.by_client: {key} for "{client}": {first["msg"]}', code="config.value") from None

    def check_clients(self, clients: Sequence[str]) -> None:
        """Fail if an entry of `by_client` is for nobody."""
        for name in self.by_client or ():
            if not any(fnmatchcase(client, name) for client in clients):
                raise ConfigError(f'model.by_client: no client "{name}"; {nearest(name, clients)}')
