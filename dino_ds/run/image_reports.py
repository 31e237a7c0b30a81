"""Reports what is wrong with single images: names those that can't be read and those of one color, and stops a run
whose data has too many of the first kind."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from dino_ds.engine import distributed
from dino_ds.errors import DataError
from dino_ds.health.files import Event
from dino_ds.run.run import Run
from dino_ds.run.saver import Saver

_DEVIATIONS = 4.0
_NO_CONTRAST = 1e-3
"""The largest range of a channel that counts as a single color, in deviations; a level of 8 bits is 17 times that."""
_GRID = 32
_MOST_NAMES = 20


class ImageReports:
    """Collects this rank's unreadable and single-color images, and the notes of its loader. Every rank calls every
    method after the same steps."""

    def __init__(self, run: Run, saver: Saver) -> None:
        self._run, self._saver, self._log = run, saver, run.log
        self._unreadable: set[str] = set()
        self._notes: list[str] = []
        self._constant = ConstantImages()
        self._constant_names: set[str] = set()

    def loaded(self, unreadable: list[str], notes: list[str]) -> None:
        """Collect what came with a micro-batch of this rank."""
        self._unreadable.update(unreadable)
        self._notes += notes

    def trained(self, names: list[str], constant: Tensor) -> None:
        """Collect the images of a micro-batch; `constant` (b,) comes from `constant_images`."""
        self._constant.add(constant, names)

    def report_unreadable(self) -> None:
        """Gather notes and unreadable images of all ranks; name and count each once. Raises DataError for too many."""
        run, seen = self._run, self._run.state.bad_images
        found = distributed.gather_objects((sorted(self._unreadable - seen), self._notes))
        self._unreadable, self._notes = set(), []
        for rank, (_, notes) in enumerate(found):
            self._log.info(*(f"note     rank {rank}: {note}" for note in notes))
        for name in sorted({name for names, _ in found for name in names}):
            seen.add(name)
            self._log.info(Event(f"unreadable image skipped: {name}", "unreadable image", name=name))
        drawn, fraction = run.images_drawn, run.options.max_bad_fraction
        limit = allowed_bad_images(fraction, drawn, run.options.images)
        if len(seen) > limit:
            self._log.info(*self._saver.saving.finish())
            raise DataError(
                f"{len(seen)} of {drawn} images are unreadable, data.max_bad_fraction {fraction:g} "
                f"allows {limit}; their names are in {run.path / 'log.txt'}: fix or remove them, or raise the fraction"
            )

    def report_constant(self, fraction: float) -> None:
        """Name new single-color images, up to a limit. `fraction` of all ranks' images since the last line are such."""
        if not fraction:
            self._constant.forget()
            return
        found = {name for names in distributed.gather_objects(self._constant.take_names()) for name in names}
        new = sorted(found - self._constant_names)
        room = max(0, _MOST_NAMES - len(self._constant_names))
        self._constant_names.update(new)
        self._log.info(*(f"warning  image of one color: {name}" for name in new[:room]))
        if new[room:] and room:
            self._log.info("warning  and more images of one color: metrics.jsonl has their part as constant_images")


class ConstantImages:
    """Collects this rank's single-color images; only `take_names` reads the device."""

    def __init__(self) -> None:
        self._seen: deque[tuple[Tensor, list[str]]] = deque(maxlen=1000)

    def add(self, constant: Tensor, names: list[str]) -> None:
        self._seen.append((constant, names))

    def take_names(self) -> list[str]:
        """The names since the last call, each once."""
        pairs = (pair for flags, names in self._seen for pair in zip(names, flags.tolist(), strict=True))
        found = dict.fromkeys(name for name, is_constant in pairs if is_constant)
        self._seen.clear()
        return list(found)

    def forget(self) -> None:
        self._seen.clear()


def constant_images(crops: list[Tensor]) -> Tensor:
    """Mark the images that have a single color in each of their crops (b, c, h, w): (b,) bool, on the device.

    Only a grid of about 32 x 32 pixels is looked at.
    """
    flat = []
    for crop in crops:
        step = max(1, crop.shape[-1] // _GRID)
        seen = crop[:, :, ::step, ::step]
        flat.append((seen.amax((2, 3)) - seen.amin((2, 3))).amax(1) < _NO_CONTRAST)
    return torch.stack(flat).all(0)


def part_shares(indices: Tensor, ends: Mapping[str, int]) -> list[Tensor]:
    """The part () of a micro-batch that came from each source of a mixture, on the device; none for a single source."""
    below = [indices.new_zeros(()), *((indices % max(ends.values()) < end).sum() for end in ends.values())]
    return [(now - before) / len(indices) for before, now in pairwise(below)]


def allowed_bad_images(fraction: float, sampled: int, images: int) -> int:
    """The most unreadable images among the first `sampled` different ones of `images` before the data is given up.

    Images come in random order, so this is what data with exactly `fraction` of unreadable images shows, plus 4
    standard deviations (of the hypergeometric distribution, with p for p (1 - p)), rounded up. It is ceil(fraction *
    images) once all were met. Data twice as bad as allowed is found out after about 16 / fraction images, a folder
    without readable images at once, and one bad file among the first stops no run unless `fraction` is 0.
    """
    sampled = min(sampled, images)
    expected = fraction * sampled
    return math.ceil(expected + _DEVIATIONS * math.sqrt(expected * (1 - sampled / images)))
