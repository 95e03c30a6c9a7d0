"""Ragged vectors: only their first entries cross, bytes are counted exactly, and shapes stay as declared."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.algorithm import NUMBER, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Ragged, Tree, is_ragged, items, schema, tree_map
from fedtailor.engines.wire import Wire
from tests.helpers import EVERYWHERE, F64, federate, make_data, make_model

PLACES = 20


def ragged(places: int, length: int, dtype: torch.dtype = F64) -> Ragged:
    values = torch.arange(1, places + 1).to(dtype)
    return Ragged((values * (torch.arange(places) < length), torch.tensor(length)))


vectors = st.tuples(st.integers(0, 30), st.integers(0, 30), st.sampled_from([F64, torch.float32, torch.uint8])).map(
    lambda c: ragged(max(c[:2]), min(c[:2]), c[2])
)


@given(vectors, vectors)
def test_round_trip(first: Ragged, second: Ragged) -> None:
    tree = ({"a": first, "b": torch.ones(2)}, (second, None))
    message = codec.encode({"round": 1}, tree)
    assert codec.size({"round": 1}, tree) == len(message)
    _, found = codec.decode(message)
    assert schema(found) == schema(tree)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(items(found), items(tree), strict=True))
    assert isinstance(found[0]["a"], Ragged)
    assert isinstance(found[1][0], Ragged)


def test_only_the_front_crosses() -> None:
    long, short = (codec.encode({}, ragged(1000, n)) for n in (1000, 10))
    assert len(long) - len(short) == pytest.approx(8 * 990, abs=16)  # safetensors pads its header to eight bytes
    secret = Ragged((torch.full((9,), 7.0), torch.tensor(0)))
    assert torch.tensor(7.0).numpy().tobytes() not in codec.encode({}, secret)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_the_messages_of_a_stack(lengths: list[int]) -> None:
    each = [{"a": ragged(12, n), "b": torch.ones(3)} for n in lengths]
    stack = tree_map(lambda *rows: torch.stack(rows), *each)
    assert isinstance(stack["a"], Ragged)
    assert codec.total_size({"call": 0}, stack, len(each)) == sum(len(codec.encode({"call": 0}, one)) for one in each)


def test_which_trees_are_ragged() -> None:
    assert is_ragged(({"a": [None, ragged(3, 1)]},))
    assert not is_ragged(({"a": [None, torch.ones(3)]}, (torch.ones(2), torch.tensor(1))))
    assert not is_ragged(None)


@pytest.mark.parametrize("shape", ["*2", "*-1", "*x", "*99999999999999", "*1.5"])
def test_a_vector_that_does_not_fit_is_refused(shape: str) -> None:
    with pytest.raises(ValueError):
        codec.build(shape, {"": torch.ones(3)})
    with pytest.raises(ValueError, match="does not fit"):
        codec.build("*9", {"": torch.ones(3, 3)})


@dataclass(frozen=True)
class Uneven(Algorithm):
    """Clients get as many numbers as they have samples, and return as many as they have left."""

    taped: bool = False

    @on_client(sends=(ReplySpec("numbers", lambda algorithm, model: ragged(PLACES, 0)), NUMBER))
    def some(self, me: ClientContext, x: Ragged, scale: Tensor) -> tuple[Tree, Tree]:
        keep = torch.arange(PLACES) < x[1] // 2
        return me.state, (Ragged((x[0] * scale * keep, x[1] // 2)), me.n)

    def round(self, fed: Federation, server: Tree) -> Tree:
        scale = fed.tape(server) if self.taped else server
        n = torch.tensor([int(fed.engine.experiment.data.train.sizes[c]) for c in fed.cohort])
        rows = torch.arange(1.0, PLACES + 1, dtype=F64) * (torch.arange(PLACES) < n[:, None])
        numbers, _ = fed.map(self.some, fed.scatter(Ragged((rows, n))), scale)
        return fed.gather(numbers, "numbers")


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_on_every_engine(engine: str) -> None:
    data = make_data()
    fed = federate(Uneven(), data, make_model("linear", data), engine)
    values, length = fed.run_round(0, (3, 0, 2), torch.tensor(2.0, dtype=F64))
    assert length.tolist() == [6, 4, 3]  # halves of 13, 9, 6
    for row, n in zip(values, length, strict=True):
        assert row.tolist() == [2.0 * (i + 1) if i < n else 0 for i in range(PLACES)]
    reference = federate(Uneven(), data, make_model("linear", data), "wire")
    reference.run_round(0, (3, 0, 2), torch.tensor(2.0, dtype=F64))
    assert isinstance(reference.engine, Wire)
    assert (fed.traffic.up, fed.traffic.down) == (reference.engine.up, reference.engine.down)


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_a_tape_refuses_them(engine: str) -> None:
    data = make_data()
    fed = federate(Uneven(taped=True), data, make_model("linear", data), engine)
    with pytest.raises(TypeError, match=r"some .*ragged"):
        fed.run_round(0, range(4), torch.tensor(2.0, dtype=F64))


def test_a_reply_that_is_too_long_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_data()
    fed = federate(Uneven(), data, make_model("linear", data), "wire")
    encode: Any = codec.encode

    def longer(header: dict[str, Any], tree: Tree) -> bytes:
        if isinstance(tree, tuple) and isinstance(tree[0], Ragged) and float(tree[1]) == 6:  # cy's reply
            tree = (ragged(PLACES + 1, PLACES + 1), tree[1])
        return bytes(encode(header, tree))

    monkeypatch.setattr(codec, "encode", longer)
    fed.run_round(0, range(4), torch.tensor(2.0, dtype=F64))
    assert [(f.client, f.reason) for f in fed.record.faults] == [("cy", 'reply "0/0" has shape [21], not [20]')]
