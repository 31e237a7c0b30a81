"""A picture: images with the boxes of their crops drawn on them, next to the crops as the network sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

GLOBAL_COLOR, LOCAL_COLOR = "#e8590c", "#1c7ed6"
_LINE = 1.1
"""Height of a local crop, inches; an image and a global crop are two lines high."""
_MARGIN = 0.6
"""Inches above the first image and below the last."""
_ORIGINAL, _GLOBAL = 3, 2
"""Columns of the grid that an image and a global crop take; a local crop takes one."""
_NAME = 90


@dataclass(frozen=True)
class Seen:
    """One image and its crops as RGB pictures; the first `num_global` are drawn large.

    Attributes:
        boxes: edges of each crop in the image: left, top, right, bottom.
    """

    name: str
    original: Image.Image
    boxes: list[tuple[int, int, int, int]]
    crops: list[Image.Image]
    num_global: int

    def color(self, crop: int) -> str:
        return GLOBAL_COLOR if crop < self.num_global else LOCAL_COLOR


def draw_sheet(rows: Sequence[Seen], title: str, note: str = "") -> Figure:
    """Draw one row an image, crops of one kind in one size, and below them a `note`."""
    large = rows[0].num_global
    small = (len(rows[0].crops) - large + 1) // 2
    columns = _ORIGINAL + _GLOBAL * large + small
    height = 2 * _LINE * len(rows) + 2 * _MARGIN
    figure = Figure(figsize=(_LINE * columns, height), dpi=100)
    edges = {"top": 1 - _MARGIN / height, "bottom": _MARGIN / height, "left": 0.01, "right": 0.99}
    grid = figure.add_gridspec(2 * len(rows), columns, **edges, hspace=0.16, wspace=0.04)
    for number, row in enumerate(rows):
        two_lines = slice(2 * number, 2 * number + 2)
        _draw_original(figure.add_subplot(grid[two_lines, :_ORIGINAL]), row)
        for crop, picture in enumerate(row.crops):
            left = _ORIGINAL + _GLOBAL * min(crop, large)
            place = grid[two_lines, left : left + _GLOBAL]
            if crop >= large:
                line, column = divmod(crop - large, small)
                place = grid[2 * number + line, left + column]
            axes = _show(figure.add_subplot(place), picture)
            _tag(axes, 0, 0, crop, row)
    _draw_title(figure, title, rows[0], height)
    figure.text(0.01, 0.15 / height, note, fontsize=9)
    return figure


def _draw_title(figure: Figure, title: str, row: Seen, height: float) -> None:
    kinds = [("global crops", GLOBAL_COLOR)]
    kinds += [("local crops", LOCAL_COLOR)] if len(row.crops) > row.num_global else []
    figure.text(0.01, 1 - 0.2 / height, title, fontsize=9, parse_math=False)
    handles = [Rectangle((0, 0), 1, 1, color=color, label=name) for name, color in kinds]
    figure.legend(handles=handles, loc="upper right", ncols=2, fontsize=8, frameon=False)


def _draw_original(axes: Axes, row: Seen) -> None:
    _show(axes, row.original)
    size = f"  {row.original.width} x {row.original.height}"
    name = row.name if len(row.name) <= _NAME else f"…{row.name[-_NAME:]}"  # the end of a path tells more
    axes.set_title(name + size, fontsize=7, loc="left", pad=2, parse_math=False)
    for crop in reversed(range(len(row.boxes))):
        left, top, right, bottom = row.boxes[crop]
        width = 2 if crop < row.num_global else 1
        # The edges of a picture's first pixel are at -0.5 and 0.5.
        box = Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, lw=width, ec=row.color(crop))
        axes.add_patch(box)
        _tag(axes, left, top, crop, row)


def _tag(axes: Axes, left: float, top: float, crop: int, row: Seen) -> None:
    style = {"facecolor": row.color(crop), "linewidth": 0, "pad": 1.5}
    axes.text(left - 0.5, top - 0.5, str(crop + 1), color="white", fontsize=6, ha="left", va="top", bbox=style)


def _show(axes: Axes, picture: Image.Image) -> Axes:
    """Pixels of small images stay visible: they are enlarged without smoothing."""
    axes.imshow(picture, interpolation="nearest" if max(picture.size) < 100 * _LINE else "antialiased")
    axes.set_axis_off()
    axes.set_anchor("NW")
    return axes
