"""The training loop: micro-batches, and the work between optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from torch import Tensor

from dino_ds.data.feed import Batch, Feed
from dino_ds.engine import distributed
from dino_ds.engine.engine import Progress
from dino_ds.errors import STOPPED, NumericError, Stopped
from dino_ds.health.beat import Beat
from dino_ds.method.step import MicroStep
from dino_ds.run.reports import BadSteps, Reports, constant_images, part_shares
from dino_ds.run.run import PeriodicTask, Run, SaveClock, Saver, StepContext

if TYPE_CHECKING:
    from dino_ds.run.guards import StopRequests


class Loop:
    """Trains a run from its current step to its last; reports its phase to `beat`; ends early if `stop` asks for it."""

    def __init__(self, run: Run, saver: Saver, beat: Beat, stop: StopRequests) -> None:
        self._run, self._saver, self._log = run, saver, run.log
        self._beat, self._stop = beat, stop
        self._reports = Reports(run, saver)
        self._bad_steps = BadSteps(run)
        self._clock = self._reports.clock
        self._saves = SaveClock(run.options.save_every, run.step.applied_steps)
        self._window: list[tuple[MicroStep, Sequence[str], Tensor, list[Tensor]]] = []
        self._ahead: list[Batch] = []

    def run(self, open_feed: Callable[[], Feed]) -> None:
        """Train to the last step. Raises SystemExit(75) after a stop on request, with everything saved."""
        run, step = self._run, self._run.step
        self._stop.install(lambda: step.flags.set("stop"))
        self._evaluate_start()
        if step.applied_steps == 0:
            self._run_if_due(run.pictures, last=False)
        with closing(open_feed()) as feed:
            self._reports.begin()
            try:
                while step.applied_steps < run.options.last_step and not self._finished():
                    self._micro_batch(feed)
            except NumericError:  # all ranks raise it
                self._log.info(*self._saver.saving.finish())
                raise
        self._log.info(*[f"ended    {self._reports.ended}"] * bool(self._reports.ended))
        self._beat.enter("end", step.applied_steps)
        self._remove_stop_file()

    def _evaluate_start(self) -> None:
        """Evaluate the weights that training begins with, or of a resumed step whose evaluation was interrupted."""
        run, done, at_start = self._run, self._run.step.applied_steps, self._saver.saved_step == 0
        if run.evaluations is None or not (done == 0 or run.evaluations.missed(done, at_start)):
            return
        if not self._run_now(run.evaluations, at_start):
            self._end_early()
        if run.evaluations.improved():
            self._log.info(*self._saver.save_best())

    def _finished(self) -> bool:
        evaluations = self._run.evaluations
        return bool(self._reports.ended) or (evaluations is not None and bool(evaluations.finished()))

    def _micro_batch(self, feed: Feed) -> None:
        step = self._run.step
        if not self._ahead:
            self._ahead = [self._next(feed) for _ in range(step.window)]
            if step.window > 1:
                self._beat.enter("step", step.applied_steps)
                step.prepare(self._ahead)
        self._beat.enter("step", step.applied_steps)
        out = self._train(self._ahead.pop(0), feed)
        if out.progress is Progress.SKIPPED:
            self._after_skip()
        elif out.progress is Progress.STEPPED:
            self._after_step(out)

    def _next(self, feed: Feed) -> Batch:
        self._beat.enter("data", self._run.step.applied_steps)
        with self._clock.waiting():
            batch = next(feed)
        self._reports.images.loaded(batch.bad, feed.take_notes())
        return batch

    def _train(self, batch: Batch, feed: Feed) -> MicroStep:
        run = self._run
        constant = constant_images([crop for name in run.options.teacher_groups for crop in batch.crops[name]])
        out = run.step.micro_batch(batch, feed.prefetch)
        self._window.append((out, batch.names, constant, part_shares(batch.indices, run.options.part_ends)))
        run.advance()
        return out

    def _after_step(self, out: MicroStep) -> None:
        run, done = self._run, self._run.step.applied_steps
        for micro, _, constant, shares in self._window:
            self._reports.trained(micro, constant, shares)
        self._begin_window()
        self._bad_steps.reset()
        self._clock.step()
        if self._beat.stop_reason:  # the monitor has seen RUN/stop, or the end of the launcher
            run.step.flags.set("stop")
        self._log.info(*self._saver.saving.poll())
        self._log.progress(done, run.options.last_step)
        last = done == run.options.last_step
        if last or done % run.options.log_every == 0:
            self._reports.write(out)
            last = last or bool(self._reports.ended)
        else:
            self._reports.foretell()
            if done == 1:
                self._reports.images.report_unreadable()
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

    def _after_skip(self) -> None:
        run, window = self._run, self._window
        self._begin_window()
        self._bad_steps.report([(out, names) for out, names, *_ in window])
        if any(distributed.gather_objects(bool(self._stop.why))):
            self._saver.check_folder()
            if run.step.applied_steps > self._saver.saved_step:
                self._save(wait=True)
            else:
                self._log.info(*self._saver.saving.finish(must=True))
            self._end_early()

    def _begin_window(self) -> None:
        self._beat.warm = True  # the limits of a process that has warmed up apply
        self._window = []

    def _run_if_due(self, task: PeriodicTask | None, last: bool) -> bool:
        """Run a task if it is due; returns False if a stop was requested before its end."""
        if task is None or not task.due(self._run.step.applied_steps, last):
            return True
        return self._run_now(task)

    def _run_now(self, task: PeriodicTask, at_start: bool = False) -> bool:
        run, step = self._run, self._run.step
        done = step.applied_steps
        self._beat.enter("evaluate", done)
        with self._clock.paused():
            where = step.teachers.exported, step.engine.device, done, done * run.options.global_batch
            return task.run(StepContext(*where, run.path, run.log, self._stop_requested, at_start, step))

    def _stop_requested(self) -> bool:
        """Whether a stop was requested; each call also shows the monitor process that work makes progress."""
        self._beat.tick()
        return self._stop.requested_anywhere()

    def _save(self, wait: bool) -> None:
        self._beat.enter("save", self._run.step.applied_steps)
        self._saver.check_folder()
        with self._clock.paused():
            self._reports.images.report_unreadable()
            self._log.info(*self._saver.save(wait))

    def _end_early(self) -> None:
        """End the run after a stop request: raises SystemExit(75)."""
        run = self._run
        done, reasons = run.step.applied_steps, distributed.gather_objects(self._stop.why)
        self._beat.enter("end", done)
        self._saver.check_folder()
        self._reports.finish()
        self._stop.finish()
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
