"""Options that commands about a model share: the images that they name, their size, options that change nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from dino_ds.config.own_recipe import own_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import holds_run, home_of
from dino_ds.data.base import UnreadableImage
from dino_ds.data.cutting import EvalCrop
from dino_ds.data.decode import load_image
from dino_ds.data.encoded import NamedFiles
from dino_ds.data.find_range import find_misfits, look_at_values
from dino_ds.data.images import ValueRange, evenly_spaced_indices
from dino_ds.data.root import open_files
from dino_ds.data.sources import Source, build_source, recipe_images
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError
from dino_ds.weights.load import Backbone, load

MAPS_AT_ONCE = 4
"""Images whose tokens or attention are computed at once."""
_FEW_PATCHES, _MANY_PATCHES = 16, 30
_MOST_OF_A_FOLDER = 16
_FORMS = "numbers or files with commas between, or a folder"


def check_unused_options(
    option: str, chosen: Collection[str], concerns: Mapping[str, Collection[str]], given: object
) -> None:
    """Raises ConfigError for an option of `given` that changes nothing of what is `chosen` by --`option`.

    concerns: name of an option -> what it changes something of. Options that are None or False are not given.
    """
    for name, concerned in concerns.items():
        value = getattr(given, name)
        if value is not None and value is not False and not set(concerned) & set(chosen):
            raise ConfigError(
                f"--{name} changes nothing of {', '.join(chosen)}: it is for {', '.join(concerned)}; "
                f"add one to --{option}, or leave --{name} out"
            )


def recipe_of(model: str, source: str | None, root: str | None) -> Recipe | None:
    """The recipe of the run `model`, or of the one that this checkpoint lies in, where no images are named: relative
    paths begin where the run was started."""
    home = home_of(model)
    if source is not None or root is not None or not home.is_run:
        return None
    recipe = own_recipe(home.folder, (), notes := list[str](), "--root")
    if distributed.rank() == 0:
        for note in notes:
            print(f"dino_ds: note: {note}", file=sys.stderr, flush=True)
    return recipe


def find_images(model: str, source: str | None, root: str | None) -> Source:
    """The images that are named, else the training images of the run `model`. Raises ConfigError, DataError."""
    if recipe := recipe_of(model, source, root):
        if recipe.data.mixture:
            return recipe_images(recipe.data, may_overlap=True)
        source, root = recipe.data.source, recipe.data.root
    if source is None and root is None:
        own = home_of(model).folder / "config.yaml"
        lost = f"{own}, which names the run's images, is missing or no file: " if holds_run(own.parent) else ""
        raise ConfigError(f"{lost}name images: --root DIR (folder, list, shards, Parquet), or --source photos")
    return build_source(source or "folder", root, "train", False)


def range_for(backbone: Backbone, sources: Sequence[Source]) -> tuple[ValueRange | None, list[str]]:
    """The model's range for images deeper than 8 bits, else one for these images, and what to say of it; every rank
    calls it. Raises ConfigError where it can't be known, or the images looked at have other channels than the model."""
    found: tuple[ValueRange | None, list[str]] = (None, [])
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:
            wanted = len(backbone.normalisation.mean)
            sample = look_at_values(sources, wanted)
            if sample.channels and wanted not in sample.channels:
                there = " or ".join(map(str, sorted(sample.channels)))
                raise ConfigError(
                    f"{backbone.source} takes images of {wanted} channels, and those looked at have {there}, such as "
                    f"{sources[0].name(0)}: give images of {wanted} channels, or a model that was trained on {there}"
                )
            chosen, words, remedy = backbone.value_range, "", "store them as the training images were"
            if chosen is None:
                chosen, words = sample.decide("the model has no range of its own, so make them images of 8 bits first")
                remedy = "store all images alike"
            notes = [f"{words}: the model has no range of its own"] if words else []
            found = chosen, notes + [f"WARNING: {text}" for text in find_misfits(sample.deep, chosen, remedy)]
    return distributed.gather_objects(found)[0]


