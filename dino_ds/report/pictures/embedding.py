"""A map of features: each image is a thumbnail near similar ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.errors import ConfigError
from dino_ds.report.pictures.canvas import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SEED = 0
_LEGEND = 20
"""Groups that a legend names, as many as there are colors."""
_INCHES = 8.0


def find_method(name: str | None) -> str:
    """The named method; without a name t-SNE if scikit-learn is installed, else PCA.

    Raises ConfigError for a method of METHODS that is not installed.
    """
    if name is None:
        return "tsne" if _is_installed("tsne") else "pca"
    if not _is_installed(name):
        module, extra = _NEEDS[name]
        raise ConfigError(f"--map {name} needs {module}: pip install 'dino_ds[{extra}]', or --map pca")
    return name


def place(features: Tensor, method: str) -> np.ndarray:
    """Features (n, d), n > 1 -> points (n, 2) by a method of METHODS: the same ones each time. Cosines decide, as in
    k-NN."""
    unit = F.normalize(features.float(), dim=-1)
    # Of so few images there are no neighbourhoods to keep.
    return METHODS["pca"](unit) if len(unit) < 5 else METHODS[method](unit)


def _is_installed(method: str) -> bool:
    if method not in _NEEDS:
        return True
    try:
        found = importlib.util.find_spec(_NEEDS[method][0])
    except ValueError:  # a stand-in for a module may have no spec
        return False
    # Caches that outlive a module leave a folder of its name, which has no file to import.
    return found is not None and found.origin is not None


def _pca(unit: Tensor) -> np.ndarray:
    centered = unit - unit.mean(dim=0)
    _, _, axes = torch.linalg.svd(centered, full_matrices=False)
    return (centered @ axes[:2].T).numpy()


def _tsne(unit: Tensor) -> np.ndarray:
    from sklearn.manifold import TSNE

    return TSNE(perplexity=min(30.0, (len(unit) - 1) / 3), init="pca", random_state=_SEED).fit_transform(unit.numpy())


def _umap(unit: Tensor) -> np.ndarray:
    from umap import UMAP

    neighbours = min(15, len(unit) - 1)
    # With a seed it works on one thread, and warns that it does unless that is asked for.
    start = "spectral" if len(unit) > 4 * neighbours else "random"
    mapper = UMAP(n_neighbors=neighbours, metric="cosine", random_state=_SEED, n_jobs=1, init=start)
    return mapper.fit_transform(unit.numpy())


METHODS: dict[str, Callable[[Tensor], np.ndarray]] = {"tsne": _tsne, "umap": _umap, "pca": _pca}
_NEEDS = {"tsne": ("sklearn", "viz"), "umap": ("umap", "umap")}
"""Module and extra."""
TITLES = {"tsne": "t-SNE", "umap": "UMAP", "pca": "PCA"}


def draw_map(points: np.ndarray, thumbnails: Sequence[np.ndarray], groups: Sequence[str] | None, title: str) -> Figure:
    """Points (n, 2) with a uint8 thumbnail (h, w, 3) each, framed in a color by group; a legend of up to 20 groups."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    names = sorted(set(groups)) if groups else []
    legend = 0 < len(names) <= _LEGEND
    columns = max(1, min(6, 100 // (4 + max(map(len, map(shorten, names)), default=0))))
    bottom = (0.25 * -(-len(names) // columns) + 0.1) if legend else 0.0
    figure = Figure(figsize=(_INCHES, _INCHES + 0.3 + bottom))
    height = figure.get_figheight()
    axes = figure.add_axes((0, bottom / height, 1, _INCHES / height))
    figure.text(0.5, 1 - 0.2 / height, title, ha="center", fontsize=9)
    low, high = points.min(axis=0), points.max(axis=0)
    places = 0.04 + 0.92 * (points - low) / np.maximum(high - low, 1e-12)
    half = float(np.clip(0.35 / np.sqrt(len(points)), 0.015, 0.035))
    colors = colormaps["tab20"](range(_LEGEND))[:, :3]
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
