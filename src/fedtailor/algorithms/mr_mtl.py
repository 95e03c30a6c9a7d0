"""MR-MTL: models pulled towards their mean. Liu, Hu, Wu, Smith, NeurIPS 2022, Algorithm 1; Evgeniou, Pontil, KDD 2004.

Symbols: w_k a client's own model; w_bar the mean of all; lam the strength of the pull between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedtailor.algorithms.ditto import Ditto
from fedtailor.core.algorithm import MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class MRMTL(Algorithm):
    """Each client trains its own model on F_k(w_k) + lam/2 |w_k - w_bar|^2; there is no other model."""

    epochs: int = 1
    """Local epochs per round."""
    lam: float = 0.1
    """Weight of the regularization towards the mean; 0 is Local. Keep local.lr times lam well below 2."""

    title: ClassVar[str] = "MR-MTL"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "model"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "lam = 0": ({"lam": 0.0}, "local", {}),
    }
    citation: ClassVar[str] = """@inproceedings{liu2022privacy,
  title={On Privacy and Personalization in Cross-Silo Federated Learning},
  author={Liu, Ken Ziyu and Hu, Shengyuan and Wu, Zhiwei Steven and Smith, Virginia},
  booktitle={NeurIPS}, year={2022}
}"""

    server_init, client_init = Ditto.server_init, Ditto.client_init
    personal, onboard = Ditto.personal, Ditto.onboard

    @on_client(sends=MODEL.summed())
    def local(self, me: ClientContext, w_bar: Params) -> tuple[Tree, Tree]:
        w = me.sgd(me.state, epochs=self.epochs, prox=(w_bar, self.lam))
        return w, w

    def round(self, fed: Federation, w_bar: Params) -> Params:
        return fed.mean(fed.map(self.local, w_bar))
