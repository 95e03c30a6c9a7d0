"""What noisy sums have cost: (epsilon, delta) of client-level differential privacy, by Renyi divergences.

McMahan et al., ICLR 2018. Two federations are neighbours if the data of one client is replaced by any other
(replace-one); cohorts have a fixed size and are drawn without replacement. One client's change has norm `clip` at most,
so a sum moves by 2 clip at most when its data is replaced: noise of standard deviation z clip has, for the accountant,
the multiplier z / 2.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import ConfigError

INSTALL = "install it with: pip install 'fedtailor[privacy]'"


def require() -> None:
    """Raise a `ConfigError` when the accountant is not installed."""
    try:
        import dp_accounting  # noqa: F401
    except ImportError:
        raise ConfigError(f"privacy.noise: the package dp-accounting is missing; {INSTALL}") from None


@dataclass(frozen=True)
class PrivacyCost:
    """What the noisy sums of a run have cost, at a given delta."""

    epsilon: float  # one client's data replaced; fixed cohorts drawn without replacement, as they are here
    epsilon_add_remove: float  # one client more or less; as if each client were drawn by itself (Poisson)


def privacy_cost(sums: Mapping[int, int], *, clients: int, cohort: int, noise: float, delta: float) -> PrivacyCost:
    """The cost of rounds in which noisy sums were made; `sums` has: sums in a round -> number of such rounds."""
    if not any(sums.values()):
        return PrivacyCost(0.0, 0.0)
    # the bound for a drawn cohort is loose where most clients are drawn; what holds without drawing holds as well
    fixed = min(_epsilon(sums, "fixed", clients, size, noise, delta) for size in {cohort, clients})
    return PrivacyCost(fixed, _epsilon(sums, "poisson", clients, cohort, noise, delta))


def renyi_epsilon(sums: Mapping[float, int], delta: float) -> float:
    """The cost of sums over the same clients; `sums` has: noise multiplier -> number of sums with it."""
    from dp_accounting.rdp import compute_epsilon

    curves = [(times, _curve("fixed", 1, 1, 1, noise)) for noise, times in sums.items() if times]
    if not curves:
        return 0.0
    return float(compute_epsilon(curves[0][1][0], sum(times * curve for times, (_, curve) in curves), delta)[0])


Draw = Literal["fixed", "poisson"]


def _epsilon(sums: Mapping[int, int], draw: Draw, clients: int, cohort: int, noise: float, delta: float) -> float:
    from dp_accounting.rdp import compute_epsilon

    curves = [(rounds, _curve(draw, in_round, clients, cohort, noise)) for in_round, rounds in sums.items()]
    orders = curves[0][1][0]
    return float(compute_epsilon(orders, sum(rounds * curve for rounds, (_, curve) in curves), delta)[0])


@lru_cache(maxsize=64)
def _curve(
    draw: Draw, in_round: int, clients: int, cohort: int, noise: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Orders, and the Renyi divergence at each, of one round with so many sums over the same cohort."""
    from dp_accounting import (
        DpEvent,
        GaussianDpEvent,
        PoissonSampledDpEvent,
        SampledWithoutReplacementDpEvent,
        SelfComposedDpEvent,
    )
    from dp_accounting.privacy_accountant import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    if draw == "fixed":
        relation = NeighboringRelation.REPLACE_ONE
        event: DpEvent = SelfComposedDpEvent(GaussianDpEvent(noise / 2), in_round)
        event = SampledWithoutReplacementDpEvent(clients, cohort, event)
    else:
        relation = NeighboringRelation.ADD_OR_REMOVE_ONE
        event = PoissonSampledDpEvent(cohort / clients, SelfComposedDpEvent(GaussianDpEvent(noise), in_round))
    accountant = RdpAccountant(neighboring_relation=relation)
    with _quiet():
        accountant.compose(event)
    return accountant.orders, accountant.rdp


@contextmanager
def _quiet() -> Iterator[None]:
    """The accountant warns of orders that it leaves out, which only makes its figure larger."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
