"""Pictures of a teacher's features: attention, PCA of patches, neighbors and a map; during a run and as a command."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.basics.files import check_absent, replace_file, why_not_writable
from dino_ds.basics.names import step_name
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import find_model_folder
from dino_ds.data.decode import load_image
from dino_ds.data.images import Source, UnreadableImage, ValueRange, evenly_spaced_indices
from dino_ds.data.multicrop import EvalCrop
from dino_ds.data.normalization import Normalization
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError
from dino_ds.evals.context import live_teacher
from dino_ds.evals.features import find_images, keep_generators
from dino_ds.evals.knn import nearest
from dino_ds.options.definition import PictureKind, PicturesOptions, Result
from dino_ds.report import draw
from dino_ds.run.run import PeriodicTask, StepContext
from dino_ds.weights.load import Backbone, load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS: tuple[str, ...] = get_args(PictureKind)
_HEADINGS = {
    "pca": "below, the first three principal components of all their patches as red, green and blue",
    "attention": "the CLS token attends most to the lightest patches",
}
_OF_PATCHES, _OF_FEATURES = tuple(_HEADINGS), ("map", "neighbors")
_SHOWN, _BANK, _QUERIES, _NEIGHBORS = 4, 300, 6, 6
_THUMBNAIL = 128
_AT_ONCE = 32
_FEW_PATCHES, _MANY_PATCHES = 16, 30
_LEAST_PATCHES, _LARGEST_PATCH = 100, 16
"""Fewest patches of an image, and largest side of a patch, with which attention shows more than a few blocks."""
_TIMES = 6
"""How many times a run draws pictures, start and end included, if its recipe does not say how often."""


def run(options: PicturesOptions) -> Result:
    """Write a PNG file of each kind in `only`. Raises ConfigError, DataError, CheckpointError."""
    files = PictureFiles(options.model, options.out, options.only or KINDS)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(options.model, device)
    kinds = options.only or shown_kinds(model)
    source = find_images(options.model, options.source, options.root)
    for name, figure in draw_pictures(model, source, model.value_range, kinds, device):
        files.add(name, draw.figure_pixels(figure))
    return Result({"pictures": files.written}, "\n".join(files.written))


def shown_kinds(model: Backbone) -> list[str]:
    """List the kinds of pictures that say something about a network."""
    patches = (model.image_size // model.stride) ** 2
    has_attention = model.is_vit and model.stride <= _LARGEST_PATCH and patches >= _LEAST_PATCHES
    none = {"pca": not model.has_patches, "attention": not has_attention}
    return [kind for kind in KINDS if not none.get(kind)]


def draw_pictures(
    model: Backbone,
    source: Source,
    value_range: ValueRange | None,
    kinds: Sequence[str],
    device: torch.device,
    at_batch: Callable[[], object] = lambda: None,
) -> Iterator[tuple[str, Figure]]:
    """Yield (kind, Figure) of images spread evenly over a source; `at_batch` is called after each batch.

    Raises ConfigError for a kind that the network does not support, DataError if the images can't be read.
    """
    if chosen := [kind for kind in _OF_PATCHES if kind in kinds]:
        crop = EvalCrop(side_of(model), model.normalization)
        pixels = torch.stack([image for _, image in _read(source, _SHOWN, crop, value_range)]).to(device)
        pictures = draw.picture_of(pixels.cpu(), model.normalization.mean, model.normalization.std)
        for kind in chosen:
            of_patches = model.attention if kind == "attention" else model.patch_tokens
            drawn = draw.draw_attention if kind == "attention" else draw.draw_pca
            values = torch.cat([of_patches(image).float().cpu() for image in pixels.split(1)])
            yield kind, drawn(pictures, values, f"{len(pixels)} of {len(source):,} images; {_HEADINGS[kind]}")
            at_batch()
    if chosen := [kind for kind in _OF_FEATURES if kind in kinds]:
        bank = _Bank(model, source, value_range, device, at_batch)
        for kind in chosen:
            yield kind, bank.draw_map() if kind == "map" else bank.draw_neighbors()
            at_batch()


def side_of(model: Backbone) -> int:
    """Return the side in pixels of images whose patches are shown: twice the native side, but 16 to 30 patches and at
    least the native side; the native side if the network takes no other."""
    native = model.image_size // model.stride
    side = model.stride * max(native, min(max(2 * native, _FEW_PATCHES), _MANY_PATCHES))
    try:
        model.network.check_image(side, side)
    except ConfigError:
        return model.image_size
    return side


def _read(source: Source, count: int, crop: EvalCrop, value_range: ValueRange | None) -> Iterator[tuple[int, Tensor]]:
    """Yield index and normalized pixels (c, side, side) of at most `count` images spread evenly over `source`, without
    unreadable ones. Raises DataError if none can be read."""
    chosen, readable, first = evenly_spaced_indices(len(source), count), 0, ""
    for index in chosen:
        try:
            pixels = crop(load_image(source, index, value_range, crop.channels))
        except UnreadableImage as error:
            first = first or str(error)
            continue
        readable += 1
        yield index, pixels
    if not readable:
        raise DataError(f"none of {len(chosen)} images can be read; the first is {first}")


class _Bank:
    """Features (n, d), thumbnails (uint8, at most 128 pixels a side) and classes of images spread over a source."""

    def __init__(
        self,
        model: Backbone,
        source: Source,
        value_range: ValueRange | None,
        device: torch.device,
        at_batch: Callable[[], object],
    ) -> None:
        crop = EvalCrop(model.image_size, model.normalization)
        images = _read(source, _BANK, crop, value_range)
        features, indices = list[Tensor](), list[int]()
        self._thumbnails: list[np.ndarray] = []
        while batch := list(itertools.islice(images, _AT_ONCE)):
            pixels = torch.stack([image for _, image in batch])
            indices += [index for index, _ in batch]
            features.append(model.features(pixels.to(device)).float().cpu())
            self._thumbnails += _thumbnails(pixels, model.normalization)
            at_batch()
        if len(indices) < 2:
            raise DataError("one image alone has no neighbors and no map: name two or more (--root DIR)")
        self._features, self._total = torch.cat(features), len(source)
        labels, classes = source.labels, source.classes
        known = [-1 if labels is None else labels[i] for i in indices]
        self._groups = [classes[label] if classes and label >= 0 else None for label in known]

    def draw_map(self) -> Figure:
        points = draw.place(self._features)
        known = [group for group in self._groups if group is not None]
        groups = known if len(known) == len(self._groups) else None
        title = f"t-SNE of the features of {len(points)} of {self._total:,} images"
        return draw.draw_map(points, self._thumbnails, groups, f"{title}; frames: classes" if groups else title)

    def draw_neighbors(self) -> Figure:
        """Draw the nearest images of some queries; a query is not its own neighbor."""
        queries = evenly_spaced_indices(len(self._features), _QUERIES)
        similarity, index = nearest(self._features[queries], self._features, min(_NEIGHBORS + 1, len(self._features)))
        neighbors, captions, same_class = [], [], []
        for query, cosines, row in zip(queries, similarity.tolist(), index.tolist(), strict=True):
            others = [(i, cosine) for i, cosine in zip(row, cosines, strict=True) if i != query][:_NEIGHBORS]
            label, labels = self._groups[query], [self._groups[i] for i, _ in others]
            neighbors.append([self._thumbnails[i] for i, _ in others])
            captions.append([label or "", *[f"{cosine:.2f} {self._groups[i] or ''}" for i, cosine in others]])
            same_class.append([None if None in (label, other) else label == other for other in labels])
        bank = f"{len(self._features)} of {self._total:,} images"
        heading = f"{len(queries)} images and the nearest by their features, of {bank}, with cosines"
        return draw.draw_neighbors([self._thumbnails[i] for i in queries], neighbors, captions, same_class, heading)


def _thumbnails(pixels: Tensor, normalization: Normalization) -> list[np.ndarray]:
    """Normalized images (b, c, h, w) -> uint8 (h, w, 3) each."""
    if pixels.shape[-1] > _THUMBNAIL:
        pixels = F.interpolate(pixels, (_THUMBNAIL, _THUMBNAIL), mode="bilinear", antialias=True)
    return list((255 * draw.picture_of(pixels, normalization.mean, normalization.std)).round().byte().numpy())


class PeriodicPictures(PeriodicTask):
    """Draws the teacher's pictures, of the same training images each time, into RUN/pictures/STEP/ and TensorBoard.

    This happens every `every` steps, at the start and at the end of the run.
    """

    def __init__(
        self,
        source: Source,
        every: int,
        image_size: int,
        normalization: Normalization,
        value_range: ValueRange | None = None,
    ) -> None:
        self._source, self._every, self._image_size = source, every, image_size
        self._normalization = normalization
        self._range = value_range

    @classmethod
    def build(cls, recipe: Recipe, source: Source, epoch_steps: int) -> PeriodicPictures:
        batch, asked = recipe.data.global_batch, recipe.eval.pictures_every
        length = recipe.length.in_steps(batch, epoch_steps) - recipe.length.begin
        every = -(-length // (_TIMES - 1)) if isinstance(asked, str) else asked.in_steps(batch, epoch_steps)
        return cls(source, every, recipe.crops.global_size, Normalization.of(recipe), recipe.data.known_range)

    def due(self, step: int, last: bool) -> bool:
        return last or step % self._every == 0

    def run(self, moment: StepContext) -> bool:
        """Draw on rank 0, which has the whole teacher; the others wait."""
        if distributed.rank() == 0:
            try:
                self._draw(moment)
            except Exception as error:  # a full disk, too little memory, a library: training must go on
                reason = error or type(error).__name__
                moment.log.info(f"warning  no pictures of step {moment.step}: {reason}; training continues")
        distributed.barrier()
        return True

    def _draw(self, moment: StepContext) -> None:
        """Write PNG files, and the same pictures to TensorBoard."""
        pictures = moment.run_dir / "pictures"
        folder = pictures / step_name(moment.step)
        teacher = live_teacher(moment.teacher, self._image_size, self._normalization)
        with keep_generators(moment.device), teacher as model:
            drawn = draw_pictures(
                model, self._source, self._range, shown_kinds(model), moment.device, moment.stop_requested
            )
            for name, figure in drawn:
                pixels = draw.figure_pixels(figure)
                moment.log.picture(name, torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), moment.step)
                pictures.mkdir(exist_ok=True)  # without parents: a deleted run folder must not come back
                folder.mkdir(exist_ok=True)
                replace_file(folder / f"{name}.png", draw.png_of(pixels))


class PictureFiles:
    """Writes PNG files into `out`; by default into RUN/pictures if `model` is a run, a folder in it if `model` is a
    checkpoint, else ./pictures. written: the paths of the files so far.

    Raises ConfigError early if the folder can't be written to, or if a file for one of `kinds` exists outside of a run:
    pictures may take minutes.
    """

    def __init__(self, model: str, out: str | None, kinds: Sequence[str]) -> None:
        source = find_model_folder(model)
        default = source.folder / "pictures" / source.name if source.folder.is_dir() else Path("pictures")
        self._folder = Path(os.path.expanduser(out)) if out else default
        self.written: list[str] = []
        for kind in kinds if out or not source.is_run else ():
            check_absent(self._folder / f"{kind}.png")
        if reason := why_not_writable(self._folder / "a.png"):
            raise _not_written(self._folder, reason)

    def add(self, name: str, pixels: np.ndarray) -> None:
        """Write a picture (h, w, 4). Raises ConfigError where it can't be written."""
        path = self._folder / f"{name}.png"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, draw.png_of(pixels))
        except OSError as error:
            raise _not_written(path, error.strerror or error) from None
        self.written.append(str(path))


def _not_written(path: Path, reason: object) -> ConfigError:
    return ConfigError(f"{path} can't be written: {reason}; name another folder with --out")
