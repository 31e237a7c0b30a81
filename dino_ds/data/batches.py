"""One micro-batch of crops from the images of a source: what a loader process does."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from dino_ds.basics.hashing import crop_seed
from dino_ds.config.crops import Masks
from dino_ds.data.augmentation_params import AugmentationParams
from dino_ds.data.base import Joined, Source, UnreadableImage, is_elsewhere, prepare_images
from dino_ds.data.cutting import cut_crops
from dino_ds.data.decode import DecodedImage, EncodedImage, check_channels, open_image
from dino_ds.data.image_cache import CachedImage, ImageCache
from dino_ds.data.images import ValueRange
from dino_ds.data.masks import draw_masks
from dino_ds.data.multicrop import CropParameters, MultiCrop
from dino_ds.data.photometric import augment, crops_per_params
from dino_ds.errors import DataError

if TYPE_CHECKING:
    from dino_ds.config.recipe import Recipe

_Opened = EncodedImage | DecodedImage | CachedImage
_CPU = torch.device("cpu")
_OF_PATIENCE = 0.8
"""Part of the time after which the loader is started again in which an image must come."""
_MAX_TRIES = 100
"""Unreadable images in a row before the data is given up."""


@dataclass(frozen=True)
class LoaderOptions:
    """The settings by which a loader makes batches of a source's images.

    global_batch is a multiple of micro_batch * world_size. workers: loader processes, 0 = in this process, None = by
    the cores; patience: seconds without a batch after which they are restarted, None = never. augment "worker": all is
    done in the loader, by Pillow; "device": it only cuts the crops, and `device` does the rest. channels: of every
    image; the color operations that need RGB are left out where it is not 3. value_range: of images deeper than 8
    bits; with one all crops are float32, and the device's code augments them in the worker too. cache: keeps
    decoded files; only for a source that has files.
    """

    seed: int = 0
    global_batch: int = 1
    micro_batch: int = 1
    rank: int = 0
    world_size: int = 1
    workers: int | None = 0
    patience: float | None = None
    augment: Literal["device", "worker"] = "worker"
    max_pixels: int | None = None
    channels: int = 3
    value_range: ValueRange | None = None
    device: torch.device = _CPU
    shares: tuple[float, ...] = ()
    cache: ImageCache | None = None

    @staticmethod
    def of(recipe: Recipe, **changes: Any) -> LoaderOptions:
        """The options of a recipe, with these changed: ranks and micro-batch are not in it."""
        data = recipe.data
        options = LoaderOptions(
            seed=recipe.seed,
            global_batch=data.global_batch,
            workers=data.workers,
            # A third: the first restart and the error after it come before the watcher ends a rank that only waits.
            patience=recipe.hang_seconds / 3 or None,
            augment=data.augment,
            max_pixels=data.max_pixels,
            channels=recipe.model.in_chans,
            value_range=data.known_range,
            shares=tuple(one.share for one in recipe.resolutions),
        )
        return replace(options, **changes)


@dataclass(frozen=True)
class LoaderBatch:
    """One micro-batch as the loader gives it: by group all its crops (v, b, ...) in one tensor; the rest as in Batch.

    Augmented in the worker: crops (v, b, c, h, w) float32, no params. To be augmented on the device: (v, b, h, w, c) of
    uint8, or of float32 in [0, 1] in a run with a value range, and for each group the params of its v * b crops;
    normalize (2, c): what is then added at the end, and what is multiplied by before.
    """

    crops: dict[str, Tensor]
    params: dict[str, list[AugmentationParams]] | None
    indices: Tensor
    epoch: int
    names: list[str]
    bad: list[str]
    normalize: Tensor
    masks: Masks = field(default_factory=dict)

    def pin_memory(self) -> LoaderBatch:
        return self.moved(Tensor.pin_memory)

    def moved(self, move: Callable[[Tensor], Tensor]) -> LoaderBatch:
        """The same batch with every tensor moved."""
        params = self.params and {name: [one.moved(move) for one in group] for name, group in self.params.items()}
        crops = {name: move(group) for name, group in self.crops.items()}
        masks = {name: {key: move(one) for key, one in group.items()} for name, group in self.masks.items()}
        indices, normalize = move(self.indices), move(self.normalize)
        return replace(self, crops=crops, params=params, indices=indices, normalize=normalize, masks=masks)

    def __reduce__(self) -> tuple[Any, ...]:
        # All but the crops as one tensor: what goes through the pipe is then less than a page and written in one
        # piece, so that a loader process can't be killed in the middle and leave the reader waiting for the rest.
        # Tensors go by shared memory, whatever their size; each takes a file descriptor, so masks are not tensors here.
        masks = {name: {key: one.numpy() for key, one in group.items()} for name, group in self.masks.items()}
        indices, normalize = self.indices.numpy(), self.normalize.numpy()
        rest = pickle.dumps((self.params, indices, self.epoch, self.names, self.bad, normalize, masks))
        return _unpack, (self.crops, torch.frombuffer(bytearray(rest), dtype=torch.uint8))


def _unpack(crops: dict[str, Tensor], rest: Tensor) -> LoaderBatch:
    params, indices, epoch, names, bad, normalize, arrays = pickle.loads(rest.numpy().tobytes())
    masks = {name: {key: torch.from_numpy(one) for key, one in group.items()} for name, group in arrays.items()}
    there = torch.from_numpy(indices), epoch, names, bad, torch.from_numpy(normalize)
    return LoaderBatch(crops, params, *there, masks)


class MultiCropDataset(Dataset[LoaderBatch | DataError]):
    """Batches by (epoch, index) pairs, of the resolution whose number they have, if any. Boxes, colors and masks
    depend on (seed, epoch, index), and on the resolution, and on nothing else."""

    def __init__(self, source: Source, multicrop: MultiCrop, options: LoaderOptions) -> None:
        self._source, self._multicrop, self._options = source, multicrop, options
        self._elsewhere = is_elsewhere(source)
        self._by_pillow = options.augment == "worker" and options.channels == 3 and options.value_range is None

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> LoaderBatch | DataError:
        """An error comes as a value: torch would make its message a traceback."""
        try:
            return self._build(keys)
        except DataError as error:
            return error

    def _build(self, keys: Sequence[tuple[int, int]]) -> LoaderBatch:
        """Crops are written where the training process will read them: there is no other copy."""
        if self._elsewhere:
            self._prepare([index for _, index in keys], getattr(keys, "later", ()))
        multicrop = self._multicrop.resolutions[getattr(keys, "resolution", 0)]
        crops = {group.name: self._empty(group.count, len(keys), group.size) for group in multicrop.groups}
        sampled, names, bad = list[list[CropParameters]](), list[str](), list[str]()
        places = [place for group in crops.values() for place in group]
        for row, (epoch, index) in enumerate(keys):
            own = [place[row] for place in places]
            cut, how, name, failures = self._sample(multicrop, epoch, index, own)
            for place, crop in zip(own, cut, strict=True):
                if place is not crop:
                    place.copy_(crop)
            sampled.append(how)
            names.append(name)
            bad += failures
        normalize = multicrop.normalization.offset_and_factor()
        params = None if self._by_pillow else self._params(crops, sampled)
        if params and self._options.augment == "worker":
            crops = {name: _augment_group(group, params[name], normalize) for name, group in crops.items()}
            params = None
        seeds = [crop_seed(self._options.seed, epoch, index) for epoch, index in keys]
        masks = draw_masks(multicrop.groups, multicrop.masks, seeds)
        indices = torch.tensor([index for _, index in keys])
        return LoaderBatch(crops, params, indices, keys[0][0], names, bad, normalize, masks)

    def _prepare(self, now: Sequence[int], later: Sequence[int]) -> None:
        """Images of this batch and of this process's next one; those in the cache are not read."""
        cache, patience = self._options.cache, self._options.patience
        indices = (index % len(self._source) for index in (*now, *later))
        missing = [index for index in indices if cache is None or cache.get(index) is None]
        prepare_images(self._source, missing, patience and _OF_PATIENCE * patience)

    def _empty(self, count: int, images: int, size: int) -> Tensor:
        """Room for the crops of a group; in a loader process, in memory that it shares with the training process."""
        channels, augmented = self._options.channels, self._by_pillow
        shape = (count, images, channels, size, size) if augmented else (count, images, size, size, channels)
        dtype = torch.float32 if augmented or self._options.value_range is not None else torch.uint8
        if get_worker_info() is None:
            return torch.empty(shape, dtype=dtype)
        storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)  # as torch's own collate does it
        return torch.empty(0, dtype=dtype).set_(storage).view(shape)

    def _sample(
        self, multicrop: MultiCrop, epoch: int, index: int, places: Sequence[Tensor] | None = None
    ) -> tuple[list[Tensor], list[CropParameters], str, list[str]]:
        """The crops of one image, in `places` unless Pillow augments them, what is still to be done to them, its name,
        and the unreadable images met before it: others sampled for (seed, epoch, index) replace them, of a mixture from
        the same part. Raises DataError after 100 in a row."""
        seed, bad, images = self._options.seed, list[str](), len(self._source)
        another = self._source.another if isinstance(self._source, Joined) else lambda _, number: number % images
        for attempt in range(_MAX_TRIES):
            # Not the neighbor: files that are broken together lie together.
            again = crop_seed(seed, epoch, index + attempt * images)
            actual = another(index % images, again) if attempt else index % images
            try:
                image = self._open(actual)
                crops, sampled = self._cut(multicrop, image, crop_seed(seed, epoch, index), places)
                return crops, sampled, self._source.name(actual), bad
            except UnreadableImage as error:
                bad.append(str(error))
        raise DataError(
            f"{len(bad)} images in a row are unreadable, the last one {bad[-1]}; look at these files and data.root"
        )

    def _open(self, index: int) -> _Opened:
        cache = self._options.cache
        return self._open_file(index) if cache is None else CachedImage(cache, index, lambda: self._open_file(index))

    def _open_file(self, index: int) -> EncodedImage | DecodedImage:
        try:
            options = self._options
            image = open_image(self._source, index, options.max_pixels, options.value_range, options.channels)
        except (UnreadableImage, DataError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            raise DataError(
                f"image {index} of {type(self._source).__name__} raised {type(error).__name__}: {error}; a source "
                "reports what it can't read by raising UnreadableImage"
            ) from error
        if image.channels != options.channels:  # only then: looking a name up takes as long as a small crop
            check_channels(image, options.channels, self._source.name(index))
        return image

    def _cut(
        self, multicrop: MultiCrop, image: _Opened, seed: int, places: Sequence[Tensor] | None
    ) -> tuple[list[Tensor], list[CropParameters]]:
        """The crops of an image, turned; augmented where Pillow does it."""
        if self._by_pillow:
            return multicrop(Image.fromarray(image.decode()), seed), []
        sampled = multicrop.sample(image.width, image.height, seed)
        return cut_crops(image, sampled, multicrop.sizes, places), sampled

    def _params(
        self, crops: dict[str, Tensor], sampled: list[list[CropParameters]]
    ) -> dict[str, list[AugmentationParams]]:
        """For each group: the first crops of all images, the second, ..."""
        params, first = {}, 0
        for name, group in crops.items():
            ordered = [of_image[place] for place in range(first, first + len(group)) for of_image in sampled]
            piece = crops_per_params(group.shape[2], self._options.device) or len(ordered)
            pieces = [ordered[i : i + piece] for i in range(0, len(ordered), piece)]
            params[name] = [AugmentationParams.build(some, self._options.channels) for some in pieces]
            first += len(group)
        return params


def augmented_crops(batch: LoaderBatch) -> dict[str, list[Tensor]]:
    """The crops (b, c, h, w) float32 of a batch by group, on its device."""
    crops = batch.crops
    if batch.params is not None:
        crops = {name: _augment_group(group, batch.params[name], batch.normalize) for name, group in crops.items()}
    return {name: list(group) for name, group in crops.items()}


def _augment_group(group: Tensor, params: Sequence[AugmentationParams], normalize: Tensor) -> Tensor:
    """(v, b, h, w, c) -> (v, b, c, h, w) float32."""
    return augment(group.flatten(0, 1), params, normalize).unflatten(0, group.shape[:2])
