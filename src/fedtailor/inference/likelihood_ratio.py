"""A likelihood ratio test of two nested models, as R's anova prints it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scipy import stats  # type: ignore[import-untyped]

from fedtailor.inference.estimates import Estimates
from fedtailor.inference.printed import aligned, finite, p_value


@dataclass(frozen=True, repr=False)
class LikelihoodRatio:
    """Two nested models of the same rows, and the test of what only the larger one has."""

    smaller: Estimates
    larger: Estimates

    @property
    def statistic(self) -> float:
        return max(self.smaller.deviance - self.larger.deviance, 0.0)

    @property
    def df(self) -> int:
        return self.larger.parameters - self.smaller.parameters

    @property
    def p(self) -> float:
        """By chi squared; cautious where a variance is tested, which cannot be below 0."""
        return float(stats.chi2.sf(self.statistic, self.df))

    @property
    def tests_variance(self) -> bool:
        """Whether a random effect is among what is tested."""
        return len(self.larger.random) > len(self.smaller.random)

    def __str__(self) -> str:
        rows = [["", "parameters", "AIC", "BIC", "logLik", "deviance", "chi squared", "df", "p"]]
        for e in (self.smaller, self.larger):
            test = [f"{self.statistic:.4f}", str(self.df), p_value(self.p)] if e is self.larger else ["", "", ""]
            numbers = [f"{v:.3f}" for v in (e.aic, e.bic, e.loglik, e.deviance)]
            rows.append([e.formula, str(e.parameters), *numbers, *test])
        notes = ["linear models are fitted by maximum likelihood here"] if self.larger.family == "gaussian" else []
        if self.tests_variance:
            notes.append(
                "a variance is tested, which cannot be below 0: p is too large, for one variance by a factor of two"
            )
        return "\n".join([*aligned(rows), *(f"note: {note}" for note in notes)])

    __repr__ = __str__

    def json(self) -> dict[str, Any]:
        """The test and both models."""
        models = [
            {"formula": e.formula, "parameters": e.parameters, "loglik": e.loglik, "aic": e.aic, "bic": e.bic}
            for e in (self.smaller, self.larger)
        ]
        test = {"statistic": self.statistic, "df": self.df, "p": self.p, "tests_variance": self.tests_variance}
        plain: dict[str, Any] = finite(test | {"models": models})
        return plain
