"""The form of every request to a site: keys, types and bounds, checked before anything is done."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedtailor.core import codec
from fedtailor.core.trees import Tree
from fedtailor.deploy.flare.refusal import Refused

Whole = Annotated[int, Field(ge=0, le=2**31)]
Round = Annotated[int, Field(ge=-(2**31), le=2**31)]  # rounds of preparation come before 1
Text = Annotated[str, Field(max_length=200)]
Places = Annotated[list[Whole], Field(max_length=100_000)]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Hello(_Form):
    op: Text
    version: Text
    run: Text
    algorithm: Text
    model: Text
    rounds: Whole
    seed: Annotated[int, Field(ge=0, le=2**63)]
    code: Annotated[list[Text], Field(max_length=100)] = []


class Start(_Form):
    op: Text
    config: dict[str, Any]
    client: Whole
    about: dict[str, Any] = Field(alias="schema")
    promise: dict[str, Any]
    first: Round


class Restore(_Form):
    op: Text
    kept: Round


class Begin(_Form):
    op: Text
    round: Round
    kept: Round
    needed: Annotated[list[Round], Field(max_length=1000)]


class Keep(_Form):
    op: Text
    round: Round


class Finish(_Form):
    op: Text


class Evaluate(_Form):
    op: Text
    round: Round
    splits: Annotated[list[Literal["train", "val", "test"]], Field(max_length=3)]
    keep: Text


class Function(_Form):
    function: Text
    round: Round
    call: Whole
    placed: Annotated[list[bool], Field(max_length=100)]
    taped: bool
    sealed: float | None = None


class Cotangent(_Form):
    round: Round
    call: Whole


class Term(_Form):
    call: Whole
    paths: Annotated[list[str], Field(max_length=100_000)]
    weight: Annotated[list[Any], Field(min_length=2, max_length=2)] | None


class SumStep(_Form):
    round: Round
    sum: Whole
    step: Literal["keys", "deal", "mask", "confirm", "reveal"]
    term: Term | None = None
    clients: Places | None = None
    threshold: Whole | None = None
    fraction_bits: Annotated[int, Field(ge=0, le=52)] | None = None
    dealers: Places | None = None
    survivors: Places | None = None
    signers: Places | None = None


OPERATIONS: dict[str, type[_Form]] = {
    "hello": Hello,
    "start": Start,
    "restore": Restore,
    "begin": Begin,
    "keep": Keep,
    "finish": Finish,
    "evaluate": Evaluate,
}
NEEDED = {
    "keys": {"term"},
    "deal": {"clients", "threshold", "fraction_bits"},
    "mask": {"dealers"},
    "confirm": {"survivors"},
    "reveal": {"signers"},
}


def read(message: bytes, most: int) -> tuple[dict[str, Any], Tree]:
    """Header and tensors of a request, none with more than `most` places; what is of no known form is refused."""
    try:
        check(codec.decode_header(message))
        return codec.decode(message, most)
    except codec.BrokenMessage as error:
        raise Refused(f"the request {error}") from None


def check(header: dict[str, Any]) -> None:
    """Refuse a header that is not of the form of its operation; the key that is wrong is named, its value is not."""
    name = header.get("op")
    if name is not None and (not isinstance(name, str) or name not in OPERATIONS):
        raise Refused(f'no operation "{str(name)[:40]}"')
    form = OPERATIONS[name] if name is not None else _of_training(header)
    operation = name or form.__name__.lower()
    try:
        form.model_validate(header)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise Refused(f'{operation} with "{key[:40]}" is not known here') from None
        raise Refused(f"{operation}: {key[:80]}: {first['msg']}") from None
    if form is SumStep:
        step, present = header["step"], {k for k in SumStep.model_fields if header.get(k) is not None}
        if wrong := sorted((present - {"round", "sum", "step"}) ^ NEEDED[step]):
            raise Refused(f'a secure sum: step "{step}" with or without "{wrong[0]}"')


def _of_training(header: dict[str, Any]) -> type[_Form]:
    if "sum" in header:
        return SumStep
    return Function if "function" in header else Cotangent
