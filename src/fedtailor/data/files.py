"""Files of data: names, and readers of IDX, CIFAR-10 and .npz that check every size before they allocate memory."""

from __future__ import annotations

import gzip
import io
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import DataError

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")  # of tables
FORMULA = ("=", "+", "-", "@", "\t", "\r")
CIFAR_RECORDS = 10_000  # in each of its files
CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32
INFLATION = 1100  # deflate makes no more bytes out of one
# what zipfile and numpy raise on damaged files; an unknown compression is a RuntimeError
BROKEN_ARCHIVE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError)
BROKEN_HEADER = (struct.error, tokenize.TokenError, SyntaxError)
_IDX_TYPES = {0x08: "u1", 0x0C: ">i4"}


def expand_home(path: Path | str) -> Path:
    """The path with `~` or `~user` replaced by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(f'{path}: there is no user "{Path(path).parts[0][1:]}"; write out the folder') from None


def client_name(path: Path) -> str | None:
    """File name without its ending, or None if it is not a data file."""
    suffix = next((s for s in SUFFIXES if path.name.lower().endswith(s)), None)
    if suffix is None or path.name.startswith("."):
        return None
    return path.name[: -len(suffix)]


def escape_formula(value: str) -> str:
    """A text for a CSV file: a quote is put before what a spreadsheet would run as a formula."""
    if not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def read_bytes(path: Path) -> bytes:
    """Content of a file, unpacked if it is gzipped."""
    try:
        content = path.read_bytes()
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e.strerror})") from e
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise DataError(f"{path}: truncated or corrupt gzip file; remove it and fetch it again") from e


def read_idx(path: Path, dimensions: int) -> NDArray[Any]:
    """An IDX array (the format of MNIST) with the given number of dimensions."""
    content = read_bytes(path)
    header = 4 + 4 * dimensions
    known = len(content) >= header and content[:2] == b"\0\0" and content[2] in _IDX_TYPES and content[3] == dimensions
    if not known:
        raise DataError(
            f"{path}: wrong magic number {content[:4].hex() or '(empty file)'}: not an IDX file of {dimensions} "
            "dimensions; remove it and fetch it again"
        )
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4)]
    dtype = np.dtype(_IDX_TYPES[content[2]])
    expected, actual = math.prod(shape) * dtype.itemsize, len(content) - header
    if actual != expected:
        raise DataError(
            f"{path}: its header promises {shape[0]} records ({expected} bytes) but {actual} bytes follow; "
            "remove it and fetch it again"
        )
    try:
        return np.frombuffer(content, dtype, offset=header).reshape(shape)
    except ValueError:  # zero bytes, but dimensions beyond any array
        raise DataError(f"{path}: its header promises the shape {shape}; remove it and fetch it again") from None


def read_cifar(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images [records, 3, 32, 32] and labels of one CIFAR-10 binary file."""
    content = np.frombuffer(read_bytes(path), np.uint8)
    if len(content) != CIFAR_RECORDS * CIFAR_RECORD_BYTES:
        raise DataError(
            f"{path}: has {len(content)} bytes instead of {CIFAR_RECORDS * CIFAR_RECORD_BYTES} "
            f"({CIFAR_RECORDS} records); remove it and fetch it again"
        )
    records = content.reshape(CIFAR_RECORDS, CIFAR_RECORD_BYTES)
    return records[:, 1:].reshape(-1, 3, 32, 32), check_labels(path, records[:, 0])


def read_npz(path: Path, names: Sequence[str], *, equal: bool = True) -> dict[str, NDArray[Any]]:
    """Arrays of an .npz file, of equal length if `equal`; objects are refused."""
    try:
        content = read_bytes(path)
        _check_sizes(content)
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in names}
    except KeyError:
        raise DataError(f"{path}: must have the arrays {', '.join(names)}; put the right file there") from None
    except (*BROKEN_ARCHIVE, *BROKEN_HEADER, OSError, EOFError, ValueError, AttributeError, TypeError) as e:
        raise DataError(f"{path}: not an .npz file, or a damaged one ({e}); put the right file there") from e
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if equal and len(set(lengths.values())) > 1:
        counts = ", ".join(f"{count} of {name}" for name, count in lengths.items())
        raise DataError(f"{path}: its arrays differ in length: {counts}; put the right file there")
    return arrays


def _check_sizes(content: bytes) -> None:
    """Refuse headers that promise more than there is: numpy allocates what a header says before it reads on."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for entry in archive.infolist():
            if entry.file_size > INFLATION * max(entry.compress_size, 1):
                raise ValueError(f"{entry.filename} would be {entry.file_size} bytes out of {entry.compress_size}")
            with archive.open(entry) as file:
                version = np.lib.format.read_magic(file)
                head = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
                shape, _, dtype = head(file)
            if math.prod(shape) * dtype.itemsize > entry.file_size:
                raise ValueError(f"{entry.filename} promises {shape}, more than there is")


def check_labels(path: Path, labels: NDArray[Any], classes: int = 10) -> NDArray[Any]:
    """Return the labels if all are in 0..classes - 1."""
    if labels.size and (labels.min() < 0 or labels.max() >= classes):
        raise DataError(f"{path}: has labels outside 0..{classes - 1}; remove it and fetch it again")
    return labels
