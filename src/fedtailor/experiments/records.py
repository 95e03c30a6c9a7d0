"""What the JSON files of a run must look like, whoever wrote them: a checksum that fits does not make them ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from fedtailor.errors import RunError

LENIENT = ConfigDict(strict=True, extra="allow")  # other versions may have more or fewer keys, never other types
Figures = dict[str, list[float]]  # by metric, one per client


class About(TypedDict, total=False):
    """run.json: what made the run, as far as more is done with it than to show it."""

    __pydantic_config__ = LENIENT  # type: ignore[misc]
    clients: list[str]
    train_samples: list[int]
    notes: list[str]
    classes: list[str]
    outputs: int
    parameters: int
    ranks: int
    task: str
    config_sha256: str


class Summary(TypedDict, total=False):
    __pydantic_config__ = LENIENT  # type: ignore[misc]
    mean: float
    std: float
    worst_tenth: float


class Outcome(TypedDict, total=False):
    """Of the last round, the selected one, or unseen clients."""

    __pydantic_config__ = LENIENT  # type: ignore[misc]
    round: int
    test: dict[str, Summary]
    clients: Figures
    gap: dict[str, float]


class Traffic(TypedDict, total=False):
    __pydantic_config__ = LENIENT  # type: ignore[misc]
    up: int
    down: int
    trips: int


class Results(TypedDict, total=False):
    """results.json of a finished run."""

    __pydantic_config__ = LENIENT  # type: ignore[misc]
    metric: str
    higher_is_better: bool
    last: Outcome
    selected: Outcome
    unseen: Outcome
    traffic: Traffic
    seconds: float
    lines: int
    faults: int
    abandoned: int


class Tensors(TypedDict):
    """An entry of an index: a file of tensors."""

    __pydantic_config__ = LENIENT  # type: ignore[misc]
    file: str
    sha256: str
    tree: Any


class Manifest(TypedDict, total=False):
    """checkpoint/manifest.json."""

    __pydantic_config__ = LENIENT  # type: ignore[misc]
    round: int
    seconds: float
    metrics_length: int
    trees: dict[str, Tensors]


ABOUT, RESULTS, MANIFEST = TypeAdapter(About), TypeAdapter(Results), TypeAdapter(Manifest)
INDEX = TypeAdapter(dict[str, Tensors])


def checked(content: Any, form: TypeAdapter[Any], path: Path) -> Any:
    """The content as it is, if it has the form."""
    try:
        form.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        raise RunError(f"{path}: {where}: {first['msg']}; this is no file of a run", code="run.damaged") from None
    return content
