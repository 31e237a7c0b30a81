"""Curves as inline SVG: drawn in their own numbers, which a transform puts on the page, so that page.js can read the
exact values back when somebody points at them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from dino_ds.pictures.series import Curve
from dino_ds.report.html import join
from dino_ds.report.text import number

COLOURS = 8
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 20, 22
_LABEL_HEIGHT = 13
_MOST_DOTS = 80


@dataclass(frozen=True)
class Line:
    """kind: line, area (filled down to `base`, or to the axis), dots (a line with a dot a point, up to 80) or hidden
    (only its values are shown when one points at it), faint; colour: 1 to 8."""

    name: str
    curve: Curve
    colour: int
    kind: str = "line"
    base: Curve | None = None


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with."""

    name: str
    value: float


@dataclass(frozen=True)
class _Frame:
    """Where x and y lie on the page: pixels = scale * value + shift."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    log: bool

    @property
    def scales(self) -> tuple[float, float]:
        wide, high = self.width - _LEFT - _RIGHT, self.height - _TOP - _BOTTOM
        return wide / (self.x[1] - self.x[0]), -high / (self.y[1] - self.y[0])

    @property
    def shifts(self) -> tuple[float, float]:
        sx, sy = self.scales
        return _LEFT - sx * self.x[0], self.height - _BOTTOM - sy * self.y[0]

    def across(self, x: float) -> float:
        return self.scales[0] * x + self.shifts[0]

    def down(self, y: float) -> float:
        return self.scales[1] * y + self.shifts[1]


def draw_chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    levels: Sequence[Level] = (),
    x_unit: str = "steps",
    zero: bool = False,
    small: bool = False,
    legend: bool = True,
) -> Markup:
    """A figure with axes, legend and newest values. zero: y begins at 0. Empty where no line has a finite value.

    y is logarithmic where all values are positive and the largest is 100 times the smallest. Of a curve with more
    points than can be told apart all that it touches is faint, and its mean is drawn over that.
    """
    lines = [line for line in lines if len(line.curve.finite)]
    if not lines:
        return Markup()
    values = np.concatenate([line.curve.finite for line in lines])
    log = not zero and values.min() > 0 and values.max() >= 100 * values.min()
    frame = _Frame(*((340, 190) if small else (520, 270)), *_ranges(lines, levels, values, zero, log), log)
    lost = sum(len(line.curve) - len(line.curve.finite) for line in lines)
    gaps = Markup('<span class="lost">{} values not finite</span>').format(number(lost)) if lost else ""
    x_axis, y_axis = _x_axis(frame, x_unit), _y_axis(frame, unit)
    (sx, sy), (tx, ty) = frame.scales, frame.shifts
    matrix = f"{sx:.9g} 0 0 {sy:.9g} {tx:.9g} {ty:.9g}"
    return Markup(
        '<figure class="{kind}"><figcaption><b>{title}</b>{legend}{gaps}</figcaption>'
        '<svg viewBox="0 0 {width} {height}" role="img" aria-label="{title}" data-matrix="{matrix}" data-log="{log:d}" '
        'data-x="{x_unit}">{axes}<g transform="matrix({matrix})">{paths}</g>{levels}'
        '<line class="cursor" y1="{top}" y2="{bottom}"/></svg></figure>\n'
    ).format(
        kind="small" if small else "large",
        title=title,
        legend="" if not legend else _newest(lines[0]) if lines[0].name == title else join(map(_key, lines)),
        gaps=gaps,
        width=frame.width,
        height=frame.height,
        matrix=matrix,
        log=log,
        x_unit=x_unit,
        axes=x_axis + y_axis,
        paths=join(_path(line, frame) for line in lines),
        levels=_levels(levels, frame),
        top=_TOP,
        bottom=frame.height - _BOTTOM,
    )


def _ranges(
    lines: Sequence[Line], levels: Sequence[Level], values: np.ndarray, zero: bool, log: bool
) -> tuple[tuple[float, float], tuple[float, float]]:
    xs = [x for line in lines for x in (line.curve.x[0], line.curve.x[-1])]
    ys = [float(values.min()), float(values.max()), *(level.value for level in levels)]
    low, high = (math.log10(y) if log else y for y in (min(ys), max(ys)))
    pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    bottom = 0.0 if zero else max(low - pad, 0.0) if low >= 0 and not log and low < pad else low - pad
    x = (float(min(xs)), float(max(xs)))
    return (x if x[0] < x[1] else (x[0] - 1, x[1] + 1)), (bottom, high + pad)


def _key(line: Line) -> Markup:
    kind = "key band" if line.kind == "area" else "key"
    return Markup('<span class="{} c{}">{} {}</span>').format(kind, line.colour, line.name, _newest(line))


def _newest(line: Line) -> Markup:
    return Markup("<i>{}</i>").format(number(float(line.curve.finite[-1])))


def _path(line: Line, frame: _Frame) -> Markup:
    """The exact points have a name, which page.js looks for."""
    exact = list(_words(line.curve.thinned(), frame.log))
    is_long = line.curve.is_long() and line.kind not in ("dots", "hidden")
    words = list(_words(line.curve.means(), frame.log)) if is_long else exact
    path = Markup('<path class="c{} {}"{} d="{}"/>')
    name = Markup(' data-name="{}"').format(line.name)
    parts = [path.format(line.colour, "faint", name, "".join(exact))] if is_long else []
    if line.kind == "area" and len(words) > 1:
        parts.append(path.format(line.colour, "fill", "", _closed(words, line.base, frame)))
    parts.append(path.format(line.colour, line.kind, "" if is_long else name, "".join(words)))
    if (line.kind == "dots" and len(words) <= _MOST_DOTS) or len(words) == 1:
        parts.append(path.format(line.colour, "dot", "", "".join(f"M{word[1:]}h0" for word in words)))
    return join(parts)


def _closed(words: Sequence[str], base: Curve | None, frame: _Frame) -> str:
    """The outline of the area between a line and what it stands on."""
    if base is not None and len(base.finite):
        under = list(_words(base.means() if base.is_long() else base, frame.log))
    else:
        floor = f"{frame.y[0]:.6g}"
        under = [f"M{word[1:].split()[0]} {floor}" for word in (words[0], words[-1])]
    return ("".join(words) + "".join(reversed(under))).replace("M", "L").replace("L", "M", 1) + "Z"


def _words(curve: Curve, log: bool) -> Iterator[str]:
    """Commands of a path: it begins anew after a value that is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        heights = np.log10(curve.y) if log else curve.y
    begins = True
    for x, y in zip(curve.x.tolist(), heights.tolist(), strict=True):
        if math.isfinite(y):
            yield f"{'M' if begins else 'L'}{x:.10g} {y:.6g}"
        begins = not math.isfinite(y)


