"""The description of a model in a file, checked before a model of that kind and size is made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedtailor.core.model import Model
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments.building import model_of
from fedtailor.experiments.config import RunConfig

LARGEST = 65_536  # any whole number among the options of a model, such as a width or a number of layers
MOST = 2**28  # numbers in one sample
Size = Annotated[int, Field(ge=1, le=2**24)]


class ModelDescription(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    task: str = Field(max_length=40)
    shape: Annotated[list[Size], Field(max_length=8)] | dict[str, Annotated[list[Size], Field(max_length=8)]]
    outputs: Size
    classes: list[str]


def read_description(about: Any, origin: str) -> ModelDescription:
    """The description in a file; one that no run could have written is a `RunError` that names the key."""
    try:
        description = ModelDescription.model_validate({k: about[k] for k in ModelDescription.model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if "[" not in str(part))  # not which kind of list it is
        raise RunError(f"{origin}: {key}: {first['msg']}") from None
    except (KeyError, TypeError):
        raise RunError(f"{origin}: does not say what its model reads; another version of fedtailor wrote it") from None
    sizes = description.shape.values() if isinstance(description.shape, dict) else [description.shape]
    if sum(map(math.prod, sizes)) > MOST:
        raise RunError(f"{origin}: shape: samples of {description.shape} are too large")
    if description.task == "classification" and description.classes and len(description.classes) != description.outputs:
        raise RunError(f"{origin}: classes: {len(description.classes)} names for {description.outputs} outputs")
    return description


def check_options(config: RunConfig, origin: str) -> None:
    """Options of a model from outside: no number so large that making it would exhaust the machine."""
    for key, number in _numbers(config.model.options):
        if abs(number) > LARGEST:
            raise RunError(f"{origin}: model.{key} = {number}: larger than any model here ({LARGEST})")


def make_described_model(
    config: RunConfig, about: ModelDescription, tensors: Mapping[str, Tensor], origin: str
) -> Model:
    """The model of a configuration, made only after its shapes, without numbers, were found to be those of the file."""
    check_options(config, origin)
    shape = {k: tuple(v) for k, v in about.shape.items()} if isinstance(about.shape, dict) else tuple(about.shape)
    if ":" not in config.model.name:  # own classes are trusted, and need not be made without numbers
        try:
            with torch.device("meta"):
                plan = model_of(config, shape, about.outputs)
        except (ConfigError, TypeError, ValueError, RuntimeError, ZeroDivisionError, IndexError) as error:
            raise RunError(f"{origin}: model.name {config.model.name}: cannot be made as it says: {error}") from None
        for name, value in plan.params.items():
            tensor = tensors.get(name)
            if tensor is not None and tensor.shape != value.shape:
                raise RunError(
                    f'{origin}: "{name}" has the shape {list(tensor.shape)}, not {list(value.shape)} as the model says'
                )
        size, numbers = sum(v.numel() for v in plan.params.values()), sum(v.numel() for v in tensors.values())
        if size > 2 * numbers + LARGEST:
            raise RunError(f"{origin}: the model has {size} parameters, and only {numbers} numbers are there")
    return model_of(config, shape, about.outputs)


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, key)
    elif isinstance(value, int | float):
        yield key, value
