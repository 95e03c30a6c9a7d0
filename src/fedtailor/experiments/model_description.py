"""The description of a model in a file, checked before a model of that kind and size is made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedtailor import algorithms, models
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.data import Shape
from fedtailor.core.model import Model
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments.building import model_of
from fedtailor.experiments.config import RunConfig

LARGEST = 65_536  # any whole number among the options of a model, such as a width or a number of layers
MOST = 2**28  # numbers in one sample
MOST_OPTIONS = 1000  # numbers among the options of a model
Size = Annotated[int, Field(ge=1, le=2**24)]


class ModelDescription(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    task: str = Field(max_length=40)
    shape: Annotated[list[Size], Field(max_length=8)] | dict[str, Annotated[list[Size], Field(max_length=8)]]
    outputs: Size
    classes: list[str]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the parts of a sample, where it has several."""
        return tuple(self.shape) if isinstance(self.shape, dict) else ()


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


def refuse_large(config: RunConfig, shape: Shape, outputs: int, most: int, origin: str = "the configuration") -> None:
    """Refuse a model of more than `most` numbers, or of endless options, before any of them has memory."""
    sections = [config.model, *(config.model.at(client) for client in config.model.by_client or ())]
    for section in sections:
        if sum(1 for _ in _numbers(section.options)) > MOST_OPTIONS:
            raise RunError(f"{origin}: the model has more than {MOST_OPTIONS} numbers among its options")
        if ":" in section.name:  # code of one's own is trusted, and need not be made without numbers
            continue
        try:
            with torch.device("meta"):
                plan = model_of(config.model_copy(update={"model": section}), shape, outputs)
        except (ConfigError, TypeError, ValueError, RuntimeError, NotImplementedError, ZeroDivisionError, IndexError):
            continue  # it is made again, with an error for people
        if (size := sum(v.numel() for v in plan.params.values())) > most:
            raise RunError(f"{origin}: the model has {size} numbers, more than the {most} that are allowed")


def make_described_model(
    config: RunConfig, about: ModelDescription, tensors: Mapping[str, Tensor], origin: str
) -> Model:
    """The model of a configuration, made only after its shapes, without numbers, were found to be those of the file."""
    check_options(config, origin)
    shape = {k: tuple(v) for k, v in about.shape.items()} if isinstance(about.shape, dict) else tuple(about.shape)
    if not models.is_own(config.model.name):  # own classes are trusted, and need not be made without numbers
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
    model = model_of(config, shape, about.outputs)
    for name, value in (model.params | model.private_buffers).items():
        if name not in tensors:
            raise RunError(f'{origin}: has no "{name}", which {config.model.name} has now')
        if tensors[name].shape != value.shape:
            form = f"{list(tensors[name].shape)}, in {config.model.name} now {list(value.shape)}"
            raise RunError(f'{origin}: "{name}" has the shape {form}')
    known = {k for k, _ in (*model.module.named_parameters(), *model.module.named_buffers())}
    if algorithms.find(config.algorithm.name).predict is Algorithm.predict and (more := sorted(tensors.keys() - known)):
        raise RunError(f'{origin}: has "{more[0]}", which {config.model.name} has no longer')
    return model


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, key)
    elif isinstance(value, int | float):
        yield key, value
