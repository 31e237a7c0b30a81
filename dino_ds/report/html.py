"""Pages that are one file and fetch nothing, with charts as SVG by matplotlib; jinja2 escapes all text."""

from __future__ import annotations

import base64
import functools
import io
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from PIL import Image, features

from dino_ds.basics import formatting
from dino_ds.basics.formatting import number
from dino_ds.report.charts import Chart, Line

COLORS = ("#2f6db3", "#dd8a2c", "#2a9461", "#b8406f", "#7659bd", "#8a6d3b", "#138a9b", "#7b8594")
"""The colors --c1 to --c8 of templates/page.css, which inverts a chart on a dark page."""
_INK = "#5c6776"
_MOST_DOTS = 80
_ROUND = [1, 2, 2.5, 5, 10]
_LABEL, _LEVELS = 13, 118
"""Height of a level's name and room for the longest, right of the chart, in points."""
_TEMPLATES = Path(__file__).parent / "templates"
_MAX_PIXELS = 100_000_000
_LONG_WORD = 28
"""Letters beyond which a word in a table, such as a path, may be broken."""


def chart_svg(chart: Chart) -> str:
    """Draw a chart as an SVG element; "" if no line has two finite values."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    if all(len(line.curve.finite) < 2 for line in chart.lines):
        return ""
    width, height = (340, 190) if chart.small else (520, 270)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.title, "path.simplify": True}):
        figure = Figure(figsize=(width / 72, height / 72), frameon=False)
        wide = width - 52 - (_LEVELS if chart.levels else 18)
        axes = figure.add_axes((52 / width, 22 / height, wide / width, (height - 42) / height))
        axes.patch.set_visible(False)
        axes.set_title("", y=1.0)  # else each drawing computes the title's position four times
        _plot(axes, chart)
        axes.text(-50 / wide, 1.03, chart.unit, transform=axes.transAxes, color=_INK, style="italic")
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(file, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = file.getvalue()
    return svg[svg.index("<svg") :]  # without the head of a file


def _plot(axes: Any, chart: Chart) -> None:
    """Draw the lines and levels of a chart on matplotlib's axes, with limits that include all finite values.

    y is logarithmic if all values are positive and the largest is at least 100 times the smallest. A curve with more
    points than can be told apart becomes a band from the lowest to the highest values, with their mean over it.
    """
    lines = [line for line in chart.lines if len(line.curve.finite)]
    values = np.concatenate([line.curve.finite for line in lines] or [np.zeros(1)])
    is_log = not chart.zero and values.min() > 0 and values.max() >= 100 * values.min()
    values = np.concatenate([values, [*chart.levels.values()], [0.0] if chart.zero else []])
    low, high = (np.log10(end) if is_log else end for end in (values.min(), values.max()))
    pad = 0.06 * (high - low)
    if pad < 1e-9 * abs(high):  # all values are equal
        pad = 0.1 * abs(high)
    pad = pad or 1.0
    low -= 0.0 if chart.zero and low == 0 else pad
    high += 0.0 if chart.zero and high == 0 > low + pad else pad
    axes.set_yscale("log" if is_log else "linear")
    axes.set_ylim(*((10.0**low, 10.0**high) if is_log else (low, high)))
    ends = [end for line in lines for end in line.curve.x[[0, -1]]] or [0.0]
    axes.set_xlim(*((min(ends), max(ends)) if min(ends) < max(ends) else (ends[0] - 1, ends[0] + 1)))
    for line in chart.lines:
        _draw_line(axes, line)
    for x in {x for steps in chart.marks.values() for x in steps}:
        axes.axvline(x, linestyle=(0, (1, 2)), color=COLORS[-1], linewidth=1.2)
    _draw_levels(axes, chart)
    _style(axes, chart.small, is_log)


def _draw_line(axes: Any, line: Line) -> None:
    curve, color, long = line.curve, COLORS[line.color - 1], line.curve.is_long and line.kind != "dots"
    x, y = curve.x, curve.y
    if long and len(curve.finite):
        x, lowest, y, highest = curve.outline()
        axes.fill_between(x, lowest, highest, color=color, alpha=0.2, linewidth=0)
    dotted = (line.kind == "dots" and len(x) <= _MOST_DOTS) or len(curve.finite) == 1
    axes.plot(x, y, "o-" if dotted else "-", color=color, markersize=4, linewidth=1.6, clip_on=False)


def _draw_levels(axes: Any, chart: Chart) -> None:
    """Draw dashed lines with their names and values; names that would overlap move apart."""
    height = axes.get_window_extent().height * 72 / axes.figure.dpi
    room = 0.0
    for name, value in sorted(chart.levels.items(), key=lambda level: level[1]):
        axes.axhline(value, linestyle=(0, (4, 3)), color=COLORS[-1], linewidth=1)
        height_of_level = float(axes.transLimits.transform((0, value))[1])
        room = max(room, height_of_level)
        shown = f"{name} {number(value, 3)}"
        axes.text(1.015, room, shown, transform=axes.transAxes, fontsize=7, va="center_baseline", color=_INK)
        room += _LABEL / height


def _style(axes: Any, small: bool, is_log: bool) -> None:
    """Set few round ticks with short numbers, a faint grid and no frame."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.xaxis.set_major_locator(MaxNLocator(4 if small else 6, integer=True, steps=_ROUND))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_locator(LogLocator(numticks=6) if is_log else MaxNLocator(4 if small else 5, steps=_ROUND))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(colors=_INK, labelsize=9, length=3)
    axes.grid(axis="y", color=_INK, alpha=0.2, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_INK)


class Tag(NamedTuple):
    """Text of a table's cell inside an element."""

    text: str
    css: str = ""
    tag: str = "span"


def is_long(cell: str | Tag) -> bool:
    """Whether a cell has a word so long that a line may break inside it."""
    words = (cell.text if isinstance(cell, Tag) else cell).split()
    return max(map(len, words), default=0) > _LONG_WORD


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template filled with values, which are all escaped."""
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    made.filters |= {name: getattr(formatting, name) for name in ("number", "percent", "duration", "gib", "nats")}
    made.tests["long"] = is_long
    return made


def draw_chart(chart: Chart) -> str:
    """Return the HTML of a chart with title and newest values, or "" if no line has two finite values."""
    svg = chart_svg(chart)
    lines = [line for line in chart.lines if len(line.curve.finite)]
    lost = sum(len(line.curve) - len(line.curve.finite) for line in lines)
    return render("chart.html", chart=chart, lines=lines, lost=lost, svg=svg) if svg else ""


def build_document(title: str, body: str) -> str:
    """Wrap HTML into a complete document, whose content security policy forbids scripts and all requests."""
    style = (_TEMPLATES / "page.css").read_text(encoding="utf-8")
    return render("page.html", title=title, body=body, style=style)


def embedded_file(path: Path, width: int) -> tuple[str, tuple[int, int]]:
    """Return a data: URL of a PNG file, as WebP and at most `width` pixels wide, and the size in pixels.

    Raises OSError or ValueError for what is not a picture.
    """
    try:
        with Image.open(path, formats=["PNG"]) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels")
            small = image.convert("RGBA" if "A" in image.getbands() or "transparency" in image.info else "RGB")
    except (SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from None
    if small.width > width:
        small = small.resize((width, max(1, round(small.height * width / small.width))), Image.Resampling.LANCZOS)
    stream, kind = io.BytesIO(), "webp" if features.check("webp") else "png"
    small.save(stream, kind.upper(), quality=84, method=5)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}", small.size
