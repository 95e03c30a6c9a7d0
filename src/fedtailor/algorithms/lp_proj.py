"""lp-proj: personal models tied together in a few random directions. Lin et al., NeurIPS 2022.

Symbols: theta personal model, counted from the common initial one; P random projection to q dimensions, the same for
all; u common vector of q numbers, all that is sent; c = u - P theta. A client minimises f(theta) + lam/p |c|_p^p.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.algorithm import Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError

PROJECTION = ReplySpec("projection", lambda algorithm, model: algorithm.server_init(model))


@dataclass(frozen=True)
class LpProj(Algorithm):
    """Each client trains a model of its own whose projection is pulled towards the common vector u."""

    p: Literal[1, 2] = 1
    """Norm of the penalty: 1 is lp-proj-1, which is robust to outlying clients; 2 is lp-proj-2."""
    q: int = 10
    """Numbers sent each way; at most the size of the model."""
    lam: float = 0.1
    """Weight of the penalty between the projected model and u; 0 is Local."""
    eta: float = 0.1
    """Learning rate of u."""
    local_rounds: int = 5
    """Steps of u per round."""
    epochs: int = 1
    """Local epochs of theta per step of u."""
    projection_seed: int = 0
    """Seed of the random projection, from which server and clients generate it; it is never sent."""

    title: ClassVar[str] = "lp-proj"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "a whole personal model"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "lam = 0": ({"lam": 0.0, "local_rounds": 1}, "local", {}),
        "lam = 0, p = 2": ({"lam": 0.0, "local_rounds": 1, "p": 2}, "local", {}),
    }
    citation: ClassVar[str] = """@inproceedings{lin2022personalized,
  title={Personalized Federated Learning towards Communication Efficiency, Robustness and Fairness},
  author={Lin, Shiyun and Han, Yuze and Li, Xiang and Zhang, Zhihua},
  booktitle={NeurIPS}, year={2022}
}"""

    def check(self, model: Model, task: str) -> None:
        if model.differing:
            raise ConfigError("model.by_client: lp-proj projects whole models, so that clients must have the same one")

    def server_init(self, model: Model) -> Tensor:
        size = sum(v.numel() for v in model.trainable.values())
        return model.like.new_zeros(min(self.q, size))

    def client_init(self, me: ClientContext) -> Params:
        return me.model.params

    @on_client(sends=PROJECTION.summed())
    def local(self, me: ClientContext, u: Tensor) -> tuple[Tree, Tree]:
        theta, first, parts = me.state, me.model.params, self.projection(me.model)

        def pull(u: Tensor, theta: Params) -> Tensor:
            c = u - torch.stack([part @ (theta[k] - first[k]).flatten() for k, part in parts.items()]).sum(0)
            return c.sign() if self.p == 1 else c

        for _ in range(self.local_rounds):
            for _ in range(self.epochs):
                step = pull(u, theta)
                # an epoch keeps the pull of its first model and stays near that; for p = 2 this bounds the penalty
                center = {k: theta[k] + (step @ part).reshape(theta[k].shape) for k, part in parts.items()}
                theta = me.sgd(theta, prox=(center, self.lam))
            u = u - self.eta * self.lam * pull(u, theta)
        return theta, u

    def round(self, fed: Federation, u: Tensor) -> Tensor:
        return fed.mean(fed.map(self.local, u))

    def personal(self, me: ClientContext, u: Tensor) -> Params:
        return me.state

    def onboard(self, me: ClientContext, u: Tensor, epochs: int) -> Params:
        return self.local(me, u)[0]

    def projection(self, model: Model) -> Params:
        """P, cut into the columns of each parameter: the same wherever the seed is the same."""
        sizes = {k: model.trainable[k].numel() for k in sorted(model.trainable)}
        whole = torch.from_numpy(orthonormal(self.projection_seed, len(self.server_init(model)), sum(sizes.values())))
        return dict(zip(sizes, whole.to(model.like).split(list(sizes.values()), dim=1), strict=True))


@lru_cache(maxsize=1)  # a large model's takes a while to make, and every call needs it
def orthonormal(seed: int, q: int, size: int) -> np.ndarray:
    """`q` random directions of unit length, at right angles to each other."""
    return np.linalg.qr(stream(seed, "projection").standard_normal((size, q)))[0].T.copy()
