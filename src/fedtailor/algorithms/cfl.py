"""CFL: clients whose updates disagree are split into clusters. Sattler et al., TNNLS 2020, Algorithm 2.

Clusters are the leaves of a binary tree. A node that was split keeps its last model w, and its children keep the
directions in which the halves pulled it: by them a client that was away, or is new, finds its way down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, flat, tree_map
from fedtailor.errors import ConfigError

CLUSTER = ReplySpec("cluster", lambda algorithm, model: model.like.new_zeros((), dtype=torch.int64))


@dataclass(frozen=True)
class CFL(Algorithm):
    """FedAvg within clusters; one at rest whose clients still pull apart is split by the cosine of their updates."""

    epochs: int = 1
    """Local epochs per round."""
    eps1: float = 0.5
    """Converged: the mean update of a cluster is shorter than this times the longest mean update so far."""
    eps2: float = 1.0
    """Conflicting: the update of some client is longer than this times the longest mean update."""
    first_rounds: int = 20
    """Number of first rounds without a split."""
    min_clients: int = 3
    """Minimum clients of a cluster in a round for a split."""
    max_clusters: int = 8
    """Maximum number of clusters; 1 is FedAvg."""

    title: ClassVar[str] = "CFL"
    learns: ClassVar[str] = "groups"
    keeps: ClassVar[str] = "group"
    citation: ClassVar[str] = """@article{sattler2020clustered,
  title={Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy Constraints},
  author={Sattler, Felix and M{\\"u}ller, Klaus-Robert and Samek, Wojciech},
  journal={IEEE Transactions on Neural Networks and Learning Systems}, year={2020}
}"""

    def check(self, model: Model, task: str) -> None:
        if self.max_clusters < 1 or self.min_clients < 2:
            raise ConfigError("algorithm: CFL needs max_clusters of at least 1 and min_clients of at least 2")

    def server_init(self, model: Model) -> Tree:
        nodes = 2 * self.max_clusters - 1
        return {
            "w": {k: v.expand(nodes, *v.shape).clone() for k, v in model.params.items()},
            "direction": model.like.new_zeros(nodes, sum(v.numel() for v in model.trainable.values())),
            "longest": model.like.new_zeros(()),
            "child": model.like.new_zeros(nodes, dtype=torch.int64),  # the first of two neighbours; 0 at a leaf
        }

    def client_init(self, me: ClientContext) -> Tree:
        return {"node": torch.zeros_like(me.n, dtype=torch.int64)}

    def onboard_init(self, me: ClientContext, server: Tree) -> Tree:
        """A newcomer goes down to a leaf, with one local training at every split on its way."""
        node = self.client_init(me)["node"]
        for _ in range(levels(server["child"].tolist())):  # the tree is the same for all who join
            w, child = at_node(node, server["w"]), at_node(node, server["child"])
            trained = me.sgd(w, epochs=self.epochs)
            update = flat({k: trained[k] - w[k] for k in me.model.trainable})
            node = torch.where(child > 0, child + nearer_half(update, server["direction"], child), node)
        return {"node": node}

    @on_client(sends=CLUSTER)
    def where(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, me.state["node"]

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, (me.sgd(w, epochs=self.epochs), me.n)

    @on_client()
    def move(self, me: ClientContext, node: Tensor) -> tuple[Tree, Tree]:
        return {"node": node}, None

    def round(self, fed: Federation, server: Tree) -> Tree:
        at = fed.gather(places := fed.map(self.where), "cluster of each client")
        w, n = fed.map(self.local, fed.scatter({k: v[at] for k, v in server["w"].items()}))
        at = fed.gather(places, "cluster of each client", w.clients)
        w, n = fed.gather(w, "model of each client"), fed.gather(n, "sample counts")
        update = flat({k: w[k] - server["w"][k][at] for k in fed.model.trainable}, stacked=True)
        server, to = tree_map(torch.clone, server), at.clone()
        for node in at.unique().tolist():
            here = (at == node).nonzero()[:, 0]
            if child := int(server["child"][node]):  # split while these clients were away
                to[here] = child + nearer_half(update[here], server["direction"], server["child"][node])
                continue
            if self.is_split(fed.round, server, update[here], n[here]):
                server["child"][node] = child = 1 + 2 * int(server["child"].count_nonzero())
                to[here] = child + bipartition(update[here])
            for leaf in to[here].unique().tolist():
                who = here[to[here] == leaf]
                if leaf != node:
                    server["direction"][leaf] = n[who] @ update[who]
                for k, v in server["w"].items():
                    v[leaf] = torch.tensordot(n[who] / n[who].sum(), w[k][who], dims=1)
        if not torch.equal(to, at):
            fed.map(self.move, fed.scatter(to))
        return server

    def is_split(self, round: int, server: Tree, update: Tensor, n: Tensor) -> bool:
        """Whether a cluster is at rest as a whole while its clients are not; remembers the longest mean update."""
        length = (n / n.sum() @ update).norm()
        longest = server["longest"].clamp_(min=length)
        is_torn = length < self.eps1 * longest and update.norm(dim=1).max() > self.eps2 * longest
        has_room = server["child"].count_nonzero() < self.max_clusters - 1 and len(n) >= self.min_clients
        return bool(is_torn and has_room and round > self.first_rounds)

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return at_node(me.state["node"], server["w"])


def at_node(node: Tensor, rows: Tree) -> Tree:
    return tree_map(lambda v: v[node[None]][0], rows)


def levels(child: list[int], node: int = 0) -> int:
    """Splits on the longest way down from a node."""
    return 1 + max(levels(child, half) for half in (child[node], child[node] + 1)) if child[node] else 0


def nearer_half(update: Tensor, direction: Tensor, child: Tensor) -> Tensor:
    """0 or 1 for every update: which of two halves it has the larger cosine with."""
    return (update @ normalize(direction[torch.stack([child, child + 1])]).T).argmax(-1)


def bipartition(update: Tensor) -> Tensor:
    """0 or 1 for every client, by complete linkage: the least similar two of a half are as similar as can be."""
    from sklearn.cluster import AgglomerativeClustering

    linkage = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="complete")
    apart = 1 - (normalize(update) @ normalize(update).T).cpu().numpy()
    return torch.from_numpy(linkage.fit_predict(apart)).to(update.device)
