"""The training operator against plain torch on the same batches, and its gradient against finite differences."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtailor.core.context import ClientContext
from fedtailor.core.data import FederatedData
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree, items, tree_map
from fedtailor.data.federated import federated
from fedtailor.models import build
from fedtailor.training.batches import Batch, single
from fedtailor.training.kernels import structure
from fedtailor.training.solver import Solver
from fedtailor.training.specification import Training
from fedtailor.training.steps import train
from tests.helpers import F64, FULL_BATCH, SOLVER, assert_equal, descend, make_data, make_me, make_model

EPOCHS = 3


def batches_of(me: ClientContext, data: FederatedData, client: int, batch_size: int) -> list[Tensor]:
    """The batches that `me.sgd` draws first, from the stream as it is documented."""
    n, start = int(data.train.sizes[client]), int(data.train.starts[client])
    rng = stream("alone", data.clients[client], "batches", 0)
    return [b.rows for b in single(start, [rng.permutation(n) for _ in range(EPOCHS)], batch_size or n)]


def by_torch(
    model: Model,
    data: FederatedData,
    batches: list[Tensor],
    optimizer: Callable[..., torch.optim.Optimizer],
    clip: float = 0,
) -> Params:
    net = deepcopy(model.module).train()
    loss_of = nn.CrossEntropyLoss() if data.task == "classification" else nn.MSELoss()
    steps = optimizer(net.parameters())
    for rows in batches:
        steps.zero_grad()
        loss_of(net(data.train.x[rows]), data.train.y[rows]).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        steps.step()
    return {k: v.detach() for k, v in net.state_dict().items() if v.is_floating_point()}


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.8, 0.05)])
def test_sgd_is_torchs(task: Any, momentum: float, weight_decay: float) -> None:
    data = make_data(task)
    model = make_model("mlp", data)
    me = make_me(data, model, 3, replace(SOLVER, momentum=momentum, weight_decay=weight_decay))
    batches = batches_of(me, data, 3, 4)
    assert [len(b) for b in batches] == [4, 4, 4, 1] * EPOCHS
    wanted = by_torch(
        model, data, batches, lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum, weight_decay=weight_decay)
    )
    assert_equal(me.sgd(model.params, epochs=EPOCHS), wanted, 1e-12)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_torchs(weight_decay: float) -> None:
    # torch adds 1e-8 to the root, we add 1e-16 inside it: where the averages are of size g, a step differs by about
    # lr * 1e-8 / g. With g above 1e-3 twelve steps of 0.01 stay within 12 * 0.01 * 1e-5; units that never fire have
    # gradient 0 and take no step in either
    data = make_data("regression")
    model = make_model("mlp", data)
    me = make_me(data, model, 3, Solver(optimizer="adam", lr=0.01, batch_size=4, weight_decay=weight_decay))
    wanted = by_torch(
        model,
        data,
        batches_of(me, data, 3, 4),
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=weight_decay),
    )
    found = me.sgd(model.params, epochs=EPOCHS)
    assert_equal(found, wanted, 1.2e-6)
    assert float((found["out.bias"] - model.params["out.bias"]).abs().min()) > 1e-3


@pytest.mark.parametrize("clip", [0.05, 0.5, 100.0])
def test_clip_is_torchs(clip: float) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    me = make_me(data, model, 0, replace(SOLVER, clip=clip))
    wanted = by_torch(model, data, batches_of(me, data, 0, 4), lambda p: torch.optim.SGD(p, lr=0.1), clip)
    # torch divides by the norm + 1e-6: nine steps, each shorter by less than lr * 1e-6, in turn change the next ones
    assert_equal(me.sgd(model.params, epochs=EPOCHS), wanted, 9 * 0.1 * 1e-6)


def test_a_clipped_step_has_the_length_of_the_limit() -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    me = make_me(data, model, 0, replace(FULL_BATCH, clip=0.02))
    after = me.sgd(model.params)
    length = sum(float(((after[k] - v) ** 2).sum()) for k, v in model.params.items()) ** 0.5
    assert length == pytest.approx(0.1 * 0.02, rel=1e-10)


def test_whole_batches() -> None:
    data = make_data()
    model = make_model("mlp", data)
    found = make_me(data, model, 0, FULL_BATCH).sgd(model.params, epochs=EPOCHS)
    assert_equal(found, descend(model, model.params, *data.train.of(0), steps=EPOCHS), 1e-12)


def test_batchnorm_statistics_are_torchs() -> None:
    data = make_data()
    model = make_model("normed", data)
    me = make_me(data, model, 2)  # six samples: batches of four and two
    wanted = by_torch(model, data, batches_of(me, data, 2, 4), lambda p: torch.optim.SGD(p, lr=0.1))
    found = me.sgd(model.params, epochs=EPOCHS)
    assert_equal(found | me.buffers, wanted, 1e-12)
    assert set(me.buffers) == {"norm.running_mean", "norm.running_var"}


def test_batches_differ_from_call_to_call_and_client_to_client() -> None:
    data = make_data()
    model = make_model("mlp", data)
    me = make_me(data, model, 3)
    first, second = me.sgd(model.params), me.sgd(model.params)
    again = make_me(data, model, 3).sgd(model.params)
    assert_equal(first, again, tolerance=0)
    assert float((first["out.weight"] - second["out.weight"]).abs().max()) > 1e-6


def test_frozen_parts_stay() -> None:
    data = make_data()
    model = make_model("mlp", data)
    frozen = {k: v.clone() for k, v in model.body.items()}
    found = make_me(data, model, 0, FULL_BATCH).sgd(model.head, epochs=2, frozen=frozen)
    assert set(found) == set(model.head)
    assert_equal(frozen, model.body, tolerance=0)
    assert_equal(found, descend(model, model.head, *data.train.of(0), steps=2, frozen=model.body), 1e-12)


@pytest.mark.parametrize("policy", ["private", "mean"])
def test_statistics_of_a_frozen_part_stay(policy: Any) -> None:
    data = make_data()
    model = make_model("normed", data, policy)
    me = make_me(data, model, 2)
    frozen = {k: v.clone() for k, v in (model.body | model.private_buffers).items()}
    before = {k: v.clone() for k, v in frozen.items()}
    me.sgd(model.head, epochs=2, frozen=frozen)
    assert_equal(frozen, before, tolerance=0)


def test_a_mask_holds_entries() -> None:
    data = make_data()
    model = make_model("mlp", data)
    mask = {k: torch.ones_like(v) for k, v in model.params.items()}
    mask["out.bias"] = torch.tensor([1.0, 0.0, 1.0], dtype=F64)
    mask["hidden.0.weight"] = torch.zeros_like(mask["hidden.0.weight"])
    solver = replace(SOLVER, momentum=0.9, weight_decay=0.1)
    found = make_me(data, model, 0, solver).sgd(model.params, epochs=2, mask=mask)
    moved = {k: found[k] != v for k, v in model.params.items()}
    assert moved["out.bias"].tolist() == [True, False, True]
    assert not moved["hidden.0.weight"].any()
    assert moved["out.weight"].all()


def test_a_mask_of_ones_is_none() -> None:
    data = make_data()
    model = make_model("mlp", data)
    ones = {k: torch.ones_like(v) for k, v in model.params.items()}
    found = make_me(data, model).sgd(model.params, mask=ones)
    assert_equal(found, make_me(data, model).sgd(model.params), tolerance=0)


def test_the_proximal_term() -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    center = {k: v + 0.5 for k, v in model.params.items()}
    me = make_me(data, model, 0, FULL_BATCH)
    wanted = descend(model, model.params, *data.train.of(0), steps=3, center=center, mu=0.7)
    assert_equal(me.sgd(model.params, epochs=3, prox=(center, 0.7)), wanted, 1e-12)
    assert_equal(me.sgd(model.params, epochs=3, prox=(center, torch.tensor(0.7, dtype=F64))), wanted, 1e-12)
    without = descend(model, model.params, *data.train.of(0), steps=3)
    assert_equal(me.sgd(model.params, epochs=3, prox=(center, 0.0)), without, 1e-12)


def test_its_own_step_size() -> None:
    data = make_data()
    model = make_model("mlp", data)
    me = make_me(data, model, 0, FULL_BATCH)
    wanted = descend(model, model.params, *data.train.of(0), steps=2, lr=0.3)
    assert_equal(me.sgd(model.params, epochs=2, lr=0.3), wanted, 1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_no_epochs(optimizer: Any) -> None:
    data = make_data()
    model = make_model("normed", data, "mean")
    me = make_me(data, model, 0, Solver(optimizer=optimizer))
    found = me.sgd(model.params, epochs=0)
    assert_equal(found, model.params, tolerance=0)
    found["out.bias"] += 1  # and they are copies
    assert_equal(me.sgd(model.params, epochs=0), model.params, tolerance=0)


def test_inputs_are_left_alone() -> None:
    data = make_data()
    model = make_model("normed", data, "mean")
    before = tree_map(torch.clone, model.params)
    me = make_me(data, model, 2)
    me.sgd(model.params, epochs=2, prox=(model.params, 0.1))
    me.loss(model.params)
    assert_equal(model.params, before, tolerance=0)
    assert not any(v.requires_grad for v in model.params.values())


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("client", range(4))
def test_loss_is_the_mean_over_the_split(split: str, client: int) -> None:
    data = make_data()
    model = make_model("mlp", data)
    x, y = getattr(data, split).of(client)
    wanted = nn.functional.cross_entropy(model(model.params, x), y) if len(x) else torch.zeros((), dtype=F64)
    assert_equal(make_me(data, model, client).loss(model.params, split), wanted, 1e-14)


def test_views() -> None:
    data = make_data()
    me = make_me(data, make_model("mlp", data), 2)
    assert_equal(me.train.x, data.train.x[10:16], tolerance=0)
    assert me.train.y.tolist() == data.train.y[10:16].tolist()
    assert me.val.mask.tolist() == [1, 1]
    assert make_me(data, make_model("mlp", data), 1).val.x.shape == (0, 4)


SOLVERS = {
    "sgd": SOLVER,
    "momentum-decay": replace(SOLVER, momentum=0.9, weight_decay=0.1),
    "clip": replace(SOLVER, clip=0.3),
    "adam": Solver(optimizer="adam", lr=0.1, batch_size=4),
}


def inputs(model: Model) -> Tree:
    return {
        "params": model.head,
        "frozen": model.body,
        "center": {k: v + 0.3 for k, v in model.head.items()},
        "mu": torch.tensor(0.4, dtype=F64),
        "lr": torch.tensor(0.2, dtype=F64),
    }


def after_training(me: ClientContext, t: Tree) -> Tensor:
    """Any smooth function of what training makes."""
    out = me.sgd(t["params"], epochs=2, frozen=t["frozen"], prox=(t["center"], t["mu"]), lr=t["lr"])
    return sum(((v + 0.3) ** 3).sum() for v in out.values())  # type: ignore[return-value]


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_gradient_through_training(solver: str, task: Any) -> None:
    data = make_data(task, shape=(3,), outputs=2)
    model = make_model("mlp", data)
    point = inputs(model)
    watched = tree_map(lambda v: v.clone().requires_grad_(), point)
    after_training(make_me(data, model, 0, SOLVERS[solver]), watched).backward()
    eps = 1e-6
    for (path, leaf), (_, value) in zip(items(watched), items(point), strict=True):
        direction = torch.from_numpy(stream("direction", path).normal(size=tuple(value.shape) or 1)).reshape(
            value.shape
        )
        ends = []
        for sign in (1, -1):
            moved = tree_map(lambda v, value=value, d=sign * eps * direction: v + d if v is value else v, point)
            ends.append(float(after_training(make_me(data, model, 0, SOLVERS[solver]), moved)))
        assert leaf.grad is not None
        slope = float((leaf.grad * direction).sum())
        assert (ends[0] - ends[1]) / (2 * eps) == pytest.approx(slope, rel=1e-6, abs=1e-8), path
        assert abs(slope) > 1e-6, path


@pytest.mark.parametrize("only", ["params", "frozen", "center", "mu", "lr"])
def test_gradient_to_one_input_alone(only: str) -> None:
    # the others are constants, as a model's initial values are
    data = make_data()
    model = make_model("mlp", data)
    together = tree_map(lambda v: v.clone().requires_grad_(), inputs(model))
    after_training(make_me(data, model), together).backward()
    alone = inputs(model)
    alone[only] = tree_map(lambda v: v.clone().requires_grad_(), alone[only])
    after_training(make_me(data, model), alone).backward()
    assert_equal(tree_map(lambda v: v.grad, alone[only]), tree_map(lambda v: v.grad, together[only]), 1e-12)


@pytest.mark.parametrize("only", ["params", "mu", "lr"])
def test_gradient_through_no_steps(only: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    t = inputs(model)
    t[only] = tree_map(lambda v: v.clone().requires_grad_(), t[only])
    out = make_me(data, model).sgd(t["params"], epochs=0, prox=(t["center"], t["mu"]), lr=t["lr"], frozen=t["frozen"])
    loss = sum(v.sum() for v in out.values()) + 0 * sum(leaf.sum() for _, leaf in items(t[only]))
    loss.backward()  # type: ignore[union-attr]
    for _, leaf in items(t[only]):
        assert leaf.grad is not None
        assert leaf.grad.unique().tolist() == [1 if only == "params" else 0]


def test_a_loss_beside_training_of_a_batchnorm_model() -> None:
    data = make_data()
    model = make_model("normed", data)
    me = make_me(data, model, 2)
    lr = torch.tensor(0.1, dtype=F64, requires_grad=True)
    params = {k: v.clone().requires_grad_() for k, v in model.params.items()}
    me.loss(me.sgd(params, lr=lr)).backward()  # the loss sees the statistics that training has left
    assert lr.grad is not None
    ends = []
    for step in (1e-6, -1e-6):
        me = make_me(data, model, 2)
        params_after = me.sgd(model.params, lr=0.1 + step)
        me.buffers = buffers_at(data, model)
        ends.append(float(me.loss(params_after)))
    assert float(lr.grad) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6)


def buffers_at(data: FederatedData, model: Model) -> Params:
    """The statistics after training at lr 0.1: constants of the derivative."""
    me = make_me(data, model, 2)
    me.sgd(model.params, lr=0.1)
    return me.buffers


def test_a_part_without_parameters() -> None:
    # FedRep on a model that is all head trains a body of nothing
    data = make_data()
    model = make_model("linear", data)
    for solver in (SOLVER, replace(SOLVER, clip=1.0)):
        assert make_me(data, model, 0, solver).sgd({}, frozen=model.params) == {}


def test_a_stack_of_clients_is_one_by_one() -> None:
    data = make_data()
    model = make_model("mlp", data)
    rows = [[Batch(torch.arange(a, a + 3)) for a in (0, 3)], [Batch(torch.arange(a, a + 3)) for a in (11, 17)]]
    both = [Batch(torch.stack([a.rows, b.rows])) for a, b in zip(*rows, strict=True)]
    fixed = Training(model, nn.CrossEntropyLoss(reduction="none"), SOLVER, data.train, lambda s: both, ("key",))

    def tensors(lr: Tensor) -> Tree:
        none: Tree = dict.fromkeys(("center", "mu", "mask", "memory"))
        return {"params": model.params, "buffers": {}, "frozen": {}, "lr": lr} | none

    lrs = torch.tensor([0.1, 0.3], dtype=F64)
    found, _ = torch.func.vmap(lambda lr: train(fixed, tensors(lr))[:2])(lrs)
    for i, mine in enumerate(rows):
        wanted, *_ = train(replace(fixed, draw=lambda s, mine=mine: mine), tensors(lrs[i]))  # type: ignore[misc]
        assert_equal({k: v[i] for k, v in found.items()}, wanted, 1e-14)


@pytest.mark.parametrize(("prox", "mask"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", ["lenet5", "resnet8"])
def test_steps_in_place_are_those_of_the_general_path(kind: str, prox: bool, mask: bool) -> None:
    data = make_data(shape=(1, 28, 28))
    model = build(kind, data.shape, data.outputs, seed=1, dtype=F64)
    never = replace(SOLVER, clip=1e12)  # acts never, but takes the general path
    found, wanted = (
        (me := make_me(data, model, 0, solver)).sgd(
            model.body,
            epochs=2,
            frozen=model.head,
            prox=({k: v + 0.1 for k, v in model.body.items() if "conv" in k}, 0.3) if prox else None,
            mask={k: v > 0 for k, v in model.body.items()} if mask else None,
        )
        | me.buffers
        for solver in (SOLVER, never)
    )
    assert_equal(found, wanted, 1e-10)
    before = model.trainable
    assert_equal(dict(model.module.named_parameters()), before, 0)  # the module has its own tensors again


@pytest.mark.parametrize(("prox", "mask"), [(False, False), (True, True)])
@pytest.mark.parametrize("kind", ["lenet5", "fmnist-cnn", "cnn"])
def test_a_head_alone_is_trained_on_what_comes_before_it(kind: str, prox: bool, mask: bool) -> None:
    data = make_data(shape=(1, 28, 28))
    model = build(kind, data.shape, data.outputs, seed=1, dtype=F64)
    assert structure.head_layer(model) is not None
    never = replace(SOLVER, clip=1e12)  # acts never, but takes the general path
    found, wanted = (
        make_me(data, model, 0, solver).sgd(
            model.head,
            epochs=3,
            frozen=model.body,
            prox=({k: v + 0.1 for k, v in model.head.items()}, 0.3) if prox else None,
            mask={k: v > 0 for k, v in model.head.items()} if mask else None,
        )
        for solver in (SOLVER, never)
    )
    assert_equal(found, wanted, 1e-10)
    assert make_me(data, model).sgd(model.head, epochs=0, frozen=model.body).keys() == model.head.keys()


def test_statistics_and_priors_have_no_head_alone() -> None:
    data = make_data(shape=(1, 28, 28))
    assert (
        structure.head_layer(build("resnet8", data.shape, 3, seed=0)) is None
    )  # batch statistics change with every batch
    assert structure.head_layer(build("cnn", (1, 28, 28), 3, seed=0, prior=True)) is None
    assert structure.head_layer(build("cnn", (1, 28, 28), 3, seed=0, head=("hidden", "out"))) is None


def test_convolutions_in_three_dimensions() -> None:
    """With the channels last in memory, which changes nothing but the speed."""
    x = torch.randn(16, 2, 3, 3, 3, dtype=F64)
    data = federated({"ada": (x, torch.arange(16) % 3)})
    module = nn.Sequential(nn.Conv3d(2, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).to(F64)
    model = Model(module)
    found = make_me(data, model).sgd(model.params, epochs=EPOCHS)
    batches = batches_of(make_me(data, model), data, 0, SOLVER.batch_size)
    assert_equal(found, by_torch(model, data, batches, lambda p: torch.optim.SGD(p, lr=SOLVER.lr)))
