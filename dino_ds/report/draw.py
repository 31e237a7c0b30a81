"""Figures made of images and maps over them, as matplotlib Figures, and these as files and tensors. No display."""

from __future__ import annotations

import colorsys
import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dino_ds.data.normalisation import visible
from dino_ds.report.maps import PatchColors, foreground, mass_mask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dino_ds.weights.load import Backbone

MASS = 0.6
DPI = 110
_HEADS = 12
"""Heads that get a column of their own."""
_FRAMES = {True: "#1971c2", False: "#f08c00"}
"""Frames of a neighbor of the query's class, and of another: blue and orange, which most people tell apart."""
_CELL, _GAP, _LINE = 1.5, 0.06, 0.19
"""Inches: a picture's side, between pictures, a line of text."""
_LETTERS = 25
_GROUPS = 20
"""Groups that the map's legend names, as many as there are colors."""
_MAP = 8.0
"""Inches of the map's side."""


class Sheet:
    """Pictures in rows and columns of one Figure.

    Args:
        rows, columns: number of cells.
        titles: one for each column.
        captions: whether there is a line of text under each picture.
        rows_of: rows that belong together, with a wider gap after them.
    """

    def __init__(
        self, rows: int, columns: int, titles: Sequence[str] = (), captions: bool = False, rows_of: int = 1
    ) -> None:
        from matplotlib.figure import Figure

        self._line = _CELL + _GAP + (_LINE if captions else 0)
        self._rows_of = rows_of
        self._top = _LINE + _GAP if any(titles) else _GAP
        width, height = columns * (_CELL + _GAP) + _GAP, self._y(rows - 1) + self._line
        self.figure = Figure(figsize=(width, height))
        self.axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")
        for column, title in enumerate(titles):
            self._text(column, self._top - _GAP, title, 8)

    def put(self, row: int, column: int, picture: np.ndarray, caption: str = "", frame: str | None = None) -> None:
        """A picture (h, w, 3) in [0, 1] or uint8, not cut: the longer side fills the cell; `frame` is a color."""
        x, y = _GAP + column * (_CELL + _GAP), self._y(row)
        high, wide = (_CELL * side / max(picture.shape[:2]) for side in picture.shape[:2])
        left, top = x + (_CELL - wide) / 2, y + (_CELL - high) / 2
        extent = (left, left + wide, top + high, top)
        self.axes.imshow(picture, extent=extent, interpolation="nearest", aspect="auto", vmin=0, vmax=1)
        if frame:
            from matplotlib.patches import Rectangle

            self.axes.add_patch(Rectangle((left, top), wide, high, fill=False, edgecolor=frame, linewidth=2.5))
        if caption:
            self._text(column, y + _CELL + _LINE, caption, 7)

    def _text(self, column: int, bottom: float, text: str, size: int) -> None:
        middle = _GAP + column * (_CELL + _GAP) + _CELL / 2
        self.axes.text(middle, bottom - 0.04, shorten(text), fontsize=size, ha="center", parse_math=False)

    def _y(self, row: int) -> float:
        return self._top + row * self._line + row // self._rows_of * (2 * _GAP if self._rows_of > 1 else 0)


def shorten(text: str) -> str:
    """The part of a text that fits under a picture."""
    return text if len(text) <= _LETTERS else text[: _LETTERS - 1] + "…"


def draw_patches(model: Backbone, images: Tensor, mean: Sequence[float], std: Sequence[float]) -> dict[str, Figure]:
    """Normalised images (b, c, h, w), on the model's device -> the figures "attention", of a ViT, and "pca"."""
    pictures = picture_of(images.cpu(), mean, std)
    figures = {"attention": draw_attention(pictures, model.attention(images).float().cpu())} if model.is_vit else {}
    return {**figures, "pca": draw_pca(pictures, model.patch_tokens(images).float().cpu())}


