"""Random crop and flip: what a plain loop does, for a batch and for a stack of clients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtailor import algorithms
from fedtailor.core.random import stream
from fedtailor.training.augmentation import PAD, augment, draw
from fedtailor.training.solver import Solver
from tests.helpers import (
    OTHERS,
    SOLVER,
    assert_equal,
    descend,
    everything,
    federate,
    make_data,
    make_me,
    make_model,
    run,
)


def one_by_one(x: Tensor, drawn: Tensor, pad: int) -> Tensor:
    out = []
    for image, (top, left, flip) in zip(x, drawn.tolist(), strict=True):
        large = torch.zeros(len(image), image.shape[1] + 2 * pad, image.shape[2] + 2 * pad, dtype=x.dtype)
        large[:, pad : pad + image.shape[1], pad : pad + image.shape[2]] = image
        crop = large[:, top : top + image.shape[1], left : left + image.shape[2]]
        out.append(crop.flip(2) if flip else crop)
    return torch.stack(out)


@pytest.mark.parametrize("pad", [1, PAD])
@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 5, 7)])
def test_it_is_crop_and_flip_of_each_image(shape: tuple[int, ...], pad: int) -> None:
    x = torch.from_numpy(stream("images").random((40, *shape)))
    drawn = torch.from_numpy(draw(stream("draws"), 40, pad))
    out = augment(x, drawn[:, :2], drawn[:, 2], pad)
    assert out.dtype == x.dtype
    assert torch.equal(out, one_by_one(x, drawn, pad))


def test_a_stack_of_clients_is_a_loop_over_them() -> None:
    x = torch.from_numpy(stream("images").random((3, 5, 2, 6, 6)))
    drawn = torch.from_numpy(np.stack([draw(stream("draws", i), 5) for i in range(3)]))
    together = augment(x, drawn[..., :2], drawn[..., 2].bool())
    for i in range(3):
        assert torch.equal(together[i], augment(x[i], drawn[i, :, :2], drawn[i, :, 2]))


def test_the_middle_without_a_flip_is_the_image() -> None:
    x = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    still = augment(x, torch.full((4, 2), PAD), torch.zeros(4))
    assert torch.equal(still, x)
    assert torch.equal(augment(x, torch.full((4, 2), PAD), torch.ones(4)), x.flip(-1))
    assert torch.equal(x, before)


def test_an_empty_batch() -> None:
    assert augment(torch.zeros(0, 3, 8, 8), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0)).shape == (0, 3, 8, 8)


def test_draws_are_even_and_named_by_their_stream() -> None:
    drawn = draw(stream("many"), 9_000)
    assert np.array_equal(drawn, draw(stream("many"), 9_000))
    assert not np.array_equal(drawn, draw(stream("others"), 9_000))
    for column, values in ((0, 9), (1, 9), (2, 2)):
        counts = np.bincount(drawn[:, column], minlength=values)
        assert len(counts) == values
        assert counts == pytest.approx(9_000 / values, rel=0.15)


@pytest.mark.parametrize("name", ["fedrep", "ditto"])
def test_engines_agree(name: str) -> None:
    data = make_data(shape=(1, 6, 6))
    model = make_model("conv", data)

    def outcome(engine: str, solver: Solver) -> dict[str, Tensor]:
        fed = federate(algorithms.make(name, {}), data, model, engine, solver)
        server = run(fed)
        assert fed.record.faults == []
        return everything(fed, server)

    solver = replace(SOLVER, augment="crop-flip", batch_size=3)
    wanted = outcome("loop", solver)
    for engine in OTHERS:
        assert_equal(outcome(engine, solver), wanted)
    plain = outcome("loop", replace(solver, augment=None))
    assert any(not torch.equal(plain[k], wanted[k]) for k in wanted if k.startswith("models/"))


def test_a_step_is_taken_on_the_images_drawn() -> None:
    data = make_data(shape=(1, 6, 6))
    model = make_model("conv", data)
    me = make_me(data, model, solver=Solver(lr=0.1, batch_size=0, augment="crop-flip"))
    x, y = data.train.of(0)
    order = stream("alone", data.clients[0], "batches", 0).permutation(len(x))
    drawn = torch.from_numpy(draw(stream("alone", data.clients[0], "augment", 0), len(x)))
    wanted = descend(model, model.params, one_by_one(x[order], drawn, PAD), y[order], steps=1)
    assert_equal(me.sgd(model.params), wanted)
