"""Models as people have them train, predict and export without a wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor import FederatedData
from fedtailor.errors import ConfigError, DataError
from fedtailor.experiments import runner
from fedtailor.serving.export import export, read_safetensors
from fedtailor.serving.predict import predict_file
from tests.cli.conftest import Call
from tests.cli.conftest import call as call
from tests.small import stop_after
from tests.world import brought, plain
from tests.world.plain import TwoInputs

FAST: dict[str, Any] = {"local.lr": 0.1, "local.batch_size": 0, "checkpoint.seconds": 0}


def data(**options: Any) -> FederatedData:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 24, 4)).astype(np.float32)
    return ft.federated({f"c{i}": (x[i], (x[i, :, 0] > 0).astype(np.int64)) for i in range(4)}, **options)


def run(model: Any, out: Path, of: FederatedData | None = None, algorithm: str = "fedavg", **keys: Any) -> ft.api.Run:
    settings = FAST | {"model.name": model} | {k.replace("__", "."): v for k, v in keys.items()}
    return ft.run(algorithm, of or data(), rounds=2, settings=settings, out=out, progress=False)


def fitted(module: nn.Module, of: FederatedData) -> dict[str, Tensor]:
    return plain.fedavg(module, of, nn.CrossEntropyLoss(reduction="none"), rounds=2, lr=0.1)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.detach(), atol=2e-6, rtol=1e-5)


def test_a_factory_takes_any_option(tmp_path: Path) -> None:
    done = run("tests.world.brought:make", tmp_path / "run", model__depth=2, model__width=3)
    begun = plain.begun(lambda shape, outputs: brought.make(shape, outputs, depth=2, width=3), (4,), 2)
    assert_equal(done.folder.personal("c1", "last"), fitted(begun, data()))


def test_a_function_and_a_class_of_the_program(tmp_path: Path) -> None:
    class Local(nn.Module):
        def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
            super().__init__()
            self.out = nn.Linear(shape[0], outputs)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x)

    done = run(Local, tmp_path / "class")
    assert_equal(done.folder.personal("c0", "last"), fitted(plain.begun(Local, (4,), 2), data()))
    by_function = run(lambda shape, outputs: Local(shape, outputs), tmp_path / "function")
    assert_equal(by_function.folder.personal("c0", "last"), done.folder.personal("c0", "last"))
    assert by_function.personal("c0").predict(data().test.x).shape == (24,)


def test_a_module_keeps_the_weights_that_it_has(tmp_path: Path) -> None:
    with plain.torch_stream(5, "weights"):
        module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    done = run(module, tmp_path / "run", model__head=["2"], algorithm="fedper")
    assert all(torch.equal(module.state_dict()[k], v) for k, v in before.items())
    assert not done.folder.about["notes"] or "cannot be read" not in str(done.folder.about["notes"])
    shared = run(module, tmp_path / "shared")
    x = data().test.x[:5]
    assert_equal(shared.folder.personal("c0", "last"), fitted(module, data()))
    assert shared.personal("c0").predict_proba(x).shape == (5, 2)
    (file,) = export(shared.path, "c0", "safetensors", tmp_path / "m.safetensors")
    np.testing.assert_allclose(read_safetensors(file).predict_proba(x), shared.personal("c0").predict_proba(x))
    with pytest.raises(KeyboardInterrupt):
        runner.start(shared.config, tmp_path / "again", None, stop_after(1), loaded=data())
    again = runner.resume(tmp_path / "again", loaded=data())
    assert_equal(again.personal("c0", "last"), shared.folder.personal("c0", "last"))


def test_what_is_no_module_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no nn"):
        run(lambda shape, outputs: 3, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def two_inputs() -> FederatedData:
    rng = np.random.default_rng(0)
    x = {k: rng.normal(size=(4, 20, n)).astype(np.float32) for k, n in (("left", 3), ("right", 2))}
    y = (x["left"][..., 0] > 0).astype(np.int64)
    return ft.federated({f"c{i}": ({k: v[i] for k, v in x.items()}, y[i]) for i in range(4)})


@pytest.mark.parametrize("to", ["safetensors", "torch", "onnx"])
def test_inputs_by_name_predict_and_export(to: str, tmp_path: Path, call: Call) -> None:
    of = two_inputs()
    done = run("tests.world.plain:TwoInputs", tmp_path / "run", of)
    own, x = done.personal("c1"), of.test.of(1)[0]
    module = plain.begun(TwoInputs, of.shape, 2)
    module.load_state_dict(done.folder.personal("c1"))
    wanted = module(**x).softmax(1).detach().numpy()
    np.testing.assert_allclose(own.predict_proba(x), wanted, atol=1e-6)
    np.savez(tmp_path / "x.npz", **{k: v.numpy() for k, v in x.items()})
    frame = predict_file(own, tmp_path / "x.npz")
    np.testing.assert_allclose(frame["probability 1"].to_numpy(), wanted[:, 1], atol=1e-6)
    np.savez(tmp_path / "less.npz", left=x["left"].numpy())
    with pytest.raises(DataError, match="left, right"):
        predict_file(own, tmp_path / "less.npz")
    ending = {"safetensors": "safetensors", "torch": "pt2", "onnx": "onnx"}[to]
    (file,) = export(done.path, "c1", to, tmp_path / f"m.{ending}")  # type: ignore[arg-type]
    if to == "safetensors":
        np.testing.assert_allclose(
            predict_file(read_safetensors(file), tmp_path / "x.npz")["probability 1"], frame["probability 1"]
        )
    elif to == "torch":
        np.testing.assert_allclose(torch.export.load(file).module()(x).detach().numpy(), wanted, atol=1e-6)


@pytest.mark.parametrize("to", ["safetensors", "torch", "onnx"])
def test_outputs_by_name_predict_and_export(to: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 20, 3)).astype(np.float32)
    of = ft.federated({f"c{i}": (x[i], x[i]) for i in range(4)}, task="tests.world.brought:Rebuilding")
    keys = {"task__name": "tests.world.brought:Rebuilding"}
    done = run("tests.world.brought:AutoEncoder", tmp_path / "run", of, **keys)
    module = plain.begun(brought.AutoEncoder, of.shape, 3)
    module.load_state_dict(done.folder.personal("c2"))
    wanted = {k: v.detach().numpy() for k, v in module(of.test.x).items()}
    found = done.personal("c2").predict(of.test.x)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6)
    np.savez(tmp_path / "x.npz", x=of.test.x.numpy())
    frame = predict_file(done.personal("c2"), tmp_path / "x.npz")
    np.testing.assert_allclose(np.stack(frame["prediction code"].to_list()), wanted["code"], atol=1e-6)
    ending = {"safetensors": "safetensors", "torch": "pt2", "onnx": "onnx"}[to]
    (file,) = export(done.path, "c2", to, tmp_path / f"m.{ending}")  # type: ignore[arg-type]
    if to == "safetensors":
        again = read_safetensors(file).predict(of.test.x)
        np.testing.assert_allclose(again["code"], wanted["code"], atol=1e-6)


class Tagger(nn.Module):
    def __init__(self, shape: dict[str, tuple[int, ...]], outputs: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.out(self.embed(input_ids))


def test_ragged_targets_are_padded_with_what_does_not_count(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = [3, 5, 2, 4, 5, 3, 2, 6]
    x = [rng.integers(1, 9, size=n).tolist() for n in lengths]
    y = [[v % 3 for v in row] for row in x]
    of = ft.federated({"a": (x, y), "b": (x[:5], y[:5]), "c": (x, y), "d": (x, y)}, task="tokens")
    assert of.train.y.shape[1] == of.train.x["input_ids"].shape[1] == 6
    assert ((of.train.y == -100) == (of.train.x["attention_mask"] == 0)).all()
    done = run(Tagger, tmp_path / "run", of)
    assert 0 <= done.results["last"]["test"]["accuracy"]["mean"] <= 1


def test_targets_that_cannot_be_padded_name_the_sample() -> None:
    x, boxes = np.zeros((3, 4)), [np.zeros((2, 4)), np.zeros((1, 4)), np.zeros((2, 4))]
    with pytest.raises(DataError, match=r'client "a".*sample 2'):
        ft.federated({"a": (x, boxes)}, task="pkg:Boxes")
    with pytest.raises(DataError, match=r'client "a".*sample 2'):
        ft.federated({"a": (x, [1.0, [2.0, 3.0], 4.0])}, task="regression")


class Augmented(torch.utils.data.Dataset[Any]):
    def __init__(self, noise: float) -> None:
        self.noise, self.rng = noise, np.random.default_rng(0)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return np.full(3, float(i), dtype=np.float32) + self.noise * self.rng.normal(size=3), i % 2


def test_augmentation_that_is_read_once_is_noted() -> None:
    (note,) = ft.federated({"a": Augmented(0.0), "b": Augmented(1.0)}).notes
    assert '"b"' in note
    assert "lazy=True" in note
    assert not ft.federated({"a": Augmented(0.0)}).notes
    assert not ft.federated({"b": Augmented(1.0)}, lazy=True).notes


@pytest.mark.parametrize(
    "algorithm", ["fedrep", "fedper", "lg-fedavg", "fedbabu", "fedrod", "fedcp", "fedas", "knn-per"]
)
def test_methods_with_a_head_need_one(algorithm: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'model\.head: .*"2"|model\.head'):
        run("tests.world.brought:make", tmp_path / "run", algorithm=algorithm)
    assert not (tmp_path / "run").exists()


def test_an_empty_head_is_noted_and_the_last_layer_named(tmp_path: Path) -> None:
    done = run("tests.world.brought:make", tmp_path / "run")
    (note,) = [note for note in done.folder.about["notes"] if note.startswith("model.head")]
    assert '["2"]' in note
    named = run("tests.world.brought:make", tmp_path / "named", algorithm="fedrep", model__head=["2"])
    assert set(named.folder.personal("c0")) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_forced_engine_says_what_to_do(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(
        'rounds = 1\n[data]\nsource = "digits"\nclients = 4\nmax_samples = 40\n'
        '[model]\nname = "tests.world.test_brought:Branching"\n[algorithm]\nname = "fedavg"\n'
        '[federation]\nengine = "vmap"\n'
    )
    code, _, err = call("run", "c.toml", "--out", "run")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert 'engine = "loop"' in err
    assert not Path("run").exists()
    assert call("run", "c.toml", "--out", "run", "--set", "federation.engine=auto")[0] == 0


class Branching(nn.Module):
    """Whose path depends on its samples."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.out = nn.Linear(int(np.prod(shape)), outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1)) * (2 if bool((x > 0.5).all()) else 1)