def picture_of(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalised images (b, c, h, w) -> pictures (b, h, w, 3) in [0, 1], as `visible` makes them."""
    shape = (1, -1, 1, 1)
    scaled = images * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)
    return torch.stack([visible(one) for one in scaled]).permute(0, 2, 3, 1)


def draw_attention(pictures: Tensor, attention: Tensor) -> Figure:
    """Pictures (b, H, W, 3) in [0, 1] and the CLS token's attention (b, heads, h, w): two rows an image.

    Above the image and each head's attention over it; below, the fewest patches with 60 % of each head's attention in
    the head's color, first of all heads together (figures 1 and 3 of the DINO paper).
    """
    heads = attention.shape[1]
    shown = min(heads, _HEADS)
    names = [f"head {head}" for head in range(shown)]
    titles = ["image, all heads" if shown == heads else f"image, {shown} of {heads} heads", *names]
    sheet = Sheet(2 * len(pictures), 1 + shown, titles, rows_of=2)
    colors = head_colors(shown)
    for i, (picture, maps) in enumerate(zip(pictures, attention[:, :shown], strict=True)):
        kept = mass_mask(maps, MASS)
        sheet.put(2 * i, 0, picture.numpy())
        sheet.put(2 * i + 1, 0, overlay(picture, maps * kept, colors))
        for head in range(shown):
            sheet.put(2 * i, 1 + head, heat(picture, maps[head]))
            sheet.put(2 * i + 1, 1 + head, overlay(picture, kept[head : head + 1].float(), colors[head : head + 1]))
    return sheet.figure


def draw_pca(pictures: Tensor, tokens: Tensor, attention: Tensor | None = None) -> Figure:
    """Pictures (b, H, W, 3) and patch tokens (b, h, w, d): images above, the first three components as RGB below.

    One PCA for all. With `attention` (b, heads, h, w) the background, one side of the first component, is black and
    the rest alone decides on the colors.
    """
    mask = torch.ones(tokens.shape[:3], dtype=torch.bool) if attention is None else foreground(tokens, attention)
    colors = PatchColors(tokens[mask])(tokens) * mask[..., None]
    sheet = Sheet(2, len(pictures))
    for column, (picture, map_) in enumerate(zip(pictures.numpy(), colors.numpy(), strict=True)):
        sheet.put(0, column, picture)
        sheet.put(1, column, map_)
    return sheet.figure


def draw_neighbors(
    queries: Sequence[np.ndarray],
    neighbors: Sequence[Sequence[np.ndarray]],
    captions: Sequence[Sequence[str]],
    same_class: Sequence[Sequence[bool | None]],
) -> Figure:
    """Draw a row for each query: the image, then its nearest neighbors; pictures (h, w, 3), with captions.

    same_class: whether each neighbor is of the query's class, or None if no class is known, for its frame's color.
    """
    known = any(same is not None for row in same_class for same in row)
    titles = ["query (blue: its class)" if known else "query", *[str(i + 1) for i in range(max(map(len, neighbors)))]]
    sheet = Sheet(len(queries), len(titles), titles, captions=any(text for texts in captions for text in texts))
    rows = zip(queries, neighbors, captions, same_class, strict=True)
    for row, (query, nearest, texts, same) in enumerate(rows):
        for column, (picture, text, alike) in enumerate(zip((query, *nearest), texts, (None, *same), strict=True)):
            sheet.put(row, column, picture, text, None if alike is None else _FRAMES[alike])
    return sheet.figure


def draw_map(points: np.ndarray, thumbnails: Sequence[np.ndarray], groups: Sequence[str] | None, title: str) -> Figure:
    """Points (n, 2) with a uint8 thumbnail (h, w, 3) each, framed in a color by group; a legend of up to 20 groups."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    names = sorted(set(groups)) if groups else []
    legend = 0 < len(names) <= _GROUPS
    columns = max(1, min(6, 100 // (4 + max(map(len, map(shorten, names)), default=0))))
    bottom = (0.25 * -(-len(names) // columns) + 0.1) if legend else 0.0
    height = _MAP + 0.3 + bottom
    figure = Figure(figsize=(_MAP, height))
    axes = figure.add_axes((0, bottom / height, 1, _MAP / height))
    figure.text(0.5, 1 - 0.2 / height, title, ha="center", fontsize=9)
    low, high = points.min(axis=0), points.max(axis=0)
    places = 0.04 + 0.92 * (points - low) / np.maximum(high - low, 1e-12)
    half = float(np.clip(0.35 / np.sqrt(len(points)), 0.015, 0.035))
    colors = colormaps["tab20"](range(_GROUPS))[:, :3]
    for i in np.argsort(-places[:, 1]):
        color = colors[names.index(groups[i]) % len(colors)] if groups else np.full(3, 0.6)
        x, y = places[i]
        axes.imshow(_framed(thumbnails[i], color), extent=(x - half, x + half, y - half, y + half))
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.axis("off")
    if legend:
        spots = [axes.plot([], [], "s", color=colors[i])[0] for i in range(len(names))]
        words = [shorten(name) for name in names]
        box = figure.legend(spots, words, loc="lower center", ncols=columns, fontsize=7, frameon=False)
        for text in box.texts:
            text.set_parse_math(False)
    return figure


def _framed(thumbnail: np.ndarray, color: np.ndarray) -> np.ndarray:
    """uint8 (h, w, 3) with a border in a color, an eighteenth of its side wide."""
    border = max(1, round(max(thumbnail.shape[:2]) / 18))
    framed = np.empty((thumbnail.shape[0] + 2 * border, thumbnail.shape[1] + 2 * border, 3), dtype=np.uint8)
    framed[:] = (255 * color).round()
    framed[border:-border, border:-border] = thumbnail
    return framed


def head_colors(heads: int) -> Tensor:
    """(heads, 3): bright colors, evenly around the circle."""
    return torch.tensor([colorsys.hsv_to_rgb(head / heads, 1, 1) for head in range(heads)])


def heat(picture: Tensor, attention: Tensor, top: float | None = None) -> np.ndarray:
    """A map (h, w) in heat colors over the gray picture (H, W, 3); lightest at `top`, else at its own maximum."""
    from matplotlib import colormaps

    scaled = attention / max(float(attention.max()) if top is None else top, 1e-12)
    return coat(picture, torch.from_numpy(colormaps["inferno"](scaled.numpy())[..., :3]))


def coat(picture: Tensor, colors: Tensor) -> np.ndarray:
    """Colors of the patches (h, w, 3) over the gray picture (H, W, 3)."""
    gray = picture.mean(dim=-1, keepdim=True).numpy()
    return (0.3 * gray + 0.7 * _enlarged(colors, picture.shape[:2])).clip(0, 1)


def overlay(picture: Tensor, weights: Tensor, colors: Tensor) -> np.ndarray:
    """A picture (H, W, 3) dark where all maps (m, h, w) are 0, elsewhere tinted by the mean of their colors (m, 3),
    weighted by the maps' values."""
    total = weights.sum(dim=0)
    tint = torch.einsum("mhw,mc->hwc", weights, colors) / total.clamp_min(1e-12)[..., None]
    size = picture.shape[:2]
    inside = _enlarged((total > 0).float(), size)[..., None]
    tinted = 0.5 * picture.numpy() + 0.5 * _enlarged(tint, size)
    return inside * tinted + (1 - inside) * 0.25 * picture.numpy()


def _enlarged(values: Tensor, size: Sequence[int]) -> np.ndarray:
    """A map (h, w, ...) at the size of a picture, patch by patch."""
    rows, columns = (torch.arange(side) * count // side for side, count in zip(size, values.shape, strict=False))
    return values[rows][:, columns].float().numpy()


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
