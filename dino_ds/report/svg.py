"""Charts as inline SVG: drawn in their own numbers, which a transform puts on the page, so that page.js can read the
exact values back when somebody points at them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dino_ds.report.charts import Chart, Level, Line
from dino_ds.report.curves import Curve
from dino_ds.report.html import render

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 20, 22
_LABEL_HEIGHT = 13
_MOST_DOTS = 80
Range = tuple[float, float]


@dataclass(frozen=True)
class Frame:
    """Places of x and y on the page: pixels = scale * value + shift."""

    width: int
    height: int
    x: Range
    y: Range
    log: bool

    @property
    def right(self) -> int:
        return self.width - _RIGHT

    @property
    def bottom(self) -> int:
        return self.height - _BOTTOM

    @property
    def scales(self) -> Range:
        wide, high = self.right - _LEFT, self.bottom - _TOP
        return wide / (self.x[1] - self.x[0]), -high / (self.y[1] - self.y[0])

    @property
    def shifts(self) -> Range:
        sx, sy = self.scales
        return _LEFT - sx * self.x[0], self.bottom - sy * self.y[0]

    @property
    def matrix(self) -> str:
        (sx, sy), (tx, ty) = self.scales, self.shifts
        return f"{sx:.9g} 0 0 {sy:.9g} {tx:.9g} {ty:.9g}"

    def across(self, x: float) -> float:
        return self.scales[0] * x + self.shifts[0]

    def down(self, y: float) -> float:
        """The height of a value on the page, before the logarithm."""
        return self.scales[1] * (math.log10(y) if self.log else y) + self.shifts[1]


def draw_chart(chart: Chart) -> str:
    """A figure with axes, legend and newest values, or "" if no line has a finite value.

    y is logarithmic if all values are positive and the largest is 100 times the smallest. A curve with more points
    than can be told apart has a faint outline with its mean drawn over it.
    """
    lines = [line for line in chart.lines if len(line.curve.finite)]
    if not lines:
        return ""
    values = np.concatenate([line.curve.finite for line in lines])
    log = not chart.zero and values.min() > 0 and values.max() >= 100 * values.min()
    size = (340, 190) if chart.small else (520, 270)
    frame = Frame(*size, *_ranges(chart, lines, values, log), log)
    return render(
        "chart.html",
        chart=chart,
        frame=frame,
        left=_LEFT,
        top=_TOP,
        keys=[(line, float(line.curve.finite[-1])) for line in lines],
        lost=sum(len(line.curve) - len(line.curve.finite) for line in lines),
        x_ticks=_x_ticks(frame),
        y_ticks=_y_ticks(frame),
        levels=_levels(chart.levels, frame),
        paths=[path for line in lines for path in _paths(line, frame)],
    )


def _ranges(chart: Chart, lines: Sequence[Line], values: np.ndarray, log: bool) -> tuple[Range, Range]:
    xs = [x for line in lines for x in (line.curve.x[0], line.curve.x[-1])]
    ys = [float(values.min()), float(values.max()), *(level.value for level in chart.levels)]
    low, high = (math.log10(y) if log else y for y in (min(ys), max(ys)))
    pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    bottom = 0.0 if chart.zero else max(low - pad, 0.0) if low >= 0 and not log and low < pad else low - pad
    x = (float(min(xs)), float(max(xs)))
    return (x if x[0] < x[1] else (x[0] - 1, x[1] + 1)), (bottom, high + pad)


def _paths(line: Line, frame: Frame) -> Iterator[dict[str, Any]]:
    """Paths of one line. The one with the exact points has its name, which page.js looks for."""
    exact = list(_commands(line.curve.thinned(), frame.log))
    is_long = line.curve.is_long() and line.kind not in ("dots", "hidden")
    drawn = list(_commands(line.curve.means(), frame.log)) if is_long else exact
    if is_long:
        yield {"css": f"c{line.color} faint", "name": line.name, "d": "".join(exact)}
    if line.kind == "area" and len(drawn) > 1:
        yield {"css": f"c{line.color} fill", "d": _outline(drawn, line.base, frame)}
    named = {} if is_long else {"name": line.name}
    yield {"css": f"c{line.color} {line.kind}", **named, "d": "".join(drawn)}
    if (line.kind == "dots" and len(drawn) <= _MOST_DOTS) or len(drawn) == 1:
        yield {"css": f"c{line.color} dot", "d": "".join(f"M{command[1:]}h0" for command in drawn)}


def _outline(commands: Sequence[str], base: Curve | None, frame: Frame) -> str:
    """The outline of the area between a line and its base."""
    if base is not None and len(base.finite):
        under = list(_commands(base.means() if base.is_long() else base, frame.log))
    else:
        floor = f"{frame.y[0]:.6g}"
        under = [f"M{command[1:].split()[0]} {floor}" for command in (commands[0], commands[-1])]
    return ("".join(commands) + "".join(reversed(under))).replace("M", "L").replace("L", "M", 1) + "Z"


def _commands(curve: Curve, log: bool) -> Iterator[str]:
    """SVG path commands; a new subpath begins after a value that is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        heights = np.log10(curve.y) if log else curve.y
    begins = True
    for x, y in zip(curve.x.tolist(), heights.tolist(), strict=True):
        if math.isfinite(y):
            yield f"{'M' if begins else 'L'}{x:.10g} {y:.6g}"
        begins = not math.isfinite(y)


def _levels(levels: Sequence[Level], frame: Frame) -> list[tuple[Level, float, float]]:
    """Levels with the heights of their lines and names; names that would overlap move apart."""
    placed, free = [], math.inf
    for level in sorted(levels, key=lambda level: level.value):
        y = frame.down(level.value)
        free = min(y - 4, free - _LABEL_HEIGHT)
        placed.append((level, y, free))
    return placed


def _x_ticks(frame: Frame) -> list[tuple[float, str, str]]:
    """Place, text anchor and text of each tick."""
    ticks = list(_ticks(*frame.x, 4 if frame.width < 400 else 6))
    edge = frame.right - 12
    return [
        (x, "end" if x > edge else "middle", _tick_text(tick, ticks)) for tick in ticks for x in [frame.across(tick)]
    ]


def _y_ticks(frame: Frame) -> list[tuple[float, str]]:
    low, high = frame.y
    ticks = _log_ticks(10**low, 10**high) if frame.log else list(_ticks(low, high, 4 if frame.width < 400 else 5))
    return [(frame.down(tick), _tick_text(tick, ticks)) for tick in ticks]


def _ticks(low: float, high: float, most: int) -> Iterator[float]:
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= raw * 0.999)
    for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        yield i * step


def _log_ticks(low: float, high: float) -> list[float]:
    """Decades; also 2 and 5 if they are fewer than two, and every second or third one if they are more than five."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = math.ceil(len(decades) / 6)
    factors = (1, 2, 5) if len(decades) <= 3 else (1,)
    values = [f * 10.0**d for d in decades if d % every == 0 for f in factors]
    return [value for value in values if low <= value <= high]


def _tick_text(value: float, ticks: Sequence[float]) -> str:
    """The shortest text that tells it from the other ticks."""
    largest = max(map(abs, ticks))
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if largest >= size * (10 if letter == "k" else 1) and value:
            return f"{value / size:.4g}{letter}"
    if value and largest < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}".replace("-", "−")
    return f"{value:,.6g}".replace("-", "−") if value else "0"
