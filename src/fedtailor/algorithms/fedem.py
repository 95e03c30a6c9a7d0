"""FedEM: every client's data is a mixture of the same distributions. Marfoq et al., NeurIPS 2021, Algorithm 1.

Symbols: theta_1 ... theta_M models of the components, stacked; pi a client's weights of them; q_m(s) how likely sample
s is of component m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared import mixture
from fedtailor.algorithms._shared.own_loss import beside, task_losses, without_prefix
from fedtailor.algorithms.ifca import another
from fedtailor.core.algorithm import COUNT, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError

COMPONENTS = ReplySpec("models of the components", lambda algorithm, model: algorithm.server_init(model), is_model=True)
Q = "fedem.q"
STEPS = 20  # of expectation and maximization over pi alone, for a newcomer


@dataclass(frozen=True)
class FedEM(Algorithm):
    """Common models, each trained on the samples that are likely its own, and mixed by private weights."""

    epochs: int = 1
    """Local epochs per round."""
    components: int = 3
    """Number of common models (M), all of which are sent to every client; 1 is FedAvg."""

    title: ClassVar[str] = "FedEM"
    learns: ClassVar[str] = "groups"
    keeps: ClassVar[str] = "group"
    private: ClassVar[str] = "weights of the components"
    onboards_fitted: ClassVar[bool] = True
    stale: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "one component": ({"components": 1}, "fedavg", {}, "dense"),
    }
    citation: ClassVar[str] = """@inproceedings{marfoq2021federated,
  title={Federated Multi-Task Learning under a Mixture of Distributions},
  author={Marfoq, Othmane and Neglia, Giovanni and Bellet, Aur{\\'e}lien and Kameni, Laetitia and Vidal, Richard},
  booktitle={NeurIPS}, year={2021}
}"""

    def check(self, model: Model, task: str) -> None:
        if self.components < 1:
            raise ConfigError(f"algorithm.components: FedEM needs at least 1, not {self.components}")
        if task not in ("classification", "regression"):
            raise ConfigError(
                f"algorithm.name: FedEM mixes probabilities of classes or numbers; it does not serve {task}"
            )
        if model.batch_statistics:
            raise ConfigError(
                "model: FedEM trains several models in one step, which cannot share statistics of BatchNorm"
            )

    def server_init(self, model: Model) -> Params:
        return {name(m, k): another(model, k, m) for m in range(self.components) for k in model.params}

    def client_init(self, me: ClientContext) -> Tensor:
        return me.n.new_ones(self.components) / self.components

    def onboard_init(self, me: ClientContext, theta: Params) -> Tensor:
        losses, pi = self.losses_by_sample(me, theta), self.client_init(me)
        for _ in range(STEPS):
            pi = self.mean_of_samples(me, responsibilities(pi, losses), pi)
        return pi

    def losses_by_sample(self, me: ClientContext, theta: Params) -> Tensor:
        """[samples, components]."""
        each = [me.train.mask.new_zeros(0, self.components)]
        for x, y, _ in me.train.parts():
            models = (me.buffers | without_prefix(str(m), theta) for m in range(self.components))
            each.append(torch.stack([task_losses(me, model, x, y) for model in models], dim=1))
        return torch.cat(each)

    def mean_of_samples(self, me: ClientContext, q: Tensor, otherwise: Tensor) -> Tensor:
        mask = me.train.mask[:, None]
        return torch.where(me.n > 0, (q * mask).sum(0) / me.n.clamp(min=1), otherwise)

    @on_client(sends=(COMPONENTS.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, theta: Params) -> tuple[Tree, Tree]:
        q = responsibilities(me.state, self.losses_by_sample(me, theta))  # (9)
        pi = self.mean_of_samples(me, q, me.state)  # (10)

        def loss(t: Params, x: Tree, y: Tensor, index: Tensor) -> Tensor:
            models = (me.buffers | without_prefix(str(m), t) for m in range(self.components))
            each = torch.stack([task_losses(me, model, x, y, training=True) for model in models], dim=1)
            return (t[Q][index] * each).sum(1)  # (11)

        return pi, (me.sgd(theta, epochs=self.epochs, frozen={Q: q}, loss=loss), me.n)

    def round(self, fed: Federation, theta: Params) -> Params:
        return fed.mean(*fed.map(self.local, theta))

    def personal(self, me: ClientContext, theta: Params) -> Params:
        first, *others = (without_prefix(str(m), theta) for m in range(self.components))
        kind = mixture.NUMBERS if me.experiment.task.kind == "regression" else mixture.CLASSES
        mixed = {kind: me.state}
        for m, other in enumerate(others, start=1):
            mixed |= beside(f"fedem.{m}", other)
        return first | mixed

    def predict(self, model: Model, personal: Params, x: Tensor) -> Tensor:
        return mixture.predict(model, personal, x, [f"fedem.{m}" for m in range(1, self.components)])


def name(m: int, parameter: str) -> str:
    """Of a component's parameter."""
    return f"{m}.{parameter}"


def responsibilities(pi: Tensor, losses: Tensor) -> Tensor:
    """q, [samples, components]."""
    return (pi.clamp(min=torch.finfo(pi.dtype).tiny).log() - losses).softmax(1)
