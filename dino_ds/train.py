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

import functools
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch

from dino_ds import distributed
from dino_ds.config.ds_config import DsConfig, load_ds_config
from dino_ds.config.flat import flat_values, lengths_without_unit
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import Memory
from dino_ds.data.find_range import with_value_range
from dino_ds.data.sources import build_source
from dino_ds.engine.device import device, fp16_supported, memory_gib
from dino_ds.engine.process import init_distributed
from dino_ds.errors import UserError, unwritable
from dino_ds.health.failures import Failures
from dino_ds.health.lock import RunLock
from dino_ds.health.records import Heartbeats
from dino_ds.health.watchdog import Watchdog, longest_wait
from dino_ds.measure.machine import host_memory_gib
from dino_ds.options.run import TrainOptions
from dino_ds.plan.start import Machine, Start, check_fits, chosen, given, kept, predict
from dino_ds.training.loop import Loop
from dino_ds.training.memory_guard import MemoryGuard
from dino_ds.training.metrics import RunLog
from dino_ds.training.run import Run
from dino_ds.training.run_folder import RunFolder
from dino_ds.training.stop import StopRequests


def train(
    options: TrainOptions,
    *,
    recipe: Recipe,
    ds: Mapping[str, Any],
    ds_path: str,
    ds_overrides: Mapping[str, str] | None = None,
) -> None:
    """Train until the recipe's length, `max_steps` optimizer steps in all, or a request to stop; every rank calls it.

    ds_overrides: None where the user has named `ds`; else a resumed run keeps its own ds config, a new one on GPUs gets
    the planner's, each with these keys changed, and `ds` is for a machine without GPUs.

    Raises UserError for what the user can fix; what can be known before the first step leaves no run folder.
    Raises PeerError where another rank is gone. Exits with code 75 after a stop on request, with everything saved.
    """
    path, rank, ranks = Path(options.run_dir), distributed.rank(), distributed.world_size()
    lock, heartbeats = RunLock(path), Heartbeats(path)
    with Watchdog(path, rank, ranks, recipe.hang_seconds) as watchdog:
        failures = Failures(path, rank, ranks, watchdog.beat)

        def stop_early(why: str) -> None:
            failures.stopped_early(why)
            if rank == 0:
                print(f"dino_ds: stopped by {why} before the first step: there is nothing to save", file=sys.stderr)

        memory_guard = MemoryGuard(watchdog.beat)
        stop_requests = StopRequests(watchdog.beat, stop_early, failures.ended_at_once)
        with failures.told(), stop_requests as stop, memory_guard.explain():
            try:
                init_distributed()
                note = _take(lock, heartbeats)
                watchdog.beat.list_in_folder()
                try:
                    start, memory = _settle(options, recipe, (ds, ds_path, ds_overrides))
                    memory_guard.settle(recipe, start.config, memory.gib)
                    run, log, last_step = _build(options, recipe, start.config)
                except UserError:  # of all ranks
                    if lock.guards_a_run:
                        watchdog.beat.unlist()
                    raise
                if rank == 0:
                    heartbeats.forget_earlier()
                with closing(log):
                    _announce(run, log, last_step, memory, note)
                    if start.path != start.why:
                        log.say(f"chosen   {start}")
                    Loop(run, log, last_step, memory.gib, watchdog.beat, stop).run()
            finally:
                _give_back(lock, heartbeats, watchdog.beat.listed)


def _take(lock: RunLock, heartbeats: Heartbeats) -> str:
    """The run folder is ours, on all ranks, and ready for heartbeats; a note if it was somebody's who is gone."""
    note = ""
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:
            note = lock.acquire()
            try:
                heartbeats.prepare()
            except OSError as error:
                raise unwritable(f"run folder {lock.run_dir}", error) from None
    return note


def _give_back(lock: RunLock, heartbeats: Heartbeats, listed: bool) -> None:
    """`listed` is False for a start that was refused: it leaves no trace in a run."""
    if distributed.rank() == 0:
        if heartbeats.prepared and not lock.guards_a_run:
            heartbeats.remove()
        elif heartbeats.prepared and not listed:
            heartbeats.bring_back_earlier()
        lock.release()


