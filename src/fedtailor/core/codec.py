"""Messages as bytes: a JSON header and the tensors of a tree in safetensors. Nothing read from a wire is executed."""

from __future__ import annotations

import json
import math
import struct
from functools import lru_cache
from typing import Any

import safetensors.numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from

from fedtailor.core.trees import Ragged, Tree, is_ragged, items, tree_map

_LENGTH = struct.Struct("<I")
PLACES = 10_000_000  # of a ragged vector, where nobody knows the model: a short message must not become a large tensor
LONGEST_HEADER = 2**24  # bytes of JSON
BROKEN = (ValueError, LookupError, TypeError, RecursionError, struct.error, SafetensorError, AttributeError)


class BrokenMessage(ValueError):
    """Bytes that are no message."""


def encode(header: dict[str, Any], tree: Tree) -> bytes:
    """A message: length of the header, header, tensors."""
    head = _head(header, tree)
    tensors = {path: leaf.detach().contiguous().cpu().numpy() for path, leaf in items(_cut(tree))}
    return _LENGTH.pack(len(head)) + head + safetensors.numpy.save(tensors)


def decode(message: bytes, places: int = PLACES) -> tuple[dict[str, Any], Tree]:
    """Header and tree of a message, whose ragged vectors have at most so many places."""
    header, tree, end = _read_head(message)
    try:
        return header, build(tree, tensors_from(message[end:]), places=places)
    except BROKEN as error:
        raise BrokenMessage(f"cannot be read ({type(error).__name__})") from None


def decode_header(message: bytes) -> dict[str, Any]:
    return _read_head(message)[0]


def _read_head(message: bytes) -> tuple[dict[str, Any], Any, int]:
    """Header, structure of the tree, and where the tensors begin."""
    try:
        (length,) = _LENGTH.unpack_from(message)
        if length > LONGEST_HEADER:
            raise BrokenMessage(f"cannot be read (its header has {length} bytes)")
        head = json.loads(message[4 : 4 + length])
        header, tree = head["header"], head["tree"]
    except BrokenMessage:
        raise
    except BROKEN as error:
        raise BrokenMessage(f"cannot be read ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise BrokenMessage("cannot be read (its header is no table)")
    return header, tree, 4 + length


def size(header: dict[str, Any], tree: Tree, *, stacked: bool = False) -> int:
    """Length of `encode(header, tree)` without encoding; of one client's part when the tree is stacked."""
    return header_size(header) + tree_size(tree, stacked=stacked)


def total_size(header: dict[str, Any], stack: Tree, clients: int) -> int:
    """Length of the messages of all clients of a stack together."""
    if is_ragged(stack):
        return sum(size(header, tree_map(lambda v, i=i: v[i], stack)) for i in range(clients))
    return clients * size(header, stack, stacked=True)


def header_size(header: dict[str, Any]) -> int:
    """What the header adds to the length of a message."""
    return len(_json(header))


def tree_size(tree: Tree, *, stacked: bool = False) -> int:
    """Length of a message without its header."""
    cut = items(tree if stacked else _cut(tree))
    shapes = tuple((path, tuple(leaf.shape[1:] if stacked else leaf.shape), leaf.dtype) for path, leaf in cut)
    return 4 + len('{"header":,"tree":}') + len(_json(structure(tree))) + _tensor_bytes(shapes)


def structure(tree: Tree) -> Any:
    """The shape of a tree as JSON: leaves are "*", a ragged vector is "*" and the number of its places."""
    if isinstance(tree, Ragged):
        return f"*{len(tree[0])}"
    if isinstance(tree, dict):
        return {k: structure(v) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        return [structure(v) for v in tree]
    return None if tree is None else "*"


def _cut(tree: Tree) -> Tree:
    """The tree with ragged vectors as long as they say."""
    if isinstance(tree, Ragged):
        return tree[0][: int(tree[1])]
    if isinstance(tree, dict):
        return {k: _cut(v) for k, v in tree.items()}
    return tuple(_cut(v) for v in tree) if isinstance(tree, (tuple, list)) else tree


def _pad(vector: torch.Tensor, places: int, most: int) -> Ragged:
    """A ragged vector as it was before `_cut`."""
    if vector.dim() != 1 or not len(vector) <= places <= max(most, len(vector)):
        raise ValueError(f"a vector of shape {list(vector.shape)} does not fit {places} places, at most {most}")
    return Ragged(
        (torch.cat([vector, vector.new_zeros(places - len(vector))]), vector.new_tensor(len(vector), dtype=torch.int64))
    )


def _head(header: dict[str, Any], tree: Tree) -> bytes:
    return _json({"header": header, "tree": structure(tree)}).encode()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


# as safetensors names them, in the order in which it writes them
_TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@lru_cache(maxsize=256)
def _tensor_bytes(shapes: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]) -> int:
    """Length of these tensors in safetensors, from names, shapes and types: nothing is written, a model is large."""
    order, end, entries = list(_TYPES), 0, {}
    for path, shape, dtype in sorted(shapes, key=lambda one: (order.index(one[2]), one[0].encode())):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[path] = {"dtype": _TYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    header = len(json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + math.ceil(header / 8) * 8 + end


def build(shape: Any, tensors: dict[str, torch.Tensor], path: str = "", places: int = PLACES) -> Tree:
    """The tree of a `structure`, with tensors by path."""
    if isinstance(shape, dict):
        return {k: build(v, tensors, f"{path}/{k}" if path else k, places) for k, v in shape.items()}
    if isinstance(shape, list):
        return tuple(build(v, tensors, f"{path}/{i}" if path else str(i), places) for i, v in enumerate(shape))
    if isinstance(shape, str) and len(shape) > 1:
        return _pad(tensors[path], int(shape[1:]), places)
    return None if shape is None else tensors[path]
