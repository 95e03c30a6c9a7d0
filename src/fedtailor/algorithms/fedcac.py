"""FedCAC: critical parameters are shared with clients whose critical ones lie alike. Wu et al., ICCV 2023, Algorithm 1.

Symbols: w common model; c_i |change * value| of each parameter in local training, m_i 1 for the share tau of each
tensor where it is largest; u_i mean of the models of clients whose m overlaps with m_i by more than a threshold that
rises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, flat, tree_map
from fedtailor.errors import ConfigError

MASK = ReplySpec("critical parameters", lambda algorithm, model: model.trainable)


@dataclass(frozen=True)
class FedCAC(Algorithm):
    """Critical entries of a client come from clients like it, the others from all."""

    epochs: int = 1
    """Local epochs per round."""
    tau: float = 0.5
    """Share of the entries of each tensor that are critical; 0 is FedAvg."""
    beta: int = 100
    """Round from which on the threshold is above every overlap: critical entries are then a client's own."""

    title: ClassVar[str] = "FedCAC"
    learns: ClassVar[str] = "masks"
    keeps: ClassVar[str] = "entries"
    private: ClassVar[str] = "critical entries"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tau = 0": ({"tau": 0.0}, "fedavg", {}),
    }
    citation: ClassVar[str] = """@inproceedings{wu2023bold,
  title={Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through Cautiously Aggressive
    Collaboration},
  author={Wu, Xinghao and Liu, Xuefeng and Niu, Jianwei and Zhu, Guogang and Tang, Shaojie},
  booktitle={ICCV}, year={2023}
}"""

    def check(self, model: Model, task: str) -> None:
        if not 0 <= self.tau <= 1 or self.beta < 1:
            raise ConfigError("algorithm: FedCAC needs tau between 0 and 1, and beta of at least 1")

    def server_init(self, model: Model) -> Tree:
        return {"w": model.params, "round": model.like.new_zeros((), dtype=torch.int64)}

    def client_init(self, me: ClientContext) -> Tree:
        return {"u": me.model.trainable, "m": tree_map(torch.zeros_like, me.model.trainable)}

    def start(self, me: ClientContext, w: Params) -> Params:
        u, m = me.state["u"], me.state["m"]
        return w | {k: torch.where(m[k] > 0, u[k], w[k]) for k in u}  # (7)

    @on_client(sends=(MODEL.weighted_by(COUNT), MASK, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        start = self.start(me, w)
        new = me.sgd(start, epochs=self.epochs)
        m = {k: critical(new[k] - start[k], new[k], self.tau) for k in me.state["m"]}  # (3)
        return {"u": {k: new[k] for k in m}, "m": m}, (new, m, me.n)

    @on_client()
    def adopt(self, me: ClientContext, u: Params) -> tuple[Tree, Tree]:
        return me.state | {"u": u}, None

    def round(self, fed: Federation, server: Tree) -> Tree:
        models, masks, n = fed.map(self.local, server["w"])
        fed.keep(models)
        each = fed.gather(models, "model of each client")
        number = server["round"] + 1
        near = alike(flat(fed.gather(masks, "critical parameters of each client"), stacked=True), number / self.beta)
        share = near / near.sum(1, keepdim=True)
        fed.report(clients_alike=near.sum(1).mean() - 1)
        u = {k: torch.tensordot(share.to(v.dtype), v, dims=1) for k, v in each.items() if k in fed.model.trainable}
        w = fed.mean(models, n)
        fed.map(self.adopt, fed.scatter(u))
        return {"w": w, "round": number}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return self.start(me, server["w"])

    def onboard(self, me: ClientContext, server: Tree, epochs: int) -> Params:
        return me.sgd(server["w"], epochs=epochs)

    def shares(self, me: ClientContext, server: Tree) -> Params:
        return {k: 1 - m for k, m in me.state["m"].items()}


def critical(change: Tensor, value: Tensor, tau: float) -> Tensor:
    """1 for the share tau of the entries with the largest |change * value|; what moved by rounding alone never is."""
    count = int(tau * value.numel())
    if not count:
        return torch.zeros_like(value)
    size = torch.where(change.abs() > 10 * torch.finfo(value.dtype).eps * value.abs(), (change * value).abs(), 0)
    return ((size >= size.flatten().topk(count).values[-1]) & (size > 0)).to(value.dtype)


def alike(masks: Tensor, time: Tensor) -> Tensor:
    """[clients, clients]: 1 where the overlap of critical parameters is above the threshold, and for oneself."""
    apart = torch.stack([(masks - one).abs().sum(1) for one in masks])
    overlap = 1 - apart / (2 * masks.sum(1)).clamp(min=1)[:, None]  # (5)
    others = ~torch.eye(len(masks), dtype=torch.bool, device=masks.device)
    if len(masks) == 1:
        return (~others).to(masks.dtype)
    mean, most = overlap[others].mean(), overlap[others].max()
    return ((overlap >= mean + time * (most - mean)) | ~others).to(masks.dtype)  # (6)
