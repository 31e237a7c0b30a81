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
from dino_ds.evals.classifiers import nearest
from dino_ds.evals.context import live_teacher
from dino_ds.evals.features import find_images, keep_generators
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
_SHOWN, _BANK, _QUERIES, _NEIGHBORS, _THUMBNAIL = 4, 300, 6, 6, 128


def run(options: PicturesOptions) -> Result:
    """Write a PNG file of each kind in `only` into `out`; by default into RUN/pictures if `model` is a run, a folder in
    it if `model` is a checkpoint, else ./pictures. Raises ConfigError, DataError, CheckpointError."""
    home = find_model_folder(options.model)
    default = home.folder / "pictures" / home.name if home.folder.is_dir() else Path("pictures")
    folder, written = Path(os.path.expanduser(options.out)) if options.out else default, list[str]()

    def not_written(path: Path, reason: object) -> ConfigError:
        return ConfigError(f"{path} can't be written: {reason}; name another folder with --out")

    for kind in (options.only or KINDS) if options.out or not home.is_run else ():  # pictures may take minutes
        check_absent(folder / f"{kind}.png")
    if why := why_not_writable(folder / "a.png"):
        raise not_written(folder, why)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(options.model, device)
    kinds = options.only or _shown_kinds(model)
    source = find_images(options.model, options.source, options.root)
    for name, figure in draw_pictures(model, source, model.value_range, kinds, device):
        path = folder / f"{name}.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, draw.png_of(draw.figure_pixels(figure)))
        except OSError as error:
            raise not_written(path, error.strerror or error) from None
        written.append(str(path))
    return Result({"pictures": written}, "\n".join(written))


