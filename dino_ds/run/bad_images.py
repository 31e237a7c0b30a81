"""Reports unreadable images, and steps skipped because of NaN or infinity; ends a run with too many of either."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from dino_ds.engine import distributed
from dino_ds.errors import DataError, NumericError
from dino_ds.health.files import Event, append_line
from dino_ds.method.step import MicroStep
from dino_ds.run.run import Run
from dino_ds.run.saver import Saver

_FILE = "bad_batches.jsonl"
_MOST = 3  # steps in a row whose loss or gradient is not finite stop the run
_SHOWN = 5
"""Unreadable images that the screen names; log.txt names all."""
_DEVIATIONS = 4.0
_NO_CONTRAST = 1e-3
"""Largest range of a channel that counts as a single color, in standard deviations; an 8-bit level is 17 times this."""
_GRID = 32


class ImageReports:
    """Collects this rank's unreadable images, and the notes of its loader. Every rank calls every method after the same
    steps."""

    def __init__(self, run: Run, saver: Saver) -> None:
        self._run, self._saver, self._log = run, saver, run.log
        self._unreadable: set[str] = set()
        self._notes: list[str] = []

    def loaded(self, unreadable: list[str], notes: list[str]) -> None:
        """Collect what came with a micro-batch of this rank."""
        self._unreadable.update(unreadable)
        self._notes += notes

    def report_unreadable(self) -> None:
        """Gather notes and unreadable images of all ranks; name and count each once. Raises DataError for too many."""
        run, seen = self._run, self._run.state.bad_images
        gathered = distributed.gather_objects((sorted(self._unreadable - seen), self._notes))
        self._unreadable, self._notes = set(), []
        for rank, (_, notes) in enumerate(gathered):
            self._log.info(*(f"note     rank {rank}: {note}" for note in notes))
        for name in sorted({name for names, _ in gathered for name in names}):
            seen.add(name)
            detail = len(seen) > _SHOWN
            self._log.info(Event(f"unreadable image skipped: {name}", "unreadable image", detail, name=name))
        drawn, fraction = run.images_drawn, run.options.max_bad_fraction
        limit = allowed_bad_images(fraction, drawn, run.options.images)
        if len(seen) > limit:
            self._log.info(*self._saver.saving.finish())
            raise DataError(
                f"{len(seen)} of {drawn} images are unreadable, data.max_bad_fraction {fraction:g} "
                f"allows {limit}; their names are in {run.path / 'log.txt'}: fix or remove them, or allow more "
                f"(--data.max_bad_fraction {math.ceil(200 * len(seen) / run.options.images) / 100:g})"
            )


class BadSteps:
    """Counts bad steps in a row. A mere fp16 overflow does not count: it is how the loss scale is found."""

    def __init__(self, run: Run) -> None:
        self._run, self._log = run, run.log
        self._in_a_row = 0

    def reset(self) -> None:
        """Begin the count anew, after a step that was applied."""
        self._in_a_row = 0

    def report(self, window: list[tuple[MicroStep, list[str]]]) -> None:
        """Report a skipped step. window: this rank's micro-batches, with their images' names. Every rank must call it.

        Raises NumericError, on all ranks, at the third bad step in a row, or if the loss scale can't fall further.
        """
        run, step = self._run, self._run.step
        run.state.skipped_steps += 1
        bad = [name for out, names in window if not torch.isfinite(out.loss) for name in names]
        by_rank = distributed.gather_objects((bad, [name for _, names in window for name in names]))
        ranks = [rank for rank, (names, _) in enumerate(by_rank) if names]
        if not ranks and step.engine.config.dynamic_loss_scale:
            if step.engine.scale_is_exhausted:
                raise NumericError(
                    f"fp16 gradients still overflow at the smallest loss scale ({step.engine.loss_scale:g}): "
                    "lower optimizer.lr, or use a bf16 ds config"
                )
            line = f"fp16 overflow after step {step.applied_steps}: the loss scale is {step.engine.loss_scale:g}"
            self._log.info(Event(line, "overflow", detail=True))
            return
        self._in_a_row += 1
        quantity = "loss" if ranks else "gradient"
        images = [name for bad, names in by_rank for name in (bad if ranks else names)]
        ranks = ranks or [*range(len(by_rank))]
        if distributed.rank() == 0:
            about = {"step": step.applied_steps, "in_a_row": self._in_a_row, "what": quantity}
            append_line(run.path / _FILE, json.dumps({**about, "ranks": ranks, "images": images}))
        reason = (
            f"the {quantity} is NaN or infinite after step {step.applied_steps}, on images of ranks "
            f"{', '.join(map(str, ranks))}: {_shorten(images)}"
        )
        self._log.info(
            Event(f"{reason}; nothing moved ({self._in_a_row} in a row; {_MOST} stop the run)", "not finite")
        )
        if self._in_a_row >= _MOST:
            raise NumericError(
                f"{reason}, {_MOST} times in a row; checkpoints in {run.path} are from before. Look at the images "
                f"in {run.path / _FILE}, lower optimizer.lr, or use a bf16 or fp32 ds config"
            )


def _shorten(names: list[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


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
    """Return the share () of a micro-batch from each source of a mixture, on the device; [] for a single source."""
    below = [indices.new_zeros(()), *((indices % max(ends.values()) < end).sum() for end in ends.values())]
    return [(now - before) / len(indices) for before, now in pairwise(below)]


def allowed_bad_images(fraction: float, sampled: int, images: int) -> int:
    """Return how many unreadable images are allowed among the first `sampled` different ones of `images`.

    Images come in random order, so this is the expected number in data with exactly `fraction` of unreadable images,
    plus 4 standard deviations (of the hypergeometric distribution, with p for p (1 - p)), rounded up. It is
    ceil(fraction * images) once all images were seen. Data twice as bad as allowed is detected after about 16 /
    fraction images, a folder without readable images at once; one bad file among the first stops no run unless
    `fraction` is 0.
    """
    sampled = min(sampled, images)
    expected = fraction * sampled
    return math.ceil(expected + _DEVIATIONS * math.sqrt(expected * (1 - sampled / images)))
