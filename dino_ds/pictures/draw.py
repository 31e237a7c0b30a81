"""Figures made of images and maps over them, as matplotlib Figures (no display is needed)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dino_ds.pictures.maps import mass_mask, patch_similarity, pca_colours

MASS = 0.6
_CELL = 1.5
"""Inches of a picture's side."""
_HEADS = 12


def draw_attention(pictures: Tensor, attention: Tensor) -> Any:
    """Pictures (b, H, W, 3) in [0, 1] and the CLS token's attention (b, heads, h, w): a row an image.

    Columns: the image, where the heads together look (the fewest patches with 60 % of the attention), each head.
    """
    heads = attention.shape[1]
    shown = min(heads, _HEADS)
    titles = ["image", f"{MASS:.0%} of all heads", *[f"head {i}" for i in range(shown)]]
    figure, axes = _grid(len(pictures), titles)
    masks = mass_mask(attention.mean(dim=1), MASS)
    for row, picture in enumerate(pictures.numpy()):
        axes[row][0].imshow(picture)
        mask = _enlarged(masks[row].float(), picture.shape[:2])[..., None]
        axes[row][1].imshow(picture * (0.25 + 0.75 * mask))
        for head in range(shown):
            axes[row][2 + head].imshow(_enlarged(attention[row, head], picture.shape[:2]), cmap="viridis")
    return figure


def draw_pca(pictures: Tensor, tokens: Tensor) -> Any:
    """Pictures (b, H, W, 3) and patch tokens (b, h, w, d): images above, the first three components as RGB below."""
    figure, axes = _grid(2, [""] * len(pictures))
    for column, (picture, colours) in enumerate(zip(pictures.numpy(), pca_colours(tokens).numpy(), strict=True)):
        axes[0][column].imshow(picture)
        axes[1][column].imshow(colours, interpolation="nearest")
    return figure


def draw_similarity(pictures: Tensor, tokens: Tensor, patches: Sequence[tuple[int, int, int]]) -> Any:
    """A row a chosen patch (image, row, column): its image with a cross, then its cosine with every patch."""
    figure, axes = _grid(len(patches), ["patch", *[""] * len(pictures)])
    scale = pictures.shape[1] / tokens.shape[1]
    for line, (image, row, column) in enumerate(patches):
        axes[line][0].imshow(pictures[image].numpy())
        axes[line][0].plot((column + 0.5) * scale, (row + 0.5) * scale, "+", color="red", markersize=12, mew=2)
        for other, similarity in enumerate(patch_similarity(tokens, image, row, column).numpy()):
            axes[line][1 + other].imshow(similarity, cmap="magma", vmin=0, vmax=1)
    return figure


def draw_neighbours(
    queries: Sequence[np.ndarray], neighbours: Sequence[Sequence[np.ndarray]], captions: Sequence[Sequence[str]]
) -> Any:
    """A row a query: the image, then its nearest neighbours with a caption each; pictures (h, w, 3)."""
    figure, axes = _grid(len(queries), ["query", *[str(i + 1) for i in range(len(neighbours[0]))]])
    for row, (query, found, texts) in enumerate(zip(queries, neighbours, captions, strict=True)):
        axes[row][0].imshow(query)
        for column, (picture, text) in enumerate(zip(found, texts, strict=True)):
            axes[row][1 + column].imshow(picture)
            axes[row][1 + column].set_xlabel(text, fontsize=7)
    return figure


def draw_map(points: np.ndarray, thumbnails: Sequence[np.ndarray], groups: Sequence[str] | None) -> Any:
    """Points (n, 2) with a thumbnail each, framed in a colour by group."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage

    figure = Figure(figsize=(9, 9), layout="constrained")
    axes = figure.subplots()
    names = sorted(set(groups)) if groups else []
    colours = colormaps["tab20"]
    for i in np.argsort(points[:, 1]):
        box = OffsetImage(thumbnails[i], zoom=28 / max(thumbnails[i].shape[:2]))
        edge = colours(names.index(groups[i]) % 20) if groups else "none"
        axes.add_artist(AnnotationBbox(box, points[i], pad=0.15, bboxprops={"edgecolor": edge, "linewidth": 1.5}))
    low, high = points.min(axis=0), points.max(axis=0)
    margin = 0.05 * (high - low)
    axes.set_xlim(low[0] - margin[0], high[0] + margin[0])
    axes.set_ylim(low[1] - margin[1], high[1] + margin[1])
    axes.axis("off")
    return figure


def draw_curves(records: Sequence[dict[str, Any]]) -> Any:
    """metrics.jsonl's records: the loss as teacher entropy + KL, accuracy, the schedules and the throughput."""
    from matplotlib.figure import Figure

    steps = [record for record in records if "loss" in record]
    x = [record["step"] for record in steps]
    figure = Figure(figsize=(10, 6), layout="constrained")
    (loss, knn), (schedules, speed) = figure.subplots(2, 2)
    entropy, kl = ([record[key] for record in steps] for key in ("teacher_entropy", "kl"))
    loss.stackplot(x, entropy, kl, labels=["teacher entropy", "KL"], colors=["#9db8d6", "#c98a3a"])
    loss.set_title("loss = entropy + KL", fontsize=10)
    loss.legend(fontsize=8)
    evaluated = [record for record in records if "knn_top1" in record]
    knn.plot([r["step"] for r in evaluated], [r["knn_top1"] for r in evaluated], "o-", color="#3b6ea5", label="teacher")
    for key, name in (("knn_raw_pixels", "raw pixels"), ("knn_chance", "chance")):
        if evaluated:
            knn.axhline(evaluated[-1][key], ls="--", color="#868e96", lw=1)
            knn.text(0, evaluated[-1][key], name, fontsize=7, va="bottom", color="#868e96")
    knn.set_title("k-NN top-1, %", fontsize=10)
    for key in ("lr", "weight_decay", "teacher_temp", "teacher_momentum"):
        values = np.array([record[key] for record in steps], dtype=float)
        span = f"{key} {values.min():.3g} to {values.max():.3g}" if len(values) else key
        schedules.plot(x, values / values.max() if len(values) and values.max() else values, label=span)
    schedules.set_title("schedules, as parts of their maximum", fontsize=10)
    schedules.legend(fontsize=7)
    speed.plot(x, [record["images_per_second"] for record in steps], color="#3b6ea5")
    speed.set_ylim(bottom=0)
    speed.set_title("images/s", fontsize=10)
    for axes in (loss, knn, schedules, speed):
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _enlarged(values: Tensor, size: tuple[int, ...]) -> np.ndarray:
    """A map (h, w) at the size of a picture, patch by patch."""
    wide = values.repeat_interleave(size[0] // values.shape[0], 0).repeat_interleave(size[1] // values.shape[1], 1)
    return wide.float().numpy()


def _grid(rows: int, titles: Sequence[str]) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_CELL * len(titles), _CELL * rows + 0.25), layout="constrained")
    axes = figure.subplots(rows, len(titles), squeeze=False)
    for cell in axes.flat:
        cell.set_xticks([])
        cell.set_yticks([])
        cell.spines[:].set_visible(False)
    for cell, title in zip(axes[0], titles, strict=True):
        cell.set_title(title, fontsize=8)
    return figure, axes


def picture_of(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalised images (b, 3, h, w) -> pictures (b, h, w, 3) in [0, 1]."""
    shape = (1, -1, 1, 1)
    scaled = images * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)
    return scaled.clamp(0, 1).permute(0, 2, 3, 1)
