"""Modules of every kind on every engine: equal to plain torch, or refused with the name of what cannot be."""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import fedtailor as ft
from fedtailor import FederatedData
from fedtailor.api import Run
from fedtailor.core.random import seeded, stream
from fedtailor.errors import ConfigError, UserError
from fedtailor.experiments import runner
from fedtailor.serving.export import export, read_safetensors
from fedtailor.tables.serve import Personal
from tests.small import stop_after
from tests.world import plain, zoo

SIZES = {"ada": 9, "bo": 14, "cy": 9, "di": 11}
ROUNDS, EPOCHS, LR = 3, 2, 0.1
ENGINES = ("loop", "vmap", "pool")
FEW = ("ReassignedBuffer", "ReassignedCounter", "CountsSamples", "Queue", "ReassignedHidden", "Tied", "ComplexConstant")
UNTRACED = {  # graphs that torch does not make of them
    "torch": {"DataDependent", "Nested", "Shared"},
    "onnx": {"DataDependent", "Nested", "Orthogonal"},
}
UNSTACKED = {  # parts without a rule for stacks, or whose path depends on the samples
    *("Attention", "Compiled", "DataDependent", "OldSpectralNorm", "OldWeightNorm", "OwnGradient", "Queue"),
    *("Recurrent", "SpectralNorm", "WeightNorm"),
}


@cache
def data() -> FederatedData:
    clients = {}
    for i, (name, n) in enumerate(SIZES.items()):
        rng = np.random.default_rng(i)
        sizes = {"train": n, "val": 4, "test": 10}
        x = {split: rng.normal(size=(size, 4)).astype(np.float32) for split, size in sizes.items()}
        clients[name] = {split: (v, (v[:, 0] + v[:, 1] ** 2 > 0.6).astype(np.int64)) for split, v in x.items()}
    return ft.federated(clients, name="made", outputs=2)


def keys(name: str, engine: str) -> dict[str, Any]:
    return {
        "model.name": f"tests.world.zoo:{name}",
        "local.batch_size": 0,
        "local.lr": LR,
        "local.kernels": "off",
        "algorithm.epochs": EPOCHS,
        "evaluation.metrics": ["loss", "accuracy"],
        "checkpoint.seconds": 0,
    } | ({"federation.workers": 2} if engine == "pool" else {})


def trained(name: str, engine: str, out: Path) -> Run:
    return ft.run("local", data(), engine=engine, rounds=ROUNDS, settings=keys(name, engine), out=out, progress=False)


@cache
def by_hand(name: str) -> dict[str, nn.Module]:
    """Each client trains a module of its own, in plain torch."""
    federated, out = data(), {}
    begun = plain.begun(getattr(zoo, name), federated.shape, 2)
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in begun.parameters()):
        with plain.torch_stream(0, "model"), torch.no_grad():
            begun = getattr(zoo, name)(federated.shape, 2)
            begun(torch.zeros(2, *federated.shape))
    resting = [k for k, m in begun.named_modules() if not m.training]
    for i, client in enumerate(federated.clients):
        own = copy.deepcopy(begun)
        x, y = federated.train.of(i)
        for round in range(1, ROUNDS + 1):
            own.train()
            for part in resting:
                own.get_submodule(part).eval()
            steps = torch.optim.SGD(own.parameters(), lr=LR)
            rng = stream(0, round, 0, client, "batches", 0)
            orders = [rng.permutation(len(y)) for _ in range(EPOCHS)]
            with seeded(0, round, 0, client, "training", 0):
                for order in orders:
                    steps.zero_grad()
                    F.cross_entropy(logits(own(x[order])), y[order]).backward()
                    steps.step()
        out[client] = own.eval()
    return out


def logits(outputs: Any) -> Any:
    return getattr(outputs, "logits", outputs)


def is_constant(name: str, key: str, value: torch.Tensor) -> bool:
    """Whether a buffer is of integers, flags or complex numbers that nobody changes, or counts the batches."""
    begun = dict(getattr(zoo, name)((4,), 2).named_buffers())[key]
    return "num_batches" in key or (not value.is_floating_point() and torch.equal(begun, value))


def assert_as_plain(run: Run, name: str) -> None:
    for i, (client, module) in enumerate(by_hand(name).items()):
        params = run.folder.personal(client, "last")
        values: dict[str, Any] = {k: v for k, v in module.named_parameters() if v.requires_grad}
        values |= {k: v for k, v in module.named_buffers() if k in params or not is_constant(name, k, v)}
        assert params.keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(params[key], value.detach(), atol=2e-6, rtol=1e-5, msg=f"{client} {key}")
        x, y = data().test.of(i)
        with torch.no_grad():
            outputs = logits(module(x))
        found = run.results["last"]["clients"]
        assert found["loss"][i] == pytest.approx(float(F.cross_entropy(outputs, y)), rel=1e-5)
        assert found["accuracy"][i] == pytest.approx(float((outputs.argmax(1) == y).double().mean()))


