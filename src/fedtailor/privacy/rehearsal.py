"""A round with made-up replies: finds out before the first real one whether an algorithm can do with sums only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from fedtailor.core.algorithm import sent_example
from fedtailor.core.client import Call
from fedtailor.core.federation import Engine, Federation
from fedtailor.core.me import Setting
from fedtailor.core.trees import Tree, tree_map
from fedtailor.engines.inprocess import Reply
from fedtailor.errors import ConfigError
from fedtailor.privacy.sealed import Privacy


class _Stage:
    """An engine without clients: every reply is the declared example, every number in it a 1."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        example = sent_example(self.setting.algorithm, call.function, self.setting.model)
        yield Reply(tuple(clients), tree_map(lambda v: torch.ones_like(v).expand(len(clients), *v.shape), example))

    def together(self, clients: Sequence[int]) -> Tree | None:
        return None

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def rehearse(setting: Setting, privacy: Privacy) -> None:
    """Raise a `ConfigError` if the algorithm looks at single replies, tapes, or sums what cannot be clipped."""
    fed = Federation(cast(Engine, _Stage(setting)), privacy=replace(privacy, secure_sum=False))
    server = setting.algorithm.server_init(setting.model)
    for round in range(1 - setting.algorithm.preparation, 2):
        fed.round, fed.cohort = round, tuple(range(len(setting.data.clients)))
        fed.asked = fed.cohort
        try:
            server = setting.algorithm.round(fed, server)
        except ConfigError:
            raise
        except Exception:  # made-up numbers need not suit an algorithm; what it asked for up to here was allowed
            return
