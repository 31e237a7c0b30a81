"""Features of images, each rank computing its share; and the images on which a command examines a model."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from dino_ds.basics import own_code, seeds
from dino_ds.config.fields import IMAGE_FORMS
from dino_ds.config.loading import recorded_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import find_model_folder, holds_run, own_recipe
from dino_ds.data import image_values, scientific
from dino_ds.data.batches import started, worker_options
from dino_ds.data.decode import MAX_PIXELS, load_image, open_image
from dino_ds.data.images import Source, UnreadableImage, ValueRange, evenly_spaced_indices, prepare_images
from dino_ds.data.sources import build_source, recipe_images
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError, UserError
from dino_ds.weights.load import Backbone

BATCH = 64
_Row = tuple[Tensor, int, int] | str
_Batch = tuple[Tensor, Tensor, list[str]]


@torch.no_grad()
def extract_features(
    describe: Callable[[Tensor], Tensor], source: Source, indices: Sequence[int], device: torch.device, reading: Reading
) -> tuple[Tensor, Tensor, list[str]]:
    """Features (n, d) and labels (n,) of the images at `indices`, on `device`; and texts that name unreadable images.
    describe: images (b, c, h, w) on `device` -> (b, d). Every rank must call it and gets all rows, in the order of
    `indices`, without the unreadable images. Labels are -1 for a source without labels. Raises GaveUp, and DataError
    where a rank can read no image."""
    mine = list(indices)[distributed.rank() :: distributed.world_size()]
    images = LabeledImages(source, mine, reading)
    read = partial(load_batches, images, source, reading.workers, reading.progress, batch_size=reading.batch)
    memory, key = reading.memory, (id(source), tuple(mine), type(reading.transform))
    loading = memory.batches(key, read, _copied) if memory else read()
    features, labels, bad, gave_up = [], [], list[str](), False
    with closing(loading) as batches:
        for crops, targets, unreadable in batches:
            bad += unreadable
            if len(crops):
                features.append(describe(crops.to(device)))
                labels.append(targets.to(device))
            if gave_up := reading.give_up():
                break
    # The ranks agree before the first collective of features: if one left alone, the others would wait for it.
    answers = distributed.gather_objects((sum(map(len, features)), bad, gave_up))
    if any(gave_up for _, _, gave_up in answers):
        raise GaveUp
    rows, unreadable = [images for images, _, _ in answers], [text for _, texts, _ in answers for text in texts]
    if not all(rows):
        first = f"; the first that can't be read is {unreadable[0]}" if unreadable else ""
        problem = f"of {len(indices)} images to evaluate, the ranks could read {rows}"
        raise DataError(f"{problem}; each needs one: fix the images, or take more (--images) or fewer processes{first}")
    described, placed = torch.cat(features), torch.cat(labels)
    features.clear()  # frees memory: there would be three copies below
    placed[:, 0] = placed[:, 0] * distributed.world_size() + distributed.rank()  # my i-th image's index in `indices`
    of_all = [distributed.concatenate_across_ranks(rows) for rows in (described, placed)]
    order = of_all[1][:, 0].argsort()
    return of_all[0][order], of_all[1][order, 1], unreadable


@dataclass(frozen=True)
class Reading:
    """How an evaluation reads images: `transform` prepares them, `workers` processes load them (None: as many as fit
    the cores), files are read in `channels` channels, and `value_range` scales values of over 8 bits.
    With `batch` 1 images may have any sizes. `progress` labels a bar on rank 0, None for no bar; `give_up` is called
    after each batch. `memory` keeps the images for later evaluations with the same kind of transform."""

    transform: Callable[[Any], Tensor]
    workers: int | None = None
    value_range: ValueRange | None = None
    batch: int = BATCH
    progress: str | None = None
    give_up: Callable[[], bool] = lambda: False
    channels: int = 3
    memory: ImageMemory | None = None


class GaveUp(Exception):
    """Raised on all ranks when `give_up` returned true on one of them."""


def _copied(batch: _Batch) -> tuple[Any, int]:
    return (batch[0].clone(), batch[1].clone(), batch[2]), batch[0].nbytes


class ImageMemory:
    """Keeps batches of transformed images, up to `most` bytes on this rank: each evaluation uses the same images."""

    def __init__(self, most: int = 256 << 20) -> None:
        self._room, self._kept = most, dict[Any, list[Any]]()

    def batches(
        self, key: Any, read: Callable[[], Generator[Any, None, None]], copied: Callable[[Any], tuple[Any, int]]
    ) -> Generator[Any, None, None]:
        """Yield the batches called `key` from memory, or else from `read`; those are kept if all of them fit.

        Args:
            copied: a batch -> its copy and the size of the copy in bytes.
        """
        if key in self._kept:
            yield from (copied(batch)[0] for batch in self._kept[key])
            return
        kept, taken = list[Any](), 0
        with closing(read()) as batches:
            for batch in batches:
                if taken <= self._room:
                    copy, size = copied(batch)
                    taken += size
                    kept.append(copy)
                else:
                    kept.clear()
                yield batch
        if taken <= self._room:
            self._kept[key] = kept
            self._room -= taken


def load_batches(
    images: Dataset[_Row], source: Source, workers: int | None, progress: str | None, **batching: Any
) -> Generator[_Batch, None, None]:
    """Yield batches of `collate`, with a progress bar `progress` on rank 0; batching: arguments of the DataLoader.
    Closing the generator ends the loader's processes."""
    loader = DataLoader(images, collate_fn=collate, **batching, **worker_options(workers))
    hidden = distributed.hidden_bar(progress is not None)
    with started(loader, source) as batches:
        yield from tqdm(batches, progress, len(loader), leave=False, disable=hidden)


