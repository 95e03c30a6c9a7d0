"""FedAMP: similar clients attract each other's models. Huang et al., AAAI 2021, Algorithm 1 and HeurFedAMP.

Symbols: w_i model of client i; u_i what the server makes of all models for it; xi_ij weight of w_j in u_i;
A(x) = 1 - exp(-x / sigma) of the squared distance of two models, alpha step down its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedtailor.algorithms._shared.model_table import gather_models, mean_or, stack_models
from fedtailor.core.algorithm import MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, flat


@dataclass(frozen=True)
class FedAMP(Algorithm):
    """Each client keeps w_i on F_i(w_i) + mu/2 |w_i - u_i|^2; mu = 0 is Local."""

    epochs: int = 1
    """Local epochs per round."""
    mu: float = 0.1
    """Weight of the proximal term towards u (the paper's lambda / alpha)."""
    attention: Literal["distance", "cosine"] = "distance"
    """Similarity of models: by distance or, in HeurFedAMP, by angle."""
    sigma: float = 1.0
    """Squared distance at which attention falls to 1/e; with cosine, the factor of the cosines."""
    alpha: float = 0.5
    """Weight of another client with the same model, times sigma; 0: no attention to others."""
    self_weight: float = 0.5
    """With cosine: weight of a client's own model in its u."""

    title: ClassVar[str] = "FedAMP"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "model"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mu = 0": ({"mu": 0.0}, "local", {}),
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {"heuristic": {"attention": "cosine"}}
    citation: ClassVar[str] = """@inproceedings{huang2021personalized,
  title={Personalized Cross-Silo Federated Learning on Non-IID Data},
  author={Huang, Yutao and Chu, Lingyang and Zhou, Zirui and Wang, Lanjun and Liu, Jiangchuan and Pei, Jian and
    Zhang, Yong},
  booktitle={AAAI}, year={2021}
}"""

    def server_init(self, model: Model) -> Tree:
        return {"w": {}}  # by name of a client the model that it sent last

    def client_init(self, me: ClientContext) -> Params:
        return me.model.params

    def onboard_init(self, me: ClientContext, server: Tree) -> Params:
        return mean_or(me.model.params, server["w"])

    @on_client(sends=MODEL)
    def local(self, me: ClientContext, u: Params) -> tuple[Tree, Tree]:
        w = me.sgd(me.state, epochs=self.epochs, prox=(u, self.mu))  # (6)
        return w, w

    def round(self, fed: Federation, server: Tree) -> Tree:
        here = [fed.names[c] for c in fed.cohort]
        known = dict.fromkeys(here, fed.model.params) | server["w"]
        w = stack_models(known.values())
        xi = self.weights(flat({k: w[k] for k in fed.model.trainable}, stacked=True))
        rows = [list(known).index(name) for name in here]
        fed.report(own_weight=xi.diagonal()[rows].mean())
        u = fed.scatter({k: torch.tensordot(xi[rows].to(v.dtype), v, dims=1) for k, v in w.items()})  # (5)
        return {"w": server["w"] | gather_models(fed, fed.map(self.local, u))}

    def weights(self, w: Tensor) -> Tensor:
        """Row i: xi_i1, xi_i2, ... of all models, which add up to 1."""
        is_self = torch.eye(len(w), dtype=torch.bool, device=w.device)
        if self.attention == "cosine":
            others = (self.sigma * normalize(w) @ normalize(w).T).masked_fill(is_self, -torch.inf).softmax(1)
            others = (1 - self.self_weight) * others.nan_to_num(0)  # nan where there is nobody else
        else:
            square = torch.stack([(w - one).square().sum(1) for one in w])
            others = (self.alpha / self.sigma * (-square / self.sigma).exp()).masked_fill(is_self, 0)
            others = others / others.sum(1, keepdim=True).clamp(min=1)  # else its own weight would be below 0
        return others + torch.diag(1 - others.sum(1))

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return me.state
