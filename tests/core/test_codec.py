"""Messages survive the wire bit for bit; what is broken is refused, and nothing in a message is ever run."""

import json
import pickle
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from fedtailor.core import codec
from fedtailor.core.trees import Tree, items, tree_map

REFUSED = (SafetensorError, struct.error, ValueError, KeyError, TypeError)  # json's errors are ValueErrors
DTYPES = [torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
names = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=5)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = 1
    for n in shape:
        count *= n
    numbers = draw(st.lists(st.integers(0, 250), min_size=count, max_size=count))
    made = torch.tensor(numbers, dtype=torch.float64).reshape(shape).to(dtype)
    return made.T if made.dim() == 2 and draw(st.booleans()) else made  # also such as are not contiguous


trees = st.recursive(
    st.none() | tensors(),
    lambda inner: st.dictionaries(names, inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
headers = st.dictionaries(names, st.integers() | st.text(max_size=5) | st.booleans() | st.lists(st.booleans()))


def equal(a: Tree, b: Tree) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(equal, a, b))
    return a is None and b is None


@given(headers, trees)
def test_round_trip(header: dict[str, Any], tree: Tree) -> None:
    message = codec.encode(header, tree)
    found_header, found = codec.decode(message)
    assert found_header == header
    assert equal(found, tree)
    assert codec.size(header, tree) == len(message)


@given(headers, trees, st.integers(1, 4))
def test_size_of_a_part_of_a_stack(header: dict[str, Any], tree: Tree, clients: int) -> None:
    stack = tree_map(lambda v: v.expand(clients, *v.shape), tree)
    assert codec.size(header, stack, stacked=True) == len(codec.encode(header, tree))


def test_numbers_that_are_none() -> None:
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], dtype=torch.float64)
    _, found = codec.decode(codec.encode({}, values))
    assert found.numpy().tobytes() == values.numpy().tobytes()


MESSAGE = codec.encode({"round": 1, "call": 0}, ({"a": torch.arange(6.0).reshape(2, 3)}, torch.tensor(3)))


@pytest.mark.parametrize("length", range(len(MESSAGE)))
def test_truncated(length: int) -> None:
    with pytest.raises(REFUSED):
        codec.decode(MESSAGE[:length])


def test_longer_than_it_says() -> None:
    with pytest.raises(REFUSED):
        codec.decode(MESSAGE + b"\0")


@given(st.integers(0, len(MESSAGE) - 1), st.integers(1, 255))
def test_corrupted(at: int, change: int) -> None:
    broken = bytearray(MESSAGE)
    broken[at] ^= change
    try:
        header, tree = codec.decode(bytes(broken))
    except REFUSED:
        return
    # a flipped bit can leave a well-formed message: then only plain data has come out of it
    json.dumps(header)
    assert all(isinstance(leaf, torch.Tensor) for _, leaf in items(tree))


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"\xff" * 64, b"\4\0\0\0null"])
def test_not_a_message(content: bytes) -> None:
    with pytest.raises(REFUSED):
        codec.decode(content)


def test_a_tree_that_names_tensors_which_are_not_there() -> None:
    head = json.dumps({"header": {}, "tree": {"a": "*", "b": "*"}}).encode()
    with pytest.raises(REFUSED):
        codec.decode(struct.pack("<I", len(head)) + head + MESSAGE[4 + struct.unpack_from("<I", MESSAGE)[0] :])


class Bomb:
    """Unpickling it would be seen."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _explode, ()


exploded: list[bool] = []


def _explode() -> None:
    exploded.append(True)


def test_a_pickle_is_not_run() -> None:
    content = pickle.dumps(Bomb())
    head = json.dumps({"header": {}, "tree": "*"}).encode()
    for message in (content, struct.pack("<I", len(content)) + content, struct.pack("<I", len(head)) + head + content):
        with pytest.raises(REFUSED):
            codec.decode(message)
    assert exploded == []
