"""FML: a private model and a common one teach each other. Shen et al., "Federated Mutual Learning", 2020, Algorithm 1.

Symbols: local the private model; meme the common one; p the probabilities of the classes of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedtailor.algorithms._shared.own_loss import beside, without_prefix
from fedtailor.algorithms.apfl import own_statistics
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError

LOCAL = "fml.local"


@dataclass(frozen=True)
class FML(Algorithm):
    """Both models take every step together, each on its own loss and on what the other one says."""

    epochs: int = 1
    """Local epochs per round, of both models."""
    alpha: float = 0.5
    """Weight of the labels in the private model's loss, beside the common model's probabilities; 1 is Local."""
    beta: float = 0.5
    """Weight of the labels in the common model's loss, beside the private model's probabilities."""

    title: ClassVar[str] = "FML"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "a whole personal model"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "alpha = 1": ({"alpha": 1.0}, "local", {}, "dense"),
    }
    citation: ClassVar[str] = """@article{shen2020federated,
  title={Federated Mutual Learning},
  author={Shen, Tao and Zhang, Jie and Jia, Xinkang and Zhang, Fengda and Huang, Gang and Zhou, Pan and Kuang, Kun and
    Wu, Fei and Wu, Chao},
  journal={arXiv:2006.16765}, year={2020}
}"""

    server_init = FedAvg.server_init

    def check(self, model: Model, task: str) -> None:
        if task != "classification":
            raise ConfigError(f"algorithm.name: FML compares probabilities of classes; it does not serve {task}")
        if not (0 <= self.alpha <= 1 and 0 <= self.beta <= 1):
            raise ConfigError("algorithm: FML needs alpha and beta between 0 and 1")

    def client_init(self, me: ClientContext) -> Params:
        return me.model.trainable

    def onboard_init(self, me: ClientContext, meme: Params) -> Params:
        return {k: meme[k] for k in me.model.trainable}

    def mutual(self, me: ClientContext, meme: Params, epochs: int) -> Params:
        def loss(t: Params, x: Tree, y: Tensor) -> Tensor:
            w = {k: t[k] for k in (*me.model.params, *me.model.private_buffers)}
            w, local = own_statistics(me.model, w, w | without_prefix(LOCAL, t))
            by_meme, by_local = me.model(w, x, training=True), me.model(local, x, training=True)
            learned = self.alpha * me.experiment.loss(by_local, y) + (1 - self.alpha) * taught(by_local, by_meme)  # (4)
            return learned + self.beta * me.experiment.loss(by_meme, y) + (1 - self.beta) * taught(by_meme, by_local)

        return me.sgd(meme | beside(LOCAL, me.state), epochs=epochs, loss=loss)

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, meme: Params) -> tuple[Tree, Tree]:
        trained = self.mutual(me, meme, self.epochs)
        return without_prefix(LOCAL, trained), ({k: trained[k] for k in meme}, me.n)

    def round(self, fed: Federation, meme: Params) -> Params:
        return fed.mean(*fed.map(self.local, meme))

    def personal(self, me: ClientContext, meme: Params) -> Params:
        return meme | me.state

    def onboard(self, me: ClientContext, meme: Params, epochs: int) -> Params:
        return meme | without_prefix(LOCAL, self.mutual(me, meme, epochs))


def taught(pupil: Tensor, teacher: Tensor) -> Tensor:
    """Of each sample, how far the pupil's probabilities are from the teacher's, which is not changed by it."""
    wanted = teacher.detach().log_softmax(1)
    return (wanted.exp() * (wanted - pupil.log_softmax(1))).sum(1)  # torch's kl_div has no rule for vmap
