"""What a program may have for a client: arrays, frames, Datasets. The same samples give the same data."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

import fedtailor as ft
from fedtailor import FederatedData
from fedtailor.core.data import take
from fedtailor.errors import UserError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 2)), np.arange(24) % 2
NAMES = np.array(["no", "yes"])[Y]
TABLE = {"a": X[:, 0], "b": X[:, 1], "label": Y}


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


def assert_same(found: FederatedData, wanted: FederatedData) -> None:
    for split in ("train", "val", "test"):
        a, b = getattr(found, split), getattr(wanted, split)
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert torch.equal(a.starts, b.starts)


NUMBERED, NAMED = (X[:9], Y[:9]), (X[:9], NAMES[:9])
READ_ONLY = X.copy()
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("client", "rest"),
    [
        ((torch.from_numpy(X), torch.from_numpy(Y)), NUMBERED),
        ((X.tolist(), Y.tolist()), NUMBERED),
        ((list(X), list(Y)), NUMBERED),
        ((READ_ONLY, Y > 0), NUMBERED),
        ((X, Y.astype(np.uint8)), NUMBERED),
        ((X, NAMES), NAMED),
        ((pd.DataFrame(X), pd.Series(Y)), NUMBERED),
        (pd.DataFrame(TABLE), NUMBERED),
        (pl.DataFrame(TABLE), NUMBERED),
        (pl.DataFrame(TABLE | {"label": NAMES}), NAMED),
        (torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), NUMBERED),
        (Items(list(zip(X, Y, strict=True))), NUMBERED),
        (Items(list(zip(X, NAMES, strict=True))), NAMED),
    ],
)
def test_one_client_in_many_forms(client: Any, rest: Any) -> None:
    wanted = ft.federated({"ada": (X, Y), "bo": (X[:9], Y[:9])})
    found = ft.federated({"ada": client, "bo": rest})
    assert_same(found, wanted)


def test_clients_of_a_list_have_numbers() -> None:
    assert ft.federated([(X, Y), (X, Y)]).clients == ("client-00", "client-01")
    assert ft.federated({7: (X, Y), 8: (X, Y)}).clients == ("7", "8")  # type: ignore[dict-item]


def test_columns_are_taken_by_name() -> None:
    frame = pd.DataFrame(TABLE)
    data = ft.federated({"ada": {"train": frame}, "bo": {"train": frame[["label", "b", "a"]]}})
    assert data.features == ("a", "b")
    assert torch.equal(data.train.of(0)[0], data.train.of(1)[0])


def test_names_of_classes_are_those_of_all_clients() -> None:
    data = ft.federated({"ada": (X, ["cat"] * 24), "bo": (X, ["ant", "bee"] * 12)})
    assert data.classes == ("ant", "bee", "cat")
    assert set(data.train.of(0)[1].tolist()) == {2}


@pytest.mark.parametrize("task", ["regression", "quantile"])
def test_numbers_to_predict_become_a_column(task: str) -> None:
    for y in (X[:, 0], Y):
        assert ft.federated({"ada": (X, y)}, task=task).train.y.shape[1:] == (1,)


def items(count: int = 12) -> list[dict[str, Any]]:
    return [{"input_ids": np.arange(1, 3 + i % 3), "label": i % 2} for i in range(count)]


def padded(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    rows = [np.pad(one["input_ids"], (0, 6 - len(one["input_ids"]))) for one in batch]
    return {"input_ids": torch.from_numpy(np.stack(rows)), "attention_mask": torch.from_numpy(np.stack(rows) > 0)}


def test_items_of_a_dataset_may_be_dicts_of_unequal_length() -> None:
    data = ft.federated({"ada": Items(items())})
    assert data.shape == {"attention_mask": (4,), "input_ids": (4,)}
    x = data.train.x
    assert torch.equal(x["attention_mask"].bool(), x["input_ids"] > 0)


@pytest.mark.parametrize("lazy", [False, True])
def test_an_own_collate_function_pads(lazy: bool) -> None:
    data = ft.federated({"ada": Items(items()), "bo": Items(items(9))}, collate=padded, lazy=lazy)
    assert data.shape == {"attention_mask": (6,), "input_ids": (6,)}
    x, y = data.train.of(1)
    assert len(x["input_ids"]) == len(y)
    assert torch.equal(x["attention_mask"], x["input_ids"] > 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ft.federated({"ada": X}), 'client "ada": give (x, y), a table, a Dataset'),
        (lambda: ft.federated({"ada": (X[:0], Y[:0])}), "no client has a training sample"),
        (
            lambda: ft.federated({"ada": pd.DataFrame(TABLE)}, target="lable"),
            'no column "lable"; did you mean "label"?',
        ),
        (lambda: ft.federated({"ada": pd.DataFrame(TABLE | {"b": NAMES})}), 'column "b" is not of numbers'),
        (lambda: ft.federated([pd.DataFrame(TABLE), pd.DataFrame({"a": Y, "label": Y})]), '"b" is not in all of them'),
        (lambda: ft.federated({"ada": (X, NAMES)}, classes=("yes", "maybe")), 'the label "no" is not in classes'),
        (lambda: ft.federated({"ada": (X, Y / 2)}), 'task="regression"'),
        (lambda: ft.federated({"ada": Items([1, 2, 3])}), "must be a pair (x, y), or a dict with the target"),
        (lambda: ft.federated([Items(items())], collate=default_collate), "collate="),
        (lambda: ft.federated([(X, Y), (X, NAMES)]), 'client "client-00" has numbers as labels and others have names'),
        (lambda: ft.federated({"ada": (np.array([{}] * 24), Y)}), "must be numbers"),
        (lambda: ft.run("fedavg", {"ada": pd.DataFrame(TABLE)}), '"ada" is a DataFrame; make data of clients by'),
    ],
)
def test_what_is_none_of_them_is_one_clear_line(make: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


class Slow(torch.utils.data.Dataset[Any]):
    """Items that have to be waited for; `most` were read at the same time."""

    def __init__(self) -> None:
        self.now, self.most, self.lock = 0, 0, threading.Lock()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Any, int]:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.01)
        with self.lock:
            self.now -= 1
        return np.full(3, i, dtype=np.float32), i % 2


def test_threads_read_the_items_of_a_batch() -> None:
    one, many = Slow(), Slow()
    first, second = (
        take(ft.federated({"ada": of}, lazy=True, threads=threads).train.x, torch.arange(6))
        for of, threads in ((one, 0), (many, 4))
    )
    assert torch.equal(first, second)
    assert one.most == 1
    assert 1 < many.most <= 4
