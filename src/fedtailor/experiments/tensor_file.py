"""The bytes of a safetensors file, one slice after the other: the library makes all of them at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

DTYPES = {  # as safetensors names them
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
SLICE = 2**24  # numbers that are written at once
Touch = Callable[[int], None]  # told how many bytes were read


def pieces(tensors: dict[str, Tensor], touch: Touch) -> Iterator[bytes | memoryview]:
    """Header and numbers of tensors by name."""
    header, end = {}, 0
    for name, value in tensors.items():
        start, end = end, end + value.nbytes
        header[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the format has it, so that the numbers are aligned
    yield len(text).to_bytes(8, "little") + text
    for value in tensors.values():
        flat = value.detach().reshape(-1)
        for i in range(0, len(flat), SLICE):
            yield flat[i : i + SLICE].contiguous().cpu().numpy().data
            touch(flat[i : i + SLICE].nbytes)
