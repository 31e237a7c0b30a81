"""One micro-batch of crops from the images of a source: what a loader process does."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from dino_ds.data.cropping import largest_shrink, resize_crop, shrunk_box
from dino_ds.data.decode import DecodedImage, EncodedImage, open_image
from dino_ds.data.images import UnreadableImage
from dino_ds.data.multicrop import CropParameters, MultiCrop, crop_seed
from dino_ds.data.photometric import AugmentationParams, augment, crops_per_plan
from dino_ds.data.sources import Source
from dino_ds.data.value_range import ValueRange
from dino_ds.errors import DataError

_Opened = EncodedImage | DecodedImage
Augment = Literal["device", "worker"]
_MAX_TRIES = 100
"""Unreadable images in a row before the data is given up."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the device: by group of crops a list of (b, c, h, w) float32, in the order of the groups.

    indices (b,) int64, all of one epoch. `bad` has one text for each unreadable image met: its name and the reason.
    """

    crops: dict[str, list[Tensor]]
    indices: Tensor
    epoch: int
    names: list[str]
    bad: list[str]


@dataclass(frozen=True)
class LoaderBatch:
    """One micro-batch as the loader gives it: by group all its crops (v, b, ...) in one tensor; the rest as in Batch.

    Augmented in the worker: crops (v, b, c, h, w) float32, no plans. To be augmented on the device: (v, b, h, w, c) of
    uint8, or of float32 in [0, 1] in a run with a value range, and for each group the plans of its v * b crops.
    """

    crops: dict[str, Tensor]
    plans: dict[str, list[AugmentationParams]] | None
    indices: Tensor
    epoch: int
    names: list[str]
    bad: list[str]

    def pin_memory(self) -> LoaderBatch:
        return self.moved(Tensor.pin_memory)

    def moved(self, move: Callable[[Tensor], Tensor]) -> LoaderBatch:
        """The same batch with every tensor moved."""
        plans = self.plans and {name: [plan.moved(move) for plan in plans] for name, plans in self.plans.items()}
        crops = {name: move(group) for name, group in self.crops.items()}
        return LoaderBatch(crops, plans, move(self.indices), self.epoch, self.names, self.bad)

    def __reduce__(self) -> tuple[Any, ...]:
        # All but the crops as one tensor: what goes through the pipe is then less than a page and written in one
        # piece, so that a loader process can't be killed in the middle and leave the reader waiting for the rest.
        rest = pickle.dumps((self.plans, self.indices.numpy(), self.epoch, self.names, self.bad))
        return _unpack, (self.crops, torch.frombuffer(bytearray(rest), dtype=torch.uint8))


def _unpack(crops: dict[str, Tensor], rest: Tensor) -> LoaderBatch:
    plans, indices, epoch, names, bad = pickle.loads(rest.numpy().tobytes())
    return LoaderBatch(crops, plans, torch.from_numpy(indices), epoch, names, bad)


@dataclass(frozen=True)
class _Sample:
    """The crops of one image and what is still to be done to them; `bad` images were tried in its place."""

    crops: list[Tensor]
    drawn: list[CropParameters]
    name: str
    bad: list[str]


class MultiCropDataset(Dataset[LoaderBatch | DataError]):
    """Batches by (epoch, index) pairs. Crops depend on (seed, epoch, index) and on nothing else.

    augment "worker": all here, by Pillow. "device": crops are only cut here, and `device` does the rest. channels: of
    every image; the colour operations that need RGB are left out where it is not 3. value_range: of images deeper than
    8 bits; with one all crops are float32, and the device's code augments them in the worker too.
    """

    def __init__(
        self,
        source: Source,
        multicrop: MultiCrop,
        seed: int,
        *,
        augment: Augment,
        max_pixels: int | None,
        channels: int,
        device: torch.device,
        value_range: ValueRange | None = None,
    ) -> None:
        self._source, self._multicrop, self._seed = source, multicrop, seed
        self._augment, self._max_pixels, self._channels, self._device = augment, max_pixels, channels, device
        self._range = value_range
        self._by_pillow = augment == "worker" and channels == 3 and value_range is None

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> LoaderBatch | DataError:
        """One batch. An error comes as a value: torch would make its message a traceback."""
        try:
            return self._build(keys)
        except DataError as error:
            return error

    def _build(self, keys: Sequence[tuple[int, int]]) -> LoaderBatch:
        """Crops are written where the training process will read them: there is no other copy."""
        crops = _empty_crops(self._multicrop, len(keys), self._channels, self._by_pillow, self._range is not None)
        drawn: list[list[CropParameters]] = []
        names: list[str] = []
        bad: list[str] = []
        places = [place for group in crops.values() for place in group]
        for row, (epoch, index) in enumerate(keys):
            sample = self._sample(epoch, index)
            for place, crop in zip(places, sample.crops, strict=True):
                place[row] = crop
            drawn.append(sample.drawn)
            names.append(sample.name)
            bad += sample.bad
        plans = None if self._by_pillow else self._plan(crops, drawn)
        if plans and self._augment == "worker":
            crops = {name: _augment_group(group, plans[name]) for name, group in crops.items()}
            plans = None
        return LoaderBatch(crops, plans, torch.tensor([index for _, index in keys]), keys[0][0], names, bad)

    def _sample(self, epoch: int, index: int) -> _Sample:
        """An unreadable image is replaced by a readable one drawn for (seed, epoch, index).

        Raises DataError after 100 unreadable ones in a row.
        """
        bad: list[str] = []
        for attempt in range(_MAX_TRIES):
            # Not the neighbour: files that are broken together lie together.
            again = crop_seed(self._seed, epoch, index + attempt * len(self._source))
            actual = again % len(self._source) if attempt else index
            try:
                image = self._open(actual)
                cut = self._augment_by_pillow if self._by_pillow else self._cut
                crops, drawn = cut(image, crop_seed(self._seed, epoch, index))
                return _Sample(crops, drawn, self._source.name(actual), bad)
            except UnreadableImage as error:
                bad.append(str(error))
        raise DataError(
            f"{len(bad)} images in a row are unreadable, the last one {bad[-1]}; look at these files and data.root"
        )

    def _open(self, index: int) -> _Opened:
        try:
            image = open_image(self._source, index, self._max_pixels, self._range)
        except (UnreadableImage, DataError, MemoryError):
            raise
        except Exception as error:
            raise DataError(
                f"image {index} of {type(self._source).__name__} raised {type(error).__name__}: {error}; a source says "
                "what it can't read by raising UnreadableImage"
            ) from error
        if image.channels != self._channels:
            raise UnreadableImage(self._source.name(index), f"{image.channels} channels, {self._channels} are wanted")
        return image

    def _augment_by_pillow(self, image: _Opened, seed: int) -> tuple[list[Tensor], list[CropParameters]]:
        return self._multicrop(Image.fromarray(image.decode()), seed), []

    def _cut(self, image: _Opened, seed: int) -> tuple[list[Tensor], list[CropParameters]]:
        """The crops, of an image that was decoded no larger than they need."""
        drawn, sizes = self._multicrop.draw(image.width, image.height, seed), self._multicrop.sizes
        boxes = [crop.box for crop in drawn]
        array = image.decode(largest_shrink(boxes, sizes))
        if array.shape[:2] != (image.height, image.width):
            across, down = array.shape[1] / image.width, array.shape[0] / image.height
            boxes = [shrunk_box(box, across, down) for box in boxes]
        return [resize_crop(array, box, size) for box, size in zip(boxes, sizes, strict=True)], drawn

    def _plan(self, crops: dict[str, Tensor], drawn: list[list[CropParameters]]) -> dict[str, list[AugmentationParams]]:
        """For each group the plans of its crops: the first of all images, the second, ..."""
        plans, first = {}, 0
        for name, group in crops.items():
            ordered = [of_image[place] for place in range(first, first + len(group)) for of_image in drawn]
            piece = crops_per_plan(group.shape[2], self._device) or len(ordered)
            pieces = [ordered[i : i + piece] for i in range(0, len(ordered), piece)]
            plans[name] = [AugmentationParams.build(some, self._channels) for some in pieces]
            first += len(group)
        return plans


def augmented_crops(batch: LoaderBatch) -> dict[str, list[Tensor]]:
    """The crops (b, c, h, w) float32 of a batch by group, on its device."""
    crops = batch.crops
    if batch.plans is not None:
        crops = {name: _augment_group(group, batch.plans[name]) for name, group in crops.items()}
    return {name: list(group) for name, group in crops.items()}


def _augment_group(group: Tensor, plans: Sequence[AugmentationParams]) -> Tensor:
    """(v, b, h, w, c) -> (v, b, c, h, w) float32."""
    return augment(group.flatten(0, 1), plans).unflatten(0, group.shape[:2])


def _empty_crops(multicrop: MultiCrop, images: int, channels: int, augmented: bool, deep: bool) -> dict[str, Tensor]:
    """Room for the crops by group; in a loader process, in memory that it shares with the training process."""
    crops = {}
    for group in multicrop.groups:
        count, size = group.count, group.size
        shape = (count, images, channels, size, size) if augmented else (count, images, size, size, channels)
        dtype = torch.float32 if augmented or deep else torch.uint8
        if get_worker_info() is None:
            crops[group.name] = torch.empty(shape, dtype=dtype)
        else:  # as torch's own collate does it
            storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)
            crops[group.name] = torch.empty(0, dtype=dtype).set_(storage).view(shape)
    return crops
