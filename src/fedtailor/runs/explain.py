"""What is shared: the degree to which each client's parameters are the common ones, as the run learned it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fedtailor.core.client import shares
from fedtailor.core.me import Setting
from fedtailor.core.trees import Params, tree_map
from fedtailor.errors import RunError
from fedtailor.runs.runner import setting_of
from fedtailor.runs.store import RunFolder, write_json, write_tree

SHARES = "shares.safetensors"


def explain(path: Path, data_root: Path | None = None) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Names of the parts and, per client, the share of each: 0 is own, 1 is common. Saved in the run's folder too.

    A part is a feature of a linear model, else a layer (mean over its parameters).
    """
    folder = RunFolder.open(path)
    saved = folder.load_checkpoint()
    if saved is None:
        raise RunError(f"{path}: has no checkpoint yet; nothing was learned")
    made_by = folder.about
    root = Path(made_by["data_root"]) if data_root is None and made_by["data_root"] else data_root
    setting = setting_of(folder.config, root)
    state = saved[1]["state"]
    found: dict[str, Params] = {}
    for i, client in enumerate(setting.data.clients):
        own = tree_map(lambda v, i=i: v[i], state["clients"])
        found[client] = shares(setting, i, own["state"], own["buffers"], state["server"])
    stack = {k: torch.stack([found[c][k] for c in found]) for k in next(iter(found.values()))}
    entry = write_tree(path / SHARES, stack)
    table = {c: parts(setting, params) for c, params in found.items()}
    write_json(path / "shares.json", {"tensors": entry, "clients": table})
    return list(next(iter(table.values()))), table


def parts(setting: Setting, params: Params) -> dict[str, float]:
    """Shares by feature where the model is linear and features have names, else by layer."""
    if setting.data.features and {v.dim() for v in params.values()} <= {1, 2} and len(params) <= 2:
        named: dict[str, Tensor] = {}
        for v in params.values():
            if v.dim() == 2 and v.shape[1] == len(setting.data.features):
                named |= dict(zip(setting.data.features, v.mean(0), strict=True))
            else:
                named["bias"] = v.mean()
        return {k: float(v) for k, v in named.items()}
    layers: dict[str, list[Tensor]] = {}
    for name, v in params.items():
        layers.setdefault(name.rpartition(".")[0] or name, []).append(v.flatten())
    return {k: float(torch.cat(v).mean()) for k, v in layers.items()}
