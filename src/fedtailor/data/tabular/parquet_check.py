"""Check the sizes in a Parquet file before polars reads it.

Polars allocates as much memory as the headers promise, and an allocation that fails ends the process: a damaged byte
is enough. The footer and every page header are structs in Thrift's compact protocol.
"""

from __future__ import annotations

import struct
from typing import Any

MAGIC = b"PAR1"
FEWEST, PER_BYTE = 1_000_000, 10_000  # values that any file may hold, and for each of its bytes
PAGE, RATIO = 64 * 2**20, 1_000  # bytes that any page may unpack to, and times its own size
DEEPEST = 16  # structs in structs; the format has 6
# numbers of fields
ROWS, GROUPS = 3, 4  # of the file
COLUMNS, META = 1, 3  # of a group, of a column
VALUES, DATA_AT, DICTIONARY_AT = 5, 9, 11  # of a column's metadata
UNPACKED, PACKED, HEADERS = 2, 3, (5, 7, 8)  # of a page: its sizes; the header of its kind, which counts values


def check(content: bytes) -> None:
    """Raise a `ValueError` if a header promises more than can be in the file."""
    length = struct.unpack("<I", content[-8:-4])[0] if len(content) >= 12 else 0
    if content[:4] != MAGIC or content[-4:] != MAGIC or length + 12 > len(content):
        raise ValueError("no Parquet file")
    try:
        footer, _ = _struct(content, len(content) - 8 - length, 0)
        most = max(FEWEST, PER_BYTE * len(content))
        _within(footer[ROWS], most, "rows")
        for group in footer.get(GROUPS, []):
            for column in group[COLUMNS]:
                _column(content, column[META], most)
    except (LookupError, TypeError, AttributeError, struct.error, RecursionError):
        raise ValueError("its headers cannot be read") from None


def _column(content: bytes, meta: dict[int, Any], most: int) -> None:
    """Check the pages of a column until all its values are counted."""
    left = _within(meta[VALUES], most, "values")
    at = meta.get(DICTIONARY_AT) or meta[DATA_AT]
    while left > 0:
        _within(at, len(content) - 8, "bytes")
        page, at = _struct(content, at, 0)
        packed = _within(page[PACKED], len(content) - at, "bytes")
        _within(page[UNPACKED], max(PAGE, RATIO * packed), "bytes in a page")
        (kind,) = (field for field in HEADERS if field in page)
        values = _within(page[kind][1], most, "values in a page")
        left -= 0 if kind == HEADERS[1] else values  # values of a dictionary are not rows
        at += packed
    if left < 0:
        raise ValueError("pages have more values than their column")


def _within(number: int, most: int, unit: str) -> int:
    if not 0 <= number <= most:
        raise ValueError(f"promises {number} {unit}")
    return number


def _varint(content: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = content[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
        if shift > 63:
            raise IndexError


def _number(content: bytes, at: int) -> tuple[int, int]:
    coded, at = _varint(content, at)
    return (coded >> 1) ^ -(coded & 1), at


def _struct(content: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    if at < 0 or depth > DEEPEST:
        raise IndexError
    fields: dict[int, Any] = {}
    last = 0
    while (head := content[at]) != 0:
        step, kind = head >> 4, head & 15
        last, at = (last + step, at + 1) if step else _number(content, at + 1)
        fields[last], at = (kind == 1, at) if kind in (1, 2) else _value(content, at, kind, depth)
    return fields, at + 1


def _value(content: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    match kind:
        case 1 | 2 | 3:  # a truth in a list, a byte
            return content[at], at + 1
        case 4 | 5 | 6:
            return _number(content, at)
        case 7:
            return struct.unpack("<d", content[at : at + 8])[0], at + 8
        case 8:
            length, at = _varint(content, at)
            return content[at : at + length], _end(content, at, length)
        case 9 | 10:
            return _list(content, at, depth)
        case 12:
            return _struct(content, at, depth + 1)
    raise KeyError(kind)


def _list(content: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    count, kind = content[at] >> 4, content[at] & 15
    at += 1
    if count == 15:
        count, at = _varint(content, at)
    _end(content, at, count)  # every entry has a byte
    out = []
    for _ in range(count):
        entry, at = _value(content, at, kind, depth + 1)
        out.append(entry)
    return out, at


def _end(content: bytes, at: int, length: int) -> int:
    if at + length > len(content):
        raise IndexError
    return at + length
