"""data.transform: a function of the user's that changes crops in training, before their colors are."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from dino_ds.basics.own_code import default_dtype, find_own, put_back
from dino_ds.errors import ConfigError, DataError, one_line


class FailedTransform(DataError):
    """The function raised an error, or returned what is not a crop."""


class OwnTransform:
    """`module:function`, found as `find_own` says; loader processes import it anew, so that it need not be picklable.

    Raises ConfigError where it is not there, or does not take a crop and a generator.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._function = find_own("data.transform", path, "function", _is_function)
        try:
            inspect.signature(self._function).bind(None, None)
        except (TypeError, ValueError):
            raise ConfigError(f"data.transform {path} must take two arguments: f(crop, rng)") from None

    def __call__(self, crop: np.ndarray, seed: int) -> np.ndarray:
        """The function's crop of `crop` (h, w, c), uint8 or float32 in [0, 1], which it may write to.

        All its random numbers come from `seed`. Raises FailedTransform for whatever it raises, but for MemoryError,
        where it changes torch's default dtype, and where its crop has another shape or type or, as float32, values
        beyond 0 and 1.
        """
        shape, dtype, before = crop.shape, crop.dtype, default_dtype()
        try:
            changed = self._function(crop, np.random.default_rng(seed))
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}, line {frame.lineno}"
            raise FailedTransform(f"{self} raised {type(error).__name__}: {one_line(error)} ({where})") from error
        if told := put_back(before):
            raise FailedTransform(f"{self} {told}")
        if not isinstance(changed, np.ndarray):
            raise FailedTransform(f"{self} returned {type(changed).__name__}, and must return an array")
        if (changed.shape, changed.dtype) != (shape, dtype):
            raise FailedTransform(
                f"{self} made {_words(changed.shape, changed.dtype)} of {_words(shape, dtype)}: both must stay"
            )
        if dtype == np.float32 and not (changed.min() >= 0 and changed.max() <= 1):  # a NaN is neither
            low, high = changed.min(), changed.max()
            raise FailedTransform(f"{self} returned values {low:g} to {high:g}: clip them to 0 and 1")
        return np.ascontiguousarray(changed)

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnTransform, (self.path,)

    def __str__(self) -> str:
        return f"data.transform {self.path}"


def _is_function(found: object) -> bool:
    return callable(found) and not inspect.isclass(found)


def _words(shape: tuple[int, ...], dtype: object) -> str:
    return f"{dtype} {' x '.join(map(str, shape))}"
