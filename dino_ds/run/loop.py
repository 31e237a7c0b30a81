"""The loop: micro-batch after micro-batch, and what happens between optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import torch
from torch import Tensor

from dino_ds.config.crops import teacher_crops
from dino_ds.data.feed import Batch, DataTimeout, Feed
from dino_ds.data.masks import synthetic_masks
from dino_ds.data.normalisation import Normalisation
from dino_ds.data.visible import crops_picture
from dino_ds.engine import distributed
from dino_ds.engine.engine import Progress
from dino_ds.errors import STOPPED, NumericError, Stopped
from dino_ds.health.beat import Beat
from dino_ds.method.step import Inputs, MicroStep
from dino_ds.models.drop_path import sample_keys
from dino_ds.run.bad_steps import BadSteps
from dino_ds.run.intervals import SaveClock
from dino_ds.run.reports import Reports, constant_images
from dino_ds.run.run import AtStep, Moment, Run
from dino_ds.run.saver import Saver
from dino_ds.run.stop import StopRequests


class Loop:
    """One run from where it stands to its last step; `beat` is told where it is, `stop` asks it to end early."""

    def __init__(self, run: Run, saver: Saver, beat: Beat, stop: StopRequests) -> None:
        self._run, self._saver, self._log = run, saver, run.log
        self._beat, self._stop = beat, stop
        self._reports = Reports(run, saver)
        self._bad_steps = BadSteps(run)
        self._clock = self._reports.clock
        self._normalisation = Normalisation.of(run.recipe)
        self._hidden = {group.name for group in run.recipe.groups if group.hides}
        recipe, start = run.recipe, run.step.applied_steps
        every = recipe.save_every
        self._saves = SaveClock(
            None if every == "auto" else every.in_steps(recipe.data.global_batch, run.epoch_steps),
            start,
            run.epoch_steps,
            recipe.expected_hours_between_failures,
        )
        self._window: list[tuple[MicroStep, list[str], Tensor]] = []
        self._ahead: list[tuple[Batch | None, Inputs]] = []
        self._window_start = run.state.position
        self._data_timed_out = False

    def run(self, open_feed: Callable[[], Feed]) -> None:
        """Raises SystemExit(75) after a stop on request, with everything saved."""
        run, step = self._run, self._run.step
        self._stop.install(lambda: step.flags.set("stop"))
        if step.applied_steps == 0:
            if not self._run_if_due(run.evaluations, last=False):
                self._end_early()
            self._run_if_due(run.pictures, last=False)
        with closing(open_feed()) as feed:
            self._clock.read()
            try:
                while step.applied_steps < run.last_step:
                    self._micro_batch(feed)
            except NumericError:  # of all ranks
                self._log.info(*self._saver.saving.finish())
                raise
        self._beat.enter("end", step.applied_steps)
        self._finish()

    def _micro_batch(self, feed: Feed) -> None:
        step = self._run.step
        if not self._ahead:
            batches = [self._next(feed) for _ in range(step.window)]
            self._ahead = [(batch, self._inputs(batch)) for batch in batches]
            if step.window > 1:
                self._beat.enter("step", step.applied_steps)
                step.prepare([inputs for _, inputs in self._ahead])
        self._beat.enter("step", step.applied_steps)
        batch, inputs = self._ahead.pop(0)
        out = self._train(batch, inputs, feed) if batch else step.micro_batch(inputs)
        if out.progress is Progress.SKIPPED:
            self._after_skip()
        elif out.progress is Progress.STEPPED:
            assert batch is not None  # a window of NaN is never applied
            self._after_step(out, batch)

    def _next(self, feed: Feed) -> Batch | None:
        """The next micro-batch; None where a stop was requested and it does not come."""
        self._beat.enter("data", self._run.step.applied_steps)
        if self._data_timed_out:
            return None
        with self._clock.waiting():
            try:
                batch = feed.next_unless(self._stop.requested_anywhere)
            except DataTimeout:
                self._data_timed_out = True
                return None
        self._reports.loaded(batch.bad, feed.take_notes())
        return batch

    def _train(self, batch: Batch, inputs: Inputs, feed: Feed) -> MicroStep:
        run = self._run
        constant = constant_images(teacher_crops(run.recipe.groups, batch.crops, run.recipe.taught_by))
        out = run.step.micro_batch(inputs, feed.prefetch)
        self._window.append((out, batch.names, constant))
        run.advance()
        return out

    def _inputs(self, batch: Batch | None) -> Inputs:
        """What the step takes of a batch; None: one of NaN, so that all ranks skip this window, moving nothing, and
        then agree on the stop. Without it the others would wait for this rank's gradient until its data come.
        """
        run = self._run
        if batch:
            return Inputs(batch.crops, sample_keys(run.recipe.seed, batch.epoch, batch.indices), batch.masks)
        micro, channels, device = run.config.micro_batch, run.recipe.model.in_chans, run.step.engine.device
        crops = {
            group.name: [torch.full((micro, channels, group.size, group.size), torch.nan, device=device)] * group.count
            for group in run.recipe.groups
        }
        indices = torch.zeros(micro, dtype=torch.long, device=device)
        return Inputs(crops, sample_keys(run.recipe.seed, 0, indices), synthetic_masks(run.recipe, micro, device))

    def _after_step(self, out: MicroStep, batch: Batch) -> None:
        run, done = self._run, self._run.step.applied_steps
        for micro, names, constant in self._window:
            self._reports.trained(micro, names, constant)
        self._begin_window()
        self._bad_steps.reset()
        self._clock.step()
        if self._beat.stop_reason:  # the monitor has seen RUN/stop, or the end of the launcher
            run.step.flags.set("stop")
        self._log.info(*self._saver.saving.poll())
        self._settle_save_interval()
        self._log.progress(done)
        last = done == run.last_step
        if last or done % run.recipe.log_every == 0:
            self._reports.write(out)
        elif done == 1:
            self._reports.collect_bad_images()  # report unreadable images after the first step
        stop = run.step.flags.count("stop") > 0 and not last
        evaluate = run.evaluations is not None and run.evaluations.due(done, last) and not stop
        if evaluate:
            stop = not self._run_if_due(run.evaluations, last) and not last
        if evaluate or done == 1:
            masks = {name: mask for name, mask in batch.masks.items() if name in self._hidden}
            picture = crops_picture(batch.crops, self._normalisation, masks=masks)
            self._log.picture("crops", picture, done)
        if not stop:
            self._run_if_due(run.pictures, last)
        if self._saves.due(done) or last or stop:
            self._save(wait=last or stop)
        if stop:
            self._end_early()

    def _after_skip(self) -> None:
        run, window = self._run, self._window
        answers = distributed.gather_objects((bool(self._stop.why), self._data_timed_out))
        timed_out = any(late for _, late in answers)
        self._begin_window(again=timed_out)
        if timed_out:
            run.step.engine.restore_scaler_state()
        else:
            self._bad_steps.report([(out, names) for out, names, _ in window])
        if timed_out or any(asked for asked, _ in answers):
            self._saver.check_folder()
            if run.step.applied_steps > self._saver.saved_step:
                self._save(wait=True)
            else:
                self._log.info(*self._saver.saving.finish(must=True))
            self._end_early()

    def _begin_window(self, again: bool = False) -> None:
        """A window ends. again: its images were not used, the next run begins with them."""
        self._beat.warm = True  # the limits of a process that has warmed up apply
        self._window = []
        if again:
            self._run.state.position = self._window_start
        self._window_start = self._run.state.position

    def _run_if_due(self, what: AtStep | None, last: bool) -> bool:
        """False where a stop was requested before its end."""
        run, done = self._run, self._run.step.applied_steps
        if what is None or not what.due(done, last):
            return True
        self._beat.enter("evaluate", done)
        with self._clock.paused():
            images = done * run.recipe.data.global_batch
            teacher, device = run.step.teachers.exported, run.step.engine.device
            return what.run(Moment(teacher, device, done, images, run.path, run.log, self._stop_requested))

    def _stop_requested(self) -> bool:
        """Asked again and again by what takes long: the monitor process sees that it makes progress."""
        self._beat.tick()
        return self._stop.requested_anywhere()

    def _save(self, wait: bool) -> None:
        self._beat.enter("save", self._run.step.applied_steps)
        self._saver.check_folder()
        with self._clock.paused():
            self._reports.collect_bad_images()
            self._log.info(*self._saver.save(wait))

    def _settle_save_interval(self) -> None:
        cost = self._saver.saving.cost
        if cost is not None and (line := self._saves.settle(cost.later_stall_seconds, distributed.gather_objects)):
            self._log.info(f"saves    {line}")

    def _end_early(self) -> None:
        """Raises SystemExit(75)."""
        run = self._run
        done, reasons = run.step.applied_steps, distributed.gather_objects(self._stop.why)
        self._beat.enter("end", done)
        self._saver.check_folder()
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
        """It was obeyed: the next start of this run continues."""
        if distributed.rank() == 0:
            (self._run.path / "stop").unlink(missing_ok=True)

    def _finish(self) -> None:
        run, path, model = self._run, self._run.path, self._run.recipe.model
        knows = model.spec().timm_model(model.backbone) is not None
        how = f"{path / 'teacher.json'} says how timm loads it" if knows else f"dino_ds.load({str(path)!r}) loads it"
        steps = run.step.schedules.steps
        of = f" of {steps}" if run.last_step < steps else ""  # --max_steps
        self._remove_stop_file()
        self._log.info(
            f"done     step {run.step.applied_steps}{of}; the run is in {path}",
            f"teacher  {path / 'teacher.safetensors'}; {how}",
            f"report   dino-ds report {path}: curves, evaluations and pictures on one page",
            *(run.evaluations.summary(cut=bool(of)) if run.evaluations else []),
        )
