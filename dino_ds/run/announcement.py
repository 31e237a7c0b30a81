"""The first and last lines of a run's log: images, length, engine, memory, what is not as usual; what was found."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress

import torch

from dino_ds.basics.durable import cache_folder
from dino_ds.config.crops import EMA, describe_crops
from dino_ds.config.ds_values import DsConfig
from dino_ds.config.flat import flat_values, lengths_without_unit
from dino_ds.config.model import ModelSection
from dino_ds.config.recipe import Recipe
from dino_ds.engine import distributed
from dino_ds.engine.device import DTYPES
from dino_ds.health.files import Event
from dino_ds.method.objective import Objective
from dino_ds.method.specs.of_recipe import accumulation_notes, heads_of, teachers_of, terms_of
from dino_ds.models.attention import chosen_kernel
from dino_ds.run.doors import Chosen
from dino_ds.run.run import Run
from dino_ds.run.run_folder import RunFolder

MOST_KEPT = 0.5
"""Part of what a teacher begins as that it may have at the end."""


def announce(run: Run, folder: RunFolder, chosen: Chosen, notes: Iterable[str]) -> None:
    """Write the first lines of a run's log; `notes` are what was found while the run was built."""
    recipe, config, steps, options = folder.recipe, folder.config, run.step.schedules.steps, run.options
    data, device = recipe.data, run.step.engine.device
    given = config.micro_batch, config.accumulation, distributed.world_size()
    balanced, alone = accumulation_notes(recipe, *given)
    epochs = steps / options.epoch_steps
    compiled = ", compiled blocks" if config.performance.compile != "off" else ""
    stopping = f", stopping after step {options.last_step}" if options.last_step < steps else ""
    run.log.info(
        Event(
            f"images   {options.images} in {data.place}; global batch {data.global_batch} = micro-batch "
            f"{config.micro_batch} x accumulation {config.accumulation} x ranks {distributed.world_size()}; "
            f"{options.epoch_steps} steps an epoch",
            images=options.images,
            place=data.place,
        ),
        Event(
            f"length   {steps} steps = {steps * data.global_batch} images = {epochs:.1f} epochs{stopping}",
            steps=steps,
            last_step=options.last_step,
        ),
        *_objective_lines(recipe),
        *([f"trained  {chosen.trained}"] if chosen.trained else []),
        f"engine   ZeRO {config.stage}, {config.precision}, {device}; run folder {run.path}",
        f"kernels  {_attention_kernels(recipe, config, device)}{compiled}",
        *first_on_gpu(device),
        chosen.memory,
        *_changed_values(recipe),
        *(f"note     {text}" for text in balanced),
        *(f"warning  {text}" for text in [*alone, *slow_teachers(recipe, steps)]),
        *(
            f"note     {name} was given without a unit: steps; other units are written '100 epochs', '1e6 images'"
            for name in lengths_without_unit(recipe)
        ),
        *(f"note     {text}" for text in [*_idle_teachers(recipe, run.step.objective), *notes]),
    )
    if folder.resume:
        position, done = run.state.position, run.step.applied_steps
        where = f"at step {done}, epoch {position.epoch}, image {position.samples}"
        run.log.info(f"resumed  {where if done else 'from the start: there is no checkpoint yet'}")


def first_on_gpu(where: torch.device) -> list[str]:
    """A line for the first run of a user on a GPU, of which a file in the cache tells."""
    seen = cache_folder() / "gpu_seen"
    if where.type != "cuda" or distributed.rank() or seen.exists():
        return []
    with suppress(OSError):
        seen.parent.mkdir(parents=True, exist_ok=True)
        seen.touch()
    return [
        "note     first run on a GPU here: dino_ds was verified on CPUs, and on GPUs neither speed nor kernels were; "
        "`dino-ds doctor` checks these, and a report should hold its page and this log"
    ]


