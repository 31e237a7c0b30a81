"""The main job: images in, a teacher out. Reads from top to bottom in the order in which it runs.

deepspeed --num_gpus 4 dino_ds/train.py --ds_config ds_configs/zero2_fp16.json --data.root /images
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a script, Python put this file's folder first on sys.path; the checkout is wanted, installed or not.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from dino_ds.cli import main

    main(["train", *sys.argv[1:]])
    sys.exit(0)

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch

from dino_ds import distributed
from dino_ds.config import Recipe
from dino_ds.costs.memory import Memory, count_parameters, estimate_memory
from dino_ds.data.bad_images import allowed_bad_images
from dino_ds.data.feed import Views
from dino_ds.data.sources import build_source
from dino_ds.ds_config import resolve_ds_config
from dino_ds.engine import Progress, fp16_supported, init_distributed, memory_gib
from dino_ds.errors import DataError, NumericError
from dino_ds.metrics import Clock, Meter, RunLog
from dino_ds.models.drop_path import sample_keys
from dino_ds.run import Run
from dino_ds.run_folder import Resume, RunFolder, flat_values
from dino_ds.step import MicroStep
from dino_ds.stop import StopRequests
from dino_ds.throughput import HostReader, ThroughputWatch

EXIT_STOPPED = 75


def train(
    *,
    recipe: Recipe,
    ds: Mapping[str, Any],
    ds_path: str,
    run_dir: str,
    max_steps: int | None,
    resume: Resume,
    allow_change: str | None = None,
) -> None:
    """Train until the recipe's length, `max_steps` optimizer steps in all, or a signal; every rank calls it.

    Raises UserError for what the user can mend; what can be known before the first step leaves no run folder.
    Exits with code 75 after a stop by SIGINT or SIGTERM, with everything saved.
    """
    init_distributed()
    data = recipe.data
    ranks, parameters = distributed.world_size(), count_parameters(recipe)
    config = resolve_ds_config(dict(ds), ds_path, data.global_batch, ranks, fp16_supported(), parameters)
    memory = estimate_memory(recipe, config, ranks, torch.cuda.is_available(), libraries=round(memory_gib() * 2**30))
    with distributed.together():
        folder = RunFolder(Path(run_dir), recipe, config, resume, allow_change)
        source = build_source(data.source, data.root, "train", data.download)
    run = Run(recipe, config, source, folder)
    steps = run.step.schedules.steps
    last_step = min(steps, max_steps or steps)
    run.open_folder()
    log = RunLog(folder.path, run.step.applied_steps, last_step)
    try:
        _announce(run, log, last_step, memory)
        _Loop(run, log, last_step, memory.gib).run()
    finally:
        log.close()


def _announce(run: Run, log: RunLog, last_step: int, memory: Memory) -> None:
    data, config, steps = run.recipe.data, run.config, run.step.schedules.steps
    ranks = distributed.world_size()
    log.say(
        f"images   {len(run.source)} in {data.root or data.source}; global batch {data.global_batch} = micro-batch "
        f"{config.micro_batch} x accumulation {config.accumulation} x ranks {ranks}; {run.epoch_steps} steps an epoch"
    )
    stopping = f", stopping after step {last_step}" if last_step < steps else ""
    epochs = steps / run.epoch_steps
    log.say(f"length   {steps} steps = {steps * data.global_batch} images = {epochs:.1f} epochs{stopping}")
    log.say(f"engine   ZeRO {config.stage}, {config.precision}, {run.step.engine.device}; run folder {run.folder.path}")
    log.say(f"kernels  {run.attention_kernels()}{', compiled blocks' if config.levers.compile else ''}")
    log.say(f"memory   predicted peak {memory}")
    for line in _changes_of(run.recipe):
        log.say(line)
    for note in (*config.notes, *getattr(run.source, "notes", ()), *run.notes):
        log.say(f"note     {note}")
    if run.folder.resume:
        where = f"at step {run.step.applied_steps}, epoch {run.position.epoch}, image {run.position.samples}"
        log.say(f"resumed  {where if run.step.applied_steps else 'from the start: there is no checkpoint yet'}")


class _Loop:
    """Micro-batch after micro-batch, and what happens between optimizer steps."""

    def __init__(self, run: Run, log: RunLog, last_step: int, predicted_gib: float) -> None:
        self._run, self._log, self._last_step, self._predicted_gib = run, log, last_step, predicted_gib
        self._meter = Meter(("loss", "teacher_entropy"), run.step.engine.device)
        self._clock = Clock(run.recipe.data.global_batch)
        self._throughput = ThroughputWatch(HostReader())
        self._save_every = run.recipe.save_every.in_steps(run.recipe.data.global_batch, run.epoch_steps)
        self._window: list[tuple[MicroStep, list[str]]] = []
        self._bad_in_a_row = 0
        self._bad_images: set[str] = set()

    def run(self) -> None:
        run, step = self._run, self._run.step
        if step.applied_steps == 0:
            self._evaluate()
        signals = StopRequests(step)
        with closing(run.build_feed()) as feed:
            self._clock.read()
            while step.applied_steps < self._last_step:
                with self._clock.waiting():
                    batch = next(feed)
                out = self._train(batch)
                if out.progress is Progress.SKIPPED:
                    self._report_skip()
                elif out.progress is Progress.STEPPED:
                    self._after_step(out, batch, signals)
        self._finish()

    def _train(self, batch: Views) -> MicroStep:
        run = self._run
        out = run.step.micro_batch(batch.views, sample_keys(run.recipe.seed, batch.epoch, batch.indices))
        self._window.append((out, batch.names))
        self._bad_images.update(batch.bad)
        run.advance()
        return out

    def _after_step(self, out: MicroStep, batch: Views, signals: StopRequests) -> None:
        run, done = self._run, self._run.step.applied_steps
        for micro, _ in self._window:
            self._meter.add(micro.loss, micro.teacher_entropy)
        self._window, self._bad_in_a_row = [], 0
        self._clock.step()
        signals.look()
        self._say_save(run.look_at_save())
        self._log.progress(done)
        last = done == self._last_step
        if last or done % run.recipe.log_every == 0:
            self._write(out)
        elif done == 1:
            self._collect_bad_images()  # rubbish is noticed at once
        evaluate = run.watch is not None and (last or run.watch.due(done))
        if evaluate:
            self._evaluate()
        if evaluate or done == 1:
            self._log.picture("crops", run.crops.picture(batch.views), done)
        stop = run.step.votes.count("stop") > 0 and not last
        if last or stop or (self._save_every and done % self._save_every == 0):
            with self._clock.paused():
                self._collect_bad_images()
                self._say_save(run.save(wait=last or stop))
        if stop:
            self._log.say(
                f"stopped  by {signals.name or 'another rank'} after step {done}; everything is saved. "
                "To continue: the same command with --resume"
            )
            raise SystemExit(EXIT_STOPPED)

    def _say_save(self, lines: str | None) -> None:
        if lines is not None:
            self._log.say(lines)

    def _report_skip(self) -> None:
        """Ranks agree on whose loss was not finite; an fp16 overflow alone is part of finding the loss scale."""
        run, step = self._run, self._run.step
        window, self._window = self._window, []
        run.skipped_steps += 1
        mine = [name for out, names in window if not torch.isfinite(out.loss) for name in names]
        culprits = [name for names in distributed.gather_objects(mine) for name in names]
        if not culprits and run.config.dynamic_loss_scale:
            self._log.say(
                f"fp16 overflow after step {step.applied_steps}: the loss scale is {step.engine.loss_scale:g}"
            )
            return
        self._bad_in_a_row += 1
        what = f"the loss is NaN or infinite on {_shorten(culprits)}" if culprits else "the gradient is NaN or infinite"
        what = f"{what}, after step {step.applied_steps}"
        limit = run.recipe.max_bad_steps
        self._log.say(f"{what}: nothing moved ({self._bad_in_a_row} in a row; {limit} stop the run)")
        if self._bad_in_a_row >= limit:
            raise NumericError(
                f"{what}, {limit} times in a row; checkpoints in {run.folder.path} are from before. "
                "Look at these images, lower optimizer.lr, or use a bf16 or fp32 ds config"
            )

    def _write(self, out: MicroStep) -> None:
        run, knobs = self._run, out.knobs
        means, speed = self._meter.read(), self._clock.read()
        rolling, warning = self._throughput.look(**speed)
        self._collect_bad_images()
        record = {
            "step": run.step.applied_steps,
            "images": run.step.applied_steps * run.recipe.data.global_batch,
            "epoch": run.position.epoch,
            "loss": means["loss"],
            "teacher_entropy": means["teacher_entropy"],
            "kl": means["loss"] - means["teacher_entropy"],
            "lr": knobs.lr,
            "weight_decay": knobs.weight_decay,
            "teacher_momentum": knobs.teacher_momentum,
            "teacher_temp": knobs.teacher_temp,
            "grad_norm": run.step.engine.grad_norm,
            "loss_scale": run.step.engine.loss_scale,
            "skipped_steps": run.skipped_steps,
            "bad_images": len(run.bad_images),
            **speed,
            **rolling,
            **run.save_figures(),
            "memory_gib": memory_gib(),
            "memory_predicted_gib": self._predicted_gib,
        }
        self._log.write(record)
        self._say(record)
        if warning:
            self._log.say(f"speed    after step {record['step']}: {warning}")

    def _collect_bad_images(self) -> None:
        """Ranks tell each other which images they could not read; each is named and counted once."""
        run, mine = self._run, sorted(self._bad_images - self._run.bad_images)
        for name in sorted({name for names in distributed.gather_objects(mine) for name in names}):
            run.bad_images.add(name)
            self._log.say(f"unreadable image skipped: {name}")
        self._bad_images.clear()
        drawn, fraction = run.images_drawn, run.recipe.data.max_bad_fraction
        limit = allowed_bad_images(fraction, drawn, len(run.source))
        if len(run.bad_images) > limit:
            raise DataError(
                f"{len(run.bad_images)} of {drawn} images are unreadable, data.max_bad_fraction {fraction:g} allows "
                f"{limit}; their names are in {run.folder.path / 'log.txt'}: mend or remove them, or raise the fraction"
            )

    def _say(self, record: dict[str, Any]) -> None:
        watch, rate = self._run.watch, record["images_per_second"]
        short = f"loss {record['loss']:.3f} = entropy {record['teacher_entropy']:.3f} + KL {record['kl']:.3f}"
        speed = f"{rate:.0f} img/s, data wait {100 * record['data_wait_fraction']:.0f} %"
        knn = f", k-NN {watch.latest:.1f} %" if watch and watch.latest is not None else ""
        self._log.progress(record["step"], f"{short}, {speed}{knn}")
        if not self._log.shows_bar:
            left = (self._last_step - record["step"]) * self._run.recipe.data.global_batch / rate
            self._log.say(f"step {record['step']}/{self._last_step}  {short}, {speed}, {_duration(left)} left{knn}")

    def _evaluate(self) -> None:
        run, done = self._run, self._run.step.applied_steps
        if run.watch is None:
            return
        with self._clock.paused():
            self._log.write({"step": done, **run.watch.evaluate(run.step.teacher, done, run.step.engine.device)})
        for name in run.watch.new_unreadable():
            self._log.say(f"unreadable image left out of the evaluation: {name}")
        self._log.say(f"k-NN     at step {done}: {run.watch.verdict()}")

    def _finish(self) -> None:
        run, path = self._run, self._run.folder.path
        self._log.say(f"done     step {run.step.applied_steps}; the run is in {path}")
        self._log.say(f"teacher  {path / 'teacher.safetensors'}; {path / 'teacher.json'} says how timm loads it")
        if run.watch and run.watch.latest is not None:
            self._log.say(f"k-NN     {run.watch.verdict()}")


def _changes_of(recipe: Recipe) -> list[str]:
    """The recipe's values that are not the defaults, a line a section."""
    changed: dict[str, list[str]] = {}
    defaults = flat_values(Recipe())
    for name, value in flat_values(recipe).items():
        if value != defaults[name]:
            section, _, key = name.rpartition(".")
            changed.setdefault(section or "recipe", []).append(f"{key} {value}")
    return [f"{section:<10}{', '.join(values)}" for section, values in changed.items()]


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def _shorten(names: list[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
