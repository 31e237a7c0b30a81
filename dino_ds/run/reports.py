"""Writes the metrics of a run every `log_every` steps, its progress, and the alarms that follow from them: of a
collapsed teacher, of unreadable images, and of steps skipped because of NaN or infinity.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dino_ds.basics.machine import host_memory_gib, resident_gib
from dino_ds.engine import distributed
from dino_ds.engine.process import memory_gib
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.errors import DataError, NumericError
from dino_ds.health.beat import Event, append_line
from dino_ds.method.step import MicroStep
from dino_ds.run.metrics import Clock, Meter
from dino_ds.run.run import Run, Saver

NEAR = 0.02
"""Fraction of ln K within which the entropy counts as 0 or as ln K, and spread below which features count as one."""
NO_KL = 0.01
"""Fraction of ln K below which the KL says that the teacher gives every image the same target."""
WINDOWS = 10
"""Consecutive lines of metrics before the alarm: a single batch may come near either bound."""
_HINTS = {
    "one prototype": "lower optimizer.lr or raise objective.teacher_temp; with Sinkhorn-Knopp raise data.global_batch, "
    "else lower objective.center_momentum",
    "uniform": "lower optimizer.lr; with Sinkhorn-Knopp raise objective.koleo_weight or lengthen optimizer.warmup, "
    "else lower objective.teacher_temp (DINO: 0.04 to 0.07)",
}
_SPREAD_HINT = "lower optimizer.lr, lengthen optimizer.warmup or raise data.global_batch"


class _Alarm:
    """Reports a symptom once it has lasted for WINDOWS lines of metrics, and again only after a recovery. It never
    stops a run."""

    def __init__(self) -> None:
        self._windows, self._kind = 0, ""
        self.on = False

    def _report(self, step: int, kind: str, symptom: str) -> str:
        """Count a line of metrics with a symptom of this kind; returns the line of an alarm that starts, else ""."""
        self._windows = self._windows + 1 if kind and kind == self._kind else int(bool(kind))
        self._kind, was_on = kind, self.on
        self.on = bool(kind) and (was_on or self._windows >= WINDOWS)
        return f"collapse after step {step}: {symptom}" if self.on and not was_on else ""


class CollapseAlarm(_Alarm):
    """Checks the entropy and the KL of targets over prototypes in each line of metrics.

    Source: DINO, section 5.3 and figure 7 (arXiv 2104.14294): KL -> 0 is a constant output; the entropy tells which:
    -> 0 without centering (one prototype takes all images), -> ln K without sharpening (uniform targets). Uniform
    targets are normal before the end of the learning rate's warm-up.

    Sinkhorn-Knopp gives equal rows uniform targets, and so a constant output shows as these.

    rows: what has one target each, an image or a patch.
    """

    def __init__(self, prototypes: int, warmup_steps: int, rows: str = "image") -> None:
        super().__init__()
        self._most, self._rows, self._warmup_steps = math.log(prototypes), rows, warmup_steps

    def look(self, step: int, entropy: float, kl: float) -> str:
        """The alarm's line when it starts, else "". Entropy and KL in nats are means since the last line of metrics."""
        kind = ""
        if abs(kl) < NO_KL * self._most:
            if entropy < NEAR * self._most:
                kind = "one prototype"
            elif entropy > (1 - NEAR) * self._most and step > self._warmup_steps:
                kind = "uniform"
        symptom = (
            f"the teacher gives every {self._rows} the same target ({kind}; entropy {entropy:.3f} of {self._most:.3f} "
            f"nats, KL {kl:.4f}; DINO, figure 7); {_HINTS.get(kind)}"
        )
        return self._report(step, kind, symptom)


class SpreadAlarm(_Alarm):
    """Checks the spread of features over images, for objectives without prototypes: 0 if all images have one feature, 1
    if they fill the sphere. A low spread is normal before the end of the warm-up."""

    def __init__(self, name: str, warmup_steps: int) -> None:
        super().__init__()
        self._name, self._warmup_steps = name, warmup_steps

    def look(self, step: int, spread: float) -> str:
        """The alarm's line when it starts, else "". `spread` is the mean since the last line of metrics."""
        kind = "one feature" if spread < NEAR and step > self._warmup_steps else ""
        symptom = f"the student gives every image the same feature ({self._name} {spread:.3f} of 1); {_SPREAD_HINT}"
        return self._report(step, kind, symptom)


_DRIFT = "preserve_loss"
FAR = 0.1
"""Distance of features to the start's above which it is being lost: runs of recipe continue stayed below 0.02, without
its weight on this distance 0.14 was reached, where ridge was below the start (docs/notes/continue.md)."""


