"""Clients with different models: what they have in common is shared, each equal to a loop in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedtailor as ft
from fedtailor import FederatedData
from fedtailor.api import Run
from fedtailor.errors import ConfigError
from fedtailor.serving.export import export, read_safetensors
from tests.world import plain

ENGINES = ("loop", "vmap", "wire", "pool")
SIZES = {"ada": 9, "bo": 14, "cy": 9, "di": 11}
DEEP = ("bo", "cy")  # who have the other model
ROUNDS = 3


class Deep(nn.Module):
    """As `plain.Layered` at both ends, with a layer more between them, and statistics of its own."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int, width: int = 6) -> None:
        super().__init__()
        self.first, self.between = nn.Linear(shape[0], width), nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(torch.tanh(self.between(torch.tanh(self.first(x))))))


def data() -> FederatedData:
    clients = {}
    for name, n in SIZES.items():
        rng = np.random.default_rng([n, len(name), ord(name[0])])
        sizes = {"train": n, "val": 8, "test": 12}
        x = {split: rng.normal(size=(size, 4)).astype(np.float32) for split, size in sizes.items()}
        clients[name] = {split: (v, (v[:, 0] + v[:, 1] ** 2 > 0.6).astype(np.int64)) for split, v in x.items()}
    return ft.federated(clients, name="made", outputs=2)


def settings(**options: Any) -> dict[str, Any]:
    other = {"name": "tests.world.test_architectures:Deep"} | options
    return {
        "model.name": "tests.world.plain:Layered",
        "model.by_client": dict.fromkeys(DEEP, other),
        "local.batch_size": 0,
        "local.lr": 0.1,
        "local.kernels": "off",
    }


def trained(algorithm: str, engine: str, out: Path, changed: dict[str, Any] | None = None, **options: Any) -> Run:
    keys = settings(**options) | ({"federation.workers": 2} if engine == "pool" else {}) | (changed or {})
    return ft.run(algorithm, data(), engine=engine, rounds=ROUNDS, settings=keys, out=out, progress=False)


def by_hand(is_shared: Callable[[str], bool], **options: Any) -> dict[str, nn.Module]:
    """One step on all data of a client a round; parameters that are shared are averaged by sample count."""
    federated = data()
    usual = plain.begun(plain.Layered, federated.shape, 2)
    other = plain.begun(lambda shape, outputs: Deep(shape, outputs, **options), federated.shape, 2)
    own = {c: copy.deepcopy(other if c in DEEP else usual) for c in SIZES}
    common = {k: v.detach().clone() for k, v in usual.named_parameters() if is_shared(k)}  # the server begins as usual
    for _ in range(ROUNDS):
        trained = {}
        for i, (client, module) in enumerate(own.items()):
            module.load_state_dict(module.state_dict() | common)
            steps = torch.optim.SGD(module.parameters(), lr=0.1)
            steps.zero_grad()
            x, y = federated.train.of(i)
            F.cross_entropy(module.train()(x), y).backward()
            steps.step()
            trained[client] = {k: module.get_parameter(k).detach().clone() for k in common}
        weight = torch.tensor([float(n) for n in SIZES.values()]) / sum(SIZES.values())
        common = {k: torch.tensordot(weight, torch.stack([own[k] for own in trained.values()]), 1) for k in common}
    for module in own.values():
        module.load_state_dict(module.state_dict() | common)
    return own


