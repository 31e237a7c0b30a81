"""The interface between training and its data: micro-batches on the device, and the position in the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dino_ds.config.crops import Masks


@dataclass(frozen=True)
class Position:
    """Position in the global stream of images: `samples` of `epoch` are consumed, over all ranks."""

    epoch: int = 0
    samples: int = 0

    def advance(self, samples: int, per_epoch: int) -> Position:
        """Position after `samples` more images; an epoch of `per_epoch` images ends if as many again would not fit."""
        consumed = self.samples + samples
        return Position(self.epoch, consumed) if consumed + samples <= per_epoch else Position(self.epoch + 1, 0)


class Batch(NamedTuple):
    """A micro-batch on the device.

    Attributes:
        crops: by crop group, in the order of the groups, each crop as (b, c, h, w) float32.
        drop_keys: the `sample_keys` of the images, (b,) int64, for stochastic depth; None without it.
        masks: of each masked group, the patches that the student predicts, and sees only if crops.mask_hides is false.
        indices: of the images, (b,) int64, all drawn in `epoch`.
        names: of the images.
        bad: name and reason of each unreadable image that was replaced.
    """

    crops: Mapping[str, Sequence[Tensor]]
    drop_keys: Tensor | None = None
    masks: Masks = MappingProxyType({})
    indices: Tensor = torch.empty(0, dtype=torch.int64)
    epoch: int = 0
    names: Sequence[str] = ()
    bad: Sequence[str] = ()


class Feed(Protocol):
    """This rank's micro-batches, without end."""

    def __next__(self) -> Batch:
        """The next micro-batch. Raises DataError for too many unreadable images in a row, or dead loader processes."""

    def prefetch(self) -> None:
        """Begin to prepare the following micro-batch, without waiting."""

    def take_notes(self) -> list[str]:
        """Lines for the log since the last call."""

    def close(self) -> None: ...