def _settle(
    options: TrainOptions, recipe: Recipe, asked: tuple[Mapping[str, Any], str, Mapping[str, str] | None]
) -> tuple[Start, Memory]:
    """The ds config and what it is predicted to take, the same on all ranks; asked: `ds`, `ds_path`, `ds_overrides`.

    Raises ConfigError where that is more than there is.
    """
    ds, ds_path, overrides = asked
    machine = functools.reduce(Machine.in_common, distributed.gather_objects(find_machine()))
    before, saved = None, Path(options.run_dir, "ds_config.json")
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0 and overrides is not None and options.resume is not False and saved.is_file():
            before = load_ds_config(str(saved), {})
    before = distributed.gather_objects(before)[0]
    start = given(recipe, ds, ds_path, machine)  # also for its check of the batch
    if overrides is not None and before is not None:
        start = kept(recipe, before, str(saved), overrides, machine)
    elif overrides is not None and machine.card_gib is not None:
        start = chosen(recipe, overrides, machine)
    if not options.allow_oversize:
        check_fits(recipe, start, machine)
    return start, predict(recipe, start.config, machine)


def find_machine() -> Machine:
    """What this rank has."""
    card = torch.cuda.get_device_properties(device()) if device().type == "cuda" else None
    return Machine(
        distributed.world_size(),
        distributed.local_world_size(),
        host_memory_gib()[0],
        card.total_memory / 2**30 if card else None,
        bf16=card is None or card.major >= 8,
        fp16=fp16_supported(),
        libraries=round(memory_gib() * 2**30),
    )


def _build(options: TrainOptions, recipe: Recipe, config: DsConfig) -> tuple[Run, RunLog, int]:
    """The run, its log and its last step."""
    data = recipe.data
    with distributed.raise_on_all_ranks():
        folder = RunFolder(Path(options.run_dir), recipe, config, options.resume, options.allow_change)
        source = build_source(data.source, data.root, "train", data.download)
    recipe, found = with_value_range(recipe, source, folder.earlier_value_range)
    folder.recipe = recipe
    run = Run(recipe, config, source, folder)
    run.notes[:0] = [found] if found else []
    distributed.set_timeouts(longest_wait(recipe.hang_seconds))
    last_step = min(run.step.schedules.steps, options.max_steps or run.step.schedules.steps)
    run.open_folder(last_step)
    with distributed.raise_on_all_ranks():
        try:
            log = RunLog(folder.path, run.step.applied_steps, last_step)
        except OSError as error:
            raise unwritable(error.filename or folder.path, error) from None
    return run, log, last_step


def _announce(run: Run, log: RunLog, last_step: int, memory: Memory, note: str) -> None:
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
    log.say(f"kernels  {run.attention_kernels()}{', compiled blocks' if config.performance.compile != 'off' else ''}")
    log.say(f"memory   predicted peak {memory}")
    for line in _changes_of(run.recipe):
        log.say(line)
    for name in lengths_without_unit(run.recipe):
        log.say(f"note     {name} was given without a unit: steps; other units are written '100 epochs', '1e6 images'")
    for text in (*config.notes, *getattr(run.source, "notes", ()), *run.notes, *filter(None, [note])):
        log.say(f"note     {text}")
    if run.folder.resume:
        where = f"at step {run.step.applied_steps}, epoch {run.position.epoch}, image {run.position.samples}"
        log.say(f"resumed  {where if run.step.applied_steps else 'from the start: there is no checkpoint yet'}")


def _changes_of(recipe: Recipe) -> list[str]:
    """The recipe's values that are not the defaults, a line a section."""
    changed: dict[str, list[str]] = {}
    defaults = flat_values(Recipe())
    for name, value in flat_values(recipe).items():
        if value != defaults[name]:
            section, _, key = name.rpartition(".")
            changed.setdefault(section or "recipe", []).append(f"{key} {value}")
    return [f"{section:<10}{', '.join(values)}" for section, values in changed.items()]