class LabeledImages(Dataset[_Row]):
    def __init__(self, source: Source, indices: list[int], reading: Reading) -> None:
        self._source, self._indices, self._draws = source, indices, own_code.is_own(getattr(source, "whole", source))
        self._transform, self._how = reading.transform, (reading.value_range, reading.channels)
        labels = source.labels
        self._labels = [-1 if labels is None else labels[index] for index in indices]  # workers get only these

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, i: Any) -> _Row:
        """The image, its index `i` and its label, or a text that names an unreadable image."""
        if self._draws:  # a user's source may draw random numbers: the same for an image in each evaluation
            seeds.seed_generators(self._indices[i])
        try:
            return self._transform(load_image(self._source, self._indices[i], *self._how)), i, self._labels[i]
        except UnreadableImage as error:
            return str(error)

    def __getitems__(self, items: list[int]) -> list[_Row]:
        prepare_images(self._source, [self._indices[item] for item in items])
        return [self[item] for item in items]


def collate(rows: list[_Row]) -> _Batch:
    """Images (b, c, h, w) that could be read, their indices and labels (b, 2), and texts that name the others."""
    good, bad = [row for row in rows if not isinstance(row, str)], [row for row in rows if isinstance(row, str)]
    if not good:
        return torch.empty(0), torch.empty(0, 2, dtype=torch.long), bad
    return torch.stack([row[0] for row in good]), torch.tensor([row[1:] for row in good]), bad


def fill_rows(
    rows: np.ndarray, batch: _Batch, describe: Callable[[Tensor], Tensor], device: torch.device, first: int = 0
) -> list[str]:
    """Write the features of a batch of `load_batches` into the rows of its images; rows[0] is that of image `first`.
    Returns texts that name the images that can't be read, whose rows stay as they are."""
    images, places, unreadable = batch
    if len(images):
        with torch.no_grad():
            rows[places[:, 0].numpy() - first] = describe(images.to(device)).float().cpu().numpy()
    return unreadable


def raw_pixels(images: Tensor) -> Tensor:
    """Images (b, c, h, w) -> (b, c * 32 * 32) shrunken pixels: the baseline that any learning must beat."""
    return F.adaptive_avg_pool2d(images.float(), min(32, images.shape[-1])).flatten(1)


