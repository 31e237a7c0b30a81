"""The first and last lines of a run's log: what is trained, on what, for how long, and what is unusual."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator

import torch

from dino_ds.basics.names import unquoted
from dino_ds.config.crops import EMA
from dino_ds.config.fields import FEW_IMAGES, MOST_PASSES
from dino_ds.config.model import ModelSection
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import Request
from dino_ds.data.images import Source
from dino_ds.engine import distributed
from dino_ds.errors import one_line
from dino_ds.health.beat import Event
from dino_ds.method.specs.own import accumulation_notes, teachers_of, terms_of
from dino_ds.run.run import Run
from dino_ds.run.run_folder import RunFolder
from dino_ds.run.train_options import ChosenDsConfig

MOST_KEPT = 0.5
"""Largest share that the initial weights may still have in a teacher at the end."""
_MOST_LINES = 9
"""Lines on the screen before the line about the run folder."""
_SHOWN_ELSEWHERE = ("data.root", "data.source")
"""Overrides that the line about the images shows."""
_PICTURES = ("map", "neighbors", "pca", "attention")
"""Kinds of pictures, the most telling first."""


def announce(run: Run, folder: RunFolder, chosen: ChosenDsConfig, request: Request, notes: Iterable[str]) -> None:
    """Write the first lines of a run's log: those that the screen shows, then details. `notes` were collected while the
    run was built."""
    recipe, config, device, data = folder.recipe, folder.config, run.step.engine.device, folder.recipe.data
    steps, batch = run.step.schedules.steps, data.global_batch
    own_steps = run.options.last_step - _first_step(folder)
    given_batch = config.micro_batch, config.accumulation, distributed.world_size()
    balanced, alone = accumulation_notes(recipe, *given_batch)
    shown = list(_summary(run, folder, chosen, request))
    if folder.resume:
        position, done = run.state.position, run.step.applied_steps
        where = f"at step {done}, epoch {position.epoch}, image {position.samples}"
        shown.append(Event(f"resumed  {where if done else 'from the start: there is no checkpoint yet'}", step=done))
    shown += [
        f"warning  {text}"
        for text in [
            *few_images(run.options.images, own_steps * batch, data.advise_command),
            *alone,
            *slow_teachers(recipe, steps),
        ]
    ]
    texts = [*notes, *balanced]
    room = max(0, _MOST_LINES - len(shown))
    hidden = len(texts) - room
    more = "" if hidden <= 0 else f"{hidden} more note{'s' if hidden > 1 else ''} and "
    details = [
        f"batch    global batch {batch} = micro-batch {given_batch[0]} x accumulation {given_batch[1]} x ranks "
        f"{given_batch[2]}; {run.options.epoch_steps} steps an epoch",
        f"engine   ZeRO {config.stage}, {config.precision}, {device}",
        *([f"chosen   {chosen.said}"] if chosen.said else []),
    ]
    run.log.info(
        *shown,
        *(f"note     {text}" for text in texts[:room]),
        f"folder   {run.path}: log.txt there has {more}all details, --verbose shows them here",
        *(Event(f"note     {text}", detail=True) for text in texts[room:]),
        chosen.memory,
        *(Event(line, detail=True) for line in details),
    )


def _summary(run: Run, folder: RunFolder, chosen: ChosenDsConfig, request: Request) -> Iterator[str]:
    """Yield lines that say what is trained, on which images and device, and for how long."""
    recipe, config, options = folder.recipe, folder.config, run.options
    data, ranks, steps = recipe.data, distributed.world_size(), run.step.schedules.steps
    yield Event(f"images   {options.images:,} in {data.place}", images=options.images, place=data.place)
    teacher = run.step.teachers.exported.backbone
    spec, weights = recipe.model.spec(), sum(tensor.numel() for tensor in teacher.parameters())
    size = f"{weights / 1e6:,.1f} million" if weights >= 1e6 else f"{weights:,}"
    network = f"{recipe.model.backbone} ({spec.sizes}; {size} weights)"
    loss = " + ".join(term.title.removeprefix("Loss of ") for term in terms_of(recipe))
    yield f"trains   {network} on {_crops_in_words(recipe)}; loss: {loss}"
    if chosen.trained:
        yield f"trained  {chosen.trained}"
    on_gpu = run.step.engine.device.type == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    each = " for each" if ranks > 1 else ""
    gib = "" if chosen.predicted_gib is None else f"; {chosen.predicted_gib:.1f} GiB of memory predicted{each}"
    yield f"device   {where}, {config.precision}, {ranks} process{'es' if ranks > 1 else ''}{gib}"
    total = f" of the schedules' {steps:,}" if options.last_step < steps else ""
    first = _first_step(folder)
    images = (options.last_step - first) * data.global_batch
    since = f" from step {first:,}" if first else ""
    yield Event(
        f"length   {options.last_step:,} steps{total}, {data.global_batch:,} images each: {images:,} images{since}, "
        f"each {images / options.images:,.1f} times",
        steps=steps,
        last_step=options.last_step,
    )
    overrides = [f"{key} {unquoted(value)}" for key, value in request.recipe.items() if key not in _SHOWN_ELSEWHERE]
    name = folder.config_name or (f"that of {folder.origin.run}" if folder.origin else "the defaults")
    as_it_is = " as it is"
    if folder.resume and request.config is None:
        name = folder.config_name or "this run's own"
        as_it_is = f", as {folder.path / 'config.yaml'} has it"
    changed = f"; set otherwise here: {one_line(', '.join(overrides), 160)}" if overrides else as_it_is
    yield f"recipe   {name}{changed}"


def _first_step(folder: RunFolder) -> int:
    """The step at which a stage began, else 0."""
    return folder.origin.first_step if folder.origin else 0


def _crops_in_words(recipe: Recipe) -> str:
    """Describe the crops in words, such as "2 global crops of 224 px, 8 local of 96"."""
    several = []
    for resolution in recipe.resolutions:
        first, *others = [
            f"{group.count} {group.name}{{}} of {group.size}{{}}" for group in recipe.groups_of(resolution)
        ]
        several.append(", ".join([first.format(" crops", " px"), *(text.format("", "") for text in others)]))
    return "; or ".join(several)


def unused_classes(recipe: Recipe, source: Source) -> list[str]:
    """Return a note if the images are in class folders, and no test images are named or held out."""
    classes, asked = len(source.classes or ()), recipe.eval
    if classes < 2 or asked.root or asked.val_share or asked.evals != "auto" or not recipe.data.own_files:
        return []
    return [f"{classes} class folders: --eval.val_share 0.1 holds a tenth of the images out, and measures k-NN on them"]


def few_images(images: int, shown: int, advise: str = "dino-ds advise") -> list[str]:
    """Return warnings about too few `images`, and about images shown too often; shown: images of all steps; advise: the
    command that says what else to do."""
    most = MOST_PASSES * images
    few = f"{images} images are few (LightlyTrain recommends several thousand): what else to do: {advise}"
    often = (
        f"each of {images:,} images is shown {shown // images:,} times; LightlyTrain advises {MOST_PASSES:,} at most: "
        f'--length "{most} images"'
    )
    return [few] * (images < FEW_IMAGES) + [often] * (shown >= most + images)


def slow_teachers(recipe: Recipe, steps: int) -> list[str]:
    """Return warnings about EMA teachers that after `steps` steps still consist mostly of their random initial weights,
    and so give the targets of an untrained network."""
    warnings = []
    drawn = recipe.stage_start is None and recipe.model.init_from is None
    for teacher in teachers_of(recipe):
        if not (teacher.follows and drawn):
            continue
        rate = sum(1 - teacher.momentum_at(steps * part // 100, steps) for part in range(100)) / 100
        if (kept := math.exp(-rate * steps)) > MOST_KEPT:
            key = "teacher.momentum" if teacher.name == EMA else f"teacher.others: {teacher.name} momentum"
            faster = f"{max(0.0, 1 - 10 / steps):.4g}"
            warnings.append(
                f"after all {steps} steps the teacher would still be {kept:.0%} what it began as: lower {key} (here "
                f"{faster} or less) or train longer"
            )
    return warnings


def closing_lines(run: Run, model: ModelSection) -> list[str]:
    """Return the last lines of the log of a run that has reached its last step."""
    path, steps = run.path, run.step.schedules.steps
    knows = model.spec().timm_model(model.backbone) is not None
    named = f", backbone={model.backbone!r}" if ":" in model.backbone else ""
    how = f"{path / 'teacher.json'} says how timm loads it" if knows else f"dino_ds.load({str(path)!r}{named}) loads it"
    of, cut = f" of {steps}" if run.step.applied_steps < steps else "", run.options.last_step < steps  # --max_steps
    evaluations, folders = run.evaluations, sorted(path.glob("pictures/step_*"), reverse=True)
    files = (folder / f"{name}.png" for folder in folders for name in _PICTURES)
    picture = next((file for file in files if file.is_file()), None)
    return [
        f"done     step {run.step.applied_steps}{of}; the run is in {path}",
        *(["ended    " + evaluations.finished()] if evaluations and evaluations.finished() else []),
        f"teacher  {path / 'teacher.safetensors'}; {how}",
        *(evaluations.ending(path, cut) if evaluations else []),
        *([f"picture  {picture}"] if picture else []),
        f"report   dino-ds report {shlex.quote(str(path))} (curves, evaluations and pictures: {path / 'report.html'})",
    ]
