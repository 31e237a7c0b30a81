"""metrics.jsonl as columns of numbers, a million lines in seconds; curves thinned to what a screen can show."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dino_ds.basics.text_file import read_lines

_MOST_SHAPES = 100
"""Sets of keys: a run writes one for training, one for evaluations, and a few more."""
_BAR_BYTES = 50_000_000
BUCKETS = 400


@dataclass(frozen=True)
class Curve:
    """Values y (n,) at x (n,), FP64; x ascends strictly, y may hold NaN and infinities."""

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.x)

    @property
    def finite(self) -> np.ndarray:
        return self.y[np.isfinite(self.y)]

    @property
    def last(self) -> float:
        """The last value; NaN if there is none."""
        return float(self.y[-1]) if len(self) else float("nan")

    @property
    def constant(self) -> bool:
        return len(self) > 0 and bool(np.isfinite(self.y).all()) and bool((self.y == self.y[0]).all())

    def at(self, x: np.ndarray) -> np.ndarray:
        """The values at ascending steps; NaN where there is none."""
        y = np.full(len(x), np.nan)
        y[np.isin(x, self.x)] = self.y[np.isin(self.x, x)]
        return y

    def thinned(self, buckets: int = BUCKETS) -> Curve:
        """At most 4 points for each of `buckets` equal parts of x: the first, the last, the lowest and the highest.

        A picture of that many columns stays the same (M4: Jugel et al., VLDB 2014). A bucket with a
        value that is not finite keeps one of them, so that the gap is seen.
        """
        if not self.is_long(buckets):
            return self
        starts = self._starts(buckets)
        kept: set[int] = set()
        for start, end in zip(starts, [*starts[1:], len(self)], strict=True):
            part = self.y[start:end]
            finite = np.isfinite(part)
            kept |= {int(start), int(end) - 1}
            if finite.any():
                kept |= {int(start + np.where(finite, part, np.inf).argmin())}
                kept |= {int(start + np.where(finite, part, -np.inf).argmax())}
            if not finite.all():
                kept.add(int(start + finite.argmin()))
        chosen = sorted(kept)
        return Curve(self.x[chosen], self.y[chosen])

    def means(self, buckets: int = BUCKETS) -> Curve:
        """The mean of the finite values of each part, at the mean of their steps; NaN where there are none."""
        starts, finite = self._starts(buckets), np.isfinite(self.y)
        counts = np.add.reduceat(finite.astype(float), starts)
        with np.errstate(invalid="ignore"):
            y = np.add.reduceat(np.where(finite, self.y, 0.0), starts) / counts
        return Curve(np.add.reduceat(self.x, starts) / np.diff([*starts, len(self)]), y)

    def is_long(self, buckets: int = BUCKETS) -> bool:
        """Whether `thinned` leaves points out."""
        return len(self) > 4 * buckets

    def _starts(self, buckets: int) -> np.ndarray:
        """Indices at which the parts that hold points begin."""
        edges = np.linspace(self.x[0], self.x[-1], buckets + 1)[1:-1]
        return np.unique([0, *np.searchsorted(self.x, edges)])


EMPTY = Curve(np.empty(0), np.empty(0))


@dataclass(frozen=True)
class Metrics:
    """Curves over the step by the key of metrics.jsonl; `lines` that were read, `broken` ones that were skipped;
    `titles` of the loss terms by name, as far as the run's recipe is known; began_with_weights: the recipe says
    that they were not drawn."""

    curves: dict[str, Curve]
    lines: int
    broken: int
    titles: Mapping[str, str] = field(default_factory=dict)
    began_with_weights: bool = False

    def __getitem__(self, key: str) -> Curve:
        return self.curves.get(key, EMPTY)


def read_metrics(path: Path) -> Metrics:
    """The curves of a metrics.jsonl; of two lines of one step the later counts.

    Raises OSError, or ConfigError for another kind of file.
    """
    shapes: dict[tuple[str, ...], array[float]] = {}
    lines = broken = 0
    for line in _lines(path):
        try:
            record = _numbers(json.loads(line))
            shape = tuple(record)
            if shape not in shapes and len(shapes) >= _MOST_SHAPES:
                raise ValueError("too many sets of keys")
            shapes.setdefault(shape, array("d")).extend(record.values())
            lines += 1
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            broken += bool(line.strip())
    return Metrics(_curves(shapes), lines, broken)


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line; NaN and infinity are text there. Raises an error for anything else."""
    try:
        values = dict(zip(record, map(float, record.values()), strict=True))
    except (TypeError, ValueError):
        values = {key: float(value) for key, value in record.items() if isinstance(value, (int, float))}
    if not 0 <= values["step"] < 2**53 or len(values) < 2:
        raise ValueError("no step, or no value")
    return values


def _curves(shapes: dict[tuple[str, ...], array[float]]) -> dict[str, Curve]:
    parts: dict[str, list[np.ndarray]] = {}
    for shape, values in shapes.items():
        table = _sane(np.frombuffer(values).reshape(-1, len(shape)))
        steps = table[:, shape.index("step")]
        for column, key in enumerate(shape):
            if key != "step":
                parts.setdefault(key, []).append(np.stack([steps, table[:, column]]))
    return {key: _merged(np.concatenate(found, axis=1)) for key, found in parts.items()}


def _sane(values: np.ndarray) -> np.ndarray:
    """Values of 1e100 and beyond, which no run has, become infinite, so that arithmetic with the others is safe."""
    size = np.abs(values)
    return np.where(size < 1e-100, 0.0, np.where(size > 1e100, np.copysign(np.inf, values), values))


def _merged(points: np.ndarray) -> Curve:
    """(2, n) in the order of the file -> ascending steps, the later of two equal ones."""
    if (np.diff(points[0]) > 0).all():
        return Curve(*points)
    steps, last = np.unique(points[0, ::-1], return_index=True)
    return Curve(steps, points[1, ::-1][last])


def _lines(path: Path) -> Iterator[bytes]:
    size = os.path.getsize(path)
    hidden = None if size > _BAR_BYTES else True
    with tqdm(total=size, unit="B", unit_scale=True, desc=path.name, disable=hidden, leave=False) as bar:
        for line in read_lines(path):
            bar.update(len(line))
            yield line
