"""Data that a program made: what would give a wrong number is refused, with the client and the split by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.data import FederatedData, Rows
from fedtailor.errors import DataError
from tests.helpers import federate, make_data, make_model, run

SPLITS = ("train", "val", "test")
NAMES = ("ada", "bo", "cy", "di")  # with 9, 1, 6 and 13 training samples of 4 numbers, 3 classes
Change = Callable[[FederatedData], dict[str, Any]]


def with_train(**parts: Callable[[Tensor], Tensor]) -> Change:
    """Other tensors for training."""

    def change(data: FederatedData) -> dict[str, Any]:
        made: dict[str, Any] = {name: make(getattr(data.train, name)) for name, make in parts.items()}
        return {"train": replace(data.train, **made)}

    return change


def with_value(part: str, row: int, value: float, split: str = "train") -> Change:
    """One value of one row changed."""

    def change(data: FederatedData) -> dict[str, Any]:
        rows = getattr(data, split)
        new = getattr(rows, part).clone()
        new[row] = value
        return {split: replace(rows, **{part: new})}

    return change


def with_starts(*starts: int) -> Change:
    return with_train(starts=lambda old: torch.tensor(starts))


def with_x(make: Callable[[Tensor], Tensor], *splits: str) -> Change:
    """Other samples in some splits."""
    return lambda data: {k: replace(getattr(data, k), x=make(getattr(data, k).x)) for k in splits or SPLITS}


FORM = "made, train: y of classification must be int64"
CLASSES: dict[str, tuple[Change, str]] = {
    "a name twice": (lambda data: {"clients": ("ada", "bo", "ada", "di")}, 'made: several clients are called "ada"'),
    "no client": (lambda data: {"clients": ()}, "made: has no clients"),
    "fractions as labels": (with_train(y=Tensor.double), FORM),
    "labels in columns": (with_train(y=lambda y: y[:, None]), FORM),
    "a label too many": (with_value("y", 10, 3), 'made: client "cy", train, row 1: the label 3 is none of the 3'),
    "a label below zero": (with_value("y", 9, -1), 'made: client "bo", train, row 1: the label -1 is none of the 3'),
    "a label of the test": (with_value("y", 9, 7, "test"), 'made: client "di", test, row 1: the label 7 is none'),
    "starts beyond the rows": (with_starts(0, 9, 10, 16, 40), "starts must go from 0 to the number of rows, 29"),
    "rows of nobody": (with_starts(0, 9, 10, 16, 28), "starts must go from 0 to the number of rows, 29"),
    "starts after the first": (with_starts(1, 9, 10, 16, 29), "starts must go from 0 .* goes from 1 to 29"),
    "starts that fall": (with_starts(0, 9, 7, 16, 29), 'made, train: starts must not decrease, .* after client "bo"'),
    "too few starts": (with_starts(0, 9, 10, 29), r"made, train: starts must be int64 \[5\], clients \+ 1"),
    "starts as fractions": (with_train(starts=Tensor.double), r"made, train: starts must be int64 \[5\]"),
    "fewer labels": (with_train(y=lambda y: y[:28]), "made, train: x has 29 rows and y has 28"),
    "bytes": (with_x(Tensor.byte), "made, train: x is torch.uint8; scale images to floating point"),
    "truth values": (with_x(Tensor.bool), "made, train: x is torch.bool; scale images to floating point"),
    "not a number": (with_value("x", 12, torch.nan), 'made: client "cy", train, row 3: x is NaN or Inf'),
    "without limit": (with_value("x", 2, -torch.inf, "val"), 'made: client "ada", val, row 3: x is NaN or Inf'),
    "other samples": (with_x(lambda x: x[:, :3], "test"), r"made, test: samples are .*\[3\], in training .*\[4\]"),
    "other width": (with_x(Tensor.float, "val"), r"made, val: samples are torch.float32 .*, in training .*float64"),
    "other names of classes": (lambda data: {"classes": ("a", "b")}, "made: 2 names of classes for 3 outputs"),
    "other names of features": (lambda data: {"features": ("a", "b")}, "made: 2 names of features for samples"),
    "a task of its own": (lambda data: {"task": "ranking"}, 'made: no task "ranking"'),
}
NUMBERS: dict[str, tuple[Change, str]] = {
    "one number a row": (with_train(y=lambda y: y[:, 0]), r"y of regression must be floating point \[rows, 3\]"),
    "other columns": (with_train(y=lambda y: y[:, :2]), r"y of regression must be floating point \[rows, 3\]"),
    "whole numbers": (with_train(y=Tensor.long), r"y of regression must be floating point \[rows, 3\]"),
    "a target that is no number": (with_value("y", 28, torch.nan), 'made: client "di", train, row 13: y is NaN or Inf'),
}


@pytest.mark.parametrize("case", CLASSES)
def test_wrong_classes(case: str) -> None:
    change, words = CLASSES[case]
    data = make_data()
    with pytest.raises(DataError, match=words):
        replace(data, **change(data))


@pytest.mark.parametrize("case", NUMBERS)
def test_wrong_numbers(case: str) -> None:
    change, words = NUMBERS[case]
    data = make_data("regression")
    with pytest.raises(DataError, match=words):
        replace(data, **change(data))


def test_numbers_beyond_a_narrower_type_are_said() -> None:
    data = make_data()
    large = replace(data, **with_value("x", 9, 1e39)(data))
    with pytest.raises(DataError, match=re.escape('made: client "bo", train, row 1: x is NaN or Inf as torch.float32')):
        large.to(torch.float32)


def test_samples_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data, looks, aminmax = make_data(), [], torch.aminmax

    def counted(v: Tensor) -> Any:
        looks.append(v)
        return aminmax(v)

    monkeypatch.setattr(torch, "aminmax", counted)
    data.only([0, 2])
    data.to(torch.float64)
    replace(data, notes=("one more",), val=data.val)
    assert looks == []
    replace(data, train=Rows(data.train.x, data.train.y, data.train.starts))
    assert len(looks) == 2


def test_a_server_knows_data_that_is_not_there() -> None:
    x, y, starts = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), torch.tensor([0, 100, 250])
    there, none = Rows(x, y, starts, is_here=False), Rows(x, y, 0 * starts, is_here=False)
    data = FederatedData("sites", "classification", ("a", "b"), there, none, none, 3).to(torch.float64)
    assert data.train.sizes.tolist() == [100, 150]
    assert data.train.x.dtype == torch.float64


def test_what_is_right_is_left_alone() -> None:
    data = make_data()
    assert data.clients == NAMES
    assert run(federate(FedAvg(), data, make_model("mlp", data)), 1)
    text = with_x(lambda x: x.long().abs())(data)
    assert replace(data, **text).train.x.dtype == torch.int64
