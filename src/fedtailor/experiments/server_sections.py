"""Sections on what the server does: with the mean of models, and when nothing gets better."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedtailor.aggregation.server_step import ServerOptimizer, ServerOptimizerName
from fedtailor.experiments.sections import Section


class ServerSection(Section):
    """What the server makes of the mean of its clients' models; Reddi et al., ICLR 2021, Algorithm 2."""

    optimizer: ServerOptimizerName = Field(
        default="none",
        description="none: the mean is the next model; momentum (FedAvgM), adam or yogi: a step towards it.",
    )
    lr: float = Field(default=1.0, gt=0, description="Learning rate of the server.")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Momentum; beta 1 of adam and yogi.")
    beta2: float = Field(default=0.99, gt=0, lt=1, description="Decay of squared changes (adam and yogi).")
    tau: float = Field(default=1e-3, gt=0, description="Added to the root of squared changes (adam and yogi).")

    def build(self) -> ServerOptimizer | None:
        """None where the mean is the next model."""
        if self.optimizer == "none":
            return None
        return ServerOptimizer(self.optimizer, self.lr, self.momentum, self.beta2, self.tau)


class EarlyStoppingSection(Section):
    """Stops a run that no longer improves on validation data."""

    patience: int = Field(
        default=0, ge=0, description="Rounds without improvement after which the run stops; 0: never."
    )
    metric: str = Field(default="", description="Metric on validation data; empty: the one that selects rounds.")
    min_delta: float = Field(default=0.0, ge=0, description="Smallest improvement that counts.")
    keep: Literal["best", "last"] = Field(
        default="best", description="Which round the run ends with: the best, or the last."
    )
