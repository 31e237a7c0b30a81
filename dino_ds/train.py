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
from typing import Any, NamedTuple

from dino_ds.checkpoint.folder import Checkpoints
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import RecipeRequest
from dino_ds.data.image_cache import fitting_cache
from dino_ds.data.images import Source
from dino_ds.data.loader import steps_per_epoch
from dino_ds.data.normalization import with_image_settings
from dino_ds.data.sources import draws_of_its_own, training_images
from dino_ds.engine import distributed
from dino_ds.engine.process import init_distributed
from dino_ds.errors import unwritable
from dino_ds.health.monitor import longest_wait
from dino_ds.method.build import build_prefetcher, build_step, check_start
from dino_ds.method.frozen import check_same_teacher, describe_distillation, distilled
from dino_ds.method.specs.base import StepImages
from dino_ds.method.specs.own import check_images_together, teachers_of
from dino_ds.method.step import TrainingStep
from dino_ds.run.announcement import announce, closing_lines, unused_classes
from dino_ds.run.beginning import Beginning, check_lengths, choose_beginning, loop_options
from dino_ds.run.guards import FolderLock, guarded
from dino_ds.run.loop import Loop
from dino_ds.run.metrics import RunLog, open_loggers
from dino_ds.run.run import PeriodicTask, Run, RunState
from dino_ds.run.run_folder import (
    OtherImages,
    RunFolder,
    TeacherFiles,
    check_same_start,
    describe_images,
    describe_settings,
    earlier_recipe,
    notes_on_changes,
    write_description,
)
from dino_ds.run.saver import Saver
from dino_ds.run.stop import Caller
from dino_ds.run.train_options import ChosenDsConfig, TrainOptions
from dino_ds.weights.frozen import stated_images


class _Request(NamedTuple):
    """The user's arguments besides the recipe: see `train`."""

    options: TrainOptions
    ds: Mapping[str, Any]
    ds_path: str
    ds_overrides: Mapping[str, Any] | None
    given: RecipeRequest | None = None
    caller: Caller | None = None

    @property
    def path(self) -> Path:
        return Path(self.options.run_dir)


def train(
    options: TrainOptions,
    *,
    recipe: Recipe,
    ds: Mapping[str, Any],
    ds_path: str,
    ds_overrides: Mapping[str, Any] | None = None,
    given: RecipeRequest | None = None,
) -> None:
    """Train until the recipe's length, `max_steps` optimizer steps in all, or a request to stop; every rank calls it.

    ds_overrides: keys to change in the ds config of a resumed run, or in the planner's of a new run on GPUs (`ds`
    is then for a machine without GPUs); None if the user has named `ds`. given: what the user has set in the recipe.

    Raises UserError for what the user can fix; errors that are found before the first step leave no run folder.
    Raises PeerError where another rank is gone. Exits with code 75 after a stop on request, with everything saved.
    """
    _train(recipe, _Request(options, ds, ds_path, ds_overrides, given))


def train_for(caller: Caller, options: TrainOptions, files: Mapping[str, Any]) -> None:
    """Run `train` for a program that outlives it; `files` has the other arguments of `train`. A stop on request raises
    SystemExit, whose cause is Stopped."""
    request = _Request(options, files["ds"], files["ds_path"], files["ds_overrides"], files["given"], caller)
    _train(files["recipe"], request)


def _train(recipe: Recipe, request: _Request) -> None:
    from dino_ds.planning.start import choose_ds_config

    with guarded(request.path, recipe.hang_seconds, request.caller) as guards:
        init_distributed()
        with FolderLock(request.path, guards).held() as lock:
            with lock.starting():
                options, ds, ds_path, overrides, *_ = request
                check_same_start(request.path, recipe, ds)
                with distributed.raise_on_all_ranks():
                    source = training_images(recipe.data, recipe.eval.val_share)
                    recipe.check_count(len(source))
                stated = functools.partial(stated_images, recipe)
                earlier = functools.partial(earlier_recipe, request.path, options.resume)
                recipe, settings = with_image_settings(recipe, source, earlier, stated)
                chosen = choose_ds_config(recipe, options, ds, ds_path, overrides)
                guards.memory.expect(recipe, chosen.config, chosen.predicted_gib)
                folder, notes = _open_folder(recipe, source, chosen, request)
                run, saver, more_notes = _build(folder, source, request, chosen.predicted_gib)
            with closing(run.log):
                announce(run, folder, chosen, request.given, [*more_notes, *lock.notes, *notes, *settings])
                feed = functools.partial(
                    build_prefetcher, folder.recipe, source, chosen.config.micro_batch, run.step.engine.device
                )
                Loop(run, saver, guards.beat, guards.stop).run(lambda: feed(run.state.position))
                run.log.info(*closing_lines(run, folder.recipe.model))


