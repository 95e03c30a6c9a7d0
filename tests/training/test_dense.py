"""The update fused into the backward pass against autograd, for clients side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms.fedrep import FedRep
from fedtailor.core.model import Model
from fedtailor.core.task import default_task
from fedtailor.core.trees import Params, Tree, leaves
from fedtailor.models import build
from fedtailor.training.arithmetic import Arithmetic
from fedtailor.training.batches import stacked
from fedtailor.training.kernels import dense, structure
from fedtailor.training.solver import Solver
from fedtailor.training.specification import Training
from fedtailor.training.steps import take_steps
from tests.helpers import F64, assert_equal, federate, make_data, run

CLIENTS = 3
BODY = ("hidden.0.weight", "hidden.0.bias", "hidden.1.weight", "hidden.1.bias")


def drawn(like: Params, seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(CLIENTS, *v.shape, generator=generator, dtype=F64) for k, v in like.items()}


def trained(
    task: Any,
    options: dict[str, Any],
    frozen: tuple[str, ...],
    prox: bool,
    mask: bool,
    by_hand: bool,
    common: bool = False,
) -> Tree:
    data = make_data(task)
    model = build("mlp", data.shape, data.outputs, seed=0, options=options, dtype=F64)
    solver = Solver(arithmetic=Arithmetic(kernels="auto" if by_hand else "off"))
    assert structure.dense_layers(model)
    values = drawn(model.params, 1)
    if common:
        values = {k: v[:1].expand(v.shape) for k, v in values.items()}
    params = {k: v for k, v in values.items() if k not in frozen}
    tensors = {
        "params": params,
        "buffers": {},
        "frozen": {k: values[k] for k in frozen},
        "center": {k: v for k, v in drawn(model.params, 2).items() if k in params and "0" in k} if prox else None,
        "mu": torch.tensor([0.5, 0.0, 2.0], dtype=F64) if prox else None,
        "mask": {k: (v > 0).to(F64) for k, v in drawn(model.params, 3).items() if k in params} if mask else None,
        "memory": None,
        "lr": torch.tensor([0.1, 0.05, 0.2], dtype=F64),
        "anchor": torch.ones(CLIENTS, dtype=F64),
    }
    starts, sizes = data.train.bounds([0, 1, 3])  # 9, 1 and 13 samples: padded batches, and clients that stop early
    orders = [[torch.randperm(n, generator=torch.Generator().manual_seed(n)).numpy()] * 2 for n in sizes]
    batches = stacked(starts, orders, 4, F64)
    training = Training(
        model, default_task(task).loss, solver, data.train, lambda _: batches, ("key",), None, None, tensors, True
    )
    before = {k: v.clone() for k, v in values.items()}
    out = take_steps(training, leaves(tensors), differentiable=False)
    assert_equal(values, before, 0)  # what came in stays as it was
    return dict(zip(params, out, strict=True))


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("frozen", [(), BODY, ("out.weight", "out.bias"), ("hidden.0.bias", "hidden.1.weight")])
@pytest.mark.parametrize(("prox", "mask"), [(False, False), (True, False), (False, True), (True, True)])
def test_by_hand_is_by_autograd(task: str, frozen: tuple[str, ...], prox: bool, mask: bool) -> None:
    options = {"hidden": [5, 4]}
    wanted = trained(task, options, frozen, prox, mask, by_hand=False)
    assert_equal(trained(task, options, frozen, prox, mask, by_hand=True), wanted, 1e-12)


@pytest.mark.parametrize("at_a_time", [1, 2])
def test_clients_of_one_stack_take_turns_in_the_cache(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"hidden": [5, 4]}
    wanted = trained("classification", options, (), True, True, by_hand=True)
    monkeypatch.setattr(dense, "at_a_time", lambda stack: at_a_time)
    assert_equal(trained("classification", options, (), True, True, by_hand=True), wanted, 1e-14)


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize(
    ("hidden", "frozen"), [([], ()), ([5, 4], ()), ([5, 4], ("hidden.0.bias",)), ([5, 4], ("out.weight", "out.bias"))]
)
@pytest.mark.parametrize(("rows", "steps"), [(4, 1), (7, 2), (8, 2), (1000, 8)])
def test_several_steps_in_one_pass(
    common: bool, hidden: list[int], frozen: tuple[str, ...], rows: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 0

    def watched(*args: Any) -> list[Any]:
        nonlocal longest
        found = passes(*args)
        longest = max(longest, *map(len, found))
        return found

    wanted = trained("classification", {"hidden": hidden}, frozen, False, False, by_hand=False, common=common)
    passes = dense._passes
    monkeypatch.setattr(dense, "_passes", watched)
    monkeypatch.setattr(dense, "rows_ahead", lambda weight, tensors: rows)
    monkeypatch.setattr(dense, "WORTHWHILE", 2)
    found = trained("classification", {"hidden": hidden}, frozen, False, False, by_hand=True, common=common)
    assert_equal(found, wanted, 1e-12)
    assert longest == steps


def test_rows_ahead() -> None:
    values = {"w": torch.zeros(3, 200, 784)}
    plain = {"params": values, "mask": None, "center": None}
    assert dense.rows_ahead("w", plain) == 79
    assert dense.rows_ahead("w", plain | {"center": {"other": values["w"]}}) == 79
    assert dense.rows_ahead("w", plain | {"center": values}) == 0
    assert dense.rows_ahead("w", plain | {"mask": values}) == 0
    assert dense.rows_ahead("other", plain) == 0


def test_at_a_time() -> None:
    assert dense.at_a_time({"w": torch.zeros(3, dense.CACHE // 40)}) == 10
    assert dense.at_a_time({"w": torch.zeros(3, dense.CACHE)}) == 1


class Named(nn.Module):
    """Layers that bear the names by which our own models tell of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(torch.tanh(self.dense(x)))
        return made


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_layers_may_be_called_dense_and_head(engine: str) -> None:
    data = make_data()
    model = Model(Named().to(F64), head=["head"])
    assert structure.dense_layers(model) == ()
    assert structure.head_layer(model) is None
    trained = run(federate(FedRep(), data, model, engine=engine), 1)
    assert any((trained[k] != v).any() for k, v in model.body.items())


def test_a_label_prior_needs_the_general_path() -> None:
    assert structure.dense_layers(build("mlp", (4,), 3, seed=0)) != ()
    assert structure.dense_layers(build("mlp", (4,), 3, seed=0, prior=True)) == ()
    assert structure.dense_layers(build("lenet5", (1, 28, 28), 3, seed=0)) == ()
