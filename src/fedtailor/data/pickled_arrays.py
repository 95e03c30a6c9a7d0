"""Arrays inside the object arrays that numpy saves by pickling, read without running anything.

`numpy.savez(data={"x": x, "y": y})` pickles the dictionary. A pickle is a program for a small stack machine. The
standard library lists its steps without executing them; here they are followed by an interpreter that knows
containers, numbers, text and numpy arrays of numbers, and refuses everything else by name.
"""

from __future__ import annotations

import io
import pickletools
import re
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
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    *("BININT1", "BININT2", "BININT", "LONG1", "BINFLOAT", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Refused(Exception):
    pass


class _PickledType:
    """A numpy dtype of numbers, known completely once its state is set."""

    def __init__(self, code: Any) -> None:
        self.code, self.order = str(code), "="

    def set_state(self, state: Any) -> None:
        self.order = str(state[1]).replace("|", "=")

    def dtype(self) -> np.dtype[Any]:
        if not _NUMBERS.fullmatch(self.code) or self.order not in "<>=":
            raise _Refused(f'an array of type "{self.code}"')
        return np.dtype(self.order + self.code)


class _PickledArray:
    """A numpy array of numbers, or a list of objects that are read in the same way, once its state is set."""

    value: Any = None

    def set_state(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        if not isinstance(kind, _PickledType):
            raise _Refused("an array without a type")
        if kind.code.startswith("O") and isinstance(content, list):
            self.value = content[0] if shape == () and len(content) == 1 else content
        elif isinstance(content, bytes):
            self.value = np.frombuffer(content, kind.dtype()).reshape(shape, order="F" if is_fortran else "C").copy()
        else:
            raise _Refused("an array without content")


def _resolve(value: Any, done: dict[int, Any]) -> Any:
    """Replace unfinished arrays by their values. Shared objects are visited once, so a small file stays small."""
    if not isinstance(value, _PickledArray | dict | list):
        return value
    if id(value) not in done:
        done[id(value)] = None  # a container that contains itself
        if isinstance(value, _PickledArray):
            done[id(value)] = _resolve(value.value, done)
        elif isinstance(value, dict):
            done[id(value)] = {key: _resolve(item, done) for key, item in value.items()}
        else:
            done[id(value)] = [_resolve(item, done) for item in value]
    return done[id(value)]


def _interpret(content: bytes) -> Any:
    """The object that a pickle describes."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any

    def pop(count: int) -> list[Any]:
        items = stack[-count:]
        del stack[-count:]
        return items

    def pop_to_mark() -> list[Any]:
        items = stack[len(stack) - stack[::-1].index(_MARK) :]
        del stack[-len(items) - 1 :]
        return items

    for opcode, argument, _ in pickletools.genops(content):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                break
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case name if name in _LITERALS:
                stack.append(argument)
            case name if name in _EMPTY:
                stack.append(_EMPTY[name]())
            case "MARK":
                stack.append(_MARK)
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "TUPLE":
                stack.append(tuple(pop_to_mark()))
            case name if name in _TUPLES:
                stack.append(tuple(pop(_TUPLES[name])))
            case "APPEND" | "APPENDS":
                items = pop(1) if opcode.name == "APPEND" else pop_to_mark()
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = pop(2) if opcode.name == "SETITEM" else pop_to_mark()
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "GLOBAL" | "STACK_GLOBAL":
                module, name = argument.split(" ", 1) if opcode.name == "GLOBAL" else pop(2)
                if (module, name) not in (*_RECONSTRUCT, _ARRAY, _DTYPE):
                    raise _Refused(f"{module}.{name}")
                stack.append((module, name))
            case "REDUCE":
                function, arguments = pop(2)
                stack.append(_construct(function, arguments))
            case "BUILD":
                state = stack.pop()
                stack[-1].set_state(state)
            case name:
                raise _Refused(f"the step {name}")
    return _resolve(stack.pop(), {})


def _construct(function: Any, arguments: Any) -> _PickledArray | _PickledType:
    if function in _RECONSTRUCT and arguments[0] == _ARRAY:
        return _PickledArray()
    if function == _DTYPE:
        return _PickledType(arguments[0])
    raise _Refused(f"a call of {function}")


def read_dict(path: Path, name: str = "data") -> dict[str, Any]:
    """The dictionary of arrays that an .npz file holds under a name."""
    try:
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:  # from memory: a false size allocates nothing
            member = io.BytesIO(archive.read(f"{name}.npy"))
        version = np.lib.format.read_magic(member)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = read_header(member)
        if shape != () or kind != np.dtype(object):
            raise _Refused(f"an array of {kind} and shape {list(shape)} where a dictionary is expected")
        value = _interpret(member.read())
    except (OSError, EOFError, KeyError, *BROKEN_ARCHIVE) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    except _Refused as refused:
        raise DataError(f"{path}: holds {refused}, which is not read; only arrays of numbers are") from None
    except (ValueError, IndexError, TypeError, AttributeError, *BROKEN_HEADER) as error:
        raise DataError(f"{path}: not what numpy writes ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds no dictionary")
    return value
