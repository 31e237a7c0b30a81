"""The loop: micro-batch after micro-batch, and what happens between optimizer steps."""

from __future__ import annotations

from contextlib import closing

import torch
from torch import Tensor

from dino_ds import distributed
from dino_ds.config.crops import teacher_crops
from dino_ds.data.batches import Batch
from dino_ds.data.loader import DataTimeout
from dino_ds.data.prefetcher import DevicePrefetcher
from dino_ds.engine.engine import Progress
from dino_ds.errors import STOPPED, NumericError
from dino_ds.health.beat import Beat
from dino_ds.intervals import SaveClock
from dino_ds.models.drop_path import sample_keys
from dino_ds.training.bad_steps import BadSteps
from dino_ds.training.constant_images import constant_images
from dino_ds.training.metrics import RunLog
from dino_ds.training.reports import Reports
from dino_ds.training.run import Run
from dino_ds.training.step import MicroStep
from dino_ds.training.stop import StopRequests


class Loop:
    """One run from where it stands to `last_step`; `beat` is told where it is, `stop` asks it to end early."""

    def __init__(
        self, run: Run, log: RunLog, last_step: int, predicted_gib: float, beat: Beat, stop: StopRequests
    ) -> None:
        self._run, self._log, self._last_step = run, log, last_step
        self._beat, self._stop = beat, stop
        self._reports = Reports(run, log, last_step, predicted_gib)
        self._bad_steps = BadSteps(run, log)
        self._clock = self._reports.clock
        self._saves = SaveClock(
            run.steps_between_saves(),
            run.step.applied_steps,
            run.epoch_steps,
            run.recipe.expected_hours_between_failures,
        )
        self._window: list[tuple[MicroStep, list[str], Tensor]] = []
        self._window_start = run.position
        self._saved_step = run.step.applied_steps
        self._data_timed_out = False

    def run(self) -> None:
        """Raises SystemExit(75) after a stop on request, with everything saved."""
        run, step = self._run, self._run.step
        self._stop.ready(lambda: step.flags.set("stop"))
        if step.applied_steps == 0:
            self._evaluate()
            self._draw()
        with closing(run.build_prefetcher()) as prefetcher:
            self._clock.read()
            try:
                while step.applied_steps < self._last_step:
                    self._micro_batch(prefetcher)
            except NumericError:  # of all ranks
                self._log_save(run.finish_save())
                raise
        self._beat.enter("end", step.applied_steps)
        self._finish()

    def _micro_batch(self, prefetcher: DevicePrefetcher) -> None:
        batch = self._next(prefetcher)
        self._beat.enter("step", self._run.step.applied_steps)
        out = self._train(batch, prefetcher) if batch else self._skip_window()
        if out.progress is Progress.SKIPPED:
            self._after_skip()
        elif out.progress is Progress.STEPPED:
            assert batch is not None  # a spoilt window is never applied
            self._after_step(out, batch)

    def _next(self, prefetcher: DevicePrefetcher) -> Batch | None:
        """The next micro-batch; None where a stop was asked for and it does not come."""
        self._beat.enter("data", self._run.step.applied_steps)
        if self._data_timed_out:
            return None
        with self._clock.waiting():
            try:
                batch = prefetcher.next_unless(self._stop.heard)
            except DataTimeout:
                self._data_timed_out = True
                return None
        self._reports.loaded(batch.bad, prefetcher.take_notes())
        return batch

    def _train(self, batch: Batch, prefetcher: DevicePrefetcher) -> MicroStep:
        run = self._run
        constant = constant_images(teacher_crops(run.recipe.crops.groups, batch.crops))
        keys = sample_keys(run.recipe.seed, batch.epoch, batch.indices)
        out = run.step.micro_batch(batch.crops, keys, prefetcher.prefetch)
        self._window.append((out, batch.names, constant))
        run.advance()
        return out

    def _skip_window(self) -> MicroStep:
        """A micro-batch of NaN: all ranks skip this window, moving nothing, and then agree on the stop.

        Without it the others would wait for this rank's gradient until its data come.
        """
        run = self._run
        micro, channels, device = run.config.micro_batch, run.recipe.model.in_chans, run.step.engine.device
        crops = {
            group.name: [torch.full((micro, channels, group.size, group.size), torch.nan, device=device)] * group.count
            for group in run.recipe.crops.groups
        }
        indices = torch.zeros(micro, dtype=torch.long, device=device)
        return run.step.micro_batch(crops, sample_keys(run.recipe.seed, 0, indices))

    def _after_step(self, out: MicroStep, batch: Batch) -> None:
        run, done = self._run, self._run.step.applied_steps
        for micro, names, constant in self._window:
            self._reports.trained(micro, names, constant)
        self._begin_window()
        self._bad_steps.reset()
        self._clock.step()
        self._poll_stop_requests()
        self._log_save(run.look_at_save())
        self._settle_interval()
        self._log.progress(done)
        last = done == self._last_step
        if last or done % run.recipe.log_every == 0:
            self._reports.write(out)
        elif done == 1:
            self._reports.collect_bad_images()  # rubbish is noticed at once
        stop = run.step.flags.count("stop") > 0 and not last
        evaluate = run.watch is not None and (last or run.watch.due(done)) and not stop
        if evaluate:
            stop = not self._evaluate() and not last
        if evaluate or done == 1:
            self._log.picture("crops", run.crops.picture(batch.crops), done)
        if not stop:
            self._draw(last)
        if self._saves.due(done) or last or stop:
            self._save(wait=last or stop)
        if stop:
            self._end_early()

    def _after_skip(self) -> None:
        run = self._run
        window, self._window = self._window, []
        stops = distributed.gather_objects(bool(self._stop.why) or self._data_timed_out)
        gave_up = distributed.gather_objects(self._data_timed_out)
        self._begin_window(again=any(gave_up))
        if any(gave_up):
            run.step.engine.restore_scaler_state()
        else:
            self._bad_steps.report([(out, names) for out, names, _ in window])
        if any(stops):
            run.folder.check_there()
            if run.step.applied_steps > self._saved_step:
                self._save(wait=True)
            else:
                self._log_save(run.finish_save(must=True))
            self._end_early()

    def _begin_window(self, again: bool = False) -> None:
        """A window ends. again: its images were not used, the next run begins with them."""
        self._beat.first_step_done()
        self._window = []
        if again:
            self._run.position = self._window_start
        self._window_start = self._run.position

    def _poll_stop_requests(self) -> None:
        """What this rank's watcher has seen: RUN/stop, or the end of the launcher."""
        flags = self._run.step.flags
        if self._beat.wished and not flags.own("stop"):
            flags.set("stop")

    def _save(self, wait: bool) -> None:
        self._beat.enter("save", self._run.step.applied_steps)
        self._run.folder.check_there()
        with self._clock.paused():
            self._reports.collect_bad_images()
            self._log_save(self._run.save(wait))
        self._saved_step = self._run.step.applied_steps

    def _settle_interval(self) -> None:
        cost = self._run.save_cost()
        if cost is not None and (line := self._saves.settle(cost.later_stall_seconds, distributed.gather_objects)):
            self._log.say(f"saves    {line}")

    def _log_save(self, lines: str | None) -> None:
        if lines is not None:
            self._log.say(lines)

    def _end_early(self) -> None:
        """Raises SystemExit(75)."""
        done, said = self._run.step.applied_steps, distributed.gather_objects(self._stop.why)
        self._beat.enter("end", done)
        self._run.folder.check_there()
        self._stop.finish()
        _, rank, by = min((not why.startswith("SIG"), rank, why) for rank, why in enumerate(said) if why)
        if by.startswith("SIG") and said.count(by) < len(said):
            by = f"{by} (rank {rank})"
        saved = f"saved step {done}" if done and self._saved_step == done else "nothing to save"
        self._log.say(f"stopped  by {by} at step {done}; {saved}. To continue: the same command with --resume")
        self._forget_stop_file()
        raise SystemExit(STOPPED)

    def _forget_stop_file(self) -> None:
        """It was obeyed: the next start of this run goes on."""
        if distributed.rank() == 0:
            (self._run.folder.path / "stop").unlink(missing_ok=True)

    def _evaluate(self) -> bool:
        """False where a stop was asked for before the end."""
        run, done = self._run, self._run.step.applied_steps
        if run.watch is None:
            return True
        self._beat.enter("evaluate", done)
        with self._clock.paused():
            images = done * run.recipe.data.global_batch
            teacher, device = run.step.teachers.exported, run.step.engine.device
            found = run.watch.evaluate(teacher, done, images, device, self._stop_heard)
            if found is not None:
                self._reports.evaluated(found)
        if found is None and done == 0:
            self._end_early()
        return found is not None

    def _draw(self, last: bool = False) -> None:
        """Rank 0 alone: its teacher is whole."""
        run, done = self._run, self._run.step.applied_steps
        if not run.album.due(done, last):
            return
        self._beat.enter("evaluate", done)
        with self._clock.paused():
            if distributed.rank() == 0:
                failure = run.album.draw(run.step.teachers.exported, done, run.step.engine.device, self._log.picture)
                if failure:
                    self._log.say(f"warning  {failure}")
            distributed.barrier()

    def _stop_heard(self) -> bool:
        """Asked again and again by what takes long: the watcher sees that it goes on."""
        self._beat.tick()
        return self._stop.heard()

    def _finish(self) -> None:
        run, path = self._run, self._run.folder.path
        self._forget_stop_file()
        self._log.say(f"done     step {run.step.applied_steps}; the run is in {path}")
        self._log.say(f"teacher  {path / 'teacher.safetensors'}; {path / 'teacher.json'} says how timm loads it")
        self._log.say(f"report   dino-ds report {path}: curves, evaluations and pictures on one page")
        if run.watch and run.watch.latest is not None:
            self._log.say(f"k-NN     {run.watch.knn_summary()}")
            if warning := run.watch.warning():
                self._log.say(f"warning  {warning}")
