"""Draws images and maps over them as matplotlib Figures, and turns them into pixels and PNG files; needs no display."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dino_ds.data.normalization import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 90
INK, _OPACITIES = "#727c8b", 16
"""Color of words in a picture without a background, legible on light and dark pages; its opacities in a PNG."""
_FRAMES = {True: "#1971c2", False: "#f08c00"}
"""Frames of neighbors of the query's class and of other classes: blue and orange, which most people tell apart."""
_CELL, _GAP, _LINE = 1.5, 0.06, 0.24  # inches: a picture's side, between pictures, a line of text
_GROUPS, _MAP = 20, 8.0  # most groups that the map's legend names: the number of colors; inches of the map's side


class Sheet:
    """Pictures in rows and columns of one Figure.

    Args:
        rows, columns: number of cells.
        titles: one for each column.
        captions: whether there is a line of text under each picture.
        heading: what the pictures are, how many of how many, and what their colors mean.
    """

    def __init__(
        self, rows: int, columns: int, titles: Sequence[str] = (), captions: bool = False, heading: str = ""
    ) -> None:
        from matplotlib.figure import Figure

        self._row = _CELL + _GAP + (_LINE if captions else 0)
        width = columns * (_CELL + _GAP) + _GAP
        lines = textwrap.wrap(heading, int(width / 0.078))  # inches of a letter's width
        self._top = _LINE * (len(lines) + any(titles)) + _GAP
        height = self._top + rows * self._row
        self.figure = Figure(figsize=(width, height))
        self.axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")
        for line, text in enumerate(lines):
            self.axes.text(_GAP, (line + 1) * _LINE - 0.04, text, fontsize=10, color=INK, parse_math=False)
        for column, title in enumerate(titles):
            self._text(column, self._top - _GAP, title, 11)

    def put(self, row: int, column: int, picture: np.ndarray, caption: str = "", frame: str | None = None) -> None:
        """Draw a picture (h, w, 3) in [0, 1] or uint8, uncropped: the longer side fills the cell; frame: a color."""
        x, y = _GAP + column * (_CELL + _GAP), self._top + row * self._row
        high, wide = (_CELL * side / max(picture.shape[:2]) for side in picture.shape[:2])
        left, top = x + (_CELL - wide) / 2, y + (_CELL - high) / 2
        extent = (left, left + wide, top + high, top)
        self.axes.imshow(picture, extent=extent, interpolation="nearest", aspect="auto", vmin=0, vmax=1)
        if frame:
            from matplotlib.patches import Rectangle

            self.axes.add_patch(Rectangle((left, top), wide, high, fill=False, edgecolor=frame, linewidth=2.5))
        if caption:
            self._text(column, y + _CELL + _LINE, caption, 10)

    def _text(self, column: int, bottom: float, text: str, size: int) -> None:
        middle = _GAP + column * (_CELL + _GAP) + _CELL / 2
        self.axes.text(middle, bottom - 0.04, _shorten(text), fontsize=size, color=INK, ha="center", parse_math=False)


def _shorten(text: str) -> str:
    """Cut a text to the 17 characters that fit under a picture."""
    return text if len(text) <= 17 else text[:16] + "…"