@contextmanager
def keep_generators(*devices: torch.device) -> Iterator[None]:
    """Restore the random-number generators on exit, also those of GPUs among `devices`: a loader draws seeds for its
    workers, which must not change training."""
    others = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            yield
    finally:
        random.setstate(others[0])
        np.random.set_state(others[1])


def find_images(model: str, source: str | None, root: str | None) -> Source:
    """The images that the options name, else the training images of the run `model`. Raises ConfigError, DataError."""
    if recipe := recipe_of(model, source, root):
        if recipe.data.mixture:
            return recipe_images(recipe.data)
        source, root = recipe.data.source, recipe.data.root
    if source is None and root is None:
        file = find_model_folder(model).folder / "config.yaml"
        lost = f"{file}, which names the run's images, is missing or no file: " if holds_run(file.parent) else ""
        raise ConfigError(f"{lost}name images, --root PLACE ({IMAGE_FORMS}), or --source photos")
    return build_source(source or "folder", root, "train", False)


def recipe_of(model: str, source: str | None, root: str | None) -> Recipe | None:
    """The recipe of `model`, a run or a run's checkpoint; None for other models, or if options name images. Relative
    paths in the recipe are looked for first in the folder where the run was started."""
    home = find_model_folder(model)
    if source is not None or root is not None or not home.is_run:
        return None
    recipe = own_recipe(home.folder, (), notes := list[str](), "--root")
    if distributed.rank() == 0:
        for note in notes:
            print(f"dino_ds: note: {note}", file=sys.stderr, flush=True)
    return recipe


def range_for(backbone: Backbone, sources: Sequence[Source]) -> tuple[ValueRange | None, list[str]]:
    """The model's value range for images of over 8 bits, else one found in these images; and notes for the user. Every
    rank calls it. Raises ConfigError for an unknown range, or if images have other channels than the model."""
    range_and_notes: tuple[ValueRange | None, list[str]] = (None, [])
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:
            wanted = len(backbone.normalization.mean)
            sample = image_values.look_at_values(sources, wanted)
            if sample.channels and wanted not in sample.channels:
                there = " or ".join(map(str, sorted(sample.channels)))
                seen = f"those looked at have {there}, such as {sources[0].name(0)}"
                remedy = f"give images of {wanted} channels, or a model that was trained on {there}"
                raise ConfigError(f"{backbone.source} takes images of {wanted} channels, and {seen}: {remedy}")
            chosen, words, remedy = backbone.value_range, "", "store them as the training images were"
            if chosen is None:
                chosen, words = sample.decide("the model has no range of its own, so make them images of 8 bits first")
                remedy = "store all images alike"
            notes = [f"{words}: the model has no range of its own"] if words else []
            notes += [f"WARNING: {text}" for text in image_values.find_misfits(sample.deep, chosen, remedy)]
            range_and_notes = chosen, notes + scientific.note_stacks(sample.stacks)
    return distributed.gather_objects(range_and_notes)[0]


def crop_pct_of(model: str, side: int) -> float | None:
    """timm's crop_pct for most images of the run `model`, as evaluations at `side` pixels cut them; None without a run,
    or if its images are not on this machine or come from a source of the user's own."""
    home = find_model_folder(model)
    try:
        recipe = recorded_recipe(home.folder / "config.yaml") if home.is_run else None
        if recipe is None or ":" in f"{recipe.data.source} {recipe.data.place}":
            return None
        source, channels = find_images(model, None, None), recipe.model.in_chans
        indices = evenly_spaced_indices(len(source), 16)
        images = [open_image(source, i, MAX_PIXELS, channels=channels) for i in indices]
    except (UserError, UnreadableImage, OSError):
        return None
    uncut = sum(min(image.width, image.height) <= side for image in images)
    return 1.0 if 2 * uncut > len(images) else 0.875
