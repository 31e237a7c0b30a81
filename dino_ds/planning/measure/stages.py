"""Measures what an image costs on its way to the training step, each stage alone on one core."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from dino_ds.config.recipe import Recipe
from dino_ds.data.base import Source, UnreadableImage
from dino_ds.data.batches import LoaderBatch, LoaderOptions, MultiCropDataset, augmented_crops
from dino_ds.data.decode import EncodedImage, open_image, range_at
from dino_ds.data.feed import Position
from dino_ds.data.loader import ResumableSampler
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.workers import started, worker_options
from dino_ds.errors import DataError
from dino_ds.planning.measure.timing import synchronize

WORKER_STAGES = ("load", "read", "decode", "crops", "hand over")
"""The stages of a loader process, in order: `load` is read and decode of a source that has no files. After them comes
"device"."""
_WARM_UP_ROUNDS, _MIN_ROUNDS = 1, 3
_MAX_TRIES = 1000
_BATCHES = 4
"""A round of handing over."""


def measure_stages(
    source: Source, recipe: Recipe, device: torch.device, images: int, seconds: float
) -> dict[str, list[float]]:
    """Stage -> seconds of wall time for one image, one number a round.

    A round takes `images` images; they are others in every round, as long as the data set lasts. There are at least 3
    rounds, and more until `seconds` are over. Raises DataError where hardly an image can be read.
    """
    stages = _Stages(source, recipe, device, images)
    with _one_thread(), tqdm(unit="round", desc="stages", leave=False, disable=None) as bar:
        begin, rounds = time.perf_counter(), 0
        while rounds < _WARM_UP_ROUNDS + _MIN_ROUNDS or time.perf_counter() - begin < seconds:
            stages.run_round()
            rounds += 1
            bar.update()
    stages.hand_over(rounds)
    return {name: values[_WARM_UP_ROUNDS:] for name, values in stages.seconds.items()}


class _Stages:
    def __init__(self, source: Source, recipe: Recipe, device: torch.device, images: int) -> None:
        self._source, self._recipe, self._device, self._images = source, recipe, device, images
        self._multicrop = MultiCrop.of(recipe)
        # Another order than the loader's: its files may be in memory already.
        sampler = ResumableSampler(len(source), LoaderOptions(seed=recipe.seed + 1), Position())
        self._order = (index for [(_, index)] in sampler)
        self._rounds = 0
        self.seconds: dict[str, list[float]] = {}

    def run_round(self) -> None:
        arrays = self._decoded()
        keys = [(self._rounds, place) for place in range(len(arrays))]
        self._rounds += 1
        dataset = self._dataset(_Decoded(arrays))
        begin = time.perf_counter()
        batch = _batch_of(dataset, keys)
        self._note("crops", time.perf_counter() - begin, len(keys))
        synchronize(self._device)
        begin = time.perf_counter()
        augmented_crops(batch.moved(lambda tensor: tensor.to(self._device)))
        synchronize(self._device)
        self._note("device", time.perf_counter() - begin, len(keys))

    def hand_over(self, rounds: int) -> None:
        """Finished batches from a loader process that has nothing else to do."""
        blank = np.zeros((64, 64, self._recipe.model.in_chans), np.uint8)
        ready = _Ready(self._dataset(_Decoded([blank])), self._images)
        whole = LoaderOptions(global_batch=self._images, micro_batch=self._images)
        sampler = ResumableSampler(self._images, whole, Position())
        options = worker_options(1)
        loader: DataLoader[LoaderBatch] = DataLoader(ready, batch_sampler=sampler, collate_fn=_as_it_is, **options)
        with started(loader, self._source) as batches:
            for _ in range(options["prefetch_factor"] + 1):  # they were ready before anybody waited
                next(batches)
            for _ in range(rounds):
                begin = time.perf_counter()
                for _ in range(_BATCHES):
                    next(batches)
                self._note("hand over", time.perf_counter() - begin, _BATCHES * self._images)

    def _decoded(self) -> list[np.ndarray]:
        """Pixels of `images` images; unreadable ones are passed over, and their time does not count."""
        spent = dict.fromkeys(("read", "decode") if hasattr(self._source, "read") else ("load",), 0.0)
        arrays: list[np.ndarray] = []
        for index in islice(self._order, _MAX_TRIES):
            try:
                times, array = self._decode(index)
            except UnreadableImage:
                continue
            arrays.append(array)
            for stage, seconds in times.items():
                spent[stage] += seconds
            if len(arrays) == self._images:
                break
        else:
            raise DataError(
                f"only {len(arrays)} of {_MAX_TRIES} images can be read: dino-ds look-data names the others"
            )
        for stage, seconds in spent.items():
            self._note(stage, seconds, len(arrays))
        return arrays

    def _decode(self, index: int) -> tuple[dict[str, float], np.ndarray]:
        limit, value_range = self._recipe.data.max_pixels, self._recipe.data.known_range
        channels = self._recipe.model.in_chans
        read: Callable[[int], bytes] | None = getattr(self._source, "read", None)
        begin = time.perf_counter()
        if read is None:
            array = open_image(self._source, index, limit, value_range, channels).decode()
            return {"load": time.perf_counter() - begin}, array
        data, value_range = read(index), range_at(self._source, index, value_range)
        middle = time.perf_counter()
        array = EncodedImage(data, self._source.name(index), limit, value_range, channels).decode()
        return {"read": middle - begin, "decode": time.perf_counter() - middle}, array

    def _dataset(self, source: Source) -> MultiCropDataset:
        return MultiCropDataset(source, self._multicrop, LoaderOptions.of(self._recipe, device=self._device))

    def _note(self, stage: str, seconds: float, images: int) -> None:
        self.seconds.setdefault(stage, []).append(seconds / images)


class _Decoded:
    """Images that are in memory already."""

    labels = None
    classes = None

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays)

    def load(self, index: int) -> Any:
        return self._arrays[index]

    def name(self, index: int) -> str:
        return str(index)


class _Ready(Dataset[LoaderBatch]):
    """The crops of the first image of `dataset`, again and again, each time written to memory anew."""

    def __init__(self, dataset: MultiCropDataset, images: int) -> None:
        self._dataset, self._images = dataset, images
        self._batch: LoaderBatch | None = None

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> LoaderBatch:
        if self._batch is None:
            self._batch = _batch_of(self._dataset, [(0, 0)] * self._images)
        return self._batch.moved(torch.clone)


def _as_it_is(batch: Any) -> Any:
    return batch


def _batch_of(dataset: MultiCropDataset, keys: Sequence[tuple[int, int]]) -> LoaderBatch:
    batch = dataset.__getitems__(keys)
    if isinstance(batch, DataError):
        raise batch
    return batch


@contextmanager
def _one_thread() -> Iterator[None]:
    """Computes with one thread, as a loader process does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
