"""Residual networks: the known sizes, torchvision's names, both norms, and the same result alone, stacked and sent."""

import pytest
import torch
from torch import Tensor

from fedtailor import algorithms
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from fedtailor.models import build
from tests.helpers import F64, OTHERS, assert_equal, everything, federate, make_data, run

IMAGE = (3, 32, 32)
NARROW = {"width": 8}


def by_hand(width: int, blocks: tuple[int, ...], stem: int, channels: int, outputs: int) -> int:
    """Weights of every convolution, two numbers per normalised channel, and the last layer."""
    total = channels * width * stem**2 + 2 * width
    before, here = width, width
    for stage, count in enumerate(blocks):
        total += 9 * before * here + 9 * here * here + 4 * here
        if stage:
            total += before * here + 2 * here
        total += (count - 1) * (18 * here * here + 4 * here)
        before, here = here, 2 * here
    return total + before * outputs + outputs


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(
    ("name", "stem", "outputs", "count"),
    [
        ("resnet18", "imagenet", 1000, 11_689_512),  # torchvision's
        ("resnet18", "cifar", 10, 11_173_962),
        ("resnet34", "imagenet", 1000, 21_797_672),  # torchvision's
        ("resnet34", "cifar", 10, 21_282_122),
        ("resnet20", "cifar", 10, 272_474),
        ("resnet14", "cifar", 10, 175_258),
        ("resnet8", "cifar", 10, 78_042),
    ],
)
def test_known_sizes(name: str, stem: str, outputs: int, count: int, norm: str) -> None:
    model = build(name, IMAGE, outputs, seed=0, options={"stem": stem, "norm": norm})
    assert sum(v.numel() for v in model.params.values()) == count
    assert set(model.head) == {"fc.weight", "fc.bias"}
    assert bool(model.private_buffers) == model.batch_statistics == (norm == "batch")
    blocks = {"8": (1,) * 3, "14": (2,) * 3, "18": (2,) * 4, "20": (3,) * 3, "34": (3, 4, 6, 3)}[name[6:]]
    assert by_hand(64 if len(blocks) == 4 else 16, blocks, 7 if stem == "imagenet" else 3, 3, outputs) == count


def test_names_are_those_of_torchvision() -> None:
    model = build("resnet18", IMAGE, 10, seed=0, options=NARROW)
    names = ["conv1.weight", "bn1.weight", "bn1.bias"]
    for stage in range(1, 5):
        for block in range(2):
            at = f"layer{stage}.{block}."
            for i in (1, 2):
                names += [f"{at}conv{i}.weight", f"{at}bn{i}.weight", f"{at}bn{i}.bias"]
            if stage > 1 and block == 0:
                names += [f"{at}downsample.0.weight", f"{at}downsample.1.weight", f"{at}downsample.1.bias"]
    assert list(model.params) == [*names, "fc.weight", "fc.bias"]
    assert "layer2.0.downsample.1.running_var" in model.private_buffers


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8), (2, 17, 12)])
def test_images_of_any_size(shape: tuple[int, ...], stem: str, norm: str) -> None:
    model = build("resnet8", shape, 7, seed=0, options=NARROW | {"stem": stem, "norm": norm})
    params = {k: v.clone() for k, v in (model.params | model.private_buffers).items()}
    for training in (True, False):
        out = model(params, torch.ones(3, *shape), training=training)
        assert out.shape == (3, 7)
        assert bool(torch.isfinite(out).all())


def test_each_stage_halves_the_image() -> None:
    for stem, sides in (("cifar", [32, 16, 8, 4]), ("imagenet", [8, 4, 2, 1])):
        module = build("resnet18", IMAGE, 2, seed=0, options=NARROW | {"stem": stem}).module.eval()
        seen: list[int] = []
        for stage in range(1, 5):
            module.get_submodule(f"layer{stage}").register_forward_hook(lambda m, i, y, s=seen: s.append(y.shape[-1]))
        module(torch.zeros(1, *IMAGE))
        assert seen == sides