def assert_predicts(own: Personal, run: Run, client: str, module: nn.Module) -> None:
    """What serves is the selected round, whose tensors a plain module is given."""
    x = data().test.x[:6]
    names = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for key, value in run.folder.personal(client).items():
            names[key].copy_(value)
        wanted = logits(module(x)).softmax(1).numpy()
    np.testing.assert_allclose(own.predict_proba(x), wanted, atol=2e-6)


def attempt(name: str, engine: str, out: Path) -> tuple[Run | None, str]:
    """A run, or why there is none."""
    try:
        return trained(name, engine, out), ""
    except ConfigError as error:
        return None, str(error)


def outcome(name: str, engine: str, folder: Path) -> str:
    """Trains, evaluates, predicts, exports and resumes; each must be as in plain torch, or be refused."""
    run, refusal = attempt(name, engine, folder / "run")
    if run is None:
        assert zoo.REFUSED.get(name, 'engine = "loop"') in refusal
        return "refused"
    assert_as_plain(run, name)
    client = "bo"
    assert_predicts(run.personal(client), run, client, copy.deepcopy(by_hand(name)[client]))
    (file,) = export(run.path, client, "safetensors", folder / "model.safetensors")
    assert_predicts(read_safetensors(file), run, client, copy.deepcopy(by_hand(name)[client]))
    resumed(run, folder / "resumed")
    return "equal"


def resumed(run: Run, path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        runner.start(run.config, path, None, stop_after(1))
    folder = runner.resume(path)
    for client in SIZES:
        wanted = run.folder.personal(client, "last")
        found = folder.personal(client, "last")
        assert all(torch.equal(found[k], v) for k, v in wanted.items())


def wanted(name: str, engine: str) -> str:
    return "refused" if name in zoo.REFUSED or (engine == "vmap" and name in UNSTACKED) else "equal"


@pytest.mark.parametrize("engine", ENGINES[:2])
@pytest.mark.parametrize("name", FEW)
def test_some_modules(name: str, engine: str, tmp_path: Path) -> None:
    assert outcome(name, engine, tmp_path) == wanted(name, engine)


@pytest.mark.parametrize("name", sorted(zoo.REFUSED))
def test_what_clients_could_not_keep_apart_is_refused_by_name(name: str, tmp_path: Path) -> None:
    assert outcome(name, "loop", tmp_path) == "refused"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", sorted(zoo.MODULES))
def test_every_module(name: str, engine: str, tmp_path: Path) -> None:
    assert outcome(name, engine, tmp_path) == wanted(name, engine)


PARTS = st.lists(st.sampled_from(zoo.PARTS), min_size=2, max_size=4, unique=True)


def several_at_once(engine: str, parts: list[str]) -> None:
    name = "_".join(parts)
    try:
        by_hand(name)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError):
        reject()  # torch does not train it, either
    with TemporaryDirectory() as folder:
        found = outcome(name, engine, Path(folder))
    assert found == "equal" or engine == "vmap"


@pytest.mark.parametrize("engine", ENGINES[:2])
def test_several_at_once(engine: str) -> None:
    settings(max_examples=5)(given(PARTS)(several_at_once))(engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_more_of_several_at_once(engine: str) -> None:
    settings(max_examples=40)(given(PARTS)(several_at_once))(engine=engine)


@pytest.mark.parametrize("name", sorted(set(zoo.MODULES) - set(zoo.REFUSED)))
@pytest.mark.parametrize("to", ["torch", "onnx"])
def test_every_module_as_a_graph(name: str, to: str, tmp_path: Path) -> None:
    """An exported graph is compared with the run before it is written; some cannot be traced."""
    run = trained(name, "loop", tmp_path / "run")
    file = tmp_path / ("model.pt2" if to == "torch" else "model.onnx")
    with suppress(UserError):
        export(run.path, "bo", to, file)  # type: ignore[arg-type]
    assert file.exists() == (name not in UNTRACED[to])


def test_the_engine_is_chosen_by_a_step_and_a_prediction(tmp_path: Path) -> None:
    run = ft.run("local", data(), rounds=1, settings=keys("DataDependent", "auto"), out=tmp_path, progress=False)
    about = run.folder.about
    assert about["engine"] != "vmap"
    assert "cannot be stacked" in about["engine_why"]


def test_a_buffer_stays_with_its_client() -> None:
    modules = by_hand("CountsSamples")
    assert {c: int(m.get_buffer("samples")) for c, m in modules.items()} == {c: 6 * n for c, n in SIZES.items()}
