"""pFedMe: the mean of the clients' Moreau envelopes is minimized. T. Dinh et al., NeurIPS 2020, Algorithm 1.

Symbols: w common model; theta = argmin f(theta) + lam/2 |theta - w|^2 personal model. Here theta is sought by epochs
over all of a client's batches; the paper takes K steps on a single batch, a fresh one for each step of w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedtailor.algorithms.ditto import Ditto
from fedtailor.core.algorithm import MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.errors import ConfigError


@dataclass(frozen=True)
class PFedMe(Algorithm):
    """Clients step w along lam (w - theta), the gradient of their envelope; each predicts with its theta."""

    local_rounds: int = 5
    """Steps of w on a client per round."""
    epochs: int = 1
    """Local epochs of theta per step of w."""
    lam: float = 1.0
    """Weight of the proximal term towards w; keep local.lr times lam well below 2."""
    eta: float = 0.5
    """Learning rate of w; 1 / lam moves w all the way to theta, and with one local round this is FedProx."""
    beta: float = 1.0
    """Step of the server towards the clients' mean; above 1 it goes beyond."""

    title: ClassVar[str] = "pFedMe"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "a whole personal model"
    citation: ClassVar[str] = """@inproceedings{dinh2020personalized,
  title={Personalized Federated Learning with Moreau Envelopes},
  author={{T. Dinh}, Canh and Tran, Nguyen H. and Nguyen, Tuan Dung},
  booktitle={NeurIPS}, year={2020}
}"""

    def check(self, model: Model, task: str) -> None:
        if self.beta > 1 and model.has_common_statistics:
            raise ConfigError("algorithm.beta: above 1 averaged variances may become negative; keep statistics private")

    def server_init(self, model: Model) -> Params:
        return model.params

    def client_init(self, me: ClientContext) -> Params:
        return me.model.params

    @on_client(sends=MODEL.summed())
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        theta = w
        for _ in range(self.local_rounds):
            theta = me.sgd(theta, epochs=self.epochs, prox=(w, self.lam))
            w = {k: w[k] - self.eta * self.lam * (w[k] - theta[k]) for k in w}
        return theta, w

    def round(self, fed: Federation, w: Params) -> Params:
        mean = fed.mean(fed.map(self.local, w))
        return tree_map(lambda old, new: torch.lerp(old, new, self.beta), w, mean)

    def personal(self, me: ClientContext, w: Params) -> Params:
        return me.state

    onboard = Ditto.onboard
