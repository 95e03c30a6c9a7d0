"""Gaussian noise on what clients have changed: on every sum, or at a client on its own reply.

Neighbours are two federations, or two sets of rows at one client, of which one client's rows may all be replaced. A
change has norm `clip` at most, so two of them are at most 2 clip apart; `accountant` says what the noise is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedtailor.aggregation import accountant
from fedtailor.aggregation.clip import Clip, changed_parts
from fedtailor.core.algorithm import COUNT, Algorithm, client_functions, reply_example, reply_part
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.reduce import PerClient
from fedtailor.core.trees import Tree, items, leaves, rebuild, wide
from fedtailor.errors import ConfigError


@dataclass(frozen=True)
class GaussianNoise:
    """Noise on every sum over the cohort. All clients count the same, and none is looked at alone."""

    multiplier: float  # standard deviation, as a multiple of clip
    clip: float
    is_secret: bool = False  # from the operating system, not from the run's seed

    def __post_init__(self) -> None:
        if not self.clip:
            raise ConfigError("privacy.noise requires privacy.clip, which bounds the influence of one client")

    def add(self, fed: Federation, x: PerClient, total: Tree) -> Tree:
        """The sum of replies with noise on every number; refuses parts that are not clipped."""
        whole = None if x.call is None else changed_parts(x.example, x.call.args, x.call.placed)
        for path, _ in items(total, "/".join(map(str, x.path))):
            part = int(path.partition("/")[0]) if isinstance(x.example, tuple) else 0
            if x.call is None or whole is None or part not in whole:
                algorithm = fed.engine.experiment.algorithm
                name = "weights" if x.call is None else reply_part(algorithm, x.call.function, path).name
                raise ConfigError(
                    f'privacy.noise: {fed.title} sums "{name}", which is not a new version of what clients were '
                    "sent, so it cannot be clipped; choose one whose clients only send models, such as fedavg"
                )
        number = fed.sums.noisy[fed.round] = fed.sums.noisy.get(fed.round, 0) + 1
        rng = np.random.default_rng() if self.is_secret else stream(fed.seed, fed.round, number, "noise")
        return add_noise(total, self.multiplier * self.clip, rng)

    def check(self, experiment: Any) -> None:
        """Raise a `ConfigError` if it does not suit the experiment."""
        accountant.require()
        if experiment.environment.missing == "stale":
            raise ConfigError('privacy.noise: not with environment.missing = "stale", which counts by sample counts')
        if experiment.model.has_common_statistics:
            raise ConfigError('privacy.noise: variances with noise may be negative; set model.buffers = "private"')


@dataclass(frozen=True)
class LocalNoise:
    """Clipping and noise, of standard deviation `noise` times `clip`, that a client adds to its own reply.

    Whoever sums it, in secret or in the open, sees no more than that. The noise comes from the operating system, never
    from a run's seed.
    """

    clip: float
    noise: float

    def apply(self, reply: Tree, args: tuple[Tree, ...], placed: tuple[bool, ...]) -> Tree:
        reply = Clip(self.clip).apply(reply, args, placed)
        parts, rng = list(reply) if isinstance(reply, tuple) else [reply], np.random.default_rng()
        for i in changed_parts(reply, args, placed):
            parts[i] = add_noise(parts[i], self.noise * self.clip, rng)
        return tuple(parts) if isinstance(reply, tuple) else parts[0]


def add_noise(tree: Tree, std: float, rng: np.random.Generator) -> Tree:
    """The tree with independent Gaussian noise on every number, added in double precision."""
    each = (wide(v) + torch.from_numpy(rng.normal(0.0, std, tuple(v.shape))).to(wide(v)) for v in leaves(tree))
    return rebuild(tree, (new.to(v.dtype) for new, v in zip(each, leaves(tree), strict=True)))


def exposed_part(
    algorithm: Algorithm, function: str, model: Model, args: tuple[Tree, ...], placed: tuple[bool, ...]
) -> str:
    """The name of a part of the reply that would leave without local noise; "" if there is none but sample counts."""
    sends = client_functions(algorithm)[function].sends  # type: ignore[attr-defined]
    covered = changed_parts(reply_example(algorithm, function, model), args, placed)
    each = enumerate(sends if isinstance(sends, tuple) else (sends,))
    return next((spec.name for i, spec in each if i not in covered and spec not in (None, COUNT)), "")
