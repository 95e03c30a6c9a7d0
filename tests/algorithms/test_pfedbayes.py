"""pFedBayes by hand, with the divergence of torch.distributions; without its prior and spread it is Local."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy

from fedtailor.algorithms import pfedbayes
from fedtailor.algorithms.local import Local
from fedtailor.algorithms.pfedbayes import PFedBayes, noise_like
from fedtailor.core.client import onboard
from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import (
    EVEN_SIZES,
    F64,
    FULL_BATCH,
    assert_equal,
    federate,
    make_data,
    make_me,
    make_model,
    models,
    run,
)

ZETA, SIGMA = 0.02, 0.2
Belief = tuple[Params, Params]  # mean and log of the standard deviation


def waves(me: ClientContext | None, params: Params) -> Params:
    """In place of noise."""
    return {k: torch.arange(v.numel(), dtype=F64).sin().reshape(v.shape) for k, v in params.items()}


def step(model: Model, q: Belief, prior: Belief, x: Tensor, y: Tensor) -> Belief:
    mu, rho = ({k: v.clone().requires_grad_() for k, v in part.items()} for part in q)
    noise = waves(None, mu)
    loss = cross_entropy(model({k: v + rho[k].exp() * noise[k] for k, v in mu.items()}, x), y)
    for k in mu:
        apart = kl_divergence(Normal(mu[k], rho[k].exp()), Normal(prior[0][k], prior[1][k].exp()))
        loss = loss + ZETA / len(x) * apart.sum()
    loss.backward()
    made = [{k: (v - 0.1 * v.grad).detach() for k, v in part.items() if v.grad is not None} for part in (mu, rho)]
    return made[0], made[1]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pfedbayes, "noise_like", waves)
    data = make_data()
    model = make_model("mlp", data)
    prior: Belief = model.params, {k: torch.full_like(v, SIGMA).log() for k, v in model.params.items()}
    q = [prior] * 4
    for _ in range(3):
        for i in range(4):
            for _ in range(2):
                q[i] = step(model, q[i], prior, *data.train.of(i))
        mu = {k: torch.stack([own[k] for own, _ in q]) for k in model.params}
        spread = {k: torch.stack([(2 * rho[k]).exp() for _, rho in q]).mean(0) for k in mu}
        prior = (
            {k: v.mean(0) for k, v in mu.items()},
            {k: (spread[k] + v.var(0, correction=0)).log() / 2 for k, v in mu.items()},
        )
    fed = federate(PFedBayes(epochs=2, zeta=ZETA, sigma=SIGMA), data, model, engine, FULL_BATCH)
    server = run(fed, rounds=3)
    assert_equal(server, {"mu": prior[0], "variance": {k: (2 * v).exp() for k, v in prior[1].items()}})
    assert_equal(models(fed, server), {name: q[i][0] for i, name in enumerate(data.clients)})


@pytest.mark.parametrize("kind", ["mlp", "normed"])
def test_without_prior_and_spread_it_is_local(kind: str) -> None:
    data = make_data(sizes=EVEN_SIZES)
    ours = federate(PFedBayes(zeta=0.0, sigma=1e-9), data, make_model(kind, data), solver=FULL_BATCH)
    alone = federate(Local(), data, make_model(kind, data), solver=FULL_BATCH)
    assert_equal(models(ours, run(ours)), models(alone, run(alone)), 1e-6)


def test_a_narrow_prior_holds_but_does_not_throw() -> None:
    """Its pull, unbounded, would be 1e7 times what steps of 0.1 can follow."""
    data = make_data()
    fed = federate(PFedBayes(zeta=10.0, sigma=1e-4), data, make_model("mlp", data))
    server = run(fed, rounds=6)
    for mine in models(fed, server).values():
        for k, v in mine.items():
            assert float((v - server["mu"][k]).abs().max()) < 0.2


def test_noise_is_normal_and_new_in_each_call() -> None:
    data = make_data()
    me, like = make_me(data, make_model("mlp", data)), {"a": torch.zeros(40, 50), "b": torch.zeros(7)}
    first, second = noise_like(me, like), noise_like(me, like)
    assert [v.shape for v in first.values()] == [v.shape for v in like.values()]
    assert abs(float(first["a"].mean())) < 0.1
    assert abs(float(first["a"].std()) - 1) < 0.1
    assert not torch.equal(first["b"], second["b"])


def test_a_newcomer_begins_at_the_prior() -> None:
    data = make_data()
    fed = federate(PFedBayes(), data, make_model("mlp", data), solver=FULL_BATCH)
    server = run(fed, cohort=[0, 1, 2])
    assert_equal(onboard(fed.engine.experiment, 3, server, 0), server["mu"], 0)
    assert not torch.equal(onboard(fed.engine.experiment, 3, server, 2)["out.bias"], server["mu"]["out.bias"])
    assert fed.record.gathered == set()


def test_mistakes() -> None:
    model = make_model("mlp", make_data())
    for wrong in (PFedBayes(sigma=0.0), PFedBayes(zeta=-1.0)):
        with pytest.raises(ConfigError, match="pFedBayes needs sigma above 0"):
            wrong.check(model, "classification")
