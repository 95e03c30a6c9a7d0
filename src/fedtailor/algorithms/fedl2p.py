"""FedL2P: a meta-network sets each client's fine-tuning, layer by layer. Lee et al., NeurIPS 2023, section 3.

Symbols: w common model; xi statistics of what enters its layers at a client; lam weights of the meta-network, whose
outputs are, for each layer, eta (factor of the step size) and beta (how much of its BatchNorm statistics is own).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared.layers import input_statistics, layers_of, with_derivable_statistics
from fedtailor.algorithms._shared.own_loss import task_losses
from fedtailor.algorithms._shared.unfolding import adam, learnable
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree, flat, unflat


@dataclass(frozen=True)
class FedL2P(Algorithm):
    """FedAvg+FT whose fine-tuning is learned: lam descends the clients' validation loss after it."""

    epochs: int = 1
    """Local epochs of the common model per round."""
    tune_epochs: int = 5
    """Epochs of fine-tuning before a client predicts."""
    meta_lr: float = 0.01
    """Learning rate of the meta-network (Adam); 0 is FedAvg+FT, if no statistics are averaged."""
    hidden: int = 32
    """Units of the meta-network's hidden layer."""
    model_rounds: int | None = None
    """Rounds in which the common model is trained; after that only the meta-network. All by default."""

    title: ClassVar[str] = "FedL2P"
    learns: ClassVar[str] = "adaptation"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "the fine-tuned model"
    onboards_fitted: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "meta_lr = 0": ({"meta_lr": 0.0, "tune_epochs": 3}, "fedavg+ft", {"tune_epochs": 3}),
    }
    citation: ClassVar[str] = """@inproceedings{lee2023fedl2p,
  title={{FedL2P}: Federated Learning to Personalize},
  author={Lee, Royson and Kim, Minyoung and Li, Da and Qiu, Xinchi and Hospedales, Timothy and Husz\\'ar, Ferenc and
    Lane, Nicholas D.},
  booktitle={NeurIPS}, year={2023}
}"""

    local: ClassVar[Any] = FedAvg.local

    def server_init(self, model: Model) -> Tree:
        return {"w": model.params, "lam": learnable(flat(self.network(model)))}

    def network(self, model: Model) -> Params:
        """Before it has learned: every eta is 1, every beta 1/2."""
        layers = len(set(layers_of(model).values()))
        draw = torch.from_numpy(stream("FedL2P").normal(size=(self.hidden, 2 * layers))).to(model.like)
        zeros = model.like.new_zeros(2 * layers, self.hidden + 1)
        return {"first": draw / layers**0.5, "first_bias": zeros.new_zeros(self.hidden), "out": zeros}

    def fine_tune(self, me: ClientContext, w: Params, lam: Tensor) -> Params:
        w = {k: v.detach() for k, v in w.items()}  # only lam learns from the validation loss
        net, layers = unflat(lam, self.network(me.model)), layers_of(me.model)
        units = (net["first"] @ input_statistics(me, w) + net["first_bias"]).relu()
        log_eta, raw = (net["out"][:, :-1] @ units + net["out"][:, -1]).chunk(2)
        eta, beta = log_eta.exp(), raw.sigmoid()
        steps = {k: eta[layers[k]].expand_as(v) for k, v in me.model.trainable.items()}  # a mask scales a step
        own = me.sgd(w, epochs=self.tune_epochs, mask=steps)
        return {k: v if k in steps else torch.lerp(w[k], v.detach(), beta[layers[k]]) for k, v in own.items()}

    @on_client(sends=(NUMBER.summed(), NUMBER.summed()))
    def judge(self, me: ClientContext, w: Params, lam: Tensor) -> tuple[Tree, Tree]:
        statistics = me.buffers
        own = with_derivable_statistics(me.model, self.fine_tune(me, w, lam) | me.buffers)
        x, y, mask = me.val
        losses = task_losses(me, own, x, y)
        me.buffers = statistics  # those of the common model, not of the fine-tuned one
        return me.state, ((losses * mask).sum(), mask.sum())

    def round(self, fed: Federation, server: Tree) -> Tree:
        w, lam = server["w"], server["lam"]
        if self.model_rounds is None or fed.round <= self.model_rounds:
            w = fed.mean(*fed.map(self.local, w))
        if self.meta_lr:
            losses, counts = fed.map(self.judge, w, fed.tape(lam["x"]))
            loss = fed.sum(losses) / fed.sum(counts).clamp(min=1)
            lam = adam(lam, fed.backward(loss), self.meta_lr)
            fed.report(outer_loss=loss.detach())
        return {"w": w, "lam": lam}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return self.fine_tune(me, server["w"], server["lam"]["x"])
