"""`dino-ds pictures`: what a teacher sees, as PNG files: attention, PCA of patches, neighbors, a map, curves."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.basics.durable import replace_file, why_not_writable
from dino_ds.basics.text_file import read_step
from dino_ds.config.loading import load_recipe
from dino_ds.config.stages import home_of
from dino_ds.data.base import Source
from dino_ds.data.cutting import EvalCrop
from dino_ds.data.images import evenly_spaced_indices
from dino_ds.data.normalisation import Normalisation
from dino_ds.errors import ConfigError, DataError
from dino_ds.evals.knn import nearest
from dino_ds.options.model import PictureKind, PicturesOptions
from dino_ds.report import draw
from dino_ds.report.curves import Metrics, read_metrics
from dino_ds.report.folder import with_titles
from dino_ds.report.maps import TITLES, find_method, place
from dino_ds.report.model_options import (
    Picked,
    check_unused_options,
    choose,
    find_images,
    in_parts,
    load_for_pictures,
    read_cuts,
    side_of,
    spread,
)
from dino_ds.report.plot import draw_curves
from dino_ds.weights.load import Backbone

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS: tuple[str, ...] = get_args(PictureKind)
_OF_PATCHES, _OF_FEATURES = KINDS[:2], KINDS[2:4]
_METRICS = "metrics.jsonl"
_IMAGES, _BANK, _NEIGHBORS, _QUERIES = 6, 500, 6, 6
_MOST = 100
"""Images that one picture shows, of those that are only counted."""
_THUMBNAIL = 128
_FEATURES_AT_ONCE = 32


_CONCERNS = {
    **dict.fromkeys(("source", "root"), (*_OF_PATCHES, *_OF_FEATURES)),
    **dict.fromkeys(("images", "size"), _OF_PATCHES),
    **{"foreground": ("pca",), "map": ("map",), "bank": _OF_FEATURES},
}
"""Option -> the pictures that it changes something of; --images are also the bank where there are no others."""


def run(options: PicturesOptions) -> None:
    """One PNG of each kind in `only`: see `PictureFiles`. Raises ConfigError, DataError, CheckpointError."""
    kinds = _kinds(options.only, home_of(options.model).folder)
    shown = _Shown(options.model, options.source, options.root, options.images or str(_IMAGES))
    concerns = _CONCERNS if shown.has_others else {**_CONCERNS, "images": _CONCERNS["root"]}
    check_unused_options("only", kinds, concerns, options)
    if (options.source or options.root) and shown.are_files and not set(kinds) & set(_OF_FEATURES):
        unused = "--root" if options.root else "--source"
        raise ConfigError(f"--images {options.images} names files: no image of {unused} is looked at")
    find_method(options.map)  # a map may take minutes: a missing package is reported first
    files = PictureFiles(options.model, options.out)
    for name, figure in _figures(options, kinds, shown):
        files.add(name, figure)
    print(json.dumps({"pictures": files.written}) if options.json else "\n".join(files.written))


class _Shown:
    """The images whose patches are shown, and those among which neighbors are sought; opened when first needed."""

    def __init__(self, model: str, source: str | None, root: str | None, images: str) -> None:
        self._named = (model, source, root)
        self._opened: Source | None = None
        self._count = int(images) if images.isdecimal() else None
        if self._count is not None and not 0 < self._count <= _MOST:
            raise ConfigError(f"--images {images}: give a number from 1 to {_MOST}, or name images")
        self._chosen = choose(images, "images", self.source) if self._count is None else []
        self.has_others = bool(source or root) or home_of(model).is_run

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
        """Images of the run or of --root, or the chosen ones if there are none."""
        return spread(self.source(), size) if self.has_others or self._count is not None else self._chosen


def _figures(options: PicturesOptions, kinds: Sequence[str], shown: _Shown) -> Iterator[tuple[str, Figure]]:
    """(name, Figure) one after another."""
    if set(kinds) - {"curves"}:
        backbone = load_for_pictures(options.model)
        kinds = _possible(kinds, backbone, options)
        if set(kinds) & set(_OF_PATCHES):
            yield from _patch_figures(backbone, shown.picked(), kinds, options)
        if set(kinds) & set(_OF_FEATURES):
            picked = shown.bank(options.bank or _BANK)
            bank = _describe(backbone, picked, "bank")
            if len(bank) < 2:
                raise DataError(
                    f"{len(bank)} of {len(picked)} images can be read; neighbors and the map want two or more: name "
                    "them with --root, or choose other pictures, such as --only attention,pca"
                )
            if "neighbors" in kinds:
                yield "neighbors", _neighbors([bank[i] for i in evenly_spaced_indices(len(bank), _QUERIES)], bank)
            if "map" in kinds:
                yield "map", _map(bank, find_method(options.map))
    if "curves" in kinds:
        yield "curves", draw_curves(_read_metrics(home_of(options.model).folder / _METRICS))


def _possible(kinds: Sequence[str], backbone: Backbone, options: PicturesOptions) -> list[str]:
    """Kinds of pictures that the network has; options.only None asks for all of these. Raises ConfigError."""
    if options.foreground or "attention" in (options.only or ()):
        _ = backbone.vit  # the side at which the CLS token looks is the foreground
    if options.only and set(options.only) & set(_OF_PATCHES) and not backbone.has_patches:
        backbone.network.patch_grid(backbone.image_size, backbone.image_size)  # says why not
    left_out = () if backbone.is_vit else _OF_PATCHES[:1] if backbone.has_patches else _OF_PATCHES
    return [kind for kind in kinds if kind not in left_out]


def _patch_figures(
    backbone: Backbone, picked: Sequence[Picked], kinds: Sequence[str], options: PicturesOptions
) -> Iterator[tuple[str, Figure]]:
    crop = EvalCrop(side_of(backbone, options.size), backbone.normalisation)
    cuts = list(read_cuts(picked, crop, "images", backbone.value_range))
    pixels = torch.stack([cut.pixels for cut in cuts])
    pictures = draw.picture_of(pixels, backbone.normalisation.mean, backbone.normalisation.std)
    attention = in_parts(backbone.attention, pixels) if backbone.is_vit else None
    if "attention" in kinds and attention is not None:
        yield "attention", draw.draw_attention(pictures, attention)
    if "pca" in kinds:
        tokens = in_parts(backbone.patch_tokens, pixels)
        yield "pca", draw.draw_pca(pictures, tokens, attention if options.foreground else None)


@dataclass(frozen=True)
class _Described:
    """An image's features (d,), a small picture of it (uint8, at most 128 pixels a side), and its class."""

    name: str
    group: str | None
    features: Tensor
    thumbnail: np.ndarray


