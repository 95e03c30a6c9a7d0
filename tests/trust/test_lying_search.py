"""A short search for what a lying server hears, and for what a lying site moves; `tests/trust/lying.py` searches on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedtailor.core.trees import Tree, tree_map
from tests.flare.test_flare import Federated, configured
from tests.trust.lying import World, compare, search_server
from tests.trust.lying_sites import Judge, mixed_config, search_site
from tests.trust.test_lying_site import LIAR, Header, LyingSites

BOUND = 40.0  # the norm of a reply has that of its count in it, 26 samples
WHOLE: list[tuple[Any, ...]] = [
    ("call", 1, 0, [0, 1, 2], {}),
    ("sum", 1, 1, 0, ["0"], None, {}),
    ("sum", 2, 1, 0, ["1"], None, {}),
]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, World]:
    root = tmp_path_factory.mktemp("worlds")
    return World(root / "0", 0), World(root / "1", 1)


def test_the_two_worlds_differ_in_every_reply_and_in_no_sum(worlds: tuple[World, World]) -> None:
    assert compare(worlds, WHOLE) == 2
    replies = []
    for world in worlds:
        job = world.sites[0]._job
        assert job is not None
        assert job.client.sums is not None
        replies.append(job.client.sums._replies[0].reply)
    assert not any(torch.equal(replies[0][path], replies[1][path]) for path in ("0", "1"))


def test_a_server_that_says_anything_hears_the_same_in_both(worlds: tuple[World, World]) -> None:
    assert search_server(worlds, seed=0, examples=12, length=8) >= 1


def test_the_search_finds_a_site_that_answers_in_the_open(
    worlds: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: the server names the largest norm, and the site says whether its reply is above it."""
    from fedtailor.engines import wire

    def tells(self: Any, call: Any, reply: Any) -> str:
        return f"reply has norm {sum(float(v.norm()) for v in reply[0]):.3g}"

    monkeypatch.setattr(wire.Site, "_unusable", tells)
    monkeypatch.setattr(wire.Site, "_limit", lambda self, call, reply: reply)
    for world in worlds:
        world.begin()
        for site in world.sites.values():
            assert site._job is not None
            site._job.client._conceal = None
    begun = ("begin", 1, [0, 1, 2], 0)
    from tests.trust.lying import do

    heard = [[do(world, action, None) for action in (begun, WHOLE[0])] for world in worlds]
    assert heard[0] != heard[1]


factors = st.sampled_from([1.0, -1.0, 0.0, 0.5, 3.0, 1e3, 1e9, float("nan"), float("inf")])
counts = st.sampled_from([1.0, 1e-9, 0.5, 0.0, -1.0, 2.0, 1e9, float("nan")])
forms = st.sampled_from(["as it was", "one direction", "no tree", "other type", "other header"])


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, dict[str, int]]:
    """The model of an honest round, and the samples of each site."""
    federated = Federated(tmp_path_factory.mktemp("honest"), one_round())
    folder = federated.run()
    return model_of(federated), dict(zip(federated.names, folder.about["train_samples"], strict=True))


def one_round() -> Any:
    return configured("fedavg", "rounds=1", f"federation.max_norm={BOUND}", "evaluation.every=1")


def model_of(federated: Federated) -> torch.Tensor:
    return torch.cat([v.flatten() for k, v in federated.tensors().items() if k.startswith("server")])


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(factor=factors, count=counts, form=forms)
def test_a_site_that_says_anything_moves_the_mean_by_its_samples_at_most(
    factor: float, count: float, form: str, honest: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two means of replies of at most this norm are 2 bound n / N apart."""

    def lie(asked: Header, answer: Header, tree: Tree) -> tuple[Header, Tree]:
        if "function" not in asked:
            return answer, tree
        if form == "no tree":
            return answer, None
        if form == "other header":
            return {"round": "x", "call": {}}, tree
        if form == "other type":
            return answer, tree_map(lambda v: v.to(torch.float16), tree)
        model = tree_map(lambda v: torch.ones_like(v) if form == "one direction" else v, tree[0])
        return answer, (tree_map(lambda v: v * factor, model), tree[1] * count)

    federated = Federated(tmp_path_factory.mktemp("lie"), one_round())
    link = LyingSites(federated.files)
    link.lie, federated.link = lie, link
    folder = federated.run()
    assert folder.results is not None
    wanted, samples = honest
    most = 2 * BOUND * samples[LIAR] / sum(samples.values())
    assert (model_of(federated) - wanted).norm() <= most * (1 + 1e-5)


@pytest.mark.parametrize("name", ["private", "late", "sealed"])
def test_a_site_that_says_anything_ends_no_run(name: str, tmp_path: Path) -> None:
    search_site(Judge(name, tmp_path), seed=1, examples=3)


@pytest.mark.parametrize("name", ["mean", "mixed"])
def test_a_site_that_says_anything_passes_no_bound(name: str, tmp_path: Path) -> None:
    search_site(Judge(name, tmp_path), seed=2, examples=8)


def test_the_search_finds_a_site_with_rows_of_another_world(tmp_path: Path) -> None:
    """Its noise hides the others' slopes: 8 % worse than alone without `keep_own`, and no worse with it."""
    judge, plan = Judge("mixed", tmp_path), [("rows", 30.0, 10.0, 0.0, 2)]
    judge.check(plan)
    judge.setting.config = mixed_config(keep_own=False)
    with pytest.raises(AssertionError):
        judge.check(plan)
