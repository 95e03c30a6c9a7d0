"""pFedGate: a private layer gates blocks of the common model, based on the client's data. Chen et al., ICML 2023.

Symbols: theta common model, its tensors cut into blocks; A, b a client's gating layer; g = mean over samples x of
sigmoid(A x + b), a number per block; M = g where a block is kept and 0 elsewhere; a client predicts with M * theta.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared.own_loss import some_samples, task_losses
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError

A, B, SOME, COUNTED = "pfedgate.A", "pfedgate.b", "pfedgate.some", "pfedgate.counted"


@dataclass(frozen=True)
class PFedGate(Algorithm):
    """The common model is averaged; what of it a client uses, and how much, its gating layer says."""

    epochs: int = 1
    """Local epochs per round, of model and gating layer together."""
    density: float = 1.0
    """Fraction of the parameters that a client may use; 1 keeps all."""
    blocks: int = 5
    """Blocks per tensor of the model; the first of each is always kept."""
    start: float = 2.0
    """Initial b: gates start at its sigmoid. With 50, and density 1, it is FedAvg."""
    samples: int = 32
    """Samples per client, drawn in each round, for the gating layer during training."""

    title: ClassVar[str] = "pFedGate"
    learns: ClassVar[str] = "masks"
    keeps: ClassVar[str] = "gates"
    private: ClassVar[str] = "a gating layer"
    needs_tensor: ClassVar[bool] = True
    stale: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "open gates": ({"density": 1.0, "start": 50.0}, "fedavg", {}),
    }
    citation: ClassVar[str] = """@inproceedings{chen2023efficient,
  title={Efficient Personalized Federated Learning via Sparse Model-Adaptation},
  author={Chen, Daoyuan and Yao, Liuyi and Gao, Dawei and Ding, Bolin and Li, Yaliang},
  booktitle={ICML}, year={2023}
}"""

    server_init, round = FedAvg.server_init, FedAvg.round

    def check(self, model: Model, task: str) -> None:
        if not 0 < self.density <= 1 or self.blocks < 1 or self.samples < 1:
            raise ConfigError("algorithm: pFedGate needs density above 0 and up to 1, blocks and samples of at least 1")

    def client_init(self, me: ClientContext) -> Tree:
        count, inputs = sum(n for n, _ in block_sizes(me.model, self.blocks).values()), me.train.x.shape[1:].numel()
        return {"A": me.n.new_zeros(count, inputs), "b": me.n.new_full((count,), self.start)}

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, theta: Params) -> tuple[Tree, Tree]:
        trained = self.train_gates(me, theta, {}, self.epochs)
        return {"A": trained[A], "b": trained[B]}, ({k: trained[k] for k in theta}, me.n)

    def train_gates(self, me: ClientContext, theta: Params, frozen: Params, epochs: int) -> Params:
        """The gating layer and what else is not frozen, on the loss of M * theta."""
        some, _, counted = some_samples(me, self.samples)

        def loss(t: Params, x: Tensor, y: Tensor) -> Tensor:
            gated = t | self.apply_gates(me.model, t, gates(t[A], t[B], t[SOME], t[COUNTED]) / t[COUNTED].sum())
            known = {k: v for k, v in gated.items() if not k.startswith("pfedgate.")}
            return task_losses(me, known, x, y, training=True)

        beside = frozen | {SOME: some, COUNTED: counted}
        return me.sgd(theta | {A: me.state["A"], B: me.state["b"]}, epochs=epochs, frozen=beside, loss=loss)

    def personal(self, me: ClientContext, theta: Params) -> Params:
        return theta | self.apply_gates(me.model, theta, self.mean_gates(me, me.state["A"], me.state["b"]))

    def onboard(self, me: ClientContext, theta: Params, epochs: int) -> Params:
        gate = self.train_gates(me, {}, theta, epochs)
        return theta | self.apply_gates(me.model, theta, self.mean_gates(me, gate[A], gate[B]))

    def mean_gates(self, me: ClientContext, a: Tensor, b: Tensor) -> Tensor:
        """Over all training samples."""
        return sum((gates(a, b, x, mask) for x, _, mask in me.train.parts()), torch.zeros_like(b)) / me.n.clamp(min=1)

    def apply_gates(self, model: Model, theta: Params, g: Tensor) -> Params:
        """M * theta. Blocks that are left out are 0; their gates have the derivatives that they would have if kept."""
        m, at, out = g - g.detach() * (1 - self.open_blocks(model, g.detach())), 0, {}
        for k, (count, size) in block_sizes(model, self.blocks).items():
            each = m[at : at + count, None].expand(count, size).reshape(-1)[: theta[k].numel()]
            out[k], at = theta[k] * each.reshape(theta[k].shape), at + count
        return out

    def open_blocks(self, model: Model, g: Tensor) -> Tensor:
        """1 for the blocks with the largest gates per entry, as many as fit beside the first ones of all tensors."""
        table = block_sizes(model, self.blocks).values()
        sizes = g.new_tensor([size for count, size in table for _ in range(count)])
        is_first = g.new_tensor([i == 0 for count, _ in table for i in range(count)])
        order = torch.where(is_first > 0, torch.inf, g / sizes).argsort(descending=True, stable=True)
        fits = sizes[order].cumsum(0) <= self.density * sizes.sum()
        return torch.maximum(fits.to(g.dtype)[order.argsort()], is_first)


def block_sizes(model: Model, blocks: int) -> dict[str, tuple[int, int]]:
    """How many blocks each tensor has, and entries of a block; the last one may have fewer."""
    sizes = {k: -(-v.numel() // blocks) for k, v in model.trainable.items()}
    return {k: (-(-v.numel() // sizes[k]), sizes[k]) for k, v in model.trainable.items()}


def gates(a: Tensor, b: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """Summed over samples."""
    return mask @ torch.sigmoid(x.flatten(1).to(a.dtype) @ a.T + b)
