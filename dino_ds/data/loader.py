"""Batches of crops, epoch after epoch, from any position in the data.

The global batches depend on (seed, epoch) and the global batch size alone; ranks, micro-batches and workers only share
the work out. So a run may be resumed, or repeated on other hardware, on the same images in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from dino_ds.data.images import UnreadableImage
from dino_ds.data.multicrop import MultiCrop, crop_seed
from dino_ds.data.sources import Source
from dino_ds.data.workers import main_module_left_out, worker_options
from dino_ds.errors import DataError

_MAX_TRIES = 100
"""Unreadable images in a row before the data is given up."""


@dataclass(frozen=True)
class Position:
    """How far training is in the global stream: `samples` of `epoch` are consumed, over all ranks."""

    epoch: int = 0
    samples: int = 0

    def advance(self, samples: int, per_epoch: int) -> Position:
        """After `samples` more, of `per_epoch` in an epoch; the next epoch begins where as many again don't fit."""
        consumed = self.samples + samples
        return Position(self.epoch, consumed) if consumed + samples <= per_epoch else Position(self.epoch + 1, 0)


@dataclass(frozen=True)
class Sample:
    """One image: crops v x (3, h, w); `index` as drawn; `name` of the image that was read; `bad`, those it replaces."""

    crops: list[Tensor]
    epoch: int
    index: int
    name: str
    bad: tuple[str, ...]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank: crops v x (b, 3, h, w) float32, indices (b,) int64, all of one epoch.

    `bad` has one text for each unreadable image met: its name and the reason.
    """

    crops: list[Tensor]
    indices: Tensor
    epoch: int
    names: list[str]
    bad: list[str]

    def pin_memory(self) -> Batch:
        crops = [crop.pin_memory() for crop in self.crops]
        return Batch(crops, self.indices.pin_memory(), self.epoch, self.names, self.bad)


class MultiCropDataset(Dataset[Sample]):
    """Crops by (epoch, index). They depend on (seed, epoch, index) and on nothing else."""

    def __init__(self, source: Source, multicrop: MultiCrop, seed: int) -> None:
        self._source, self._multicrop, self._seed = source, multicrop, seed

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        """An unreadable image is replaced by a readable one drawn for (seed, epoch, index).

        Raises DataError after 100 unreadable ones in a row.
        """
        epoch, index = key
        bad: list[str] = []
        for attempt in range(_MAX_TRIES):
            # Not the neighbour: files that are broken together lie together.
            again = crop_seed(self._seed, epoch, index + attempt * len(self._source))
            actual = again % len(self._source) if attempt else index
            try:
                image = self._source.load(actual)
            except UnreadableImage as error:
                bad.append(str(error))
                continue
            crops = self._multicrop(image, crop_seed(self._seed, epoch, index))
            return Sample(crops, epoch, index, self._source.name(actual), tuple(bad))
        raise DataError(
            f"{len(bad)} images in a row are unreadable, the last one {bad[-1]}; look at these files and data.root"
        )


class ResumableSampler(Sampler[list[tuple[int, int]]]):
    """The (epoch, index) pairs of one rank's micro-batches, without end.

    Micro-step m of a step, on rank r, reads the places [m * micro * ranks + r * micro, + micro) of the global batch.
    What does not fill a global batch at the end of an epoch is left out; each epoch leaves out other images.
    """

    def __init__(
        self, images: int, seed: int, global_batch: int, micro_batch: int, rank: int, world_size: int, start: Position
    ) -> None:
        self._images, self._seed, self._micro, self._rank = images, seed, micro_batch, rank
        self._chunk = micro_batch * world_size
        assert global_batch % self._chunk == 0
        self._per_epoch = steps_per_epoch(images, global_batch) * global_batch
        self._start = start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        position, permuted, order = self._start, -1, torch.empty(0)
        if position.samples + self._chunk > self._per_epoch:
            position = Position(position.epoch + 1, 0)
        while True:
            if position.epoch != permuted:
                order, permuted = _permutation(self._images, self._seed, position.epoch), position.epoch
            first = position.samples + self._rank * self._micro
            yield [(position.epoch, index) for index in order[first : first + self._micro].tolist()]
            position = position.advance(self._chunk, self._per_epoch)


class Loader:
    """An endless iterator of Batch. `workers` as for `worker_options`."""

    def __init__(
        self, source: Source, multicrop: MultiCrop, seed: int, sampler: ResumableSampler, workers: int | None
    ) -> None:
        loader: DataLoader[Sample | DataError] = DataLoader(
            _ErrorsAsValues(MultiCropDataset(source, multicrop, seed)),
            batch_sampler=sampler,
            collate_fn=_collate,
            **worker_options(workers),
        )
        with main_module_left_out(unless_defines=source):
            self._batches: Iterator[Batch | DataError] | None = iter(loader)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """Raises DataError where too many images in a row are unreadable."""
        if self._batches is None:
            raise StopIteration
        batch = next(self._batches)
        if isinstance(batch, DataError):
            self.close()
            raise batch
        return batch

    def close(self) -> None:
        """Stop the workers; what they have prefetched is dropped."""
        self._batches = None


def build_loader(
    source: Source,
    multicrop: MultiCrop,
    seed: int,
    global_batch: int,
    micro_batch: int,
    rank: int,
    world_size: int,
    workers: int | None,
    start: Position,
) -> Loader:
    """This rank's micro-batches from `start` on. workers None = automatic.

    global_batch must be a multiple of micro_batch * world_size. Raises DataError if there are fewer images than that.
    """
    sampler = ResumableSampler(len(source), seed, global_batch, micro_batch, rank, world_size, start)
    return Loader(source, multicrop, seed, sampler, workers)


def steps_per_epoch(images: int, global_batch: int) -> int:
    """Optimizer steps in one pass over the data; the rest that fills no batch is dropped. Raises DataError if none."""
    if images < global_batch:
        raise DataError(
            f"{images} images < one global batch of {global_batch}: set --data.global_batch to {images} or less, "
            "or add images"
        )
    return images // global_batch


def _permutation(images: int, seed: int, epoch: int) -> Tensor:
    """(images,) int64, the order of an epoch, the same on all ranks."""
    generator = torch.Generator().manual_seed(crop_seed(seed, epoch, -1) >> 1)  # -1: no sample has this index
    return torch.randperm(images, generator=generator)


class _ErrorsAsValues(Dataset["Sample | DataError"]):
    """torch would turn an error of a worker into one whose message is a traceback."""

    def __init__(self, dataset: MultiCropDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> Sample | DataError:
        try:
            return self._dataset[key]
        except DataError as error:
            return error


def _collate(items: list[Sample | DataError]) -> Batch | DataError:
    samples: list[Sample] = []
    for item in items:
        if isinstance(item, DataError):
            return item
        samples.append(item)
    return Batch(
        crops=[torch.stack(views) for views in zip(*(sample.crops for sample in samples), strict=True)],
        indices=torch.tensor([sample.index for sample in samples]),
        epoch=samples[0].epoch,
        names=[sample.name for sample in samples],
        bad=[text for sample in samples for text in sample.bad],
    )