def test_initial_values_keep_the_size_of_gradients() -> None:
    model = build("resnet18", IMAGE, 10, seed=0)
    weight = model.params["layer3.0.conv1.weight"]  # 256 outputs of 3x3: the variance is 2 / (256 * 9)
    assert weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.01)
    assert_equal(build("resnet18", IMAGE, 10, seed=0).params, model.params, tolerance=0)


@pytest.mark.parametrize(("width", "groups"), [(8, 1), (16, 1), (24, 3), (64, 4)])
def test_groups_have_16_channels_or_8(width: int, groups: int) -> None:
    module = build("resnet8", IMAGE, 2, seed=0, options={"width": width, "norm": "group"}).module
    assert module.get_submodule("bn1").num_groups == groups


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_stack_of_clients_is_a_loop_over_them(norm: str) -> None:
    options = NARROW | {"norm": norm}
    models = [build("resnet8", (2, 8, 8), 3, seed=seed, options=options, dtype=F64) for seed in range(3)]
    params = {k: torch.stack([m.params[k] for m in models]) for k in models[0].params}
    buffers = {k: torch.stack([m.private_buffers[k] for m in models]) for k in models[0].private_buffers}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 2, 8, 8, dtype=F64, generator=generator)
    y = torch.randint(3, (3, 4), generator=generator)

    def loss(params: Params, buffers: Params, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(models[0](params | buffers, x, training=True), y)

    together = torch.func.vmap(torch.func.grad(loss))(params, buffers, x, y)
    for i, model in enumerate(models):
        own = {k: v.clone() for k, v in model.private_buffers.items()}
        alone = torch.func.grad(loss)(model.params, own, x[i], y[i])
        assert_equal({k: v[i] for k, v in together.items()}, alone, tolerance=1e-9)
        assert_equal({k: v[i] for k, v in buffers.items()}, own, tolerance=1e-9)
        if norm == "batch":
            assert float((own["bn1.running_mean"] - model.private_buffers["bn1.running_mean"]).abs().max()) > 0


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_engines_agree(norm: str) -> None:
    # of equal size for BatchNorm, so that clients do share a stack
    sizes = {"ada": (6, 2, 3), "bo": (6, 1, 2), "cy": (5, 2, 2)}
    data = make_data(shape=(1, 6, 6), sizes=sizes)
    model = build("resnet8", data.shape, data.outputs, seed=0, options=NARROW | {"norm": norm}, dtype=F64)

    def outcome(engine: str) -> dict[str, Tensor]:
        fed = federate(algorithms.make("fedrep", {}), data, model, engine)
        server = run(fed, rounds=2)
        assert fed.record.faults == []
        return everything(fed, server)

    wanted = outcome("loop")
    for engine in OTHERS:
        assert_equal(outcome(engine), wanted, tolerance=1e-8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stem": "cifra"}, r'model\.stem = "cifra": no such stem; did you mean "cifar"\?'),
        ({"norm": "layer"}, r'model\.norm = "layer": no such norm; known: batch, group'),
        ({"norm": "group", "width": 12}, r'model\.width = 12: norm "group" needs a multiple of 8'),
        ({"depth": 20}, r'model\.depth: resnet8 has no option "depth"'),
    ],
)
def test_mistakes(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build("resnet8", IMAGE, 10, seed=0, options=options)


def test_one_class_with_a_depth() -> None:
    model = build("fedtailor.models.resnets:ResNet", IMAGE, 10, seed=0, options={"depth": 14, "width": 16})
    assert_equal(model.params, build("resnet14", IMAGE, 10, seed=0).params, tolerance=0)
    with pytest.raises(ConfigError, match=r"model\.depth.*\b21\b.*\b8\b.*\b14\b.*\b18\b.*\b20\b.*\b34\b"):
        build("fedtailor.models.resnets:ResNet", IMAGE, 10, seed=0, options={"depth": 21})


def test_samples_that_are_no_images() -> None:
    with pytest.raises(ConfigError, match=r"model\.name.*resnet8.*\[13\]"):
        build("resnet8", (13,), 10, seed=0)
