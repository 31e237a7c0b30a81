"""Figures made of images and maps over them, as matplotlib Figures."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from dino_ds.data.visible import visible
from dino_ds.report.pictures.canvas import Sheet
from dino_ds.report.pictures.maps import PatchColors, foreground, mass_mask, patch_similarity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MASS = 0.6
_HEADS = 12
"""Heads that get a column of their own."""
_FRAMES = {True: "#1971c2", False: "#f08c00"}
"""Frames of a neighbour of the query's class, and of another: blue and orange, which most people tell apart."""


class PatchModel(Protocol):
    """A model that can be drawn: images (b, 3, h, w) -> tokens (b, rows, columns, d), and a ViT's attention of the CLS
    token (b, heads, rows, columns)."""

    is_vit: bool

    def patch_tokens(self, images: Tensor) -> Tensor: ...

    def attention(self, images: Tensor) -> Tensor: ...


def draw_patches(model: PatchModel, images: Tensor, mean: Sequence[float], std: Sequence[float]) -> dict[str, Figure]:
    """Normalised images (b, c, h, w), on the model's device -> the figures "attention" and "pca".

    The second is "similarity", of the patches in the middle, if a network has no attention.
    """
    pictures = picture_of(images.cpu(), mean, std)
    tokens = model.patch_tokens(images).float().cpu()
    if not model.is_vit:
        middle = tokens.shape[1] // 2, tokens.shape[2] // 2
        patches = [(i, *middle) for i in range(len(tokens))]
        return {"pca": draw_pca(pictures, tokens), "similarity": draw_similarity(pictures, tokens, patches)}
    attention = model.attention(images).float().cpu()
    return {"attention": draw_attention(pictures, attention), "pca": draw_pca(pictures, tokens)}


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


def draw_similarity(pictures: Tensor, tokens: Tensor, patches: Sequence[tuple[int, int, int]]) -> Figure:
    """A row a chosen patch (image, row, column): its image with a cross, then its cosine with every patch.

    The first row has the images themselves. Black is a cosine of 0 or less, light yellow 1.
    """
    from matplotlib import colormaps

    sheet = Sheet(1 + len(patches), 1 + len(pictures), ["patch", *[f"{i + 1}" for i in range(len(pictures))]])
    rows, columns = tokens.shape[1:3]
    for other, picture in enumerate(pictures.numpy()):
        sheet.put(0, 1 + other, picture)
    for line, (image, row, column) in enumerate(patches, 1):
        sheet.put(line, 0, pictures[image].numpy())
        sheet.mark(line, 0, (column + 0.5) / columns, (row + 0.5) / rows)
        for other, similarity in enumerate(patch_similarity(tokens, image, row, column).numpy()):
            sheet.put(line, 1 + other, colormaps["magma"](similarity.clip(0, 1))[..., :3])
    return sheet.figure


def draw_neighbours(
    queries: Sequence[np.ndarray],
    neighbours: Sequence[Sequence[np.ndarray]],
    captions: Sequence[Sequence[str]],
    same_class: Sequence[Sequence[bool | None]],
) -> Figure:
    """Draw a row for each query: the image, then its nearest neighbours; pictures (h, w, 3), with captions.

    same_class: whether each neighbour is of the query's class, or None if no class is known, for its frame's color.
    """
    known = any(same is not None for row in same_class for same in row)
    titles = ["query (blue: its class)" if known else "query", *[str(i + 1) for i in range(max(map(len, neighbours)))]]
    sheet = Sheet(len(queries), len(titles), titles, captions=any(text for texts in captions for text in texts))
    rows = zip(queries, neighbours, captions, same_class, strict=True)
    for row, (query, found, texts, same) in enumerate(rows):
        for column, (picture, text, alike) in enumerate(zip((query, *found), texts, (None, *same), strict=True)):
            sheet.put(row, column, picture, text, None if alike is None else _FRAMES[alike])
    return sheet.figure


def head_colors(heads: int) -> Tensor:
    """(heads, 3): bright colors, evenly around the circle."""
    return torch.tensor([colorsys.hsv_to_rgb(head / heads, 1, 1) for head in range(heads)])


def heat(picture: Tensor, attention: Tensor, top: float | None = None) -> np.ndarray:
    """A map (h, w) in heat colors over the grey picture (H, W, 3); lightest at `top`, else at its own maximum."""
    from matplotlib import colormaps

    scaled = attention / max(float(attention.max()) if top is None else top, 1e-12)
    return coat(picture, torch.from_numpy(colormaps["inferno"](scaled.numpy())[..., :3]))


def coat(picture: Tensor, colors: Tensor) -> np.ndarray:
    """Colors of the patches (h, w, 3) over the grey picture (H, W, 3)."""
    grey = picture.mean(dim=-1, keepdim=True).numpy()
    return (0.3 * grey + 0.7 * _enlarged(colors, picture.shape[:2])).clip(0, 1)


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
