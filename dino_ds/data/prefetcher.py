"""Brings batches to the device: the next one is copied and augmented during the current training step."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from dino_ds.basics.ranges import AUGMENTATION, named_range
from dino_ds.config.crops import all_crops
from dino_ds.data.batches import LoaderBatch, augmented_crops
from dino_ds.data.feed import Batch
from dino_ds.data.loader import Loader
from dino_ds.data.photometric import find_kernels
from dino_ds.errors import DataError


class DevicePrefetcher:
    """Endless iterator of Batch over a loader. Raises the loader's errors.

    On a GPU, `prefetch` is called once a step's backward pass is launched; it copies and augments the next crops on a
    side stream during that pass.
    """

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: Batch | DataError | None = None
        self._notes: list[str] = []
        self._first = True

    def __iter__(self) -> DevicePrefetcher:
        return self

    def __next__(self) -> Batch:
        if self._stream is None:
            return self._to_device(next(self._loader))
        ready, self._next = self._next, None
        if isinstance(ready, DataError):
            raise ready
        if ready is None:
            ready = self._to_device(next(self._loader))
        step = torch.cuda.current_stream(self._device)
        step.wait_stream(self._stream)
        masks = (tensor for mask in ready.masks.values() for tensor in mask.values())
        for tensor in (*all_crops(ready.crops), ready.indices, *masks):
            tensor.record_stream(step)  # or the side stream would reuse its memory while the step reads it
        return ready

    def prefetch(self) -> None:
        """Copy and augment the next batch if it is ready, without waiting; `__next__` raises its errors."""
        if self._stream is None or self._next is not None:
            return
        try:
            if batch := self._loader.next_if_ready():
                self._next = self._to_device(batch)
        except DataError as error:
            self._next = error

    def take_notes(self) -> list[str]:
        """Log lines of the loader and of the augmentation since the last call."""
        notes, self._loader.notes, self._notes = self._loader.notes + self._notes, [], []
        return notes

    def close(self) -> None:
        """Stop the loader's processes."""
        self._next = None
        self._loader.close()

    def _to_device(self, batch: LoaderBatch) -> Batch:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            ready = to_device(batch, self._device)
        if self._first and batch.params:
            reasons = [find_kernels(self._device, group.dtype, group.shape[2:])[1] for group in batch.crops.values()]
            if any(reasons):
                self._notes.append(
                    "augmentation takes some 490 launches a batch, not 8: the fused kernels don't run here "
                    f"({next(filter(None, reasons))})"
                )
        self._first = False
        return ready


def to_device(batch: LoaderBatch, device: torch.device) -> Batch:
    """Copy a batch to the device and augment it there on the current stream; the host does not wait."""
    moved = batch.moved(lambda tensor: tensor.to(device, non_blocking=True))
    with named_range(AUGMENTATION):
        crops = augmented_crops(moved)
    return Batch(crops, moved.indices, batch.epoch, batch.names, batch.bad, moved.masks)
