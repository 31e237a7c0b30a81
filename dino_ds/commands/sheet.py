"""A picture: images with the boxes of their crops drawn on them, next to the crops as the network sees them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from dino_ds.data.multicrop import CropParameters

GLOBAL_COLOR, LOCAL_COLOR = "#e8590c", "#1c7ed6"
_ROW = 192
"""Pixels: height of an image, and of a global crop."""
_ORIGINAL_WIDTH = 264
_GAP, _LINE, _MARGIN = 6, 22, 14
_TAG_HEIGHT = 12
_LOCAL_SIDE = (_ROW - _GAP) // 2
_INK, _PAPER, _GREY = "#212529", "#ffffff", "#868e96"

_Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Seen:
    """One image, how its crops were `sampled`, and these as RGB pictures; the first `num_global` are shown large."""

    name: str
    original: Image.Image
    sampled: list[CropParameters]
    crops: list[Image.Image]
    num_global: int

    def color(self, crop: int) -> str:
        return GLOBAL_COLOR if crop < self.num_global else LOCAL_COLOR


def draw_sheet(rows: Sequence[Seen], title: str, note: str = "") -> Image.Image:
    """One row an image, below them a `note`. Crops are scaled to fit the sheet; the page shows them pixel by pixel."""
    columns = _local_columns(rows[0])
    width = 2 * _MARGIN + _ORIGINAL_WIDTH + (_ROW + _GAP) * rows[0].num_global + columns * (_LOCAL_SIDE + _GAP)
    height = 2 * _MARGIN + _LINE + len(rows) * (_ROW + _LINE + _GAP) + (_LINE if note else 0)
    sheet = Image.new("RGB", (width, height), _PAPER)
    _draw_title(sheet, title, rows[0])
    if note:
        ImageDraw.Draw(sheet).text((_MARGIN, height - _MARGIN - 13), note, fill=_INK, font=_font(13))
    for number, row in enumerate(rows):
        _draw_row(sheet, row, _MARGIN + _LINE + _GAP + number * (_ROW + _LINE + _GAP))
    return sheet


def describe(crop: CropParameters) -> str:
    """The operations on a crop, in words."""
    left, top, right, bottom = crop.box
    words = [f"{right - left} x {bottom - top} at {left}, {top}"]
    words += [f"turned left by {90 * crop.turns} degrees"] if crop.turns else []
    words += ["mirrored"] if crop.flip else []
    words += [f"{name} {factor:+.2f}" if name == "hue" else f"{name} x {factor:.2f}" for name, factor in crop.jitter]
    words += ["grey"] if crop.gray else []
    words += [f"blur {crop.blur_radius:.1f} px"] if crop.blur_radius is not None else []
    words += ["solarized"] if crop.solarize else []
    return ", ".join(words)


def _draw_title(sheet: Image.Image, title: str, row: Seen) -> None:
    draw = ImageDraw.Draw(sheet)
    legend = [("global crops", GLOBAL_COLOR)]
    legend += [("local crops", LOCAL_COLOR)] if len(row.crops) > row.num_global else []
    room = sheet.width - 2 * _MARGIN - sum(draw.textlength(text, font=_font(13)) + 16 for text, _ in legend)
    while draw.textlength(title, font=_font(13)) > room:
        title = f"{title.rstrip('…')[:-1]}…"
    x = float(_MARGIN)
    for text, color in [(title, _INK), *legend]:
        draw.text((x, _MARGIN), text, fill=color, font=_font(13))
        x += draw.textlength(text, font=_font(13)) + 16


def _draw_row(sheet: Image.Image, row: Seen, y: int) -> None:
    draw = ImageDraw.Draw(sheet)
    scale = min(_ORIGINAL_WIDTH / row.original.width, _ROW / row.original.height)
    size = (max(1, round(row.original.width * scale)), max(1, round(row.original.height * scale)))
    sheet.paste(_scaled(row.original, size), (_MARGIN, y))
    _draw_boxes(draw, row, scale, y)
    name = _shortened(draw, f"{row.name}  {row.original.width} x {row.original.height}", sheet.width - 2 * _MARGIN)
    draw.text((_MARGIN, y + _ROW + 3), name, fill=_GREY, font=_font(11))
    large, x = row.num_global, _MARGIN + _ORIGINAL_WIDTH + _GAP
    for number, crop in enumerate(row.crops):
        line, column = divmod(max(0, number - large), _local_columns(row) or 1)
        side = _ROW if number < large else _LOCAL_SIDE
        left = x + min(number, large) * (_ROW + _GAP) + column * (_LOCAL_SIDE + _GAP)
        top = y + line * (_LOCAL_SIDE + _GAP)
        sheet.paste(_scaled(crop, (side, side)), (left, top))
        _draw_tag(draw, (left, top, left + _tag_width(draw, number), top + _TAG_HEIGHT), number, row.color(number))


def _draw_boxes(draw: ImageDraw.ImageDraw, row: Seen, scale: float, y: int) -> None:
    boxes = []
    for crop in row.sampled:
        left, top, right, bottom = (edge * scale for edge in crop.box)
        right, bottom = max(left, right - 1), max(top, bottom - 1)  # of a very long image less than a pixel
        boxes.append((_MARGIN + left, y + top, _MARGIN + right, y + bottom))
    for number in reversed(range(len(boxes))):
        draw.rectangle(boxes[number], outline=row.color(number), width=2 if number < row.num_global else 1)
    taken: list[_Box] = []
    for number, box in enumerate(boxes):
        taken.append(_free_corner(box, _tag_width(draw, number), taken))
        _draw_tag(draw, taken[-1], number, row.color(number))


def _free_corner(box: _Box, width: float, taken: list[_Box]) -> _Box:
    """Place for a tag in a corner of the box where it hides no other tag, if there is one."""
    left, top, right, bottom = box
    corners = [(x, y) for x in (left, right - width) for y in (top, bottom - _TAG_HEIGHT)]
    places = [(x, y, x + width, y + _TAG_HEIGHT) for x, y in corners]
    # Two boxes overlap unless one lies beside the other.
    free = (a for a in places if all(a[0] > b[2] or b[0] > a[2] or a[1] > b[3] or b[1] > a[3] for b in taken))
    return next(free, places[0])


def _draw_tag(draw: ImageDraw.ImageDraw, place: _Box, number: int, color: str) -> None:
    draw.rectangle(place, fill=color)
    middle = ((place[0] + place[2] + 1) / 2, (place[1] + place[3]) / 2)
    draw.text(middle, str(number + 1), fill=_PAPER, font=_font(10), anchor="mm")


def _tag_width(draw: ImageDraw.ImageDraw, number: int) -> float:
    return draw.textlength(str(number + 1), font=_font(10)) + 5


def _local_columns(row: Seen) -> int:
    """Local crops stand in two lines."""
    return math.ceil((len(row.crops) - row.num_global) / 2)


def _scaled(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Enlarged without smoothing, so that the pixels of small images can be seen."""
    larger = size[0] > image.width
    return image.resize(size, Image.Resampling.NEAREST if larger else Image.Resampling.LANCZOS)


def _shortened(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """The end of a long path tells more than its beginning."""
    if draw.textlength(text, font=_font(11)) <= width:
        return text
    while draw.textlength(f"…{text}", font=_font(11)) > width:
        text = text[1:]
    return f"…{text}"


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own font has no letters beyond ASCII, and names of files have."""
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size)