class DriftAlarm:
    """Warns of features that leave those of the weights that a run started from: this needs no labels.

    `ended` says why the run ends: the distance is above `most`, if this is not None. "" before.
    """

    def __init__(self, most: float | None = None) -> None:
        self._on, self._most, self.ended = False, most, ""

    def look(self, step: int, distance: float) -> str:
        """The warning when the distance comes above FAR, else "". `distance` is the mean since the last line."""
        if self._most is not None and distance > self._most:
            self.ended = f"eval.stop_after: preserve_loss {distance:.3f} is above {self._most:g}"
        was_on, self._on = self._on, distance > FAR
        if was_on or not self._on:
            return ""
        what = f"warning  step {step}: features are leaving the start's (preserve_loss {distance:.3f} of 2)"
        return f"{what}: what it knew may be lost; raise objective.preserve_weight or lower optimizer.lr"


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

    def loaded(self, unreadable: Sequence[str], notes: list[str]) -> None:
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
        position, fraction = run.state.position, run.options.max_bad_fraction
        drawn = run.options.images if position.epoch else position.samples  # after an epoch, those it left out too
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
        self._in_a_row = 0

    def report(self, window: list[tuple[MicroStep, Sequence[str]]]) -> None:
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
        more = f" and {len(images) - 4} more" if len(images) > 4 else ""
        reason = (
            f"the {quantity} is NaN or infinite after step {step.applied_steps}, on images of ranks "
            f"{', '.join(map(str, ranks))}: {', '.join(images[:4])}{more}"
        )
        self._log.info(
            Event(f"{reason}; nothing moved ({self._in_a_row} in a row; {_MOST} stop the run)", "not finite")
        )
        if self._in_a_row >= _MOST:
            raise NumericError(
                f"{reason}, {_MOST} times in a row; checkpoints in {run.path} are from before. Look at the images "
                f"in {run.path / _FILE}, lower optimizer.lr, or use a bf16 or fp32 ds config"
            )


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


_SOON = 5.0
"""Seconds of training after which the log says how long the run will take."""
_LONG_WAIT = 0.1
"""Share of the time spent waiting for data above which the step line states it."""