def picture_of(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalized images (b, c, h, w) -> pictures (b, h, w, 3) in [0, 1], as `visible` makes them."""
    shape = (1, -1, 1, 1)
    scaled = images * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)
    return torch.stack([visible(image) for image in scaled]).permute(0, 2, 3, 1)


def draw_attention(pictures: Tensor, attention: Tensor, heading: str = "") -> Figure:
    """Draw pictures (b, H, W, 3) in [0, 1] and the CLS token's attention (b, heads, h, w): a row for each image, a
    column for each of the first 12 heads (figure 3 of the DINO paper)."""
    heads, shown = attention.shape[1], min(attention.shape[1], 12)
    first = "image" if shown == heads else f"{shown} of {heads} heads"
    sheet = Sheet(len(pictures), 1 + shown, [first, *(f"head {head}" for head in range(shown))], heading=heading)
    for row, (picture, maps) in enumerate(zip(pictures, attention, strict=True)):
        sheet.put(row, 0, picture.numpy())
        for head in range(shown):
            sheet.put(row, 1 + head, heat(picture, maps[head]))
    return sheet.figure


def draw_pca(pictures: Tensor, tokens: Tensor, heading: str = "") -> Figure:
    """Draw pictures (b, H, W, 3), below them as RGB three principal components of their patch tokens (b, h, w, d)."""
    sheet = Sheet(2, len(pictures), heading=heading)
    for row, images in enumerate((pictures, patch_colors(tokens))):
        for column, image in enumerate(images.numpy()):
            sheet.put(row, column, image)
    return sheet.figure


def patch_colors(tokens: Tensor) -> Tensor:
    """Patch tokens (..., d) -> their first three principal components as RGB (..., 3).
    A color means the same in all images. A component's sign is arbitrary: its largest weight is made positive. Source:
    DINOv3's `notebooks/pca.ipynb`: components of unit variance, doubled, through a sigmoid."""
    flat = tokens.flatten(0, -2).double()
    centered = flat - flat.mean(dim=0)
    values, vectors = torch.linalg.eigh(centered.T @ centered / len(centered))
    axes = vectors.flip(dims=(1,))[:, :3]
    axes = axes * axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()
    # Without any variance every patch becomes middle gray.
    deviations = values.flip(dims=(0,))[:3].clamp_min(0).sqrt() + 1e-12
    return torch.sigmoid(2 * (centered @ (axes / deviations))).float().unflatten(0, tokens.shape[:-1])


def draw_neighbors(
    queries: Sequence[np.ndarray],
    neighbors: Sequence[Sequence[np.ndarray]],
    captions: Sequence[Sequence[str]],
    same_class: Sequence[Sequence[bool | None]],
    heading: str = "",
) -> Figure:
    """Draw a row for each query: the image, then its nearest neighbors; pictures (h, w, 3), with captions.
    same_class: whether each neighbor is of the query's class, or None if no class is known, for its frame's color."""
    known = any(same is not None for row in same_class for same in row)
    titles = ["image", *[str(i + 1) for i in range(max(map(len, neighbors)))]]
    heading += "; frames: blue the same class, orange another" if known else ""
    sheet = Sheet(len(queries), len(titles), titles, any(map(any, captions)), heading)
    for row, (query, nearest, texts, same) in enumerate(zip(queries, neighbors, captions, same_class, strict=True)):
        for column, (picture, text, alike) in enumerate(zip((query, *nearest), texts, (None, *same), strict=True)):
            sheet.put(row, column, picture, text, None if alike is None else _FRAMES[alike])
    return sheet.figure


def place(features: Tensor) -> np.ndarray:
    """Features (n, d), n > 1 -> points (n, 2) by t-SNE, the same in each call. They are normalized, as in k-NN."""
    from sklearn.manifold import TSNE

    unit = F.normalize(features.float(), dim=-1).numpy()
    return TSNE(perplexity=min(30.0, (len(unit) - 1) / 3), init="pca", random_state=0).fit_transform(unit)


def draw_map(points: np.ndarray, thumbnails: Sequence[np.ndarray], groups: Sequence[str] | None, title: str) -> Figure:
    """Draw a uint8 thumbnail (h, w, 3) at each of the points (n, 2), framed by group; a legend for up to 20 groups."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    names = sorted(set(groups)) if groups else []
    legend = 0 < len(names) <= _GROUPS
    columns = max(1, min(5, 80 // (4 + max(map(len, map(_shorten, names)), default=0))))
    bottom = (0.25 * -(-len(names) // columns) + 0.1) if legend else 0.0
    height = _MAP + 0.3 + bottom
    figure = Figure(figsize=(_MAP, height))
    axes = figure.add_axes((0, bottom / height, 1, _MAP / height))
    figure.text(0.5, 1 - 0.2 / height, title, ha="center", fontsize=11, color=INK)
    colors = colormaps["tab20"]([*range(0, _GROUPS, 2), *range(1, _GROUPS, 2)])[:, :3]  # dark ones first, then light
    frames = [colors[names.index(group) % _GROUPS] for group in groups] if groups else [(0.6,) * 3] * len(points)
    side = round(_MAP * DPI)
    canvas = Image.new("RGBA", (side, side), (255, 255, 255, 0))
    size = round(side * float(np.clip(0.7 / np.sqrt(len(points)), 0.03, 0.07)))
    border = max(1, size // 18)
    low, high = points.min(axis=0), points.max(axis=0)
    places = (side - size) * (points - low) / np.maximum(high - low, 1e-12)
    for i in np.argsort(-places[:, 1]):  # lower ones cover higher ones
        left, top = round(float(places[i, 0])), side - size - round(float(places[i, 1]))
        canvas.paste(tuple(round(255 * value) for value in frames[i]), (left, top, left + size, top + size))
        inside = size - 2 * border
        canvas.paste(Image.fromarray(thumbnails[i]).resize((inside, inside)), (left + border, top + border))
    axes.imshow(np.asarray(canvas))
    axes.axis("off")
    if legend:
        spots = [axes.plot([], [], "s", color=colors[i])[0] for i in range(len(names))]
        style = {"ncols": columns, "fontsize": 11, "labelcolor": INK, "frameon": False}
        box = figure.legend(spots, list(map(_shorten, names)), loc="lower center", **style)
        for text in box.texts:
            text.set_parse_math(False)
    return figure


def heat(picture: Tensor, attention: Tensor) -> np.ndarray:
    """Turn a picture (H, W, 3) gray, and overlay a map (h, w) in heat colors, lightest at the map's maximum."""
    from matplotlib import colormaps

    scaled = attention / max(float(attention.max()), 1e-12)
    colors = torch.from_numpy(colormaps["inferno"](scaled.numpy())[..., :3])
    sides = zip(picture.shape, attention.shape, strict=False)
    rows, columns = (torch.arange(side) * count // side for side, count in sides)
    return (0.3 * picture.mean(dim=-1, keepdim=True) + 0.7 * colors[rows][:, columns]).clamp(0, 1).numpy()


def figure_pixels(figure: Figure) -> np.ndarray:
    """A Figure -> uint8 (h, w, 4), clear where nothing is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(DPI)
    figure.set_facecolor("none")
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # letters that the font lacks are drawn as boxes
        canvas.draw()
    return np.array(canvas.buffer_rgba())


def png_of(pixels: np.ndarray) -> bytes:
    """Pixels uint8 (h, w, 4) -> a PNG file, two to three times smaller by its palette: 240 colors, and 16 opacities of
    the words' color for what is not opaque."""
    colors = 256 - _OPACITIES
    image = Image.fromarray(pixels[..., :3]).quantize(colors)
    opacity = pixels[..., 3]
    indices = np.where(opacity == 255, np.asarray(image), colors + opacity // _OPACITIES)
    ink = [int(INK[i : i + 2], 16) for i in (1, 3, 5)]
    palette = (image.getpalette() or [])[: 3 * colors]
    image = Image.fromarray(indices.astype(np.uint8), "P")
    image.putpalette([*palette, *[0] * (3 * colors - len(palette)), *ink * _OPACITIES])
    clear = bytes([*[255] * colors, *range(0, 256, 255 // (_OPACITIES - 1))])
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True, transparency=clear)
    return file.getvalue()
