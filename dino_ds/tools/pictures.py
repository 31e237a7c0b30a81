"""`dino-ds pictures`: what a teacher sees, as PNG files: attention, PCA of patches, similarity, neighbours, a map."""

from __future__ import annotations

import itertools
import json as jsons
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.data.images import evenly_spaced_indices
from dino_ds.data.multicrop import EvalCrop, channel_statistics
from dino_ds.data.sources import Source
from dino_ds.errors import ConfigError, DataError
from dino_ds.evals.knn import nearest
from dino_ds.options.model import PicturesOptions
from dino_ds.pictures import draw
from dino_ds.pictures.charts import draw_curves
from dino_ds.pictures.embedding import TITLES, draw_map, find_method, place
from dino_ds.pictures.series import Metrics, read_metrics
from dino_ds.tools.chosen_images import Picked, choose, find_patches, read_cuts, spread
from dino_ds.tools.evaluate import find_images
from dino_ds.tools.frozen import in_parts, load_frozen, side_of
from dino_ds.tools.idle import check_unused_options
from dino_ds.tools.picture_files import PictureFiles
from dino_ds.weights.load import Backbone

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("attention", "pca", "similarity", "neighbours", "map", "curves")
_OF_PATCHES, _OF_FEATURES = KINDS[:3], KINDS[3:5]
_METRICS = "metrics.jsonl"
_IMAGES, _BANK, _NEIGHBOURS, _QUERIES, _PATCHES = 6, 500, 6, 6, 4
_MOST = 100
"""Images that one picture shows, of those that are only counted."""
_THUMBNAIL = 128
_FEATURES_AT_ONCE = 32


@dataclass(frozen=True)
class _Wishes:
    """What was asked for beyond the images; `map` is a method of `place`."""

    kinds: Sequence[str]
    queries: str | None
    patch: str | None
    foreground: bool
    map: str
    bank: int
    size: int | None


_CONCERNS = {
    **dict.fromkeys(("source", "root"), (*_OF_PATCHES, *_OF_FEATURES)),
    **dict.fromkeys(("images", "size"), _OF_PATCHES),
    **{"queries": ("neighbours",), "patch": ("similarity",), "foreground": ("pca",), "map": ("map",)},
    "bank": _OF_FEATURES,
}
"""Option -> the pictures that it changes something of; --images are also the bank where there are no others."""


def run(options: PicturesOptions) -> None:
    """One PNG of each kind in `only`: see `PictureFiles`. Raises ConfigError, DataError, CheckpointError."""
    kinds = _kinds(options.only, Path(options.model))
    shown = _Shown(options.model, options.source, options.root, options.images or str(_IMAGES))
    given = {name: getattr(options, name) for name in _CONCERNS}
    given["foreground"] = options.foreground or None
    concerns = _CONCERNS if shown.has_others else {**_CONCERNS, "images": _CONCERNS["root"]}
    check_unused_options("only", kinds, concerns, given)
    if (options.source or options.root) and shown.are_files and not set(kinds) & set(_OF_FEATURES):
        unused = "--root" if options.root else "--source"
        raise ConfigError(f"--images {options.images} names files: no image of {unused} is looked at")
    wishes = _Wishes(
        kinds,
        options.queries,
        options.patch,
        options.foreground,
        find_method(options.map),
        options.bank or _BANK,
        options.size,
    )
    files = PictureFiles(options.model, options.out)
    for name, figure in _figures(options.model, shown, wishes):
        files.add(name, figure)
    print(jsons.dumps({"pictures": files.written}) if options.json else "\n".join(files.written))


class _Shown:
    """The images whose patches are shown, and those among which neighbours are sought; opened when first needed."""

    def __init__(self, model: str, source: str | None, root: str | None, images: str) -> None:
        self._named = (model, source, root)
        self._opened: Source | None = None
        self._count = int(images) if images.isdecimal() else None
        if self._count is not None and not 0 < self._count <= _MOST:
            raise ConfigError(f"--images {images}: give a number from 1 to {_MOST}, or name images")
        self._chosen = choose(images, "images", self.source) if self._count is None else []
        self.has_others = bool(source or root) or (Path(model) / "config.yaml").is_file()

    @property
    def are_files(self) -> bool:
        """Whether the source has no part in them."""
        return self._count is None and self._opened is None

    def source(self) -> Source:
        if self._opened is None:
            self._opened = find_images(*self._named)
        return self._opened

    def picked(self) -> list[Picked]:
        return self._chosen if self._count is None else spread(self.source(), self._count)

    def bank(self, size: int) -> list[Picked]:
        """Of the images of the run or of --root; where there are none, the chosen ones."""
        return spread(self.source(), size) if self.has_others or self._count is not None else self._chosen


def _figures(model: str, shown: _Shown, wishes: _Wishes) -> Iterator[tuple[str, Figure]]:
    """(name, Figure) one after another."""
    if set(wishes.kinds) - {"curves"}:
        backbone = load_frozen(model)
        asked = choose(wishes.queries, "queries", shown.source) if wishes.queries else None
        if set(wishes.kinds) & set(_OF_PATCHES):
            yield from _patch_figures(backbone, shown.picked(), wishes)
        if set(wishes.kinds) & set(_OF_FEATURES):
            yield from _feature_figures(backbone, shown.bank(wishes.bank), asked, wishes)
    if "curves" in wishes.kinds:
        yield "curves", draw_curves(_read_metrics(Path(model) / _METRICS))


