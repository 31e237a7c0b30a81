"""The training loop: micro-batches, the work between optimizer steps, and what it reports: a line of metrics every
`log_every` steps, progress, unreadable images, and steps that are skipped because of NaN or infinity."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dino_ds.basics.machine import host_memory_gib, resident_gib
from dino_ds.data.feed import Batch, Feed
from dino_ds.engine import distributed, engine, process, schedules
from dino_ds.errors import STOPPED, DataError, NumericError, Stopped
from dino_ds.health.beat import Beat, Event, append_line
from dino_ds.method.step import MicroStep
from dino_ds.run.metrics import Clock, CollapseAlarm, DriftAlarm, Meter, SpreadAlarm
from dino_ds.run.run import PeriodicTask, Run, SaveClock, Saver, StepContext

if TYPE_CHECKING:
    from dino_ds.run.guards import StopRequests


class _Trained(NamedTuple):
    """A micro-batch of this rank: its MicroStep, its images' names, results of `constant_images` and `part_shares`."""

    step: MicroStep
    names: Sequence[str]
    constant: Tensor
    shares: list[Tensor]


class Loop:
    """Trains a run from its current step to its last; reports its phase to `beat`; ends early if `stop` asks for it."""

    def __init__(self, run: Run, saver: Saver, beat: Beat, stop: StopRequests) -> None:
        self._run, self._saver, self._log = run, saver, run.log
        self._beat, self._stop = beat, stop
        self._reports = Reports(run, saver)
        self._clock = self._reports.clock
        self._saves = SaveClock(run.options.save_every, run.step.applied_steps)
        self._window: list[_Trained] = []
        self._ahead: list[Batch] = []

    def run(self, open_feed: Callable[[], Feed]) -> None:
        """Train to the last step. Raises SystemExit(75) after a stop on request, with everything saved."""
        run, step = self._run, self._run.step
        self._stop.install(lambda: step.flags.set("stop"))
        done, at_start, evaluations = step.applied_steps, self._saver.saved_step == 0, run.evaluations
        # Evaluate the weights that training begins with, or a resumed step whose evaluation was interrupted.
        if evaluations is not None and (done == 0 or evaluations.missed(done, at_start)):
            if not self._run_now(evaluations, at_start):
                self._end_early()
            if evaluations.improved():
                self._log.info(*self._saver.save_best())
        if done == 0:
            self._run_if_due(run.pictures, last=False)
        with closing(open_feed()) as feed:
            self._reports.begin()
            try:
                while step.applied_steps < run.options.last_step and not self._finished():
                    self._micro_batch(feed)
            except NumericError:  # all ranks raise it
                self._log.info(*self._saver.saving.finish())
                raise
        if self._reports.drift.ended:
            self._log.info(f"ended    {self._reports.drift.ended}")
        self._beat.enter("end", step.applied_steps)
        self._remove_stop_file()

    def _finished(self) -> bool:
        evaluations = self._run.evaluations
        return bool(self._reports.drift.ended) or (evaluations is not None and bool(evaluations.finished()))

    def _micro_batch(self, feed: Feed) -> None:
        step = self._run.step
        if not self._ahead:
            for _ in range(step.window):
                self._beat.enter("data", step.applied_steps)
                with self._clock.spending("wait"):
                    batch = next(feed)
                self._reports.unreadable.update(batch.bad)
                self._reports.notes += feed.take_notes()
                self._ahead.append(batch)
            if step.window > 1:
                self._beat.enter("step", step.applied_steps)
                step.prepare(self._ahead)
        self._beat.enter("step", step.applied_steps)
        self._window.append(self._train(self._ahead.pop(0), feed))
        progress = self._window[-1].step.progress
        if progress is engine.Progress.ACCUMULATING:
            return
        window, self._window = self._window, []
        self._beat.warm = True  # ends the longer time limits of start-up and the first step
        if progress is not engine.Progress.SKIPPED:
            self._after_step(window)
            return
        self._reports.skipped(window)
        if any(distributed.gather_objects(bool(self._stop.why))):
            self._saver.check_folder()
            if step.applied_steps > self._saver.saved_step:
                self._save(wait=True)
            else:
                self._log.info(*self._saver.saving.finish(must=True))
            self._end_early()

    def _train(self, batch: Batch, feed: Feed) -> _Trained:
        run, options = self._run, self._run.options
        constant = constant_images([crop for name in options.teacher_groups for crop in batch.crops[name]])
        out = run.step.micro_batch(batch, feed.prefetch)
        consumed = run.step.engine.config.micro_batch * distributed.world_size()
        run.state.position = run.state.position.advance(consumed, options.epoch_steps * options.global_batch)
        return _Trained(out, batch.names, constant, part_shares(batch.indices, options.part_ends))

    def _after_step(self, window: list[_Trained]) -> None:
        run, done = self._run, self._run.step.applied_steps
        self._reports.trained(window)
        self._clock.steps += 1
        if self._beat.stop_reason:  # the monitor has seen RUN/stop, or the end of the launcher
            run.step.flags.set("stop")
        self._log.info(*self._saver.saving.poll())
        self._log.progress(done, run.options.last_step)
        last = done == run.options.last_step
        if last or done % run.options.log_every == 0:
            self._reports.write()
            last = last or bool(self._reports.drift.ended)
        else:
            self._reports.foretell()
            if done == 1:
                self._reports.report_unreadable()
        stop = run.step.flags.count("stop") > 0 and not last
        evaluate = run.evaluations is not None and run.evaluations.due(done, last) and not stop
        if evaluate:
            stop = not self._run_if_due(run.evaluations, last) and not last
        last = last or (evaluate and self._finished())
        if not stop:
            self._run_if_due(run.pictures, last)
        improved = evaluate and run.evaluations is not None and run.evaluations.improved()
        if self._saves.due(done) or last or stop or improved:
            self._save(wait=last or stop)
        if stop:
            self._end_early()

    def _run_if_due(self, task: PeriodicTask | None, last: bool) -> bool:
        """Run a task if it is due; returns False if a stop was requested before its end."""
        return task is None or not task.due(self._run.step.applied_steps, last) or self._run_now(task)

    def _run_now(self, task: PeriodicTask, at_start: bool = False) -> bool:
        run, step = self._run, self._run.step
        done = step.applied_steps

        def stop_requested() -> bool:
            self._beat.tick()  # shows the monitor process that work makes progress
            return self._stop.requested_anywhere()

        self._beat.enter("evaluate", done)
        with self._clock.spending("pause"):
            where = step.teachers.exported, step.engine.device, done, done * run.options.global_batch
            return task.run(StepContext(*where, run.path, run.log, stop_requested, at_start, step))

    def _save(self, wait: bool) -> None:
        self._beat.enter("save", self._run.step.applied_steps)
        self._saver.check_folder()
        with self._clock.spending("pause"):
            self._reports.report_unreadable()
            self._log.info(*self._saver.save(wait))

    def _end_early(self) -> None:
        """End the run after a stop request: raises SystemExit(75)."""
        run = self._run
        done, reasons = run.step.applied_steps, distributed.gather_objects(self._stop.why)
        self._beat.enter("end", done)
        self._saver.check_folder()
        if self._reports.newest is not None:  # the run ends between two lines: write the metrics of what is saved
            self._reports.write()
        self._stop.over = True
        _, rank, by = min((not why.startswith("SIG"), rank, why) for rank, why in enumerate(reasons) if why)
        if by.startswith("SIG") and reasons.count(by) < len(reasons):
            by = f"{by} (rank {rank})"
        saved = f"saved step {done}" if done and self._saver.saved_step == done else "nothing to save"
        stopped = f"by {by} at step {done}; {saved}"
        self._log.info(f"stopped  {stopped}. To continue: the same command with --resume")
        self._remove_stop_file()
        raise SystemExit(STOPPED) from Stopped(f"{run.path}: stopped {stopped}")

    def _remove_stop_file(self) -> None:
        """Remove RUN/stop once it was obeyed, so that the next start of this run continues."""
        if distributed.rank() == 0:
            (self._run.path / "stop").unlink(missing_ok=True)


