"""Makes pages that are one file and fetch nothing; jinja2 escapes all text, so that none is taken for HTML."""

from __future__ import annotations

import base64
import functools
import io
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from PIL import Image, features

from dino_ds.report import text
from dino_ds.report.charts import Chart
from dino_ds.report.plot import chart_svg

_TEMPLATES = Path(__file__).parent / "templates"
_MAX_PIXELS = 100_000_000
_LONG_WORD = 28
"""Letters beyond which a word in a table, such as a path, may be broken."""


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
    made.filters |= {name: getattr(text, name) for name in ("number", "percent", "duration", "gib", "nats")}
    made.tests["long"] = is_long
    return made


def draw_chart(chart: Chart) -> str:
    """Return the HTML of a chart with title and newest values, or "" if no line has a finite value."""
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