def _describe(backbone: Backbone, picked: Sequence[Picked], option: str) -> list[_Described]:
    found = []
    cuts = read_cuts(picked, EvalCrop(backbone.image_size, backbone.normalisation), option, backbone.value_range)
    while batch := list(itertools.islice(cuts, _FEATURES_AT_ONCE)):
        pixels = torch.stack([cut.pixels for cut in batch])
        features = in_parts(backbone.features, pixels, len(pixels))
        small = _thumbnails(pixels, backbone.normalisation)
        for cut, row, thumbnail in zip(batch, features, small, strict=True):
            found.append(_Described(cut.picked.name, cut.picked.group, row, thumbnail))
    return found


def _map(bank: Sequence[_Described], method: str) -> Figure:
    groups = [image.group for image in bank if image.group is not None]
    points = place(torch.stack([image.features for image in bank]), method)
    title, thumbnails = f"{TITLES[method]} of {len(bank)} images' features", [image.thumbnail for image in bank]
    return draw.draw_map(points, thumbnails, groups if len(groups) == len(bank) else None, title)


def _neighbors(queries: Sequence[_Described], bank: Sequence[_Described]) -> Figure:
    """The nearest of the bank for each query, which is not its own neighbor."""
    asked, there = (torch.stack([image.features for image in images]) for images in (queries, bank))
    # One more than is shown: the query itself may be among them.
    similarity, index = nearest(asked, there, min(_NEIGHBORS + 1, len(bank)))
    found, captions, same_class = [], [], []
    for query, cosines, row in zip(queries, similarity.tolist(), index.tolist(), strict=True):
        own = os.path.realpath(query.name)
        pairs = [(bank[i], cosine) for i, cosine in zip(row, cosines, strict=True)]
        others = [(image, cosine) for image, cosine in pairs if os.path.realpath(image.name) != own][:_NEIGHBORS]
        found.append([image.thumbnail for image, _ in others])
        captions.append([query.group or "", *[f"{cosine:.2f} {image.group or ''}" for image, cosine in others]])
        groups = [image.group for image, _ in others]
        same_class.append([None if None in (query.group, group) else query.group == group for group in groups])
    return draw.draw_neighbors([query.thumbnail for query in queries], found, captions, same_class)


def _kinds(only: Sequence[str] | None, model: Path) -> list[str]:
    """Kinds of pictures to draw, in the order of KINDS. Raises ConfigError."""
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
    try:
        return with_titles(metrics, load_recipe(str(path.parent / "config.yaml"), {}))
    except ConfigError:  # gone, or of another version: the terms have their names alone
        return metrics


def _thumbnails(pixels: Tensor, normalisation: Normalisation) -> np.ndarray:
    """Normalised images (b, c, h, w) -> uint8 (b, h, w, 3)."""
    if pixels.shape[-1] > _THUMBNAIL:
        pixels = F.interpolate(pixels, (_THUMBNAIL, _THUMBNAIL), mode="bilinear", antialias=True)
    return (255 * draw.picture_of(pixels, normalisation.mean, normalisation.std)).round().byte().numpy()


class PictureFiles:
    """`out`, or RUN/pictures where `model` is a run (of a checkpoint a folder in it), or ./pictures; `written` are the
    files' paths so far.

    Raises ConfigError where nothing can be written: a map may take minutes.
    """

    def __init__(self, model: str, out: str | None) -> None:
        home = home_of(model)
        own = home.folder / "pictures" / home.name if home.folder.is_dir() else Path("pictures")
        self._folder = Path(os.path.expanduser(out)) if out else own
        board = home.folder / "tensorboard"
        self._board = board if out is None and board.is_dir() else None
        step = home.name.removeprefix("step_")
        described = home.folder / f"{home.name or 'teacher'}.json"
        self._step = int(step) if step.isdecimal() else _step_of(described)
        self.written: list[str] = []
        if reason := why_not_writable(self._folder / "a.png"):
            raise _not_written(self._folder, reason)

    def add(self, name: str, figure: Figure) -> None:
        """Raises ConfigError where it can't be written."""
        path = self._folder / f"{name}.png"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, draw.figure_png(figure))
            if self._board is not None:
                from torch.utils.tensorboard import SummaryWriter

                with SummaryWriter(self._board) as writer:
                    writer.add_image(f"pictures/{name}", draw.figure_tensor(figure), self._step)
        except OSError as error:
            raise _not_written(path, error.strerror or error) from None
        self.written.append(str(path))


def _not_written(path: Path, reason: object) -> ConfigError:
    return ConfigError(f"{path} can't be written: {reason}; name another folder with --out")


def _step_of(about: Path) -> int:
    """The step of the teacher that is shown, or 0 if nothing tells it."""
    try:
        return read_step(about)
    except (OSError, ValueError):
        return 0