def _build_periodic_tasks(
    recipe: Recipe, source: Source, epoch_steps: int
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
    recipe: Recipe, source: Source, chosen: ChosenDsConfig, request: _Request
) -> tuple[RunFolder, list[str]]:
    """Open the run folder; returns it, and notes for the log.

    Raises UserError for a folder that the run can't use, and ConfigError if more memory is predicted than there is.
    """
    data, config, said = recipe.data, chosen.config, request.given.notes if request.given else []
    with distributed.raise_on_all_ranks():
        cache_gib, notes = fitting_cache(data.cache_gib, source)
        recipe = change_recipe(recipe, {"data.cache_gib": str(cache_gib)}) if notes else recipe
        folder = RunFolder(request.path, recipe, config, request.options.resume, request.options.allow_change)
        folder.config_name = (request.given.config if request.given else None) or folder.config_name
        if not request.options.allow_oversize:
            chosen.check_fits()
    folder.agree()
    notes = [*getattr(source, "notes", ()), *notes, *unused_classes(recipe, source), *draws_of_its_own(source)]
    return folder, [*dict.fromkeys(said), *config.notes, *notes]


def _build(
    folder: RunFolder, source: Source, request: _Request, predicted_gib: float | None
) -> tuple[Run, Saver, list[str]]:
    """Build the run, new or from its checkpoint, and its saver; returns them and notes for the log.

    The folder is then this run's. Every rank must call this. Raises UserError for data, a ds config or a
    checkpoint that can't be used, and where the disk has no room for one checkpoint.
    """
    config, batch = folder.config, folder.recipe.data.global_batch
    epoch_steps = steps_per_epoch(len(source), batch)
    images = describe_images(source, folder.recipe.data.root)
    other_images = OtherImages(folder.recipe, images, folder.allows_other_images)
    keep_every = folder.recipe.keep_every.in_steps(batch, epoch_steps)
    checkpoints = Checkpoints(folder.path, folder.recipe.keep_checkpoints, keep_every)

    # Where the run begins and ends; a stage's recipe counts from its beginning.
    begin = choose_beginning(folder, checkpoints, other_images, request.options, request.given)
    recipe, max_steps = folder.recipe, request.options.max_steps
    last_step = folder.last_step(epoch_steps, max_steps)
    ends = f"--max_steps {max_steps}" if max_steps else f"length {recipe.length}"
    begin.check_ahead(last_step, str(folder.path), ends)
    notes = [*begin.notes, *check_lengths(recipe, epoch_steps, last_step)]

    # What is learned, and what is done between steps.
    evaluations, pictures = _build_periodic_tasks(recipe, source, epoch_steps)
    run_id = folder.adopt_run_id(begin.resumed.manifest if begin.resumed else None)
    check_start(recipe)
    check_images_together(recipe, StepImages(config.micro_batch, config.accumulation, distributed.world_size()))
    step, state = build_step(begin.built(recipe), config, epoch_steps, begin.weights), RunState()
    notes += [*step.engine.config.notes, *_describe_start(begin, step, recipe)]

    # What is saved, and what is loaded.
    teacher = distilled(step.teachers)
    about = {"run_id": run_id, "images": images.to_json(), "frozen_teacher": teacher}
    description = describe_settings(recipe, config) | about
    files = TeacherFiles(folder.path, recipe, teacher)
    saver = Saver(checkpoints, step, state, evaluations, description, files, recipe.save_in_background)
    if begin.resumed is not None:
        manifest = begin.resumed.manifest
        check_same_teacher(manifest, teacher)
        notes += [*notes_on_changes(manifest, recipe, config, folder.began_in), *other_images.notes(manifest)]
    notes += begin.load(saver)
    distributed.set_timeouts(longest_wait(recipe.hang_seconds))
    log, tidied = _open_log(folder, saver, last_step, request)
    options = loop_options(recipe, source, epoch_steps, last_step, predicted_gib)
    run = Run(folder.path, options, step, state, evaluations, pictures, log)
    return run, saver, [*notes, *tidied]


def _describe_start(begin: Beginning, step: TrainingStep, recipe: Recipe) -> list[str]:
    """Notes on the weights that the run begins with, and on the teacher that is distilled."""
    notes = []
    if step.engine.started_from:
        notes.append(f"started from {step.engine.started_from}")
        if recipe.outlasting_start:
            notes.append("BatchNorm keeps the statistics of the start (teacher.batch_norm frozen)")
    elif begin.resumed is None and begin.previous is None:
        notes += [note for teacher in teachers_of(recipe) for note in teacher.notes(recipe)]
    return [*notes, *describe_distillation(step.teachers, recipe)]


def _open_log(folder: RunFolder, saver: Saver, last_step: int, request: _Request) -> tuple[RunLog, list[str]]:
    """Make the folder this run's own, tidy it and open its log; from here on only the disk can refuse the start."""
    step = saver.step.applied_steps
    if step < last_step:
        saver.check_space()
    with distributed.raise_on_all_ranks():
        loggers, lost = open_loggers(folder.config.raw, folder.path, str(folder.run_id))
    write_description(folder)
    notes, tell = [*lost, *saver.tidy()], request.caller.tell if request.caller else None
    with distributed.raise_on_all_ranks():
        try:
            return RunLog(folder.path, step, loggers, tell, request.options.verbose), notes
        except OSError as error:
            raise unwritable(error.filename or folder.path, error) from None
