"""IFCA: several models, and each client trains the one that fits it best. Ghosh et al., NeurIPS 2020, Algorithm 1.

Symbols: theta_1 ... theta_k models of the clusters, stacked; j the cluster of a client, s its one-hot vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.core.algorithm import MODEL, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.errors import ConfigError

MEMBERS = ReplySpec(
    "sample count by cluster", lambda algorithm, model: (model.like.new_zeros(()),) * algorithm.clusters
)


@dataclass(frozen=True)
class IFCA(Algorithm):
    """FedAvg within clusters; in every round a client joins the one whose model has the least training loss."""

    epochs: int = 1
    """Local epochs per round."""
    clusters: int = 2
    """Models, all of which are sent to every client (k); 1 is FedAvg."""

    title: ClassVar[str] = "IFCA"
    learns: ClassVar[str] = "groups"
    keeps: ClassVar[str] = "group"
    onboards_fitted: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "one cluster": ({"clusters": 1}, "fedavg", {}),
    }
    citation: ClassVar[str] = """@inproceedings{ghosh2020efficient,
  title={An Efficient Framework for Clustered Federated Learning},
  author={Ghosh, Avishek and Chung, Jichan and Yin, Dong and Ramchandran, Kannan},
  booktitle={NeurIPS}, year={2020}
}"""

    def check(self, model: Model, task: str) -> None:
        if self.clusters < 1:
            raise ConfigError(f"algorithm.clusters: IFCA needs at least 1, not {self.clusters}")

    def server_init(self, model: Model) -> Params:
        return {k: torch.stack([another(model, k, j) for j in range(self.clusters)]) for k in model.params}

    def cluster(self, me: ClientContext, theta: Params) -> Tensor:
        losses = [me.loss({k: v[j] for k, v in theta.items()}) for j in range(self.clusters)]
        return torch.stack(losses).argmin(0)

    @on_client(sends=(MODEL.weighted_by(MEMBERS), MEMBERS))
    def local(self, me: ClientContext, theta: Params) -> tuple[Tree, Tree]:
        j = self.cluster(me, theta)
        trained = me.sgd(row(theta, j), epochs=self.epochs)
        return {}, (trained, tuple(torch.where(j == i, me.n, 0) for i in range(self.clusters)))

    def round(self, fed: Federation, theta: Params) -> Params:
        trained, members = fed.map(self.local, theta)
        rows = [row(theta, j) for j in fed.places(range(self.clusters))]
        for j in range(self.clusters):
            if (count := fed.sum(members[j])) > 0:  # else the model stays as it is
                rows[j] = fed.mean(trained, members[j])
            fed.report(**{f"samples_of_cluster_{j}": count})
        return tree_map(lambda *each: torch.stack(each), *rows)

    def personal(self, me: ClientContext, theta: Params) -> Params:
        return row(theta, self.cluster(me, theta))


def row(theta: Params, j: Tensor) -> Params:
    return {k: v[j[None]][0] for k, v in theta.items()}


def another(model: Model, name: str, j: int) -> Tensor:
    """The initial value of a parameter in cluster j: in others than the first its entries are in a random order."""
    value = model.params[name]
    if j == 0 or name not in model.trainable:
        return value
    order = torch.from_numpy(stream("IFCA", name, j).permutation(value.numel())).to(value.device)
    return value.flatten()[order].reshape(value.shape)
