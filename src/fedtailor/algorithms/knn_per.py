"""kNN-Per: FedAvg's model interpolated with the client's nearest neighbours. Marfoq et al., ICML 2022, section 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, common, on_client
from fedtailor.core.context import ClientContext, View
from fedtailor.core.data import take
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.errors import ConfigError

FEATURES, LABELS, SHARE = "knn.features", "knn.labels", "knn.share"
NOBODY = -1  # the label of an empty place


@dataclass(frozen=True)
class KNNPer(Algorithm):
    """Rounds of FedAvg; p = lam kNN + (1 - lam) model, with neighbours in the space of the features before the head."""

    epochs: int = 1
    """Local epochs per round."""
    k: int = 10
    """Number of neighbours."""
    scale: float = 1.0
    """A vote weighs exp(-|f - f'|^2 / (scale * number of features))."""
    lams: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    """Weights of kNN to choose from, for each client by its validation loss; only 0 is FedAvg."""
    default_lam: float = 0.5
    """Weight of kNN for a client without validation samples."""
    capacity: int = 1000
    """Maximum training samples per client to keep features of, evenly spaced."""

    title: ClassVar[str] = "kNN-Per"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "features"
    private: ClassVar[str] = "features of samples, their share"
    onboards_fitted: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "no votes": ({"lams": (0.0,), "default_lam": 0.0}, "fedavg", {}),
    }
    citation: ClassVar[str] = """@inproceedings{marfoq2022personalized,
  title={Personalized Federated Learning through Local Memorization},
  author={Marfoq, Othmane and Neglia, Giovanni and Kameni, Laetitia and Vidal, Richard},
  booktitle={ICML}, year={2022}
}"""

    round = FedAvg.round

    def server_init(self, model: Model) -> Params:
        return model.common(model.params)

    def client_init(self, me: ClientContext) -> Params:
        return me.model.without(self.server_init(me.model))  # nothing, unless architectures differ

    @on_client(sends=(common(MODEL).weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        new = me.sgd(w | me.state, epochs=self.epochs)
        return {k: new[k] for k in me.state}, ({k: new[k] for k in w}, me.n)

    def check(self, model: Model, task: str) -> None:
        if task != "classification":
            raise ConfigError(
                f"algorithm.name: kNN-Per lets neighbours vote for classes; it is for classification, not {task}"
            )
        if not model.head:
            raise ConfigError("model.head: kNN-Per compares the features before the head, but the model has none")
        if min(self.k, self.capacity, len(self.lams)) < 1 or self.scale <= 0:
            raise ConfigError("algorithm: kNN-Per needs k, capacity and scale above 0, and at least one of lams")

    def personal(self, me: ClientContext, w: Params) -> Params:
        w = w | me.state
        x, y, _ = view = me.train if len(me.train.y) else empty(me.train)
        row = torch.arange(self.capacity, device=me.n.device)
        sample = (row * (me.n / self.capacity).clamp(min=1)).long().clamp(max=len(y) - 1)
        is_kept = row < me.n
        if len(y) > self.capacity:
            view = View(take(x, sample), y[sample], is_kept)
            y, sample = view.y, row
        features = torch.cat([me.features(w, part.x) for part in view.parts()])
        store = w | {
            FEATURES: torch.where(is_kept[:, None], features[sample], 0),
            LABELS: torch.where(is_kept, y[sample], NOBODY),
        }
        likelihood = me.n.new_zeros(len(self.lams))
        for x, y, mask in me.val.parts():
            voted, modelled = self.both_probabilities(me.model, me.buffers | store, x)
            right = [log_blend(voted, modelled, lam).gather(1, y[:, None])[:, 0] for lam in self.lams]
            likelihood = likelihood + torch.where(mask > 0, torch.stack(right), 0).sum(1)
        best = me.n.new_tensor(self.lams)[likelihood.argmax(0, keepdim=True)][0]
        chosen = torch.where(me.val.mask.sum() > 0, best, self.default_lam)
        return store | {SHARE: torch.where(me.n > 0, chosen, 0)}  # nobody to ask: the model alone

    def predict(self, model: Model, personal: Params, x: Tensor) -> Tensor:
        return log_blend(*self.both_probabilities(model, personal, x), personal[SHARE])

    def both_probabilities(self, model: Model, personal: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        store, labels = personal[FEATURES], personal[LABELS]
        features, logits = model.features_and_outputs(personal, x)
        squares = features.square().sum(1)[:, None] - 2 * features @ store.T + store.square().sum(1)
        nearness = torch.where(labels == NOBODY, -torch.inf, -squares / (self.scale * store.shape[1]))
        near, who = nearness.topk(min(self.k, self.capacity))
        is_for = labels[who][..., None] == torch.arange(logits.shape[1], device=labels.device)
        votes = torch.where(near > -torch.inf, near, torch.finfo(near.dtype).min).softmax(1)
        return (votes[..., None] * is_for).sum(1), logits.softmax(1)


def empty(view: View) -> View:
    """In place of no samples: one that does not count."""
    return View(*tree_map(lambda v: v.new_zeros(1, *v.shape[1:]), tuple(view)))


def log_blend(voted: Tensor, modelled: Tensor, lam: float | Tensor) -> Tensor:
    """Log of lam kNN + (1 - lam) model; never of 0, where no neighbour votes for a class."""
    p = lam * voted + (1 - lam) * modelled
    return p.clamp(min=torch.finfo(p.dtype).tiny).log()
