"""pFedBayes: a posterior over each client's weights under a learned common prior. Zhang et al., ICML 2022, Algorithm 1.

Symbols: q_i = N(mu_i, sigma_i^2) a client's posterior, entry by entry, with rho_i = log sigma_i; w = N(mu, sigma^2) the
prior, the same for all; zeta the weight of KL(q_i || w) beside the log likelihood. A client predicts with mu_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared.own_loss import beside, task_losses, without_prefix
from fedtailor.core.algorithm import MODEL, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError

SPREAD = ReplySpec("squared distance from the prior, and variance", lambda algorithm, model: model.trainable)
RHO, MU, PULL, WIDTH, NOISE, SHARE = (f"pfedbayes.{k}" for k in ("rho", "mu", "pull", "width", "noise", "share"))
LEAST = 1e-12  # of a variance


@dataclass(frozen=True)
class PFedBayes(Algorithm):
    """Where clients agree, the prior is narrow and holds them together; where they differ, it is wide."""

    epochs: int = 1
    """Local epochs per round."""
    zeta: float = 0.05
    """Weight of the prior; 0: independent posteriors."""
    sigma: float = 0.05
    """Initial standard deviation of posteriors and prior."""

    title: ClassVar[str] = "pFedBayes"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "a mean and a variance of every parameter"
    citation: ClassVar[str] = """@inproceedings{zhang2022personalized,
  title={Personalized Federated Learning via Variational {B}ayesian Inference},
  author={Zhang, Xu and Li, Yinchuan and Li, Wenpeng and Guo, Kaiyang and Shao, Yunfeng},
  booktitle={ICML}, year={2022}
}"""

    def check(self, model: Model, task: str) -> None:
        if self.sigma <= 0 or self.zeta < 0:
            raise ConfigError("algorithm: pFedBayes needs sigma above 0 and zeta of at least 0")

    def server_init(self, model: Model) -> Tree:
        variance = {k: torch.full_like(v, self.sigma**2) for k, v in model.trainable.items()}
        return {"mu": model.params, "variance": variance}

    def client_init(self, me: ClientContext) -> Tree:
        rho = {k: torch.full_like(v, log(self.sigma)) for k, v in me.model.trainable.items()}
        return {"mu": me.model.trainable, "rho": rho}

    def onboard_init(self, me: ClientContext, server: Tree) -> Tree:
        rho = {k: v.log() / 2 for k, v in server["variance"].items()}
        return {"mu": {k: server["mu"][k] for k in me.model.trainable}, "rho": rho}

    @on_client(sends=(MODEL.summed(), SPREAD.summed()))
    def local(self, me: ClientContext, server: Tree) -> tuple[Tree, Tree]:
        state, statistics = self.posterior(me, server, self.epochs)
        apart = {k: (v - server["mu"][k]).square() + (2 * state["rho"][k]).exp() for k, v in state["mu"].items()}
        return state, (state["mu"] | statistics, apart)

    def posterior(self, me: ClientContext, server: Tree, epochs: int) -> tuple[Tree, Params]:
        """Steps on -log p(data | mu + sigma * noise) + zeta KL(q || w), per sample; and the model's statistics."""
        mu, rho = me.state["mu"], me.state["rho"]
        statistics = {k: v for k, v in server["mu"].items() if k not in mu}
        share = self.zeta / me.n.clamp(min=1)
        # a stiffer pull than 1 / lr would throw a step of gradient descent beyond the mean of the prior
        pull = {k: (share / v).clamp(max=1 / me.lr) for k, v in server["variance"].items()}
        fixed = beside(MU, {k: server["mu"][k] for k in mu}) | beside(PULL, pull) | beside(WIDTH, server["variance"])

        def loss(t: Params, x: Tensor, y: Tensor) -> Tensor:
            rho, noise = without_prefix(RHO, t), without_prefix(NOISE, t)
            drawn = t | {k: t[k] + rho[k].exp() * noise[k] for k in noise}
            known = {k: v for k, v in drawn.items() if not k.startswith("pfedbayes.")}
            return task_losses(me, known, x, y, training=True) + divergence(t)

        for _ in range(epochs):
            frozen = fixed | beside(NOISE, noise_like(me, mu)) | {SHARE: share}
            trained = me.sgd(mu | statistics | beside(RHO, rho), frozen=frozen, loss=loss)
            mu, rho, statistics = (
                {k: trained[k] for k in mu},
                without_prefix(RHO, trained),
                {k: trained[k] for k in statistics},
            )
        return {"mu": mu, "rho": rho}, statistics

    def round(self, fed: Federation, server: Tree) -> Tree:
        """The prior that is nearest to the posteriors: their mean, and their mean squared distance from it."""
        mu, apart = (fed.mean(x) for x in fed.map(self.local, server))
        variance = {k: (v - (mu[k] - server["mu"][k]).square()).clamp(min=LEAST) for k, v in apart.items()}
        return {"mu": mu, "variance": variance}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return server["mu"] | me.state["mu"]

    def onboard(self, me: ClientContext, server: Tree, epochs: int) -> Params:
        state, statistics = self.posterior(me, server, epochs)
        return state["mu"] | statistics


def divergence(t: Params) -> Tensor:
    """zeta / n times KL(q || w), without what does not depend on q; the pull on the mean is bounded."""
    mu, pull, width, rho = (without_prefix(prefix, t) for prefix in (MU, PULL, WIDTH, RHO))
    means = [(pull[k] * (t[k] - mu[k]).square()).sum() for k in mu]
    spreads = [((2 * rho[k]).exp() / width[k] - 2 * rho[k]).sum() for k in mu]
    return torch.stack(means).sum() / 2 + t[SHARE] * torch.stack(spreads).sum() / 2


def noise_like(me: ClientContext, params: Params) -> Params:
    """Standard normal numbers, other ones in each call."""
    sizes = [v.numel() for v in params.values()]
    drawn = torch.special.ndtri(me.uniform(sum(sizes)).clamp(1e-7, 1 - 1e-7)).split(sizes)
    return {k: part.reshape(v.shape) for (k, v), part in zip(params.items(), drawn, strict=True)}
