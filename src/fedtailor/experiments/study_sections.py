"""The sections of a comparison: the grid and the search before it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from fedtailor.experiments.sections import Section, dotted

VALUES, RANGE = "values", "range"  # what may be searched: a list, or all numbers between two


class CompareSection(Section):
    """A grid of runs."""

    name: str = Field(default="compare", description="Name of the folder that holds the runs.")
    algorithms: tuple[str | dict[str, Any], ...] = Field(
        default=("local", "fedavg"),
        min_length=1,
        description='Names, or tables such as {name = "ditto", lam = 0.5, set = {"local.lr" = 0.1}, label = "mine"}.',
    )
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1, description="Seeds; each algorithm runs once per seed.")
    workers: int = Field(default=0, ge=0, description="Parallel runs; 0: one per core.")
    against: str = Field(default="", description="Row that the others are tested against; empty: the first.")


class Range(Section):
    """All numbers between two; whole ones if both are."""

    low: int | float
    high: int | float
    log: bool = False  # evenly on a logarithmic scale

    @model_validator(mode="after")
    def _is_one(self) -> Range:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError("low must be below high, and above 0 where log = true")
        return self


def is_range(value: Any) -> bool:
    """Whether a table of a configuration means all numbers between two."""
    return isinstance(value, Range) or (isinstance(value, dict) and {"low", "high"} <= value.keys())


def _keyed(tables: Any) -> Any:
    """Tables within tables as keys with dots, but for ranges."""
    if not isinstance(tables, dict):
        return tables
    out: dict[str, Any] = {}
    for key, value in tables.items():
        inner = value if is_range(value) else dotted(value)
        nested = isinstance(inner, dict) and not is_range(inner)
        out |= _keyed({f"{key}.{k}": v for k, v in value.items()}) if nested else {key: inner}
    return out


Values = Annotated[
    Annotated[Annotated[list[Any], Field(min_length=1)], Tag(VALUES)] | Annotated[Range, Tag(RANGE)],
    Discriminator(lambda value: RANGE if is_range(value) else VALUES),
]
Space = Annotated[dict[str, Values], BeforeValidator(_keyed)]  # key -> its values


class SearchSection(Section):
    """Hyper-parameter search on validation data, before the comparison."""

    trials: int = Field(default=6, ge=1, description="Configurations tried per algorithm, the same number for all.")
    sampler: Literal["grid", "optuna"] = Field(
        default="grid",
        description="grid: combinations of listed values; optuna: TPE, also in ranges of numbers.",
    )
    seed: int = Field(default=1000, ge=0, description="Seed of the search runs; must not be one of compare.seeds.")
    seeds: tuple[int, ...] = Field(default=(), description="Several seeds for each configuration; empty: seed alone.")
    rounds: int = Field(default=0, ge=0, description="Rounds per search run; 0: as many as in the comparison.")
    space: Space = Field(
        default_factory=dict,
        description='What to try for all, by key: "local.lr" = [0.01, 0.1] or {low = 0.01, high = 1, log = true}.',
    )
    algorithms: dict[str, Space] = Field(
        default_factory=dict, description="What to try for one algorithm, by its name or label."
    )

    @property
    def all_seeds(self) -> tuple[int, ...]:
        return self.seeds or (self.seed,)
