"""FedDyn: dynamic regularization aligns the clients' minima. Acar et al., ICLR 2021, Algorithm 1.

Symbols: theta common model; theta_k trained by client k; u_k = grad L_k(theta_k) / alpha and h the paper's h / alpha,
both scaled by alpha as duals of ADMM are; P clients of a round, of m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedtailor.core.algorithm import MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, tree_map


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """Each client minimises L_k(theta_k) - alpha <u_k, theta_k> + alpha/2 |theta_k - theta|^2."""

    epochs: int = 1
    """Local epochs per round."""
    alpha: float = 0.1
    """Weight of the proximal term towards the common model, and step of the linear term."""
    serve: Literal["server", "mean"] = "server"
    """Predict with theta, or with the mean of the clients' models of the last round."""

    title: ClassVar[str] = "FedDyn"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "nothing"
    counts_all: ClassVar[bool] = True
    private: ClassVar[str] = "an estimate of its gradient"
    citation: ClassVar[str] = """@inproceedings{acar2021federated,
  title={Federated Learning Based on Dynamic Regularization},
  author={Acar, Durmus Alp Emre and Zhao, Yue and {Matas Navarro}, Ramon and Mattina, Matthew and Whatmough, Paul N. and
    Saligrama, Venkatesh},
  booktitle={ICLR}, year={2021}
}"""

    def server_init(self, model: Model) -> Tree:
        return {"theta": model.params, "h": tree_map(torch.zeros_like, model.trainable)}

    def client_init(self, me: ClientContext) -> Params:
        return {k: torch.zeros_like(v) for k, v in me.model.trainable.items()}

    @on_client(sends=MODEL.summed())
    def local(self, me: ClientContext, theta: Params) -> tuple[Tree, Tree]:
        u = me.state
        center = {k: theta[k] + u[k] for k in u}  # the linear term and the pull together are a pull to here
        theta_k = me.sgd(theta, epochs=self.epochs, prox=(center, self.alpha))
        return {k: u[k] - (theta_k[k] - theta[k]) for k in u}, theta_k

    def round(self, fed: Federation, server: Tree) -> Tree:
        theta = server["theta"]
        mean = fed.mean(fed.map(self.local, theta))
        share = len(fed.cohort) / fed.clients  # |P| / m
        h = {k: v - share * (mean[k] - theta[k]) for k, v in server["h"].items()}
        return {"theta": mean | {k: mean[k] - v for k, v in h.items()}, "h": h}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        theta, h = server["theta"], server["h"]
        return theta if self.serve == "server" else theta | {k: theta[k] + v for k, v in h.items()}