def _levels(levels: Sequence[Level], frame: _Frame) -> Markup:
    """Dashed, with a name at the right; names that would meet move apart."""
    drawn, free, right = [], math.inf, frame.width - _RIGHT
    for level in sorted(levels, key=lambda level: level.value):
        y = frame.down(math.log10(level.value) if frame.log else level.value)
        free = min(y - 4, free - _LABEL_HEIGHT)
        drawn.append(
            Markup(
                '<line class="level" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/><text class="level" x="{}" y="{:.1f}">'
                "{} {}</text>"
            ).format(_LEFT, right, y, y, right - 2, free, level.name, number(level.value, 3))
        )
    return join(drawn)


def _x_axis(frame: _Frame, unit: str) -> Markup:
    bottom = frame.height - _BOTTOM
    ticks, drawn = list(_ticks(*frame.x, 4 if frame.width < 400 else 6)), []
    for x in ticks:
        across = frame.across(x)
        edge = "end" if across > frame.width - _RIGHT - 12 else "middle"
        drawn.append(
            Markup(
                '<line class="tick" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>'
                '<text text-anchor="{3}" x="{0:.1f}" y="{4}">{5}</text>'
            ).format(across, bottom, bottom + 4, edge, bottom + 16, _tick_text(x, ticks))
        )
    axis = Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
        _LEFT, frame.width - _RIGHT, bottom, bottom
    )
    name = Markup('<text class="unit" x="2" y="{}">{}</text>').format(bottom + 16, unit)
    return join(drawn) + axis + name


def _y_axis(frame: _Frame, unit: str) -> Markup:
    low, high = frame.y
    ticks = _log_ticks(10**low, 10**high) if frame.log else list(_ticks(low, high, 4 if frame.width < 400 else 5))
    drawn = []
    for value in ticks:
        y = frame.down(math.log10(value) if frame.log else value)
        drawn.append(
            Markup(
                '<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>'
                '<text text-anchor="end" x="{}" y="{:.1f}">{}</text>'
            ).format(_LEFT, frame.width - _RIGHT, y, y, _LEFT - 6, y + 4, _tick_text(value, ticks))
        )
    name = Markup('<text class="unit" x="2" y="12">{}</text>').format(unit)
    return join(drawn) + name


def _ticks(low: float, high: float, most: int) -> Iterator[float]:
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= raw * 0.999)
    for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        yield i * step


def _log_ticks(low: float, high: float) -> list[float]:
    """Decades; of fewer than two also 2 and 5; of more than five every second one, or fewer."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = math.ceil(len(decades) / 6)
    factors = (1, 2, 5) if len(decades) <= 3 else (1,)
    values = [f * 10.0**d for d in decades if d % every == 0 for f in factors]
    return [value for value in values if low <= value <= high]


def _tick_text(value: float, ticks: Sequence[float]) -> str:
    """As short as it can be told from the other ticks."""
    largest = max(map(abs, ticks))
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if largest >= size * (10 if letter == "k" else 1) and value:
            return f"{value / size:.4g}{letter}"
    if value and largest < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}".replace("-", "−")
    return f"{value:,.6g}".replace("-", "−") if value else "0"
