"""Batches on the device: the next one is copied and augmented while the training step works on this one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from dino_ds.data.batches import Batch, augmented_views
from dino_ds.data.loader import Loader, NoBatchYet


@dataclass(frozen=True)
class Views:
    """One micro-batch on the device: views (b, c, h, w) float32, global ones first; indices (b,) int64.

    epoch, names and bad as in Batch.
    """

    views: list[Tensor]
    indices: Tensor
    epoch: int
    names: list[str]
    bad: list[str]


class Feed:
    """An endless iterator of Views over a loader. Raises what the loader raises."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: Views | None = None

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Views:
        return self.next_unless(_never)

    def next_unless(self, give_up: Callable[[], bool]) -> Views:
        """As `Loader.next_unless`."""
        if self._stream is None:
            return self._bring(self._loader.next_unless(give_up))
        ready = self._next or self._bring_aside(self._stream, give_up)
        self._next = None
        step = torch.cuda.current_stream(self._device)
        step.wait_stream(self._stream)
        for tensor in (*ready.views, ready.indices):
            tensor.record_stream(step)  # or the side stream would reuse its memory while the step reads it
        with suppress(NoBatchYet):  # this one is there; the next call will say it
            self._next = self._bring_aside(self._stream, give_up)
        return ready

    def take_notes(self) -> list[str]:
        """What the loader has to say since the last call."""
        notes, self._loader.notes = self._loader.notes, []
        return notes

    def close(self) -> None:
        """Stop the loader's processes."""
        self._next = None
        self._loader.close()

    def _bring_aside(self, stream: torch.cuda.Stream, give_up: Callable[[], bool]) -> Views:
        batch = self._loader.next_unless(give_up)
        with torch.cuda.stream(stream):
            return self._bring(batch)

    def _bring(self, batch: Batch) -> Views:
        there = batch.moved(lambda tensor: tensor.to(self._device, non_blocking=True))
        return Views(augmented_views(there), there.indices, batch.epoch, batch.names, batch.bad)


def _never() -> bool:
    return False
