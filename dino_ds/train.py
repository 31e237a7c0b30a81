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
from dino_ds.config.ds_config import resolve_ds_config
from dino_ds.config.flat import flat_values
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import Memory, count_parameters, estimate_memory
from dino_ds.data.sources import build_source
from dino_ds.engine.device import fp16_supported, memory_gib
from dino_ds.engine.process import init_distributed
from dino_ds.health.failures import Failures
from dino_ds.health.lock import RunLock
from dino_ds.health.records import Heartbeats
from dino_ds.health.watchdog import Watchdog, longest_wait
from dino_ds.training.loop import Loop
from dino_ds.training.metrics import RunLog
from dino_ds.training.run import Run
from dino_ds.training.run_folder import Resume, RunFolder
from dino_ds.training.stop import StopRequests


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
    """Train until the recipe's length, `max_steps` optimizer steps in all, or a request to stop; every rank calls it.

    Raises UserError for what the user can fix; what can be known before the first step leaves no run folder.
    Raises PeerError where another rank is gone. Exits with code 75 after a stop on request, with everything saved.
    """
    path, rank, ranks = Path(run_dir), distributed.rank(), distributed.world_size()
    lock, heartbeats = RunLock(path), Heartbeats(path)
    with Watchdog(path, rank, ranks, recipe.hang_seconds) as dog:
        failures = Failures(path, rank, ranks, dog.beat)

        def stop_early(why: str) -> None:
            failures.stopped_early(why)
            if rank == 0:
                print(f"dino_ds: stopped by {why} before the first step: there is nothing to save", file=sys.stderr)

        with failures.told(), StopRequests(dog.beat, stop_early, failures.ended_at_once) as stop:
            try:
                init_distributed()
                note = _take(lock, heartbeats)
                dog.beat.list_in_folder()
                run, log, last_step, memory = _build(recipe, ds, ds_path, path, max_steps, resume, allow_change)
                with closing(log):
                    _announce(run, log, last_step, memory, note)
                    Loop(run, log, last_step, memory.gib, dog.beat, stop).run()
            finally:
                _give_back(lock, heartbeats)


def _take(lock: RunLock, heartbeats: Heartbeats) -> str:
    """The run folder is ours, on all ranks, and ready for heartbeats; a note if it was somebody's who is gone."""
    note = ""
    with distributed.together():
        if distributed.rank() == 0:
            note = lock.acquire()
            heartbeats.prepare()
    return note


def _give_back(lock: RunLock, heartbeats: Heartbeats) -> None:
    if distributed.rank() == 0:
        if not lock.guards_a_run:
            heartbeats.remove()
        lock.release()


def _build(
    recipe: Recipe,
    ds: Mapping[str, Any],
    ds_path: str,
    path: Path,
    max_steps: int | None,
    resume: Resume,
    allow_change: str | None,
) -> tuple[Run, RunLog, int, Memory]:
    """The run, its log, its last step and the predicted memory."""
    data = recipe.data
    ranks, parameters = distributed.world_size(), count_parameters(recipe)
    config = resolve_ds_config(dict(ds), ds_path, data.global_batch, ranks, fp16_supported(), parameters)
    memory = estimate_memory(recipe, config, ranks, torch.cuda.is_available(), libraries=round(memory_gib() * 2**30))
    with distributed.together():
        folder = RunFolder(path, recipe, config, resume, allow_change)
        source = build_source(data.source, data.root, "train", data.download)
    run = Run(recipe, config, source, folder)
    distributed.set_timeouts(longest_wait(recipe.hang_seconds))
    last_step = min(run.step.schedules.steps, max_steps or run.step.schedules.steps)
    run.open_folder()
    return run, RunLog(folder.path, run.step.applied_steps, last_step), last_step, memory


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
    log.say(f"kernels  {run.attention_kernels()}{', compiled blocks' if config.levers.compile != 'off' else ''}")
    log.say(f"memory   predicted peak {memory}")
    for line in _changes_of(run.recipe):
        log.say(line)
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
