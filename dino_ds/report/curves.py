"""Reads metrics.jsonl into columns of numbers, a million lines in seconds."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dino_ds.basics.text_file import read_lines

_PARTS = 400


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

    @property
    def is_long(self) -> bool:
        """Whether the curve has more points than a chart can show apart."""
        return len(self) > 4 * _PARTS

    def outline(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Split x into 400 equal parts; return mean x and lowest, mean and highest y of parts with finite values."""
        known = np.isfinite(self.y)
        x, y = self.x[known], self.y[known]
        edges = np.linspace(self.x[0], self.x[-1], _PARTS + 1)[1:-1]
        starts = np.unique(np.searchsorted(x, [self.x[0], *edges]))
        starts = starts[starts < len(x)]
        counts = np.diff([*starts, len(x)])
        means = np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts
        return means[0], np.minimum.reduceat(y, starts), means[1], np.maximum.reduceat(y, starts)


EMPTY = Curve(np.empty(0), np.empty(0))


@dataclass(frozen=True)
class Metrics:
    """Curves over the step by key of metrics.jsonl. lines, broken: numbers of lines that were read, and skipped.
    titles: of the loss terms by name, {} if the run's recipe is unknown. began_with_weights: the recipe says that the
    initial weights were not random. first_step: at which the run began, that of the run before for a stage that goes
    on."""

    curves: dict[str, Curve]
    lines: int
    broken: int
    titles: Mapping[str, str] = field(default_factory=dict)
    began_with_weights: bool = False
    first_step: int = 0

    @property
    def images(self) -> Curve:
        """Number of images that the run itself has trained on, whose global batch may have changed on a resume."""
        curve = self["images"]
        batch = np.round(curve.y / np.maximum(curve.x, 1))
        return Curve(curve.x, np.cumsum(np.diff(curve.x, prepend=self.first_step) * batch))

    def __getitem__(self, key: str) -> Curve:
        return self.curves.get(key, EMPTY)


def read_metrics(path: Path) -> Metrics:
    """Read the curves of a metrics.jsonl; of two lines with the same step the later counts.

    Raises OSError, or ConfigError for another kind of file.
    """
    points: dict[str, array[float]] = {}
    lines = broken = 0
    for line in read_lines(path):
        try:
            record = _numbers(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            broken += bool(line.strip())
            continue
        lines += 1
        step = record.pop("step")
        for key, value in record.items():
            points.setdefault(key, array("d")).extend((step, value))
    return Metrics({key: _curve_of(np.frombuffer(pairs)) for key, pairs in points.items()}, lines, broken)


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line, where NaN and infinity are text. Raises an error if step or values are missing."""
    try:
        values = dict(zip(record, map(float, record.values()), strict=True))
    except (TypeError, ValueError):
        values = {key: float(value) for key, value in record.items() if isinstance(value, (int, float))}
    if not 0 <= values["step"] < 2**53 or len(values) < 2:
        raise ValueError("no step, or no value")
    return values


def _curve_of(pairs: np.ndarray) -> Curve:
    """Alternating steps and values, in the order of the file -> a curve; of equal steps the last one counts.

    Values beyond 1e100, which no run has, become infinite, and those below 1e-100 zero, so that arithmetic is safe.
    """
    steps, values = pairs[0::2], pairs[1::2]
    size = np.abs(values)
    sane = np.where(size < 1e-100, 0.0, np.where(size > 1e100, np.copysign(np.inf, values), values))
    ascending, last = np.unique(steps[::-1], return_index=True)
    return Curve(ascending, sane[::-1][last])
