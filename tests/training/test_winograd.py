"""Convolutions with fewer products are convolutions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.models import build
from fedtailor.training.arithmetic import Arithmetic
from fedtailor.training.kernels import winograd
from tests.helpers import F64, SOLVER, assert_equal, make_data, make_me


def layer(*args: object, **kwargs: object) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(*args, **kwargs)  # type: ignore[arg-type]


def with_gradients(run: Callable[[Tensor], Tensor], made: nn.Conv2d, x: Tensor, d: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = run(x)
    return [y, *torch.autograd.grad(y, [x, *made.parameters()], d)]


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize(("size", "padding"), [(5, (0, 0)), (5, (2, 1)), (3, (0, 0)), (3, (1, 1))])
@pytest.mark.parametrize("shape", [(12, 12), (11, 14), (5, 8)])
def test_outputs_and_gradients_are_those_of_the_direct_way(
    shape: tuple[int, int], size: int, padding: tuple[int, int], is_last: bool
) -> None:
    made = layer(3, 6, size, padding=padding, bias=size == 5).to(F64)
    x = torch.randn(2, 3, *shape, dtype=F64)
    x = x.to(memory_format=torch.channels_last) if is_last else x
    d = torch.randn_like(made(x))
    found = with_gradients(lambda x: winograd.convolve(x, made.weight, made.bias, padding), made, x, d)
    for one, other in zip(found, with_gradients(made, made, x, d), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("size", [3, 5])
def test_rounding_errors_are_small(size: int) -> None:
    made = layer(32, 64, size)
    x = torch.randn(20, 32, 12, 12).relu()
    d = torch.randn_like(made(x))
    found = with_gradients(lambda x: winograd.convolve(x, made.weight, made.bias), made, x, d)
    exact = layer(32, 64, size).to(F64)
    wanted = with_gradients(exact, exact, x.double(), d.double())
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() / other.norm() < 1e-5


def is_used(made: nn.Module, x: Tensor) -> bool:
    with winograd.inside(made):
        y = made(x)
    assert "forward" not in vars(made)
    torch.testing.assert_close(y, made(x), rtol=0, atol=1e-4)
    return "_Convolve" in _names(y.grad_fn)


def _names(node: object) -> str:
    return "" if node is None else f"{node} " + "".join(_names(n) for n, _ in node.next_functions)  # type: ignore[attr-defined]


def test_it_is_used_where_it_gains() -> None:
    x = torch.randn(2, 64, 12, 12)
    assert is_used(layer(64, 64, 5, padding=2), x)
    assert is_used(layer(64, 32, 5, bias=False), x)
    assert is_used(layer(64, 64, 5, padding=1), x)  # 10 outputs, 12 computed


@pytest.mark.parametrize(
    ("made", "size"),
    [
        (layer(64, 64, 5, stride=2), 12),
        (layer(64, 64, 5, dilation=2), 12),
        (layer(64, 64, 5, padding="same"), 12),
        (layer(64, 64, 5, padding=1, padding_mode="reflect"), 12),
        (layer(64, 128, 5, groups=2), 12),
        (layer(64, 64, 3), 12),
        (layer(64, 64, (3, 5)), 12),
        (layer(64, 64, 7), 12),
        (layer(64, 16, 5), 14),  # too small to gain
        (layer(64, 64, 5), 9),  # 5 outputs, 8 computed
    ],
)
def test_others_stay_as_they_are(made: nn.Conv2d, size: int) -> None:
    assert not is_used(made, torch.randn(2, 64, size, size))
    assert made(torch.randn(64, size, size)).dim() == 3


def test_a_single_image_without_a_batch() -> None:
    made = layer(64, 64, 5)
    with winograd.inside(made):
        assert made(torch.randn(64, 8, 8)).shape == (64, 4, 4)


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [((2, 3, 12, 12), "expected input.* to have 64 channels"), ((2, 64, 2, 2), "Kernel size can't be greater")],
)
def test_an_error_is_torchs_and_leaves_the_module_as_it_was(shape: tuple[int, ...], wrong: str) -> None:
    made = layer(64, 64, 5)
    with pytest.raises(RuntimeError, match=wrong), winograd.inside(made):
        made(torch.randn(shape))
    assert "forward" not in vars(made)


def test_it_can_be_differentiated_twice() -> None:
    x, weight, bias = (torch.randn(shape, dtype=F64) for shape in ((2, 3, 8, 8), (4, 3, 3, 3), (4,)))

    def slopes(convolution: Callable[..., Tensor]) -> list[Tensor]:
        tensors = [v.clone().requires_grad_() for v in (x, weight, bias)]
        first = torch.autograd.grad(convolution(*tensors, padding=(1, 1)).tanh().sum(), tensors, create_graph=True)
        return list(torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), tensors))

    for found, wanted in zip(slopes(winograd.convolve), slopes(F.conv2d), strict=True):
        assert_equal(found, wanted, 1e-10)


@pytest.mark.parametrize("gradient", ["jfb", "implicit"])
def test_equilibria_of_convolutions(threads: Callable[[int], None], gradient: str) -> None:
    """The implicit gradient is found with transforms that know only torch's own convolutions."""
    data = make_data(shape=(1, 8, 8))
    options = {"norm": "group", "warm_start": False, "gradient": gradient, "tolerance": 1e-10, "max_iterations": 200}
    model = build("deq-resnet-s", data.shape, data.outputs, seed=1, dtype=F64, options=options)
    solver = replace(SOLVER, lr=0.01)
    trained = []
    for count in (1, 2):
        threads(count)
        trained.append(make_me(data, model, 0, solver).sgd(model.params))
    assert_equal(trained[0], trained[1], 1e-8)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("change", [{}, {"momentum": 0.9}, {"optimizer": "adam", "lr": 0.001}])
def test_training_uses_it_on_any_number_of_threads_and_finds_the_same(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None], change: dict[str, object]
) -> None:
    data = make_data(shape=(1, 28, 28))
    model = build("cnn", data.shape, data.outputs, seed=1, dtype=F64)
    solver = replace(SOLVER, **change)  # type: ignore[arg-type]
    used = Mock(wraps=winograd.convolve)
    monkeypatch.setattr(winograd, "convolve", used)
    found = []
    for count in (1, 2):
        threads(count)
        found.append(make_me(data, model, 0, solver).sgd(model.params))
        assert used.call_count
        used.reset_mock()
    assert_equal(found[0], found[1], 0.0)
    general = replace(solver, arithmetic=Arithmetic(kernels="off"))
    assert_equal(found[0], make_me(data, model, 0, general).sgd(model.params), 1e-10)
    assert not used.call_count


def test_a_loss_of_ones_own_may_differentiate_the_model(threads: Callable[[int], None]) -> None:
    threads(1)
    data = make_data(shape=(1, 28, 28))
    model = build("cnn", data.shape, data.outputs, seed=1, dtype=F64)

    def loss(tensors: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        each = F.cross_entropy(model(tensors, x), y, reduction="none")
        (slope,) = torch.autograd.grad(each.sum(), x, create_graph=True)
        return each + slope.square().flatten(1).sum(1)

    found = make_me(data, model, 0, SOLVER).sgd(model.params, loss=loss)
    assert all(v.isfinite().all() for v in found.values())
    assert any((v != model.params[k]).any() for k, v in found.items())