def _patch_figures(backbone: Backbone, picked: Sequence[Picked], wishes: _Wishes) -> Iterator[tuple[str, Figure]]:
    crop = EvalCrop(side_of(backbone, wishes.size))
    cuts = list(read_cuts(picked, crop, "images", backbone.value_range))
    grid = crop.size // backbone.patch_size
    middles = [(i, grid // 2, grid // 2) for i in range(min(_PATCHES, len(cuts)))]
    patches = find_patches(wishes.patch, cuts, crop, grid) if wishes.patch else middles
    pixels = torch.stack([cut.pixels for cut in cuts])
    pictures = _pictures(pixels)
    attention = in_parts(backbone.attention, pixels)
    if "attention" in wishes.kinds:
        yield "attention", draw.draw_attention(pictures, attention)
    tokens = in_parts(backbone.patch_tokens, pixels)
    if "pca" in wishes.kinds:
        yield "pca", draw.draw_pca(pictures, tokens, attention if wishes.foreground else None)
    if "similarity" in wishes.kinds:
        yield "similarity", draw.draw_similarity(pictures, tokens, patches)


def _feature_figures(
    backbone: Backbone, picked: Sequence[Picked], asked: Sequence[Picked] | None, wishes: _Wishes
) -> Iterator[tuple[str, Figure]]:
    bank = _describe(backbone, picked, "bank")
    if len(bank) < 2:
        raise DataError(
            f"{len(bank)} of {len(picked)} images can be read; neighbours and the map want two or more: name them "
            "with --root, or choose other pictures, such as --only attention,pca,similarity"
        )
    if "neighbours" in wishes.kinds:
        some = [bank[i] for i in evenly_spaced_indices(len(bank), _QUERIES)]
        yield "neighbours", _neighbours(_describe(backbone, asked, "queries") if asked else some, bank)
    if "map" in wishes.kinds:
        groups = [image.group for image in bank if image.group is not None]
        features = torch.stack([image.features for image in bank])
        points, title = place(features, wishes.map), f"{TITLES[wishes.map]} of {len(bank)} images' features"
        thumbnails = [image.thumbnail for image in bank]
        yield "map", draw_map(points, thumbnails, groups if len(groups) == len(bank) else None, title)


@dataclass(frozen=True)
class _Described:
    """An image's features (d,), a small picture of it (uint8, at most 128 pixels a side), and its class."""

    name: str
    group: str | None
    features: Tensor
    thumbnail: np.ndarray


def _describe(backbone: Backbone, picked: Sequence[Picked], option: str) -> list[_Described]:
    found = []
    cuts = read_cuts(picked, EvalCrop(backbone.image_size), option, backbone.value_range)
    while batch := list(itertools.islice(cuts, _FEATURES_AT_ONCE)):
        pixels = torch.stack([cut.pixels for cut in batch])
        features, small = in_parts(backbone.features, pixels, len(pixels)), _thumbnails(pixels)
        for cut, row, thumbnail in zip(batch, features, small, strict=True):
            found.append(_Described(cut.picked.name, cut.picked.group, row, thumbnail))
    return found


def _neighbours(queries: Sequence[_Described], bank: Sequence[_Described]) -> Figure:
    """The nearest of the bank for each query, which is not its own neighbour."""
    asked, there = (torch.stack([image.features for image in images]) for images in (queries, bank))
    # One more than is shown: the query itself may be among them.
    similarity, index = nearest(asked, there, min(_NEIGHBOURS + 1, len(bank)))
    found, captions, same_class = [], [], []
    for query, cosines, row in zip(queries, similarity.tolist(), index.tolist(), strict=True):
        own = os.path.realpath(query.name)
        pairs = [(bank[i], cosine) for i, cosine in zip(row, cosines, strict=True)]
        others = [(image, cosine) for image, cosine in pairs if os.path.realpath(image.name) != own][:_NEIGHBOURS]
        found.append([image.thumbnail for image, _ in others])
        captions.append([query.group or "", *[f"{cosine:.2f} {image.group or ''}" for image, cosine in others]])
        same_class.append([_same(query.group, image.group) for image, _ in others])
    return draw.draw_neighbours([query.thumbnail for query in queries], found, captions, same_class)


def _same(one: str | None, other: str | None) -> bool | None:
    return None if one is None or other is None else one == other


def _kinds(only: Sequence[str] | None, model: Path) -> list[str]:
    """In the order of KINDS. Raises ConfigError."""
    has_curves = (model / _METRICS).is_file()
    if only and "curves" in only and not has_curves:
        raise ConfigError(f"--only curves: {model / _METRICS} does not exist; curves are those of a run folder")
    return [kind for kind in KINDS if (kind in only if only else kind != "curves" or has_curves)]


def _read_metrics(path: Path) -> Metrics:
    """Raises ConfigError."""
    try:
        metrics = read_metrics(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error}; fix it, or leave curves out with --only") from None
    if not metrics.lines:
        raise ConfigError(f"{path} holds no line of metrics: leave curves out with --only")
    return metrics


def _pictures(pixels: Tensor) -> Tensor:
    """Normalised images (b, c, h, w) -> pictures (b, h, w, 3)."""
    return draw.picture_of(pixels, *channel_statistics(pixels.shape[1]))


def _thumbnails(pixels: Tensor) -> np.ndarray:
    """Normalised images (b, c, h, w) -> uint8 (b, h, w, 3)."""
    if pixels.shape[-1] > _THUMBNAIL:
        pixels = F.interpolate(pixels, (_THUMBNAIL, _THUMBNAIL), mode="bilinear", antialias=True)
    return (255 * _pictures(pixels)).round().byte().numpy()
