"""The interface of training to its data: micro-batches on its device, and how far they have come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from dino_ds.config.crops import Masks


@dataclass(frozen=True)
class Position:
    """Place in the global stream of images: `samples` of `epoch` are consumed, over all ranks."""

    epoch: int = 0
    samples: int = 0

    def advance(self, samples: int, per_epoch: int) -> Position:
        """After `samples` more, of `per_epoch` in an epoch; the next epoch begins where as many again don't fit."""
        consumed = self.samples + samples
        return Position(self.epoch, consumed) if consumed + samples <= per_epoch else Position(self.epoch + 1, 0)


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the device: by group of crops a list of (b, c, h, w) float32, in the order of the groups.

    indices (b,) int64, all of one epoch. `bad` has one text for each unreadable image met: its name and the reason.
    `masks` says which patches of masked groups are hidden from the student.
    """

    crops: dict[str, list[Tensor]]
    indices: Tensor
    epoch: int
    names: list[str]
    bad: list[str]
    masks: Masks = field(default_factory=dict)


class DataTimeout(Exception):
    """The next batch has not come, and who waits for it was told to give up. It may be asked for again."""


class Feed(Protocol):
    """This rank's micro-batches, without end."""

    def next_unless(self, give_up: Callable[[], bool]) -> Batch:
        """The next one; `give_up` is asked every few seconds without one, and DataTimeout raised if it returns true.

        Raises DataError if too many images in a row are unreadable, or if what loads them does not come back.
        """
        ...

    def prefetch(self) -> None:
        """Begin with the one after it, as far as that can be done without waiting."""
        ...

    def take_notes(self) -> list[str]:
        """Human-readable lines that came up since the last call."""
        ...

    def close(self) -> None: ...
