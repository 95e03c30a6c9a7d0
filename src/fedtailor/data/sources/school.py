"""School: exam scores of 15 362 pupils in 139 schools, from 25 yes-or-no columns and two numbers (Goldstein, 1991)."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.core.data import FederatedData
from fedtailor.data.configs import SchoolConfig
from fedtailor.data.download import data_root, locate
from fedtailor.data.files import read_bytes
from fedtailor.data.tabular.encode import SiteColumns, encode_sites
from fedtailor.data.tabular.preparation import TargetColumn
from fedtailor.errors import DataError

FILE = "school/school.mat"
SCORES = (1, 70)  # the lowest and the highest score: the target is between 0 and 1
HEADER, VERSION = 128, b"\x00\x01IM"  # of a little-endian file
MATRIX, COMPRESSED = 14, 15  # types of elements
CELLS, COMPLEX = 1, 1 << 11  # class and flag of a matrix
NUMBERS = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}


def load(config: SchoolConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    tables = read_schools(locate(data_root(root), FILE, config.source))
    columns = tuple(f"x{i:02d}" for i in range(tables[0][0].shape[1] - 1))  # the last is a constant
    low, high = SCORES
    width = len(str(len(tables) - 1))
    sites = [
        SiteColumns(
            name=f"school-{i:0{width}d}",
            file=FILE,
            numeric={name: x[:, j] for j, name in enumerate(columns)},
            categorical={},
            y=(y - low) / (high - low),
        )
        for i, (x, y) in enumerate(tables)
    ]
    notes = (f"{sum(len(site.y) for site in sites)} pupils in {len(sites)} schools; scores {low} to {high} as 0 to 1",)
    target = TargetColumn(name="score", task="regression")
    return encode_sites(config.source, sites, columns, target, config, config.standardise, seed=seed, notes=notes)


def read_schools(path: Path) -> list[tuple[Any, Any]]:
    """Features and scores of each school, from a MATLAB 5 file."""
    try:
        cells = read_cells(read_bytes(path))
        tables = [
            (x.astype(np.float64), y.astype(np.float64)[:, 0]) for x, y in zip(cells["X"], cells["Y"], strict=True)
        ]
    except (ValueError, LookupError) as error:
        raise DataError(f"{path}: must hold cells X and Y, one for each school ({error}); put it there again") from None
    widths = {x.shape[1:] for x, _ in tables}
    if not tables or len(widths) != 1 or len(*widths) != 1 or any(len(x) != len(y) for x, y in tables):
        raise DataError(f"{path}: schools must have the same columns, and a score for each pupil; put it there again")
    return tables


def read_cells(content: bytes) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Matrices in the cell arrays of a MATLAB 5 file, by variable; other variables are skipped.

    scipy reads these files too, but a damaged one ends the process there; here it is a `ValueError`. An element is a
    tag (type, length) and its bytes, padded to eight; a matrix is an element that consists of elements. See the
    MathWorks' "MAT-File Level 5 File Format".
    """
    if len(content) < HEADER or content[HEADER - 4 : HEADER] != VERSION:
        raise ValueError("no MATLAB 5 file")
    out = {}
    for kind, part in _elements(content[HEADER:]):
        for inner, body in _elements(_decompress(part)) if kind == COMPRESSED else [(kind, part)]:
            if inner == MATRIX:
                name, value = _matrix(body)
                if isinstance(value, list):
                    out[name] = value
    return out


def _decompress(part: bytes) -> bytes:
    try:
        return zlib.decompress(part)
    except zlib.error as error:
        raise ValueError(str(error)) from None


def _elements(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(content):
        if at + 8 > len(content):
            raise ValueError("an element is cut short")
        kind, length = struct.unpack_from("<II", content, at)
        start = at + 8
        if kind >> 16:  # four bytes at most lie in the tag
            kind, length, start = kind & 0xFFFF, kind >> 16, at + 4
        end = start + length
        if end > len(content) or (start == at + 4 and length > 4):
            raise ValueError("an element is longer than what it is in")
        yield kind, content[start:end]
        at = end if kind == COMPRESSED else at + 8 if start == at + 4 else end + -length % 8


def _matrix(content: bytes, *, may_be_cells: bool = True) -> tuple[str, Any]:
    """Name and content: a list of cells, an array, or None for other kinds of matrices."""
    parts = list(_elements(content))
    if len(parts) < 3 or len(parts[0][1]) != 8 or len(parts[1][1]) % 4 or not parts[1][1]:
        raise ValueError("a matrix without flags, sizes or name")
    (flags,) = struct.unpack_from("<I", parts[0][1])
    shape = np.frombuffer(parts[1][1], "<i4").tolist()
    name, rest = parts[2][1].decode("latin-1"), parts[3:]
    if min(shape) < 0:
        raise ValueError("a matrix of negative size")
    if flags & 0xFF == CELLS and may_be_cells:
        if len(rest) != math.prod(shape) or any(kind != MATRIX for kind, _ in rest):
            raise ValueError("as many matrices as cells are needed")
        return name, [_numbers(body) for _, body in rest]
    if flags & COMPLEX or len(rest) != 1 or rest[0][0] not in NUMBERS:
        return name, None
    kind, body = rest[0]
    if len(body) != np.dtype(NUMBERS[kind]).itemsize * math.prod(shape):
        raise ValueError("a matrix does not hold as many numbers as its sizes say")
    return name, np.frombuffer(body, NUMBERS[kind]).reshape(shape, order="F")


def _numbers(content: bytes) -> np.ndarray[Any, Any]:
    _, value = _matrix(content, may_be_cells=False)
    if not isinstance(value, np.ndarray):
        raise ValueError("a cell holds no matrix of numbers")
    return value
