"""Checks for lengths that exceed the run's, once an epoch's steps are known: the schema compares equal units."""

from __future__ import annotations

from dino_ds.config.recipe import Recipe
from dino_ds.errors import ConfigError
from dino_ds.method.specs.of_recipe import terms_of

MOST_PASSES = 2000
"""The most often that LightlyTrain advises to see an image."""


def check_lengths(recipe: Recipe, epoch_steps: int, images: int) -> list[str]:
    """Lines for the log about warm-ups that end no sooner than the run, and about images that are seen too often; an
    epoch has `epoch_steps` optimizer steps, the data set `images`.

    Raises ConfigError where the run would not do what it is for: a backbone that is frozen to the end, or a loss
    term that never begins.
    """
    batch, trial = recipe.data.global_batch, "(a short trial keeps its schedules with --max_steps)"
    last, length = recipe.length.in_steps(batch, epoch_steps), f"length {recipe.length}"
    never = {"model.freeze_backbone": (recipe.model.freeze_backbone, "the backbone would never learn")}
    never |= {f"{term.name}.start": (term.start, f"{term.title} would never begin") for term in terms_of(recipe)}
    for name, (part, so) in never.items():
        if part.value and (end := part.in_steps(batch, epoch_steps)) >= last:
            raise ConfigError(f"{name} {part} is step {end}, and {length} is {last} steps: {so}; shorten it {trial}")
    late = {
        "optimizer.warmup": (recipe.optimizer.warmup, "the learning rate does not reach its peak"),
        "objective.freeze_prototypes": (recipe.objective.freeze_prototypes, "the prototypes stay as they were drawn"),
    }
    how = recipe.objective
    if how.warmup_teacher_temp != how.teacher_temp:
        so = f"objective.teacher_temp {how.teacher_temp:g} is not reached"
        late["objective.teacher_temp_warmup"] = (how.teacher_temp_warmup, so)
    for term in terms_of(recipe):
        if term.weight.length is not None:
            late[f"the ramp of {term.name}'s weight"] = (term.weight.length, f"it does not reach {term.weight.end:g}")
    most = MOST_PASSES * images
    often = f"{length} shows each of {images:,} images {last * batch // images:,} times; LightlyTrain advises "
    often += f'{MOST_PASSES:,} at most: --length "{most} images"'
    return ([often] if last * batch > most + batch else []) + [
        f"{name} {part} is {steps} steps, and {length} is {last}: {so}"
        for name, (part, so) in late.items()
        if (steps := part.in_steps(batch, epoch_steps)) > last
    ]
