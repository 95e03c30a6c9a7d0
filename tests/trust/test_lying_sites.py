"""A site that answers nonsense: the server names it and goes on with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor.core import codec
from fedtailor.deploy.flare.server import _unknown_greeting
from fedtailor.engines.wire import Wire
from fedtailor.experiments import runner
from fedtailor.experiments.building import build_experiment
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


SCHEMA = {"task": "classification", "shape": [4], "whole_numbers": False, "outputs": 3, "classes": [], "features": []}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, ""),
        ({"samples": 10**12}, "number of samples"),
        ({"samples": 3.5}, "number of samples"),
        ({"samples": True}, "number of samples"),
        ({"schema": None}, "schema"),
        ({"schema": SCHEMA | {"shape": [10**9]}}, "shape or number of outputs"),
        ({"schema": SCHEMA | {"shape": "4"}}, "shape or number of outputs"),
        ({"schema": SCHEMA | {"shape": [2**20, 2**20]}}, "task"),
        ({"schema": SCHEMA | {"classes": [1]}}, "names of classes or features"),
        ({"schema": SCHEMA | {"task": "spying"}}, "task"),
    ],
)
def test_what_a_site_says_of_itself_is_checked(changes: dict[str, Any], what: str) -> None:
    assert _unknown_greeting({"samples": 10, "schema": SCHEMA} | changes) == what
