"""Takes from a recipe what the training loop needs: plain values. Checks for lengths beyond the run's, once the
steps of an epoch are known."""

from __future__ import annotations

import itertools

from dino_ds.config.recipe import Recipe
from dino_ds.data.base import Joined, Source
from dino_ds.errors import ConfigError
from dino_ds.method.specs.of_recipe import heads_of, terms_of
from dino_ds.run.run import LoopOptions


def loop_options(
    recipe: Recipe, source: Source, epoch_steps: int, last_step: int, predicted_gib: float | None
) -> LoopOptions:
    """The plain values that the training loop needs."""
    batch, every = recipe.data.global_batch, recipe.save_every
    parts = source.joined if isinstance(source, Joined) else ()
    ends = itertools.accumulate(len(part) for _, part in parts)
    return LoopOptions(
        seed=recipe.seed,
        images=len(source),
        global_batch=batch,
        epoch_steps=epoch_steps,
        last_step=last_step,
        log_every=recipe.log_every,
        save_every=None if every == "auto" else every.in_steps(batch, epoch_steps),
        max_bad_fraction=recipe.data.max_bad_fraction,
        teacher_groups=tuple(group.name for group in recipe.groups if recipe.teacher.taught_by in group.teachers),
        predicted_gib=predicted_gib,
        part_ends=dict(zip((place for place, _ in parts), ends, strict=True)),
    )


def check_lengths(recipe: Recipe, epoch_steps: int, last_step: int) -> list[str]:
    """Lines for the log about warm-ups that end after the run's length, or after `last_step`, the last step of this
    start; an epoch has `epoch_steps` optimizer steps.

    Raises ConfigError for a backbone that is frozen to the end, or a loss term that never begins.
    """
    batch, trial = recipe.data.global_batch, "(a short trial keeps its schedules with --max_steps)"
    last, length = recipe.length.in_steps(batch, epoch_steps), f"length {recipe.length}"
    never = {"model.freeze_backbone": (recipe.model.freeze_backbone, "the backbone would never learn")}
    never |= {f"{term.name}.start": (term.start, f"{term.title} would never begin") for term in terms_of(recipe)}
    for name, (part, so) in never.items():
        if part.value and (end := part.in_steps(batch, epoch_steps)) >= last:
            raise ConfigError(f"{name} {part} is step {end}, and {length} is {last} steps: {so}; shorten it {trial}")
    late, how = (
        {"optimizer.warmup": (recipe.optimizer.warmup, "the learning rate does not reach its peak")},
        recipe.objective,
    )
    if heads_of(recipe):
        late["objective.freeze_prototypes"] = (how.freeze_prototypes, "the prototypes stay as they were drawn")
    if how.warmup_teacher_temp != how.teacher_temp:
        so = f"objective.teacher_temp {how.teacher_temp:g} is not reached"
        late["objective.teacher_temp_warmup"] = (how.teacher_temp_warmup, so)
    for term in terms_of(recipe):
        if term.weight.length is not None:
            late[f"the ramp of {term.name}'s weight"] = (term.weight.length, f"it does not reach {term.weight.end:g}")
    ends = (
        f"{length} is {last}" if last_step >= last else f"--max_steps ends at {last_step} (--length shortens these too)"
    )
    return [
        f"{name} {part} is {steps} steps, and {ends}: {so}"
        for name, (part, so) in late.items()
        if (steps := part.in_steps(batch, epoch_steps)) > min(last, last_step)
    ]