def assert_as_plain(run: Run, wanted: dict[str, nn.Module]) -> None:
    for client, module in wanted.items():
        params = run.folder.personal(client, "last")
        values = {k: v for k, v in module.state_dict().items() if "num_batches" not in k}
        assert params.keys() >= values.keys()
        for name, value in values.items():
            assert torch.allclose(params[name], value, atol=2e-6, rtol=1e-5), (client, name)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_architectures_share_the_body_that_both_have(engine: str, tmp_path: Path) -> None:
    run = trained("fedper", engine, tmp_path / "run")
    assert_as_plain(run, wanted := by_hand(lambda name: name.startswith("first.")))
    x, y = (federated := data()).test.of(1)
    right = (wanted["bo"].eval()(x).argmax(1) == y).double().mean()
    assert run.results["last"]["clients"]["accuracy"][1] == pytest.approx(float(right))
    assert (run.personal("bo").predict(x) == wanted["bo"](x).argmax(1).numpy()).all()
    assert run.personal("ada").predict(federated.test.of(0)[0]).shape == (12,)
    said = [note for note in run.folder.about["notes"] if "architectures" in note]
    assert said == [
        "clients have 2 architectures: 2 with 44 parameters, 2 with 98 parameters"
        + ("; vmap stacks clients of one architecture" if engine == "vmap" else "")
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_two_architectures_share_a_head(engine: str, tmp_path: Path) -> None:
    run = trained("lg-fedavg", engine, tmp_path / "run")
    assert_as_plain(run, by_hand(lambda name: name.startswith("out.")))


@pytest.mark.parametrize("engine", ENGINES)
def test_neighbours_with_what_is_common(engine: str, tmp_path: Path) -> None:
    run = trained("knn-per", engine, tmp_path / "run")
    assert_as_plain(run, by_hand(lambda name: name.startswith(("first.", "out."))))


def test_a_parameter_of_another_shape_is_not_common(tmp_path: Path) -> None:
    run = trained(
        "lg-fedavg", "loop", tmp_path / "run", {"model.head": ["first", "out"]}, width=5, head=["first", "out"]
    )
    assert_as_plain(run, by_hand(lambda name: name == "out.bias", width=5))


def test_each_sends_only_what_is_common(tmp_path: Path) -> None:
    both = trained("fedper", "wire", tmp_path / "both").results["traffic"]
    usual = trained("fedper", "wire", tmp_path / "usual", {"model.by_client": {}}).results["traffic"]
    assert both == usual  # of both models the first layer


def test_a_resumed_run_is_the_straight_one(tmp_path: Path) -> None:
    from fedtailor.experiments import runner

    straight = trained("fedper", "loop", tmp_path / "straight")
    config, loaded = straight.config, data()
    runner.start(config, tmp_path / "halves", loaded=loaded, until=1)
    halves = runner.resume(tmp_path / "halves", loaded=loaded)
    assert halves.fingerprint() == straight.folder.fingerprint()


def test_an_exported_model_is_that_of_the_client(tmp_path: Path) -> None:
    run = trained("fedper", "loop", tmp_path / "run")
    (file,) = export(run.path, "cy", "safetensors", tmp_path / "cy.safetensors")
    x = data().test.of(2)[0]
    assert (read_safetensors(file).predict(x) == run.personal("cy").predict(x)).all()


@pytest.mark.parametrize("algorithm", ["fedavg", "ditto", "scaffold", "fedprox", "learn2pfed-net", "pfedhn", "fedala"])
def test_methods_that_share_more_refuse(algorithm: str, tmp_path: Path) -> None:
    title = ft.algorithms.algorithms()[algorithm].title
    with pytest.raises(ConfigError) as error:
        trained(algorithm, "loop", tmp_path / "run")
    assert str(error.value).startswith(
        f'model.by_client: {title} shares "between.bias", "between.weight", "norm.bias" and 1 more, which not all'
    )
    assert not (tmp_path / "run").exists()


def test_what_is_shared_after_a_projection_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.by_client"):
        trained("lp-proj", "loop", tmp_path / "run")


def test_private_heads_may_differ_under_any_method_that_shares_the_body(tmp_path: Path) -> None:
    head = ["between", "norm", "out"]
    run = trained("fedrep", "loop", tmp_path / "run", head=head)
    assert run.folder.personal("bo")["between.weight"].shape == (6, 6)
    assert torch.equal(
        run.folder.personal("bo", "last")["first.weight"], run.folder.personal("ada", "last")["first.weight"]
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model.by_client": {"bob": {"name": "linear"}}}, 'model.by_client: no client "bob"; did you mean "bo"?'),
        ({"model.by_client": {"bo": {"dtype": "float64"}}}, 'model.by_client: "dtype" is the same for all clients'),
        ({"model.by_client": {"bo": {"name": 3}}}, 'model.by_client: name for "bo": Input should be a valid string'),
        ({"model.by_client": {"bo": {"name": "mlp", "hiden": [3]}}}, 'model.hiden: mlp has no option "hiden"'),
        ({"local.keep_state": True}, "model.by_client: not with local.keep_state"),
        ({"model.by_client": {"*o": {"name": "linear"}}}, "model.by_client: FedPer would share nothing"),
    ],
)
def test_mistakes_are_said_in_one_line(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        trained("fedper", "loop", tmp_path / "run", changed)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_own_models_of_clients_are_looked_after(tmp_path: Path) -> None:
    run = trained("fedper", "loop", tmp_path / "run")
    assert "model.by_client.bo.name" in run.folder.about["code"]
    from fedtailor.experiments import user_code

    named = user_code.names(run.config)
    assert named["model.by_client.cy.name"] == "tests.world.test_architectures:Deep"
