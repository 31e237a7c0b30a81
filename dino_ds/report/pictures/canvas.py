"""A sheet of pictures with titles as a matplotlib Figure, and Figures as files and tensors. No display is needed."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110
_CELL, _GAP, _LINE = 1.5, 0.06, 0.19
"""Inches: a picture's side, between pictures, a line of text."""
_LETTERS = 25


class Sheet:
    """Pictures in rows and columns; every place is computed beforehand, so that nothing overlaps.

    `titles`: one a column; `captions`: whether there is a line of text under each picture. `rows_of`: rows that belong
    together, with a wider gap after them.
    """

    def __init__(
        self, rows: int, columns: int, titles: Sequence[str] = (), captions: bool = False, rows_of: int = 1
    ) -> None:
        from matplotlib.figure import Figure

        self._line = _CELL + _GAP + (_LINE if captions else 0)
        self._rows_of = rows_of
        self._top = _LINE + _GAP if any(titles) else _GAP
        width = columns * (_CELL + _GAP) + _GAP
        height = self._y(rows - 1) + self._line
        self.figure = Figure(figsize=(width, height))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(height, 0)
        self.axes.axis("off")
        for column, title in enumerate(titles):
            self._text(column, self._top - _GAP, title, 8)

    def put(self, row: int, column: int, picture: np.ndarray, caption: str = "", frame: str | None = None) -> None:
        """A picture (h, w, 3) in [0, 1] or uint8, not cut: the longer side fills the cell; `frame` is a color."""
        x, y = self._x(column), self._y(row)
        high, wide = (_CELL * side / max(picture.shape[:2]) for side in picture.shape[:2])
        left, top = x + (_CELL - wide) / 2, y + (_CELL - high) / 2
        extent = (left, left + wide, top + high, top)
        self.axes.imshow(picture, extent=extent, interpolation="nearest", aspect="auto", vmin=0, vmax=1)
        if frame:
            from matplotlib.patches import Rectangle

            self.axes.add_patch(Rectangle((left, top), wide, high, fill=False, edgecolor=frame, linewidth=2.5))
        if caption:
            self._text(column, y + _CELL + _LINE, caption, 7)

    def mark(self, row: int, column: int, x: float, y: float) -> None:
        """A cross at a point of the picture there, in parts of its sides."""
        place = (self._x(column) + x * _CELL, self._y(row) + y * _CELL)
        for color, width in (("white", 4.0), ("red", 2.0)):
            self.axes.plot(*place, "+", color=color, markersize=11 + width / 2, mew=width)

    def _text(self, column: int, bottom: float, text: str, size: int) -> None:
        middle = self._x(column) + _CELL / 2
        self.axes.text(middle, bottom - 0.04, shorten(text), fontsize=size, ha="center", parse_math=False)

    def _x(self, column: int) -> float:
        return _GAP + column * (_CELL + _GAP)

    def _y(self, row: int) -> float:
        return self._top + row * self._line + row // self._rows_of * (2 * _GAP if self._rows_of > 1 else 0)


def shorten(text: str) -> str:
    """The part of a text that fits under a picture."""
    return text if len(text) <= _LETTERS else text[: _LETTERS - 1] + "…"


def figure_pixels(figure: Figure, dpi: float = DPI) -> np.ndarray:
    """A Figure -> uint8 (h, w, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a class in letters that the font lacks has boxes for a name
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def figure_tensor(figure: Figure, dpi: float = DPI) -> Tensor:
    """A Figure -> uint8 (3, h, w), as TensorBoard's `add_image` takes it."""
    return torch.from_numpy(figure_pixels(figure, dpi)).permute(2, 0, 1).contiguous()


def figure_png(figure: Figure, dpi: float = DPI, palette: bool = False) -> bytes:
    """A Figure -> a PNG file. With a palette of 256 colors it is two to three times smaller."""
    image = Image.fromarray(figure_pixels(figure, dpi))
    if palette:
        image = image.quantize(256)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()
