"""LoRA by peft in any module; globs for heads; what cannot be done is said."""

import builtins
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from fedtailor.core.model import Model
from fedtailor.errors import ConfigError
from fedtailor.experiments import runner
from fedtailor.experiments.building import model_of
from fedtailor.models import build
from fedtailor.models.adapters import AdapterConfig, add_lora
from tests.small import DIGITS, config

ADAPTER = AdapterConfig(rank=2, alpha=6.0)


def made(**options: Any) -> Model:
    return build("mlp", (4,), 3, seed=1, options={"hidden": (5, 6)}, adapter=ADAPTER.model_copy(update=options))


def test_only_adapters_and_the_head_are_trained() -> None:
    model = made()
    plain = build("mlp", (4,), 3, seed=1, options={"hidden": (5, 6)})
    heads = set(plain.head)
    assert {k for k in model.params if "lora" not in k} == heads == set(model.head)
    assert all(k.endswith(("base_layer.weight", "base_layer.bias")) for k in model.fixed)
    assert len([k for k in model.params if ".lora_A." in k]) == 2
    for k, v in plain.params.items():  # the weights are those of the model without adapters
        same = model.params.get(k, model.fixed.get(f"{k.rpartition('.')[0]}.base_layer.{k.rpartition('.')[2]}"))
        assert same is not None
        assert torch.equal(same, v)


def test_a_layer_with_an_adapter_by_hand() -> None:
    with torch.random.fork_rng():
        module = nn.Sequential(nn.Linear(4, 5))
    add_lora(module, AdapterConfig(rank=2, alpha=6.0, targets=("0",)))
    model = Model(module)
    a, b = torch.randn(2, 4), torch.randn(5, 2)
    x = torch.randn(7, 4)
    base = linear(x, model.fixed["0.base_layer.weight"], model.fixed["0.base_layer.bias"])
    found = model({"0.lora_A.default.weight": a, "0.lora_B.default.weight": b}, x)
    torch.testing.assert_close(found, base + 3 * x @ a.T @ b.T)


def test_nothing_but_adapters() -> None:
    model = made(train=())
    assert all("lora" in k for k in model.params)
    assert not model.head


def test_the_same_seed_gives_the_same_adapters() -> None:
    one, other = made(), made()
    assert all(torch.equal(one.params[k], other.params[k]) for k in one.params)


def test_globs_name_a_head() -> None:
    model = build("mlp", (4,), 3, seed=1, options={"hidden": (5, 6)}, adapter=ADAPTER, head=["*.lora_B.*"])
    assert set(model.head) == {k for k in model.params if ".lora_B." in k}
    assert set(Model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), head=["1*"]).head) == {"1.weight", "1.bias"}
    with pytest.raises(ConfigError, match=r'no part "\*\.lora_C\.\*"'):
        build("mlp", (4,), 3, seed=1, head=["*.lora_C.*"])


def test_targets_are_layers() -> None:
    first = next(k for k in made().params if "lora_A" in k).partition(".lora_A")[0]
    assert len([k for k in made(targets=(first,)).params if "lora_A" in k]) == 1
    with pytest.raises(ConfigError, match=r'targets: .*"\*\.query"'):
        made(targets=("*.query",))
    with pytest.raises(ConfigError, match=r'train: .*"nose"'):
        made(train=("nose",))
    with pytest.raises(ConfigError, match="no dense layer before its head"):
        build("linear", (4,), 3, seed=1, adapter=ADAPTER)


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name == "peft":
            raise ImportError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"peft .*fedtailor\[adapters\]"):
        made()


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedsa-lora", "feddpa", "fedalt", "learn2pfed-net", "fedselect"])
def test_runs_send_adapters_only(tmp_path: Any, name: str) -> None:
    settings = (
        "rounds=2",
        f"algorithm.name={name}",
        "model.adapter={rank = 2, train = []}",
        'model.head=["*.lora_B.*"]',
    )
    run_config = config(*settings, task=DIGITS)
    folder = runner.start(run_config, tmp_path / "run")
    results = folder.results
    assert results is not None
    model = model_of(run_config, (64,), 10)
    size = sum(v.nbytes for k, v in model.params.items() if name not in ("fedper", "fedsa-lora") or "lora_A" in k)
    most = 2 * 4 * (size + 2000)  # two rounds, four clients; a count, names
    assert 0 < results["traffic"]["up"] <= most


class Encoder(nn.Module):
    """Layers of torch, which have fused forms for prediction."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(shape[1], 2, 16, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(shape[1], outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(x, src_key_padding_mask=x[:, :, 0] > 1).mean(1))


def test_adapters_in_layers_of_torch_count_in_predictions() -> None:
    name = "tests.models.test_adapters:Encoder"
    model = build(name, (5, 8), 3, seed=0, adapter=AdapterConfig(targets=("*.linear1", "*.linear2")))
    params = {k: torch.randn(v.shape) for k, v in model.params.items()}
    x = torch.randn(4, 5, 8).clamp(max=1)
    with torch.no_grad():
        predicted, trained = model(params, x), model(params, x, training=True)
        without = model({k: torch.zeros_like(v) if "lora_B" in k else v for k, v in params.items()}, x)
    torch.testing.assert_close(predicted, trained)
    assert not torch.allclose(predicted, without)


def test_an_adapter_that_would_have_no_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers\.layers\.0\.self_attn\.out_proj"):
        build("tests.models.test_adapters:Encoder", (5, 8), 3, seed=0, adapter=AdapterConfig(targets=("*.out_proj",)))
