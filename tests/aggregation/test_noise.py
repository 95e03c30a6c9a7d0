"""Clipping by hand, noise of the stated size, and the accountant's own figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from torch import nn

from fedtailor import algorithms
from fedtailor.aggregation import noise as sampler
from fedtailor.aggregation.accountant import privacy_cost
from fedtailor.aggregation.clip import Clip
from fedtailor.aggregation.dry_run import rehearse
from fedtailor.aggregation.noise import GaussianNoise, add_noise, changed_parts
from fedtailor.aggregation.secure import Secure
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.random import stream
from fedtailor.core.reduce import Aggregation, Open
from fedtailor.core.trees import Params, Tree, leaves, tree_map
from fedtailor.errors import ConfigError
from fedtailor.experiments import runner
from fedtailor.models import build
from tests.helpers import ENGINES, F64, assert_equal, federate, make_data, make_model
from tests.small import DIGITS, config, records, stop_after

NOISE = ("privacy.clip=0.5", "privacy.noise=2.0", "algorithm.name=fedavg")
REPEATABLE = (*NOISE, "privacy.repeatable_noise=true")


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def test_clipping_by_hand() -> None:
    message = {"a": vector(1, 1), "b": vector(1)}
    reply = ({"a": vector(3, 1), "b": vector(0)}, vector(7).squeeze())  # the change is (2, 0), (-1): norm sqrt(5)
    found, count = Clip(1.0).apply(reply, (message,), (False,))
    s = 1 / math.sqrt(5)
    assert_equal(found, {"a": vector(1 + 2 * s, 1), "b": vector(1 - s)}, 1e-15)
    assert count == 7
    assert_equal(Clip(2.3).apply(reply, (message,), (False,)), reply, 1e-15)
    assert_equal(Clip(1.0).apply(message, (message,), (False,)), message, 0.0)  # no change at all


def test_parts_are_clipped_together_and_by_their_own_message() -> None:
    u, v = {"a": vector(0, 0)}, {"b": vector(5)}
    found = Clip(1.0).apply(({"b": vector(9)}, {"a": vector(3, 0)}), (u, v), (False, False))  # changes 4 and (3)
    assert_equal(found, ({"b": vector(5.8)}, {"a": vector(0.6, 0)}), 1e-12)


def test_what_counts_as_a_new_version_of_a_message() -> None:
    w, n = {"a": vector(1, 2)}, vector(1).squeeze()
    assert changed_parts((w, n), (w,), (False,)) == {0: 0}
    assert changed_parts(w, (n, w), (False, False)) == {0: 1}
    assert changed_parts((w, w), (w,), (False,)) == {0: 0}  # an argument counts once
    assert changed_parts((w, n), (w,), (True,)) == {}  # each client was sent another one
    assert changed_parts(n, (n,), (False,)) == {}  # a number is not a model
    assert changed_parts({"a": vector(1)}, (w,), (False,)) == {}
    assert changed_parts({"b": vector(1, 2)}, (w,), (False,)) == {}


@dataclass(frozen=True)
class Watched(Algorithm):
    """FedAvg whose server looks at the models."""

    def server_init(self, model: Any) -> Tree:
        return model.params

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return {}, (me.sgd(w, epochs=3), me.n)

    def round(self, fed: Federation, w: Params) -> Tree:
        models, _ = fed.map(self.local, w)
        return fed.gather(models, "models")


def changes(engine: str, clip: float) -> torch.Tensor:
    """What each client changed, as rows."""
    data = make_data()
    fed = federate(Watched(), data, make_model("mlp", data), engine)
    with_clip(fed, clip)
    start = fed.engine.experiment.model.params
    models = fed.run_round(1, range(4), start)
    return torch.cat([(models[k] - start[k]).flatten(1) for k in sorted(start)], 1)


def with_clip(fed: Federation, clip: float) -> None:
    """As a run is set up that has `privacy.clip`."""
    with_privacy(fed, Aggregation((Clip(clip),) if clip else ()))


def with_privacy(fed: Federation, aggregation: Aggregation) -> None:
    setting = replace(fed.engine.experiment, aggregation=aggregation)
    for inside in [site.inside for site in getattr(fed.engine, "sites", [])] or [fed.engine]:
        inside.experiment = setting
    fed.engine.experiment = setting


@pytest.mark.parametrize("engine", ENGINES)
def test_no_client_changes_more_than_clip(engine: str) -> None:
    free, held = changes(engine, 0.0), changes(engine, 0.1)
    norms = free.norm(dim=1)
    assert (norms > 0.1).any()
    assert_equal(held, free * (0.1 / norms).clamp(max=1)[:, None], 1e-12)


def test_noise_has_the_stated_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler.discrete_gaussian, "__defaults__", (stream("size", "test").bytes,))
    drawn = add_noise({"a": torch.zeros(100_000, dtype=F64), "b": torch.zeros(3, 3)}, 0.7, 0.5)
    assert abs(drawn["a"].std().item() / 0.7 - 1) < 4 / math.sqrt(2 * 100_000)
    assert abs(drawn["a"].mean().item()) < 4 * 0.7 / math.sqrt(100_000)
    assert drawn["b"].dtype == torch.float32
    assert len(set(drawn["b"].flatten().tolist())) == 9


def noised(engine: str, noise: float, *, secure: bool = False, round: int = 1, secret: bool = False) -> Params:
    data = make_data()
    model = build("mlp", data.shape, data.outputs, seed=1, options={"hidden": (1000,)}, dtype=F64)
    fed = federate(algorithms.make("fedavg", {}), data, model, engine)
    # the mean without noise is weighted; here all must count the same
    added = GaussianNoise(noise or 1e-300, 0.5, not secret)
    with_privacy(fed, Aggregation((Clip(0.5),), Secure(40) if secure else Open(), added))
    found: Params = fed.run_round(round, range(4), model.params)
    assert fed.sums.noisy == {round: 1}
    return found


def test_noise_on_a_mean_is_z_times_clip_over_clients() -> None:
    difference = torch.cat([v.flatten() for v in leaves(tree_map(torch.sub, noised("loop", 3.0), noised("loop", 0.0)))])
    assert len(difference) == 8003
    assert abs(difference.std().item() / (3.0 * 0.5 / 4) - 1) < 4 / math.sqrt(2 * 8003)


def test_noise_is_the_same_on_all_engines_and_with_secure_sums() -> None:
    wanted = noised("loop", 3.0)
    for engine in ("vmap", "wire"):
        assert_equal(noised(engine, 3.0), wanted, 1e-12)
    assert_equal(noised("wire", 3.0, secure=True), wanted, 1e-11)
    assert (noised("loop", 3.0, round=2)["out.bias"] != wanted["out.bias"]).all()


def test_secret_noise_does_not_follow_from_the_seed() -> None:
    one, other = (noised("loop", 3.0, secret=True) for _ in range(2))
    equal = sum(int((one[k] == other[k]).sum()) for k in one)
    assert equal < 3  # of 8003 numbers with 2**24 steps per standard deviation: by chance three in 4e-13 of runs


@pytest.mark.parametrize(
    ("algorithm", "what"), [("fednova", "samples times weight of steps"), ("jointls", "normal equations")]
)
def test_sums_of_other_things_than_changes_are_refused(algorithm: str, what: str) -> None:
    data = make_data("regression")
    fed = federate(algorithms.make(algorithm, {}), data, make_model("linear", data))
    slots = Aggregation((Clip(1.0),), noise=GaussianNoise(1.0, 1.0))
    with pytest.raises(ConfigError, match=f'sums "{what}", which is not a new version of what clients were sent'):
        rehearse(replace(fed.engine.experiment, aggregation=slots))


def _cdf(x: float) -> float:
    """Of the normal distribution."""
    return math.erfc(-x / math.sqrt(2)) / 2


def exact_epsilon(multiplier: float, delta: float) -> float:
    """Of one Gaussian mechanism with this noise per sensitivity: Balle and Wang, ICML 2018, Theorem 5."""

    def excess(epsilon: float) -> float:
        a, b = 1 / (2 * multiplier), epsilon * multiplier
        return _cdf(a - b) - math.exp(epsilon) * _cdf(-a - b) - delta

    low, high = 0.0, 500.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def test_epsilon_is_above_the_exact_one_and_not_by_much() -> None:
    found = privacy_cost({1: 20, 2: 5}, clients=8, cohort=8, noise=12.0, delta=1e-5)  # 30 sums, nobody is drawn
    replaced = exact_epsilon(12.0 / 2 / math.sqrt(30), 1e-5)  # the sum moves by twice the clip
    removed = exact_epsilon(12.0 / math.sqrt(30), 1e-5)
    assert replaced < found.epsilon < 1.15 * replaced
    assert removed < found.epsilon_add_remove < 1.15 * removed


def test_epsilon_is_the_accountants_own_figure() -> None:
    found = privacy_cost({1: 30, 3: 10}, clients=100, cohort=5, noise=4.0, delta=1e-6)
    fixed = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    poisson = RdpAccountant()
    for sums, rounds in ((1, 30), (3, 10)):
        fixed.compose(SampledWithoutReplacementDpEvent(100, 5, SelfComposedDpEvent(GaussianDpEvent(2.0), sums)), rounds)
        poisson.compose(PoissonSampledDpEvent(0.05, SelfComposedDpEvent(GaussianDpEvent(4.0), sums)), rounds)
    assert found.epsilon == pytest.approx(fixed.get_epsilon(1e-6), rel=1e-12)
    assert found.epsilon_add_remove == pytest.approx(poisson.get_epsilon(1e-6), rel=1e-12)
    assert found.epsilon > found.epsilon_add_remove


def test_drawing_clients_never_costs_more_than_asking_all() -> None:
    drawn, everybody = (privacy_cost({1: 20}, clients=4, cohort=c, noise=1.0, delta=1e-5).epsilon for c in (3, 4))
    assert drawn <= everybody
    assert privacy_cost({}, clients=4, cohort=4, noise=1.0, delta=1e-5).epsilon == 0


def test_a_run_tells_what_it_has_spent(tmp_path: Path) -> None:
    told: list[Any] = []
    made = config(*NOISE, "federation.clients_per_round=2", "federation.engine=loop")
    folder = runner.start(made, tmp_path / "run", listener=lambda p: told.append(p.epsilon))
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant.compose(SampledWithoutReplacementDpEvent(4, 2, GaussianDpEvent(1.0)), 5)
    assert told[-1] == pytest.approx(accountant.get_epsilon(1e-5))
    assert told == sorted(told)
    assert [line["epsilon"] for line in folder.metrics()] == told
    assert folder.results is not None
    assert folder.results["privacy"]["epsilon"] == told[-1]
    assert folder.results["privacy"]["noisy_sums"] == 5


@pytest.mark.parametrize("settings", [REPEATABLE, ("privacy.secure_sum=true", "algorithm.name=fedrep")])
def test_an_interrupted_run_ends_as_if_it_were_not(settings: tuple[str, ...], tmp_path: Path) -> None:
    whole = runner.start(config(*settings), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        runner.start(config(*settings), tmp_path / "parts", listener=stop_after(2))
    assert records(runner.resume(tmp_path / "parts")) == records(whole)


def test_a_run_with_secure_sums_takes_the_wire(tmp_path: Path) -> None:
    folder = runner.start(config("privacy.secure_sum=true", "algorithm.name=ditto"), tmp_path / "secure")
    plain = runner.start(config("algorithm.name=ditto", "federation.engine=wire"), tmp_path / "plain")
    assert folder.about["engine"] == "wire"
    assert folder.results is not None
    assert plain.results is not None
    assert folder.results["privacy"] == {"secure_sum": True, "clip": 0.0, "noise": 0.0}
    assert folder.results["traffic"]["trips"] == 6 * plain.results["traffic"]["trips"]
    assert folder.results["last"]["test"]["loss"]["mean"] == pytest.approx(
        plain.results["last"]["test"]["loss"]["mean"], abs=1e-5
    )
    assert folder.about["task_id"] == plain.about["task_id"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("privacy.noise=1",), "privacy.noise requires privacy.clip"),
        (("privacy.secure_sum=true", "federation.engine=vmap"), 'not with federation.engine = "vmap"'),
        (("privacy.secure_sum=true", "algorithm.name=cfl"), "CFL looks at single replies"),
        (("privacy.secure_sum=true", "federation.clients_per_round=1"), "a sum over one client is its reply"),
        ((*NOISE, "environment.missing=stale"), 'not with environment.missing = "stale"'),
        ((*NOISE, "algorithm.name=fednova"), 'FedNova sums "samples times weight of steps"'),
    ],
)
def test_what_cannot_be_kept_is_refused_before_there_is_a_folder(
    settings: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        runner.start(config(*settings), tmp_path / "run")
    assert told in str(refused.value)
    assert not (tmp_path / "run").exists()


def normed(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A model that has variances."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))


def test_averaged_variances_have_no_noise(tmp_path: Path) -> None:
    task = DIGITS | {"model": {"name": f"{__name__}:normed", "buffers": "mean"}}
    with pytest.raises(ConfigError, match=r"variances .* set model"):
        runner.start(config(*NOISE, task=task), tmp_path / "run")
