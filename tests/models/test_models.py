"""Models by name: sizes of the papers, heads, and errors that say what to do."""

import re
from pathlib import Path

import pytest
import torch

from fedtailor.errors import ConfigError
from fedtailor.models import MODELS, build
from tests.helpers import F64, assert_equal


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "count", "head"),
    [
        ("lenet5", (3, 32, 32), 10, 62_006, {"fc3.weight", "fc3.bias"}),
        ("fmnist-cnn", (1, 28, 28), 10, 10_290, {"fc.weight", "fc.bias"}),
        ("cnn", (1, 28, 28), 10, 582_026, {"out.weight", "out.bias"}),
        ("mlp", (1, 28, 28), 10, 784 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10, {"out.weight", "out.bias"}),
        ("linear", (13,), 2, 28, {"out.weight", "out.bias"}),
        ("lstm", (24,), 1, 48 * (1 + 12 + 1) + 48 * (12 + 12 + 1) + 13, {"out.weight", "out.bias"}),
        ("lstm", (24, 2, 3), 1, 48 * (6 + 12 + 1) + 48 * (12 + 12 + 1) + 13, {"out.weight", "out.bias"}),
    ],
)
def test_sizes_and_heads(name: str, shape: tuple[int, ...], outputs: int, count: int, head: set[str]) -> None:
    model = build(name, shape, outputs, seed=0)
    assert sum(v.numel() for v in model.params.values()) == count
    assert set(model.head) == head
    assert model(model.params, torch.zeros(3, *shape)).shape == (3, outputs)


@pytest.mark.parametrize(
    ("name", "shape"), [("lenet5", (1, 28, 28)), ("lenet5", (3, 17, 20)), ("fmnist-cnn", (3, 33, 12))]
)
def test_other_sizes_of_images(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, shape, 7, seed=0)
    assert model(model.params, torch.zeros(2, *shape)).shape == (2, 7)


def test_initial_values_come_from_the_seed() -> None:
    first, again, other = (build("mlp", (4,), 3, seed=s) for s in (1, 1, 2))
    assert_equal(first.params, again.params, tolerance=0)
    assert not torch.equal(first.params["out.weight"], other.params["out.weight"])


def test_options() -> None:
    assert build("mlp", (4,), 3, seed=0, options={"hidden": [6, 5]}).params["out.weight"].shape == (3, 5)
    assert set(build("mlp", (4,), 3, seed=0, options={"hidden": []}).params) == {"out.weight", "out.bias"}
    assert set(build("linear", (4,), 3, seed=0, options={"bias": False}).params) == {"out.weight"}
    assert build("linear", (4,), 3, seed=0, dtype=F64).dtype == F64


def test_another_head() -> None:
    assert set(build("mlp", (4,), 3, seed=0, head=["hidden.1", "out"]).body) == {"hidden.0.weight", "hidden.0.bias"}
    with pytest.raises(ConfigError, match=r'"fc3".*hidden\.0'):
        build("mlp", (4,), 3, seed=0, head=["fc3"])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mpl", {}, r'model\.name: no model "mpl"; did you mean "mlp"\?'),
        ("mlp", {"hiden": (3,)}, r'model\.hiden: mlp has no option "hiden"; did you mean "hidden"\?'),
        ("lenet5", {"hidden": (3,)}, r'model\.hidden: lenet5 has no option "hidden"; it has none'),
        ("mlp", {"hidden": [4, 0]}, r"model\.hidden: 0 is not a whole number above 0"),
        ("mlp", {"hidden": ["4"]}, r"model\.hidden: '4' is not a whole number above 0"),
        ("mlp", {"hidden": 16}, r"model\.hidden = 16: must be a list such as \[16\]"),
        ("lstm", {"hidden": 0}, r"model\.hidden: 0 is not a whole number above 0"),
        ("lstm", {"layers": 0}, r"model\.layers: 0 is not a whole number above 0"),
        ("mlp", {"shape": (3,)}, r'model\.shape: mlp has no option "shape"'),
        ("no.such.place:Net", {}, r'model\.name: cannot import "no\.such\.place:Net"'),
        ("fedtailor.models:Nothing", {}, r'model\.name: cannot import "fedtailor\.models:Nothing"'),
        ("fedtailor.models:MODELS", {}, r'"fedtailor\.models:MODELS" is not a class or function'),
    ],
)
def test_mistakes(name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(name, (4,), 3, seed=0, options=options)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lenet5", (13,)),
        ("fmnist-cnn", (28, 28)),
        ("lenet5", (3, 8, 8)),
        ("lenet5", (3, 12, 12)),
        ("fmnist-cnn", (1, 8, 8)),
    ],
)
def test_samples_that_do_not_fit(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"model.name: {name} does not fit samples of shape {list(shape)}")):
        build(name, shape, 10, seed=0)


def test_a_module_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_network.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    head = ('last',)\n"
        "    def __init__(self, shape, outputs, width=3):\n"
        "        super().__init__()\n"
        "        self.first, self.last = nn.Linear(shape[0], width), nn.Linear(width, outputs)\n"
        "    def forward(self, x):\n"
        "        return self.last(self.first(x))\n"
        "def headless(shape, outputs):\n"
        "    return nn.Linear(shape[0], outputs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = build("users_network:Net", (4,), 2, seed=0, options={"width": 6})
    assert set(model.head) == {"last.weight", "last.bias"}
    assert model.params["last.weight"].shape == (2, 6)
    assert build("users_network:headless", (4,), 2, seed=0).head == {}
    assert "users_network:Net" not in MODELS
    with pytest.raises(ConfigError, match=r'"widht".*"width"'):
        build("users_network:Net", (4,), 2, seed=0, options={"widht": 6})


def test_statistics_by_policy() -> None:
    private, mean = (build("tests.helpers:Normed", (4,), 2, seed=0, buffers=b) for b in ("private", "mean"))
    assert set(mean.params) - set(private.params) == set(private.private_buffers)
