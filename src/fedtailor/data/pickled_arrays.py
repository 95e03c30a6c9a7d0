"""Arrays inside the object arrays that numpy saves by pickling, read without running anything.

`numpy.savez(data={"x": x, "y": y})` pickles the dictionary. Pickle is a small program; here its steps are followed by
an interpreter that knows containers, numbers, text and numpy arrays of numbers, and refuses everything else by name.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.data.files import BROKEN_ARCHIVE, BROKEN_HEADER
from fedtailor.errors import DataError

_ARRAY, _DTYPE = ("numpy", "ndarray"), ("numpy", "dtype")
_RECONSTRUCT = (("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"))
_NUMBERS = re.compile(r"[biuf][1248]")
_MARK = object()
_SIZES = {"C": "<B", "B": "<I", "\x8e": "<Q", "\x8c": "<B", "X": "<I", "\x8d": "<Q", "\x8a": "<B"}
_FIXED = {"K": "<B", "M": "<H", "J": "<i", "G": ">d"}
_CONSTANTS = {"N": None, "\x88": True, "\x89": False}


class _Refused(Exception):
    pass


class _Type:
    """A numpy dtype of numbers, in the making."""

    def __init__(self, code: Any) -> None:
        self.code, self.order = str(code), "="

    def build(self, state: Any) -> None:
        self.order = str(state[1]).replace("|", "=")

    def dtype(self) -> np.dtype[Any]:
        if not _NUMBERS.fullmatch(self.code) or self.order not in "<>=":
            raise _Refused(f'an array of type "{self.code}"')
        return np.dtype(self.order + self.code)


class _Array:
    """A numpy array in the making: of numbers, or a list of things that are read as well."""

    value: Any = None

    def build(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        if not isinstance(kind, _Type):
            raise _Refused("an array without a type")
        if kind.code.startswith("O") and isinstance(content, list):
            self.value = content[0] if shape == () and len(content) == 1 else content
        elif isinstance(content, bytes):
            self.value = np.frombuffer(content, kind.dtype()).reshape(shape, order="F" if is_fortran else "C").copy()
        else:
            raise _Refused("an array without content")


def _content(value: Any, done: dict[int, Any]) -> Any:
    """What arrays in the making have become; what is shared is looked at once, so that a file cannot grow in memory."""
    if not isinstance(value, _Array | dict | list):
        return value
    if id(value) not in done:
        done[id(value)] = None  # what holds itself holds nothing
        if isinstance(value, _Array):
            done[id(value)] = _content(value.value, done)
        elif isinstance(value, dict):
            done[id(value)] = {key: _content(item, done) for key, item in value.items()}
        else:
            done[id(value)] = [_content(item, done) for item in value]
    return done[id(value)]


class _Reader:
    """A stack, a memo, and the steps of a pickle that put things together."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise _Refused("an end before its end")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def since_mark(self) -> list[Any]:
        place = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def read(self) -> Any:
        while (step := self.take(1).decode("latin1")) != ".":
            self.step(step)
        return _content(self.stack.pop(), {})

    def step(self, step: str) -> None:
        push = self.stack.append
        if step in "\x80\x95":  # protocol, frame
            self.take(1 if step == "\x80" else 8)
        elif step in _CONSTANTS:
            push(_CONSTANTS[step])
        elif step in _FIXED:
            push(self.number(_FIXED[step]))
        elif step in _SIZES:
            content = self.take(self.number(_SIZES[step]))
            is_text, is_number = step in "\x8cX\x8d", step == "\x8a"
            push(
                content.decode()
                if is_text
                else int.from_bytes(content, "little", signed=True)
                if is_number
                else content
            )
        elif step in "(])}":
            push(_MARK if step == "(" else [] if step == "]" else () if step == ")" else {})
        elif step in "\x94qr":
            self.memo[len(self.memo) if step == "\x94" else self.number("<B" if step == "q" else "<I")] = self.stack[-1]
        elif step in "hj":
            push(self.memo[self.number("<B" if step == "h" else "<I")])
        elif step in "t\x85\x86\x87":
            push(tuple(self.since_mark() if step == "t" else self.last(ord(step) - 0x84)))
        elif step in "ae":
            items = self.last(1) if step == "a" else self.since_mark()
            self.stack[-1].extend(items)
        elif step in "su":
            items = self.last(2) if step == "s" else self.since_mark()
            self.stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif step in "c\x93":
            push(self.named(*((self.line(), self.line()) if step == "c" else self.last(2))))
        elif step == "R":
            push(self.called(*self.last(2)))
        elif step == "b":
            state = self.stack.pop()
            self.stack[-1].build(state)
        else:
            raise _Refused(f"the step {step!r}")

    def last(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def named(self, module: str, name: str) -> tuple[str, str]:
        if (module, name) not in (*_RECONSTRUCT, _ARRAY, _DTYPE):
            raise _Refused(f"{module}.{name}")
        return module, name

    def called(self, function: Any, arguments: Any) -> _Array | _Type:
        if function in _RECONSTRUCT and arguments[0] == _ARRAY:
            return _Array()
        if function == _DTYPE:
            return _Type(arguments[0])
        raise _Refused(f"a call of {function}")


def read_dict(path: Path, name: str = "data") -> dict[str, Any]:
    """The dictionary that an .npz file holds under a name; of arrays of numbers, and nothing that had to be run."""
    try:
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:  # of a file as much is asked for as it promises
            member = io.BytesIO(archive.read(f"{name}.npy"))
        version = np.lib.format.read_magic(member)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = read_header(member)
        if shape != () or kind != np.dtype(object):
            raise _Refused(f"an array of {kind} and shape {list(shape)} where a dictionary is expected")
        value = _Reader(member.read()).read()
    except (OSError, EOFError, KeyError, *BROKEN_ARCHIVE) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    except _Refused as refused:
        raise DataError(f"{path}: holds {refused}, which is not read; only arrays of numbers are") from None
    except (ValueError, IndexError, TypeError, AttributeError, *BROKEN_HEADER) as error:
        raise DataError(f"{path}: not what numpy writes ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds no dictionary")
    return value
