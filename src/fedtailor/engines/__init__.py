"""Where the clients run. The algorithm does not know."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from fedtailor.core.federation import Engine
from fedtailor.core.me import Setting
from fedtailor.engines.loop import loop
from fedtailor.engines.vmap import vmap
from fedtailor.engines.wire import Wire
from fedtailor.errors import ConfigError

EngineName = Literal["auto", "loop", "vmap", "wire", "flare"]

ENGINES = {
    "loop": "one client after the other; the reference",
    "vmap": "clients stacked into one tensor operation; for many small clients and dense models",
    "wire": "every message through bytes; for tests and exact traffic",
    "flare": "a real federation of sites, each with its own data; see fedtailor federation --help",
}


def make(name: EngineName, setting: Setting, chunk: int = 64) -> Engine:
    """An engine by name; "auto" stacks clients where that is faster."""
    if name == "auto":
        name = choose(setting)
    if name == "vmap":
        return vmap(setting, chunk)
    if name == "flare":
        raise ConfigError('federation.engine = "flare": run it with fedtailor federation submit')
    return Wire(setting) if name == "wire" else loop(setting)


def threads(setting: Setting) -> int:
    """Small dense layers are slower on two threads than on one; convolutions are not."""
    return torch.get_num_threads() if _convolves(setting) else 1


def _convolves(setting: Setting) -> bool:
    return any(isinstance(m, (nn.modules.conv._ConvNd, nn.RNNBase)) for m in setting.model.module.modules())


def choose(setting: Setting) -> Literal["loop", "vmap"]:
    """Stacking pays for dense models of several clients; grouped convolutions are slower than single ones."""
    return "loop" if _convolves(setting) or setting.model.batch_statistics or len(setting.data.clients) < 4 else "vmap"