def slow_teachers(recipe: Recipe, steps: int) -> list[str]:
    """A warning on each average of the student that ends a run of `steps` steps mostly as it began: what it teaches is
    then the untrained network."""
    found = []
    drawn = recipe.stage_start is None and recipe.model.init_from is None
    for teacher in teachers_of(recipe):
        if not (teacher.follows and drawn):
            continue
        rate = sum(1 - teacher.momentum_at(steps * part // 100, steps) for part in range(100)) / 100
        if (kept := math.exp(-rate * steps)) > MOST_KEPT:
            key = "teacher.momentum" if teacher.name == EMA else f"teacher.others: {teacher.name} momentum"
            faster = f"{max(0.0, 1 - 10 / steps):.4g}"
            found.append(
                f"after all {steps} steps the teacher would still be {kept:.0%} what it began as: lower {key} (here "
                f"{faster} or less) or train longer"
            )
    return found


def _idle_teachers(recipe: Recipe, objective: Objective) -> list[str]:
    """A note on each further teacher that no loss term reads."""
    others = [one.name for one in teachers_of(recipe)[1:] if not objective.teacher_features(one.name)]
    return [f"no loss term reads the teacher {name}: it follows, and is saved, for nothing else" for name in others]


def _objective_lines(recipe: Recipe) -> list[str]:
    """The lines on what is compared: crops and their masks, heads, and the terms with their weights."""
    crops, terms = recipe.crops, terms_of(recipe)
    masks = ""
    if crops.mask != "none":
        low, high = crops.mask_ratio
        masks = f"; {crops.mask} masks of {crops.mask_share:.0%} of the global ones hide {low:.0%} to {high:.0%} each"
    heads = [
        f"{name} {head.prototypes} prototypes ({head.layers} layers of {head.hidden}, bottleneck {head.bottleneck})"
        for name, head in heads_of(recipe).items()
    ]
    targets = dict.fromkeys(term.targets for term in terms if term.targets)
    weighted = " + ".join(f"{term.weight} x {term.name}" for term in terms)
    return [
        f"crops    {_sizes_in_words(recipe)}{masks}",
        *([f"heads    {', '.join(heads)}"] if heads else []),
        f"terms    {weighted}{'; targets by ' if targets else ''}{', '.join(targets)}",
        *(line for term in terms for line in term.describe(recipe)),
        *(line for teacher in teachers_of(recipe) for line in teacher.describe()),
    ]


def _sizes_in_words(recipe: Recipe) -> str:
    """ "2x224 + 8x96", or such as "2x224 + 8x96 in 60% of the steps, 2x448 + 8x192 in 40%"."""
    several = [(describe_crops(recipe.groups_of(one)), one.share) for one in recipe.resolutions]
    if len(several) == 1:
        return several[0][0]
    return ", ".join(f"{text} in {share:.0%}{' of the steps' * (n == 0)}" for n, (text, share) in enumerate(several))


def _attention_kernels(recipe: Recipe, config: DsConfig, where: torch.device) -> str:
    """The kernel that runs for each crop size, such as "sdpa: flash at 197 and 37 tokens"."""
    performance, attention = config.performance, recipe.model.spec().attention
    sides = dict.fromkeys(group.size for one in recipe.resolutions for group in recipe.groups_of(one))
    asked = [shape for side in sides if (shape := attention(side))]
    if not asked:
        name, own = recipe.model.backbone, "its" if ":" in recipe.model.backbone else "timm's"
        return f"{name} runs by {own} own code, crops of each size in a pass of their own"
    if performance.attention != "sdpa":
        return performance.attention
    kernels: dict[str, list[str]] = {}
    for heads, width, tokens in asked:
        kernel: str = performance.attention_backend
        if kernel == "auto":
            kernel = chosen_kernel(heads, width, tokens, DTYPES[config.precision], where)
        kernels.setdefault(kernel, []).append(str(tokens))
    return "sdpa: " + ", ".join(f"{name} at {' and '.join(tokens)} tokens" for name, tokens in kernels.items())


def _changed_values(recipe: Recipe) -> list[str]:
    """The recipe's values that are not the defaults, a line a section."""
    changed: dict[str, list[str]] = {}
    defaults = flat_values(Recipe())
    for name, value in flat_values(recipe).items():
        if value != defaults[name]:
            section, _, key = name.rpartition(".")
            changed.setdefault(section or "recipe", []).append(f"{key} {value}")
    return [f"{section:<10}{', '.join(values)}" for section, values in changed.items()]


def closing_lines(run: Run, model: ModelSection) -> list[str]:
    """The lines of a run that has come to its last step."""
    path, steps = run.path, run.step.schedules.steps
    knows = model.spec().timm_model(model.backbone) is not None
    how = f"{path / 'teacher.json'} says how timm loads it" if knows else f"dino_ds.load({str(path)!r}) loads it"
    of, cut = f" of {steps}" if run.step.applied_steps < steps else "", run.options.last_step < steps  # --max_steps
    evaluations = run.evaluations
    return [
        f"done     step {run.step.applied_steps}{of}; the run is in {path}",
        *(["ended    " + evaluations.finished()] if evaluations and evaluations.finished() else []),
        f"teacher  {path / 'teacher.safetensors'}; {how}",
        f"report   dino-ds report {path}: curves, evaluations and pictures on one page",
        *([*evaluations.summary(cut), *evaluations.ending(path)] if evaluations else []),
    ]