def _shown_kinds(model: Backbone) -> list[str]:
    """The kinds of pictures that say something about a network: attention to few patches shows little."""
    has_attention = model.is_vit and model.stride <= 16 and (model.image_size // model.stride) ** 2 >= 100
    shows = {"pca": model.has_patches, "attention": has_attention}
    return [kind for kind in KINDS if shows.get(kind, True)]


def draw_pictures(
    model: Backbone,
    source: Source,
    value_range: ValueRange | None,
    kinds: Sequence[str],
    device: torch.device,
    at_batch: Callable[[], object] = lambda: None,
) -> Iterator[tuple[str, Figure]]:
    """Yield (kind, Figure) of images spread evenly over a source; `at_batch` is called after each batch.
    Raises ConfigError for a kind that the network does not support, DataError if the images can't be read."""
    if chosen := [kind for kind in _HEADINGS if kind in kinds]:
        # Twice the native side, within 16 to 30 patches and not below it; the native one if no other is possible.
        native = model.image_size // model.stride
        side = model.stride * max(native, min(max(2 * native, 16), 30))
        try:
            model.network.check_image(side, side)
        except ConfigError:
            side = model.image_size
        crop = EvalCrop(side, model.normalization)
        pixels = torch.stack([image for _, image in _read(source, _SHOWN, crop, value_range)]).to(device)
        pictures = draw.picture_of(pixels.cpu(), model.normalization.mean, model.normalization.std)
        for kind in chosen:
            of_patches = model.attention if kind == "attention" else model.patch_tokens
            drawn = draw.draw_attention if kind == "attention" else draw.draw_pca
            values = torch.cat([of_patches(image).float().cpu() for image in pixels.split(1)])
            yield kind, drawn(pictures, values, f"{len(pixels)} of {len(source):,} images; {_HEADINGS[kind]}")
            at_batch()
    if chosen := [kind for kind in ("map", "neighbors") if kind in kinds]:
        bank = _Bank(model, source, value_range, device, at_batch)
        for kind in chosen:
            yield kind, bank.draw_map() if kind == "map" else bank.draw_neighbors()
            at_batch()


def _read(source: Source, count: int, crop: EvalCrop, value_range: ValueRange | None) -> Iterator[tuple[int, Tensor]]:
    """Yield index and normalized pixels (c, side, side) of at most `count` images spread evenly over `source`, without
    unreadable ones. Raises DataError if none can be read."""
    chosen, unreadable = evenly_spaced_indices(len(source), count), list[str]()
    for index in chosen:
        try:
            pixels = crop(load_image(source, index, value_range, crop.channels))
        except UnreadableImage as error:
            unreadable.append(str(error))
            continue
        yield index, pixels
    if len(unreadable) == len(chosen):
        raise DataError(f"none of {len(chosen)} images can be read; the first is {unreadable[0]}")


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
        while batch := list(itertools.islice(images, 32)):
            pixels = torch.stack([image for _, image in batch])
            indices += [index for index, _ in batch]
            features.append(model.features(pixels.to(device)).float().cpu())
            if pixels.shape[-1] > _THUMBNAIL:
                pixels = F.interpolate(pixels, (_THUMBNAIL, _THUMBNAIL), mode="bilinear", antialias=True)
            shown = draw.picture_of(pixels, model.normalization.mean, model.normalization.std)
            self._thumbnails += list((255 * shown).round().byte().numpy())
            at_batch()
        if len(indices) < 2:
            raise DataError("one image alone has no neighbors and no map: name two or more (--root DIR)")
        self._features = torch.cat(features)
        labels, classes = source.labels, source.classes
        known = [-1 if labels is None else labels[i] for i in indices]
        self._groups = [classes[label] if classes and label >= 0 else None for label in known]
        self._shown = f"{len(indices)} of {len(source):,} images"

    def draw_map(self) -> Figure:
        known = [group for group in self._groups if group is not None]
        groups = known if len(known) == len(self._groups) else None
        title = f"t-SNE of the features of {self._shown}{'; frames: classes' if groups else ''}"
        return draw.draw_map(draw.place(self._features), self._thumbnails, groups, title)

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
        heading = f"{len(queries)} images and the nearest by their features, of {self._shown}, with cosines"
        return draw.draw_neighbors([self._thumbnails[i] for i in queries], neighbors, captions, same_class, heading)


class PeriodicPictures(PeriodicTask):
    """Draws the teacher's pictures, of the same training images each time, into RUN/pictures/STEP/ and TensorBoard:
    every `every` steps, at the start and at the end of the run."""

    def __init__(
        self, source: Source, every: int, image_size: int, normalization: Normalization, value_range: ValueRange | None
    ) -> None:
        self._source, self._every, self._image_size = source, every, image_size
        self._normalization, self._range = normalization, value_range

    @classmethod
    def build(cls, recipe: Recipe, source: Source, epoch_steps: int) -> PeriodicPictures:
        batch, asked = recipe.data.global_batch, recipe.eval.pictures_every
        length = recipe.length.in_steps(batch, epoch_steps) - recipe.length.begin
        # Six times, start and end included, if the recipe does not say how often.
        every = -(-length // 5) if isinstance(asked, str) else asked.in_steps(batch, epoch_steps)
        return cls(source, every, recipe.crops.global_size, Normalization.of(recipe), recipe.data.known_range)

    def due(self, step: int, last: bool) -> bool:
        return last or step % self._every == 0

    def run(self, moment: StepContext) -> bool:
        """Draw on rank 0, which has the whole teacher; the others wait."""
        folder = moment.run_dir / "pictures" / step_name(moment.step)
        teacher = live_teacher(moment.teacher, self._image_size, self._normalization)
        if distributed.rank() == 0:
            try:
                with keep_generators(moment.device), teacher as model:
                    kinds, at_batch = _shown_kinds(model), moment.stop_requested
                    for name, figure in draw_pictures(model, self._source, self._range, kinds, moment.device, at_batch):
                        pixels = draw.figure_pixels(figure)
                        moment.log.picture(name, torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), moment.step)
                        folder.parent.mkdir(exist_ok=True)  # without parents: a deleted run folder must not come back
                        folder.mkdir(exist_ok=True)
                        replace_file(folder / f"{name}.png", draw.png_of(pixels))
            except Exception as error:  # a full disk, too little memory, a library: training must go on
                reason = error or type(error).__name__
                moment.log.info(f"warning  no pictures of step {moment.step}: {reason}; training continues")
        distributed.barrier()
        return True
