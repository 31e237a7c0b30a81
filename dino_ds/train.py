"""The main job: images in, a teacher out. Reads from top to bottom in the order in which it runs.

deepspeed --num_gpus 4 dino_ds/train.py --ds_config ds_configs/zero2_fp16.json --data.root /images
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    # For a script, Python puts its folder first on sys.path; here the checkout must come first, installed or not.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.argv.insert(1, "train")
    runpy.run_module("dino_ds", run_name="__main__")
    sys.exit(0)

import functools
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from dino_ds.checkpoint.folder import Checkpoints
from dino_ds.config import ds_schema, loading
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import Request, TrainOptions
from dino_ds.data import image_cache, images, loader, normalization, sources
from dino_ds.engine import distributed, process
from dino_ds.errors import unwritable
from dino_ds.health.monitor import longest_wait
from dino_ds.method import build, frozen
from dino_ds.method.specs.base import StepImages
from dino_ds.method.specs.own import check_images_together, teachers_of
from dino_ds.method.step import TrainingStep
from dino_ds.run import beginning, metrics, run_folder
from dino_ds.run.guards import Caller, FolderLock, guarded
from dino_ds.run.loop import Loop
from dino_ds.run.run import PeriodicTask, Run, RunState, Saver
from dino_ds.weights.frozen import stated_images


def train(
    options: TrainOptions,
    *,
    recipe: Recipe,
    ds: Mapping[str, Any],
    ds_path: str,
    request: Request,
    caller: Caller | None = None,
) -> None:
    """Train until the recipe's length, `max_steps` optimizer steps in all, or a request to stop; every rank calls it.

    Args:
        ds: the ds JSON that the request names, or the one for machines without GPUs, with the keys the request sets.
        ds_path: where `ds` was read.
        request: what the user has typed.
        caller: callbacks of the Python program that outlives the run; None for a command. With a caller, a stop on
            request raises SystemExit, whose cause is Stopped.

    Raises UserError for what the user can fix; errors that are found before the first step leave no run folder.
    Raises PeerError where another rank is gone. Exits with code 75 after a stop on request, with everything saved.
    """
    from dino_ds.planning.start import choose_ds_config

    path = Path(options.run_dir)
    with guarded(path, recipe.hang_seconds, caller) as guards:
        process.init_distributed()
        with FolderLock(path, guards).held() as lock:
            with lock.starting():
                run_folder.check_same_start(path, recipe, ds)
                with distributed.raise_on_all_ranks():
                    source = sources.training_images(recipe.data, recipe.eval.val_share)
                    recipe.check_count(len(source))
                stated = functools.partial(stated_images, recipe)
                earlier = functools.partial(run_folder.earlier_recipe, path, options.resume)
                recipe, settings = normalization.with_image_settings(recipe, source, earlier, stated)
                chosen = choose_ds_config(recipe, options, ds, ds_path, request)
                guards.memory.run = recipe, chosen.config, chosen.predicted_gib
                folder, notes = _open_folder(recipe, source, chosen, options, request)
                run, saver, more_notes = _build(folder, source, options, request, chosen.predicted_gib, caller)
            with closing(run.log):
                beginning.announce(run, folder, chosen, request, [*more_notes, *lock.notes, *notes, *settings])
                feed = functools.partial(
                    build.build_prefetcher, folder.recipe, source, chosen.config.micro_batch, run.step.engine.device
                )
                Loop(run, saver, guards.beat, guards.stop).run(lambda: feed(run.state.position))
                run.log.info(*beginning.closing_lines(run, folder.recipe.model))


def _build_periodic_tasks(
    recipe: Recipe, source: images.Source, epoch_steps: int
) -> tuple[PeriodicTask | None, PeriodicTask | None]:
    """Evaluations and pictures of a run, each None where the recipe asks for none. Every rank must call it."""
    evaluations: PeriodicTask | None = None
    pictures: PeriodicTask | None = None
    if recipe.eval.every.value:
        from dino_ds.evals.runner import EvalRunner

        evaluations = EvalRunner.build(recipe, source, epoch_steps)
    if recipe.eval.pictures_every == "auto" or recipe.eval.pictures_every.value:
        from dino_ds.report.pictures import PeriodicPictures

        pictures = PeriodicPictures.build(recipe, source, epoch_steps)
    return evaluations, pictures


def _open_folder(
    recipe: Recipe, source: images.Source, chosen: ds_schema.ChosenDsConfig, options: TrainOptions, request: Request
) -> tuple[run_folder.RunFolder, list[str]]:
    """Open the run folder; returns it, and notes for the log. Raises UserError for a folder that the run can't use, and
    ConfigError if more memory is predicted than there is."""
    data, config = recipe.data, chosen.config
    with distributed.raise_on_all_ranks():
        cache_gib, notes = image_cache.fitting_cache(data.cache_gib, source)
        recipe = loading.change_recipe(recipe, {"data.cache_gib": str(cache_gib)}) if notes else recipe
        folder = run_folder.RunFolder(Path(options.run_dir), recipe, config, options.resume, options.allow_change)
        folder.config_name = request.config or folder.config_name
        if not options.allow_oversize:
            chosen.check_fits()
    folder.agree()
    classes, asked = len(source.classes or ()), recipe.eval
    unused = classes > 1 and not (asked.root or asked.val_share) and asked.evals == "auto" and data.own_files
    knn = f"{classes} class folders: --eval.val_share 0.1 holds a tenth of the images out, and measures k-NN on them"
    notes = [*getattr(source, "notes", ()), *notes, *([knn] if unused else []), *sources.draws_of_its_own(source)]
    return folder, [*dict.fromkeys(request.notes), *config.notes, *notes]


def _build(
    folder: run_folder.RunFolder,
    source: images.Source,
    options: TrainOptions,
    request: Request,
    predicted_gib: float | None,
    caller: Caller | None,
) -> tuple[Run, Saver, list[str]]:
    """Build the run, new or from its checkpoint, and its saver, on all ranks; returns them and notes for the log.
    Raises UserError for data, a ds config or a checkpoint that can't be used, or a disk without room for one
    checkpoint."""
    config, batch = folder.config, folder.recipe.data.global_batch
    epoch_steps = loader.steps_per_epoch(len(source), batch)
    folder.images = run_folder.describe_images(source, folder.recipe.data.root)
    keep_every = folder.recipe.keep_every.in_steps(batch, epoch_steps)
    checkpoints = Checkpoints(folder.path, folder.recipe.keep_checkpoints, keep_every)

    # Where the run begins and ends; a stage's recipe counts from its beginning.
    begin = beginning.choose_beginning(folder, checkpoints, options, request)
    recipe, manifest = folder.recipe, begin.resumed.manifest if begin.resumed else None
    last_step = folder.last_step(epoch_steps, options.max_steps, manifest.step if manifest else 0)
    notes = [*begin.notes, *beginning.check_lengths(recipe, epoch_steps, last_step)]

    # What is learned, and what is done between steps.
    evaluations, pictures = _build_periodic_tasks(recipe, source, epoch_steps)
    folder.run_id = manifest.run_id if manifest else folder.run_id or folder.new_id
    build.check_start(recipe)
    check_images_together(recipe, StepImages(config.micro_batch, config.accumulation, distributed.world_size()))
    step, state = build.build_step(begin.built(recipe), config, epoch_steps, begin.weights), RunState()
    notes += [*step.engine.config.notes, *_describe_start(begin, step, recipe)]

    # What is saved, and what is loaded.
    teacher = frozen.distilled(step.teachers)
    about = {"run_id": folder.run_id, "images": folder.images.to_json(), "frozen_teacher": teacher}
    files = run_folder.TeacherFiles(folder.path, recipe, teacher)
    description = folder.settings() | about
    saver = Saver(checkpoints, step, state, evaluations, description, files, recipe.save_in_background)
    if manifest:
        frozen.check_same_teacher(manifest, teacher)
        notes += folder.notes(manifest)
    notes += begin.load(saver)
    distributed.set_timeouts(longest_wait(recipe.hang_seconds))
    log, tidied = _open_log(folder, saver, last_step, options.verbose, caller)
    loop = beginning.loop_options(recipe, source, epoch_steps, last_step, predicted_gib)
    run = Run(folder.path, loop, step, state, evaluations, pictures, log)
    return run, saver, [*notes, *tidied]


def _describe_start(begin: beginning.Beginning, step: TrainingStep, recipe: Recipe) -> list[str]:
    """Notes on the weights that the run begins with, and on the teacher that is distilled."""
    notes = []
    if step.engine.started_from:
        notes.append(f"started from {step.engine.started_from}")
        if recipe.outlasting_start:
            notes.append("BatchNorm keeps the statistics of the start (teacher.batch_norm frozen)")
    elif begin.resumed is None and begin.previous is None:
        notes += [note for teacher in teachers_of(recipe) for note in teacher.notes(recipe)]
    return [*notes, *frozen.describe_distillation(step.teachers, recipe)]


def _open_log(
    folder: run_folder.RunFolder, saver: Saver, last_step: int, verbose: bool, caller: Caller | None
) -> tuple[metrics.RunLog, list[str]]:
    """Make the folder this run's own, tidy it and open its log; from here on only the disk can refuse the start."""
    step = saver.step.applied_steps
    if step < last_step:
        saver.check_space()
    with distributed.raise_on_all_ranks():
        loggers, lost = metrics.open_loggers(folder.config.raw, folder.path, str(folder.run_id))
    run_folder.write_description(folder)
    notes, tell = [*lost, *saver.tidy()], caller.tell if caller else None
    with distributed.raise_on_all_ranks():
        try:
            return metrics.RunLog(folder.path, step, loggers, tell, verbose), notes
        except OSError as error:
            raise unwritable(error.filename or folder.path, error) from None