_FILE = "bad_batches.jsonl"
_MOST = 3  # steps in a row whose loss or gradient is not finite stop the run


class Reports:
    """Collects and writes the reports of a run. The loop updates `clock`. Every rank calls every method.
    newest: the step of the newest micro-batch since the last line of metrics. unreadable, notes: this rank's unreadable
    images, and the notes of its loader, which are not reported yet."""

    def __init__(self, run: Run, saver: Saver) -> None:
        self._run, self._saver, self._log = run, saver, run.log
        self.unreadable, self.notes = set[str](), list[str]()
        self._bad_in_a_row = 0
        self._shares = tuple(f"share/{source}" for source in run.options.part_ends)
        objective, warmup = run.step.objective, run.step.schedules.warmup_steps
        self._meter = Meter(("loss", *objective.scalars, "constant_images", *self._shares), run.step.engine.device)
        self.clock = Clock(run.options.global_batch)
        self._began = 0.0, 0
        self._after_first: tuple[float, int] | None = None
        self._foretold = False
        self.newest: MicroStep | None = None
        self._said_constant = self._said_wait = False
        self._collapse: list[tuple[tuple[str, ...], CollapseAlarm | SpreadAlarm]] = [
            ((entropy.scalar, entropy.kl), CollapseAlarm(entropy.prototypes, warmup, entropy.rows))
            for entropy in objective.entropies
        ]
        self._collapse += [((name,), SpreadAlarm(name, warmup)) for name in objective.spreads]
        self.drift = DriftAlarm(run.options.most_drift)

    def begin(self) -> None:
        """Begin to measure speed: training starts or continues now."""
        self.clock.read()
        self._began = time.monotonic(), self._run.step.applied_steps

    def report_unreadable(self) -> None:
        """Gather notes and unreadable images of all ranks; name and count each once. Raises DataError for too many."""
        run, seen = self._run, self._run.state.bad_images
        gathered = distributed.gather_objects((sorted(self.unreadable - seen), self.notes))
        self.unreadable, self.notes = set(), []
        for rank, (_, notes) in enumerate(gathered):
            self._log.info(*(f"note     rank {rank}: {note}" for note in notes))
        for name in sorted({name for names, _ in gathered for name in names}):
            seen.add(name)
            detail = len(seen) > 5  # log.txt names them all
            self._log.info(Event(f"unreadable image skipped: {name}", "unreadable image", detail, name=name))
        position, fraction = run.state.position, run.options.max_bad_fraction
        drawn = run.options.images if position.epoch else position.samples  # after an epoch, left-out ones count too
        limit = allowed_bad_images(fraction, drawn, run.options.images)
        if len(seen) > limit:
            self._log.info(*self._saver.saving.finish())
            enough = math.ceil(200 * len(seen) / run.options.images) / 100
            problem = f"{len(seen)} of {drawn} images are unreadable, data.max_bad_fraction {fraction:g} allows {limit}"
            remedy = f"fix or remove them, or allow more (--data.max_bad_fraction {enough:g})"
            raise DataError(f"{problem}; their names are in {run.path / 'log.txt'}: {remedy}")

    def skipped(self, window: list[_Trained]) -> None:
        """Report a skipped step. A mere fp16 overflow is no bad step: it is how the loss scale is found.
        Raises NumericError, on all ranks, at the third bad step in a row, or if the loss scale can't fall further."""
        run, step = self._run, self._run.step
        run.state.skipped_steps += 1
        bad = [name for micro in window if not torch.isfinite(micro.step.loss) for name in micro.names]
        by_rank = distributed.gather_objects((bad, [name for micro in window for name in micro.names]))
        ranks = [rank for rank, (names, _) in enumerate(by_rank) if names]
        if not ranks and step.engine.config.dynamic_loss_scale:
            if step.engine.scale_is_exhausted:
                problem = f"fp16 gradients still overflow at the smallest loss scale ({step.engine.loss_scale:g})"
                raise NumericError(f"{problem}: lower optimizer.lr, or use a bf16 ds config")
            line = f"fp16 overflow after step {step.applied_steps}: the loss scale is {step.engine.loss_scale:g}"
            self._log.info(Event(line, "overflow", detail=True))
            return
        self._bad_in_a_row += 1
        quantity = "loss" if ranks else "gradient"
        images = [name for bad, names in by_rank for name in (bad if ranks else names)]
        ranks = ranks or [*range(len(by_rank))]
        if distributed.rank() == 0:
            about = {"step": step.applied_steps, "in_a_row": self._bad_in_a_row, "what": quantity}
            append_line(run.path / _FILE, json.dumps({**about, "ranks": ranks, "images": images}))
        more = f" and {len(images) - 4} more" if len(images) > 4 else ""
        where = f"on images of ranks {', '.join(map(str, ranks))}: {', '.join(images[:4])}{more}"
        reason = f"the {quantity} is NaN or infinite after step {step.applied_steps}, {where}"
        said = f"{reason}; nothing moved ({self._bad_in_a_row} in a row; {_MOST} stop the run)"
        self._log.info(Event(said, "not finite"))
        if self._bad_in_a_row >= _MOST:
            remedy = f"Look at the images in {run.path / _FILE}, lower optimizer.lr, or use a bf16 or fp32 ds config"
            before = f"{_MOST} times in a row; checkpoints in {run.path} are from before"
            raise NumericError(f"{reason}, {before}. {remedy}")

    def trained(self, window: list[_Trained]) -> None:
        """Add the micro-batches of an applied step."""
        self.newest, self._bad_in_a_row = window[-1].step, 0
        for micro, _, constant, shares in window:
            scalars = [micro.scalars[name] for name in self._run.step.objective.scalars]
            self._meter.add(micro.loss, *scalars, constant.float().mean(), *shares)

    def foretell(self) -> None:
        """Log once, 5 seconds after the first step, how long the rest of the run takes, if that is over a minute, and
        how to train for a quarter of a whole run. Call this after each step."""
        run, done, now = self._run, self._run.step.applied_steps, time.monotonic()
        self._after_first = self._after_first or (now, done)  # the first step takes longer than others
        seconds, steps = now - self._after_first[0], done - self._after_first[1]
        if self._foretold or seconds < 5.0:
            return
        self._foretold, left = True, (run.options.last_step - done) * seconds / steps
        images = run.options.last_step * run.options.global_batch // 4
        is_whole = self._began[1] == 0 and run.options.last_step == run.step.schedules.steps
        shorter = f'; a quarter of it: a new run with --length "{images} images"' if is_whole else ""
        if shorter and run.step.schedules.warmup_steps * run.options.global_batch > images:
            shorter += ' --optimizer.warmup "10 %"'
        if left > 60:
            self._log.info(f"time     about {_duration(left)} left{shorter}")

    def write(self) -> None:
        """Write the newest step's line of metrics, and the alarms that it raises."""
        assert self.newest is not None
        means, speed, schedule, self.newest = self._meter.read(), self.clock.read(), self.newest.schedule, None
        self.report_unreadable()
        predicted = self._run.options.predicted_gib
        by_rank = distributed.gather_objects(resident_gib())  # ranks are numbered machine by machine
        save = {}
        if cost := self._saver.saving.cost:  # of the last checkpoint of this process
            save = {"save_seconds": cost.seconds, "save_stall_seconds": cost.stall_seconds}
            save |= {"checkpoint_gib": cost.bytes / 2**30}
        record = {
            **self._describe_step(means, schedule),
            **speed,
            "host_memory_gib": sum(by_rank[: distributed.local_world_size()]),
            "host_free_gib": host_memory_gib()[1],
            **save,
            "memory_gib": process.memory_gib(),
            **({} if predicted is None else {"memory_predicted_gib": predicted}),
        }
        texts = [alarm.look(record["step"], *(record[name] for name in names)) for names, alarm in self._collapse]
        texts += [self.drift.look(record["step"], record["preserve_loss"])] if "preserve_loss" in record else []
        self._log.write({**record, "collapsed": int(any(alarm.on for _, alarm in self._collapse))})
        self._show_progress(record)
        if means["constant_images"] and not self._said_constant:
            self._said_constant = True
            part = f"{means['constant_images']:.2%}"
            self._log.info(f"warning  {part} of the images are of one color (constant_images of metrics.jsonl)")
        self._log.info(*filter(None, texts))

    def _describe_step(self, means: dict[str, float], schedule: schedules.ScheduleValues) -> dict[str, Any]:
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
        run, step, waits = self._run, record["step"], record["data_wait_fraction"]
        waiting = f", waits for data {100 * waits:.0f} % of the time" if waits > 0.1 else ""
        if waiting and not self._said_wait:
            self._said_wait = True
            waiting += " (dino-ds bench tune finds the loader processes that help)"
        losses = {name: record.get(f"{name}_loss") for name in run.step.objective.terms}
        terms = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items() if loss is not None)
        loss = f"loss {record['loss']:.3f}{f' ({terms})' if terms else ''}"
        seconds, steps = time.monotonic() - self._began[0], step - self._began[1]
        left = f"about {_duration((run.options.last_step - step) * seconds / steps)} left"
        speed = f"{record['images_per_second']:.0f} images/s{waiting}"
        self._log.info(Event(f"step {step}/{run.options.last_step}  {loss}, {speed}, {left}", "step", step=step))
        self._foretold = True


