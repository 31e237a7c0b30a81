"""`dino-ds pictures`: what a teacher sees, as PNG files: attention, PCA of patches, similarity, neighbours, a map."""

from __future__ import annotations

import json as jsons
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from dino_ds.data.images import UnreadableImage
from dino_ds.data.multicrop import MEAN, STD, EvalCrop
from dino_ds.data.sources import Source
from dino_ds.errors import ConfigError, DataError
from dino_ds.evals.features import spread_indices
from dino_ds.evals.knn import nearest
from dino_ds.pictures import draw
from dino_ds.pictures.curves import draw_curves
from dino_ds.pictures.embedding import TITLES, draw_map, place
from dino_ds.tools.evaluate import find_images
from dino_ds.weights.load import Backbone, load

_BATCH = 32
_NEIGHBOURS = 6
_QUERIES = 6
_DPI = 110
KINDS = ("attention", "pca", "similarity", "neighbours", "map")


def run(
    *,
    model: str | None,
    source: str | None,
    root: str | None,
    out: str | None,
    images: int,
    bank: int,
    size: int | None,
    json: bool,
) -> None:
    """One PNG of each kind into `out`: `images` images of the source, spread evenly; neighbours among `bank`.

    A run's curves are drawn too. Raises ConfigError, DataError, CheckpointError.
    """
    if model is None:
        raise ConfigError("give a run folder, a file of weights, a Hugging Face folder or a timm name")
    backbone = load(model).to("cuda" if torch.cuda.is_available() else "cpu")
    found = find_images(model, source, root)
    folder = Path(out) if out else Path(model) / "pictures" if Path(model).is_dir() else Path("pictures")
    side = _side(backbone, size)
    written = []
    for name, figure in _figures(backbone, found, images, bank, side, Path(model) / "metrics.jsonl"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / f"{name}.png", dpi=_DPI)
        except OSError as error:
            raise ConfigError(f"{folder} can't be written: {error.strerror or error}; mend --out") from None
        written.append(str(folder / f"{name}.png"))
    print(jsons.dumps({"pictures": written}) if json else "\n".join(written))


def _figures(backbone: Backbone, source: Source, images: int, bank: int, side: int, metrics: Path) -> Any:
    """(name, Figure) one after another."""
    shown, _ = _read(source, spread_indices(len(source), images), side)
    pictures = draw.picture_of(shown, MEAN, STD)
    attention, tokens = _batches(backbone.attention, shown), _batches(backbone.patch_tokens, shown)
    yield "attention", draw.draw_attention(pictures, attention)
    yield "pca", draw.draw_pca(pictures, tokens)
    middle = tokens.shape[1] // 2
    chosen = [(i, middle, middle) for i in range(min(4, len(shown)))]
    yield "similarity", draw.draw_similarity(pictures, tokens, chosen)
    crops, indices = _read(source, spread_indices(len(source), bank), backbone.image_size)
    features = _batches(backbone.features, crops)
    thumbnails = draw.picture_of(crops, MEAN, STD).numpy()
    labels = source.labels
    names = None if labels is None or source.classes is None else [source.classes[labels[i]] for i in indices]
    yield "neighbours", _neighbours(features, thumbnails, names)
    small = list((255 * thumbnails).round().astype(np.uint8))
    yield "map", draw_map(place(features, "tsne"), small, names, f"{TITLES['tsne']} of {len(small)} images' features")
    if metrics.is_file():
        yield "curves", draw_curves([jsons.loads(line) for line in metrics.read_text().splitlines()])


def _neighbours(features: Tensor, thumbnails: np.ndarray, names: Sequence[str] | None) -> Any:
    """Each query's own image, which is its nearest, is left out."""
    count = min(_NEIGHBOURS, len(features) - 1)
    queries = spread_indices(len(features), _QUERIES)
    similarity, index = nearest(features[queries], features, count + 1)
    found, captions = [], []
    for query, cosines, row in zip(queries, similarity.tolist(), index.tolist(), strict=True):
        others = [(i, cosine) for i, cosine in zip(row, cosines, strict=True) if i != query][:count]
        found.append([thumbnails[i] for i, _ in others])
        captions.append([f"{cosine:.2f}" + (f" {names[i]}" if names else "") for i, cosine in others])
    return draw.draw_neighbours([thumbnails[q] for q in queries], found, captions)


def _side(backbone: Backbone, size: int | None) -> int:
    """Pixels of the images whose patches are shown. Raises ConfigError."""
    patch = backbone.patch_size
    if size is None:
        return max(backbone.image_size, 16 * patch)
    if size % patch:
        raise ConfigError(f"--size {size} is not a multiple of the patch size {patch}: use {size // patch * patch}")
    return size


def _read(source: Source, indices: Sequence[int], side: int) -> tuple[Tensor, list[int]]:
    """Images (b, 3, side, side), normalised, and which they are; unreadable ones are left out. Raises DataError."""
    crop = EvalCrop(side)
    rows, kept = [], []
    for index in tqdm(indices, desc="images", leave=False, disable=None):
        try:
            image = source.load(index)
        except UnreadableImage:
            continue
        rows.append(crop(image if isinstance(image, Image.Image) else np.asarray(image)))
        kept.append(index)
    if len(rows) < 2:
        raise DataError(f"{len(rows)} of {len(indices)} images could be read; pictures want two or more")
    return torch.stack(rows), kept


def _batches(function: Any, images: Tensor) -> Tensor:
    where = function.__self__.vit.pos_embed.device
    return torch.cat([function(part.to(where)).float().cpu() for part in images.split(_BATCH)])
