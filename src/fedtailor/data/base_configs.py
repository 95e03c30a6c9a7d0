"""What data sources have in common: how samples are split, and how they are dealt to clients."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedtailor.errors import DataError

Corruption = Literal[
    "mixed",
    "gaussian-noise",
    "shot-noise",
    "impulse-noise",
    "speckle-noise",
    "gaussian-blur",
    "defocus-blur",
    "contrast",
    "brightness",
    "saturate",
    "jpeg",
    "pixelate",
]


STANDARDISE = "Standardise numeric columns by all training rows (pooled) or each client's."


class SourceConfig(BaseModel):
    """Base of all sources: immutable; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int | None = Field(default=None, ge=0, description="Seed of partition and splits; none: the run's seed.")


class SplitConfig(SourceConfig):
    """How each client's samples are cut into train, val and test."""

    test: float = Field(default=0.25, description="Fraction of each client's samples kept for the final test.")
    val: float = Field(default=0.1, description="Fraction of each client's samples used to select models.")
    max_samples: int | None = Field(default=None, ge=1, description="Maximum samples per client.")
    max_train: int | None = Field(
        default=None, ge=1, description="Maximum training samples per client; val and test are not reduced."
    )

    @model_validator(mode="after")
    def _check_fractions(self) -> SplitConfig:
        if not (self.test >= 0 and self.val >= 0 and self.test + self.val < 1):
            raise DataError(
                f"data.test = {self.test} and data.val = {self.val} leave nothing to train on; "
                "both must be at least 0 and their sum below 1"
            )
        return self


class PartitionConfig(SplitConfig):
    """How pooled samples are dealt to clients."""

    clients: int = Field(default=10, description="Number of clients the samples are dealt to.")
    partition: Literal["iid", "dirichlet", "classes", "quantity"] = Field(
        default="dirichlet",
        description="How samples are dealt: equally, by label proportions, by whole classes, or in unequal amounts.",
    )
    alpha: float = Field(default=0.5, description="Concentration of the Dirichlet draws; smaller is more skewed.")
    classes_per_client: int = Field(default=2, description='Distinct classes of each client under partition "classes".')
    samples_per_client: int | None = Field(
        default=None,
        ge=1,
        description='Samples of each client under partition "classes"; all by default.',
    )
    sizes: Literal["lognormal", "dirichlet"] = Field(
        default="lognormal", description='Distribution of the client sizes under partition "quantity".'
    )
    sigma: float = Field(default=1.0, ge=0, description="Spread of the log-normal client sizes; 0 makes them equal.")
    min_samples: int = Field(default=4, ge=1, description='Minimum samples per client ("dirichlet", "quantity").')
    permuted: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Fraction of clients with permuted labels, all by the same permutation (concept shift).",
    )
    corruption: Corruption | None = Field(
        default=None,
        description='Corrupt all images as in CIFAR-10-C, "mixed": a different corruption per client (feature shift).',
    )
    severity: int | None = Field(
        default=None, ge=1, le=5, description="Severity of the corruption; drawn per client by default."
    )

    @model_validator(mode="after")
    def _check_partition(self) -> PartitionConfig:
        if not 0 < self.alpha < math.inf:
            raise DataError(f"data.alpha = {self.alpha}: must be above 0 (0.1 is strong skew, 100 almost none)")
        if self.clients < 1:
            raise DataError(f"data.clients = {self.clients}: must be at least 1")
        if self.classes_per_client < 1:
            raise DataError(f"data.classes_per_client = {self.classes_per_client}: must be at least 1")
        if self.severity is not None and self.corruption is None:
            raise DataError('data.severity requires data.corruption, such as "mixed"')
        return self
