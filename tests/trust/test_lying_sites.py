"""A site that answers nonsense: the server names it and goes on with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor.core import codec
from fedtailor.engines.wire import Wire
from fedtailor.experiments import runner
from fedtailor.experiments.building import build_experiment
from fedtailor.flare.protocol import data_schema, hello_fault
from tests.helpers import make_data
from tests.small import config

GOOD = codec.encode({}, {"w": torch.zeros(1)})
HUGE = GOOD.replace(b'{"w":"*"}', b'{"w":"*2000000000"}')
HUGE = codec._LENGTH.pack(len(HUGE) - len(GOOD) + codec._LENGTH.unpack_from(GOOD)[0]) + HUGE[4:]


class Lying(Wire):
    """The first site answers calls and evaluations as it likes."""

    lie: Callable[[bytes], bytes]

    def carry(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | OSError]]:
        each = list(requests)
        for (client, request), (_, reply) in zip(each, super().carry(each), strict=True):
            header = codec.decode_header(request)
            lies = client == 0 and ("function" in header or header["op"] == "evaluate")
            yield client, self.lie(reply) if lies and isinstance(reply, bytes) else reply


@pytest.mark.parametrize(
    "lie",
    [
        lambda reply: b"",
        lambda reply: reply[: len(reply) // 2],
        lambda reply: b"\xff" * 100,
        lambda reply: codec.encode({}, None),
        lambda reply: codec.encode({}, ({"val": torch.zeros(3)}, {})),
        lambda reply: HUGE,
    ],
    ids=["nothing", "half", "bytes", "no tree", "other tree", "a large vector"],
)
def test_a_reply_that_cannot_be_read_is_one_that_does_not_count(lie: Callable[[bytes], bytes], tmp_path: Path) -> None:
    made = config("rounds=2")
    engine = Lying(build_experiment(made))
    engine.lie = lie
    folder = runner.train_on(engine, "wire", made, tmp_path / "run", None)
    for line in folder.metrics():
        assert {fault["client"] for fault in line["faults"]} == {folder.about["clients"][0]}
    assert folder.results is not None


SCHEMA = {
    "task": "classification",
    "x": {"": [[4], "float32"]},
    "y": [[], "int64"],
    "outputs": 3,
    "classes": ["a", "b", "c"],
    "features": [],
}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, ""),
        ({"samples": 10**12}, "number of samples"),
        ({"samples": 3.5}, "number of samples"),
        ({"samples": True}, "number of samples"),
        ({"schema": None}, "schema"),
        ({"schema": SCHEMA | {"more": 1}}, "schema"),
        ({"schema": SCHEMA | {"x": {"": [[10**9], "float32"]}}}, "form of its samples"),
        ({"schema": SCHEMA | {"x": {"": [[2**20, 2**20], "float32"]}}}, "form of its samples"),
        ({"schema": SCHEMA | {"x": {"": [[4], "load"]}}}, "form of its samples"),
        ({"schema": SCHEMA | {"y": "int64"}}, "form of its samples"),
        ({"schema": SCHEMA | {"outputs": 0}}, "number of outputs"),
        ({"schema": SCHEMA | {"classes": [1]}}, "names of classes or features"),
    ],
)
def test_what_a_site_says_of_itself_is_checked(changes: dict[str, Any], what: str) -> None:
    assert hello_fault({"samples": 10, "schema": SCHEMA} | changes) == what


def test_what_sites_say_is_usable() -> None:
    for task in ("classification", "regression"):
        assert hello_fault({"samples": 3, "schema": data_schema(make_data(task))}) == ""