def constant_images(crops: list[Tensor]) -> Tensor:
    """Mark the images that have a single color in each of their crops (b, c, h, w): (b,) bool, on the device.
    A coarse grid of pixels is one color if its normalized values differ by < 1e-3; 8-bit levels differ by 17e-3."""
    steps = [max(1, crop.shape[-1] // 32) for crop in crops]
    grids = [crop[:, :, ::step, ::step] for crop, step in zip(crops, steps, strict=True)]
    return torch.stack([(seen.amax((2, 3)) - seen.amin((2, 3))).amax(1) < 1e-3 for seen in grids]).all(0)


def part_shares(indices: Tensor, ends: Mapping[str, int]) -> list[Tensor]:
    """Return the share () of a micro-batch from each source of a mixture, on the device; [] for a single source."""
    below = [indices.new_zeros(()), *((indices % max(ends.values()) < end).sum() for end in ends.values())]
    return [(now - before) / len(indices) for before, now in pairwise(below)]


def allowed_bad_images(fraction: float, sampled: int, images: int) -> int:
    """Return how many unreadable images are allowed among the first `sampled` different ones of `images`.
    Images come in random order, so this is the expected number in data with exactly `fraction` of unreadable images,
    plus 4 standard deviations (hypergeometric, with p in place of p (1 - p)), rounded up. It is ceil(fraction * images)
    once all images were seen. Data twice as bad as allowed is detected after about 16 / fraction images, a folder
    without readable images at once; one bad file among the first stops no run unless `fraction` is 0."""
    sampled = min(sampled, images)
    expected = fraction * sampled
    return math.ceil(expected + 4.0 * math.sqrt(expected * (1 - sampled / images)))


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"
    return f"{seconds:.0f} s"