def load_for_pictures(model: str) -> Backbone:
    """The model, on the GPU where there is one. Raises CheckpointError."""
    return load(model, _device())


def in_parts(function: Callable[[Tensor], Tensor], images: Tensor, at_once: int = MAPS_AT_ONCE) -> Tensor:
    """Results of a method of the model on images (b, c, h, w), a few at a time: FP32 on the CPU."""
    return torch.cat([function(part.to(_device())).float().cpu() for part in images.split(at_once)])


def side_of(backbone: Backbone, size: int | None) -> int:
    """Pixels of the images whose patches are shown: `size`, or twice the native side within 16 and 30 patches.

    It is never less than the native side unless `size` is; of a network that takes no other size the native one.
    Raises ConfigError.
    """
    patch = backbone.stride
    if size is None:
        native = backbone.image_size // patch
        side = patch * max(native, min(max(2 * native, _FEW_PATCHES), _MANY_PATCHES))
        try:
            backbone.network.check_image(side, side)
        except ConfigError:  # it is made for its own size alone
            return backbone.image_size
        return side
    if size % patch:
        near = max(round(size / patch), 1) * patch
        raise ConfigError(f"--size {size} is not a multiple of the patch size {patch}: use {near}")
    return size


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Picked:
    """Image `index` of a source. `named`: whether somebody asked for this very one, so that it may not be missing."""

    source: Source
    index: int
    named: bool = False

    @property
    def name(self) -> str:
        return self.source.name(self.index)

    @property
    def group(self) -> str | None:
        """The name of its class."""
        labels, classes = self.source.labels, self.source.classes
        return None if labels is None or classes is None or labels[self.index] < 0 else classes[labels[self.index]]


@dataclass(frozen=True)
class Cut:
    """An image as a network gets it, (c, side, side), normalised; `size` is the image's (width, height)."""

    picked: Picked
    pixels: Tensor
    size: tuple[int, int]


def spread(source: Source, count: int) -> list[Picked]:
    """At most `count` images, evenly spread."""
    return [Picked(source, index) for index in evenly_spaced_indices(len(source), count)]


def choose(text: str, option: str, images: Callable[[], Source]) -> list[Picked]:
    """The images that `text` names: numbers into `images()`, files, folders (at most 16 of each), commas between.

    Raises ConfigError, DataError.
    """
    chosen: list[Picked] = []
    for word in (part.strip() for part in text.split(",")):
        path = os.path.expanduser(word)
        if word.isdecimal():
            source = images()
            if int(word) >= len(source):
                raise ConfigError(f"--{option} {word}: there are {len(source)} images, 0 to {len(source) - 1}")
            chosen.append(Picked(source, int(word), named=True))
        elif os.path.isdir(path):
            chosen += spread(open_files(path), _MOST_OF_A_FOLDER)
        elif os.path.lexists(path):
            chosen.append(Picked(NamedFiles([path]), 0, named=True))
        else:
            raise ConfigError(f"--{option} {word!r}: there is no such file or folder; give {_FORMS}")
    return chosen


def read_cuts(picked: Sequence[Picked], crop: EvalCrop, option: str, value_range: ValueRange | None) -> Iterator[Cut]:
    """Cuts of the images in turn; unreadable ones are left out unless they were named. Raises DataError, also if none
    can be read.

    `value_range`: the range of images deeper than 8 bits, or None, and they are unreadable.
    """
    first, readable = "", 0
    for one in tqdm(picked, desc=option, unit=" images", leave=False, disable=None):
        try:
            image = load_image(one.source, one.index, value_range, crop.channels)
        except UnreadableImage as error:
            if one.named:
                raise DataError(f"--{option}: {error} can't be read: fix it, or name another") from None
            first = first or str(error)
            continue
        readable += 1
        if isinstance(image, Image.Image):
            yield Cut(one, crop(image), image.size)
        else:
            array = np.asarray(image)
            yield Cut(one, crop(array), (array.shape[1], array.shape[0]))
    if not readable:
        raise DataError(f"none of {len(picked)} images can be read; the first is {first}")