class Reports:
    """Collects and writes the reports of a run; `images` reports on its images. The loop updates `clock`.

    Every rank calls every method.
    """

    def __init__(self, run: Run, saver: Saver) -> None:
        self._run, self._saver, self._log = run, saver, run.log
        self.images = ImageReports(run, saver)
        self._shares = tuple(f"share/{source}" for source in run.options.part_ends)
        meters = ("loss", *run.step.objective.scalars, "constant_images", *self._shares)
        self._meter = Meter(meters, run.step.engine.device)
        self.clock = Clock(run.options.global_batch)
        self._began = 0.0, 0
        self._after_first: tuple[float, int] | None = None
        self._foretold = False
        self._newest: MicroStep | None = None
        """Of steps without a line of metrics."""
        self._said_constant = self._said_wait = False
        warmup = run.step.schedules.warmup_steps
        objective = run.step.objective
        self._collapse: list[tuple[tuple[str, ...], CollapseAlarm | SpreadAlarm]] = [
            ((entropy.scalar, entropy.kl), CollapseAlarm(entropy.prototypes, warmup, entropy.rows))
            for entropy in objective.entropies
        ]
        self._collapse += [((name,), SpreadAlarm(name, warmup)) for name in objective.spreads]
        self._drift = DriftAlarm(run.options.most_drift)

    def begin(self) -> None:
        """Begin to measure speed: training starts or continues now."""
        self.clock.read()
        self._began = time.monotonic(), self._run.step.applied_steps

    def trained(self, micro: MicroStep, constant: Tensor, shares: list[Tensor]) -> None:
        """Add a micro-batch of an applied step; `constant` (b,) from `constant_images`, `shares` from `part_shares`."""
        self._newest = micro
        scalars = [micro.scalars[name] for name in self._run.step.objective.scalars]
        self._meter.add(micro.loss, *scalars, constant.float().mean(), *shares)

    def foretell(self) -> None:
        """Say once, seconds after the first step, how long the run will take, if that is a minute or more, and how to
        train for a quarter of it. Until then call this after each step."""
        run, done, now = self._run, self._run.step.applied_steps, time.monotonic()
        self._after_first = self._after_first or (now, done)  # the first step takes longer than others
        seconds, steps = now - self._after_first[0], done - self._after_first[1]
        if self._foretold or seconds < _SOON:
            return
        self._foretold, left = True, (run.options.last_step - done) * seconds / steps
        images = run.options.last_step * run.options.global_batch // 4
        is_whole = self._began[1] == 0 and run.options.last_step == run.step.schedules.steps
        shorter = f'; a quarter of it: a new run with --length "{images} images"' if is_whole else ""
        if shorter and run.step.schedules.warmup_steps * run.options.global_batch > images:
            shorter += ' --optimizer.warmup "10 %"'
        if left > 60:
            self._log.info(f"time     about {_duration(left)} left{shorter}")

    def write(self, out: MicroStep) -> None:
        """Write a step's line of metrics, and the alarms that it raises."""
        means, speed, self._newest = self._meter.read(), self.clock.read(), None
        self.images.report_unreadable()
        predicted = self._run.options.predicted_gib
        record = {
            **self._describe_step(means, out.schedule),
            **speed,
            **_read_host(),
            **self._saver.metrics(),
            "memory_gib": memory_gib(),
            **({} if predicted is None else {"memory_predicted_gib": predicted}),
        }
        texts = [alarm.look(record["step"], *(record[name] for name in names)) for names, alarm in self._collapse]
        texts += [self._drift.look(record["step"], record[_DRIFT])] if _DRIFT in record else []
        self._log.write({**record, "collapsed": int(any(alarm.on for _, alarm in self._collapse))})
        self._show_progress(record)
        if means["constant_images"] and not self._said_constant:
            self._said_constant = True
            part = f"{means['constant_images']:.2%}"
            self._log.info(f"warning  {part} of the images are of one color (constant_images of metrics.jsonl)")
        self._log.info(*filter(None, texts))

    @property
    def ended(self) -> str:
        """Why the run ends before its last step, or ""."""
        return self._drift.ended

    def finish(self) -> None:
        """Write the metrics of a run that ends between two lines, so that it ends at the step that is saved."""
        if self._newest is not None:
            self.write(self._newest)

    def _describe_step(self, means: dict[str, float], schedule: ScheduleValues) -> dict[str, Any]:
        """The metrics of training: progress, losses, schedules, gradient, skipped steps and bad images."""
        run, objective = self._run, self._run.step.objective
        return {
            "step": run.step.applied_steps,
            "images": run.step.applied_steps * run.options.global_batch,
            "epoch": run.state.position.epoch,
            "loss": means["loss"],
            **{name: means[name] for name in objective.scalars},
            **{entropy.kl: means[entropy.loss] - means[entropy.scalar] for entropy in objective.entropies},
            "lr": schedule.lr,
            "weight_decay": schedule.weight_decay,
            "teacher_momentum": schedule.teacher_momentum,
            **{f"{name}_momentum": momentum for name, momentum in schedule.momenta.items()},
            **{f"{name}_weight": schedule.weights[name] for name, w in run.step.schedules.weights.items() if w.moves},
            "teacher_temp": schedule.teacher_temp,
            "grad_norm": run.step.engine.grad_norm,
            "loss_scale": run.step.engine.loss_scale,
            "skipped_steps": run.state.skipped_steps,
            "bad_images": len(run.state.bad_images),
            "constant_images": means["constant_images"],
            **{name: means[name] for name in self._shares},
        }

    def _show_progress(self, record: dict[str, Any]) -> None:
        run, rate = self._run, record["images_per_second"]
        waits = record["data_wait_fraction"]
        waiting = f", waits for data {100 * waits:.0f} % of the time" if waits > _LONG_WAIT else ""
        if waiting and not self._said_wait:
            self._said_wait = True
            waiting += " (dino-ds bench tune finds the loader processes that help)"
        losses = {name: record.get(f"{name}_loss") for name in run.step.objective.terms}
        terms = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items() if loss is not None)
        loss = f"loss {record['loss']:.3f}{f' ({terms})' if terms else ''}"
        short = f"{loss}, {rate:.0f} images/s{waiting}"
        seconds, steps = time.monotonic() - self._began[0], record["step"] - self._began[1]
        left = f"about {_duration((run.options.last_step - record['step']) * seconds / steps)} left"
        line = f"step {record['step']}/{run.options.last_step}  {short}, {left}"
        self._log.info(Event(line, "step", step=record["step"]))
        self._foretold = True


def _read_host() -> dict[str, float]:
    """Memory of rank 0's machine in GiB: resident sets of this run's ranks and loader processes, and free memory."""
    by_rank = distributed.gather_objects(resident_gib())
    return {
        "host_memory_gib": sum(by_rank[: distributed.local_world_size()]),  # ranks are numbered machine by machine
        "host_free_gib": host_memory_gib()[1],
    }


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"
    return f"{seconds:.0f} s"
