"""Reads a pickle as data: dicts, lists, tuples, text, bytes, numbers and NumPy arrays of numbers. Nothing in it is run.

A pickle names the functions of NumPy that build its arrays. Here each of these names stands for something small of
ours, any other name refuses the file, and so does any operation that plain data has no need of. The reader is Python's
slow one: the one in C takes as much memory as an operation names.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dino_ds.basics.text_file import read_bytes
from dino_ds.errors import DataError, one_line

_MAX_BYTES = 16 << 20
_OPERATIONS = """
    PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4
    FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE
    SHORT_BINUNICODE BINUNICODE8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT
    SETITEM SETITEMS GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL REDUCE BUILD
"""


def read_plain_pickle(path: Path) -> Any:
    """Content of the file; `numpy.asarray` takes its arrays. Strings of Python 2 become text.

    Raises DataError for a file that is not a pickle, holds anything else, or is larger than 16 MiB.
    """
    try:
        data = read_bytes(path, _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is refused: {getattr(error, 'strerror', None) or error}") from None
    try:
        file = io.BytesIO(data)
        content = _Reader(file).load()
        if file.read(1):
            raise pickle.UnpicklingError("something follows the pickle")
        return content
    except pickle.UnpicklingError as error:
        raise DataError(f"{path} is refused: it holds more than plain data ({one_line(error)})") from None
    except Exception as error:  # a damaged pickle makes its reader raise anything
        raise DataError(f"{path} is not a readable pickle: {type(error).__name__}: {one_line(error)}") from None


class _Array:
    """Stand-in for NumPy's `_reconstruct`; its contents come with BUILD."""

    def __init__(self) -> None:
        self._values = np.empty(0)

    def set(self, state: Any) -> None:
        _, shape, kind, fortran, data = state
        self._values = _values(data, kind, shape, "F" if fortran else "C")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._values, dtype=dtype)


class _Kind:
    """Stand-in for `numpy.dtype`: a kind of number; its byte order comes with BUILD."""

    def __init__(self, code: Any) -> None:
        if not isinstance(code, str) or not re.fullmatch("[biuf][1248]", code):
            raise pickle.UnpicklingError(f"arrays of {code!r:.20}")
        self._code, self._order = code, "="

    def set(self, state: Any) -> None:
        if state[1] not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("an array's byte order")
        self._order = state[1]

    def dtype(self) -> np.dtype:
        return np.dtype(self._order + self._code)


def _values(data: Any, kind: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(kind, _Kind) or not isinstance(data, bytes | bytearray) or order not in ("C", "F"):
        raise pickle.UnpicklingError("an array that is none")
    if len(data) != math.prod(shape) * kind.dtype().itemsize:
        raise pickle.UnpicklingError(f"an array of shape {shape!r:.40} in {len(data)} bytes")
    return np.frombuffer(data, kind.dtype()).reshape(shape, order=order)


class _Reader(pickle._Unpickler):
    stack: list[Any]

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="latin1")
        self._encoded: dict[str, bytes] = {}  # each text once, however often it is named
        self._known: dict[str, Callable[..., Any]] = {
            "numpy.ndarray": _nothing,
            "numpy.dtype": lambda code, *_: _Kind(code),
            "multiarray._reconstruct": lambda *_: _Array(),
            "multiarray.scalar": lambda kind, data: _values(data, kind, (1,), "C")[0].item(),
            "numeric._frombuffer": _values,
            "_codecs.encode": self._encode,
            "builtins.bytes": lambda: b"",
            "__builtin__.bytes": lambda: b"",
        }

    def find_class(self, module: str, name: str) -> Any:
        place = re.sub(r"^numpy\._?core\.", "", module)
        found = self._known.get(f"{place}.{name}")
        if found is None:
            raise pickle.UnpicklingError(f"it names {module!r:.40}.{name!r:.40}")
        return found

    def _encode(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"bytes in {encoding!r:.20}")
        return self._encoded.setdefault(text, text.encode("latin1"))

    def _build(self) -> None:
        """BUILD, of our stand-ins alone: Python's sets attributes of whatever it is given."""
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, _Array | _Kind):
            raise pickle.UnpicklingError(f"it changes a {type(target).__name__}")
        target.set(state)

    dispatch: ClassVar[dict[int, Any]] = {
        code: operation
        for code, operation in pickle._Unpickler.dispatch.items()
        if code in {getattr(pickle, name)[0] for name in _OPERATIONS.split()}
    }
    dispatch[pickle.BUILD[0]] = _build


def _nothing() -> None:
    """`numpy.ndarray` is only ever passed on."""
