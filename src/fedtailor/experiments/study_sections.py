"""The sections of a comparison: the grid and the search before it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from fedtailor.experiments.sections import Section, dotted


class CompareSection(Section):
    """A grid of runs."""

    name: str = Field(default="compare", description="Name of the folder that holds the runs.")
    algorithms: tuple[str | dict[str, Any], ...] = Field(
        default=("local", "fedavg"), min_length=1, description='Names, or tables such as {name = "ditto", lam = 0.5}.'
    )
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1, description="Seeds; each algorithm runs once per seed.")
    workers: int = Field(default=0, ge=0, description="Parallel runs; 0: one per core.")


Space = Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], BeforeValidator(dotted)]  # key -> its values


class SearchSection(Section):
    """Hyper-parameter search on validation data, before the comparison."""

    trials: int = Field(default=6, ge=1, description="Configurations tried per algorithm, the same number for all.")
    seed: int = Field(default=1000, ge=0, description="Seed of the search runs; must not be one of compare.seeds.")
    rounds: int = Field(default=0, ge=0, description="Rounds per search run; 0: as many as in the comparison.")
    space: Space = Field(
        default_factory=dict, description='Values to try for all algorithms, by key: "local.lr" = [0.01, 0.1].'
    )
    algorithms: dict[str, Space] = Field(
        default_factory=dict, description="Values to try for one algorithm, by its name or label."
    )
