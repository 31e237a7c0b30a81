"""Reads from a recipe its loss terms, teachers and heads, and the crops with who sees them.

Everything that speaks of terms or teachers iterates over these, and names none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from dino_ds.config.crops import EMA, CropGroup, Resolution, dino_groups
from dino_ds.config.sections import HeadSection
from dino_ds.errors import ConfigError
from dino_ds.method.specs import coding_rate, dino, distill, gram, koleo, preserve
from dino_ds.method.specs.base import Batch, Recipe, TeacherSpec, TermSpec
from dino_ds.method.specs.ema import EmaSpec
from dino_ds.method.specs.own import TEACHERS, TERMS, own_problems, own_teachers, own_terms

_TERMS: dict[Any, str] = {
    dino.DinoSpec: dino.SECTIONS,
    dino.IbotSpec: dino.SECTIONS,
    distill.FeatureSpec: distill.SECTIONS,
    coding_rate.CodingRateSpec: coding_rate.SECTIONS,
    koleo.KoLeoSpec: koleo.SECTIONS,
    gram.GramSpec: gram.SECTIONS,
    preserve.PreserveSpec: preserve.SECTIONS,
}
"""Our loss terms in the order of the objective, with the sections of a recipe that their problems follow from."""
_NAMES = {dino.DINO, dino.IBOT, dino.LOCAL_WEIGHT, coding_rate.CODING_RATE, koleo.KOLEO, gram.GRAM, preserve.PRESERVE}
_TEACHERS = (EmaSpec, distill.FrozenSpec, gram.GramTeacherSpec, preserve.StartSpec)


def terms_of(recipe: Recipe) -> list[TermSpec]:
    """The loss terms of a recipe, in the order of the objective. Raises ConfigError for a term of a user's that can't
    be found."""
    ours = [spec for kind in _TERMS for spec in kind.in_recipe(recipe)]
    own = own_terms(recipe.objective.terms)
    taken = {name for spec in ours for name in (spec.name, *spec.scheduled)}
    for spec in own:
        _take_names(TERMS, spec.name, spec.scheduled, taken)
    return [*ours, *own]


def known_terms(recipe: Recipe) -> list[TermSpec]:
    """The loss terms of a recipe as far as they are found here: a run may have been trained where others are."""
    try:
        return terms_of(recipe)
    except ConfigError:
        objective, teacher = recipe.objective, recipe.teacher
        alone: dict[str, object] = {"objective": objective.model_copy(update={"terms": "{}"})}
        alone["teacher"] = teacher.model_copy(update={"others": "{}"})
        return terms_of(recipe.model_copy(update=alone))


def teachers_of(recipe: Recipe) -> list[TeacherSpec]:
    """The teachers of a recipe, the EMA teacher first. Raises ConfigError for one of a user's that can't be found."""
    ours = [spec for kind in _TEACHERS for spec in kind.in_recipe(recipe)]
    own, taken = own_teachers(recipe.teacher.others), {spec.name for spec in ours}
    for spec in own:
        _take_names(TEACHERS, spec.name, (), taken)
    return [*ours, *own]


def heads_of(recipe: Recipe) -> dict[str, HeadSection]:
    """The heads of prototypes that a recipe's student trains, by name."""
    return {name: head for term in terms_of(recipe) for name, head in term.heads.items()}


def groups_of(recipe: Recipe, resolution: Resolution) -> tuple[CropGroup, ...]:
    """The crops that are cut from every image in a step of this resolution, in order, and who sees them."""
    crops, teachers = recipe.crops, teachers_of(recipe)
    sizes = resolution.global_size, crops.global_scale, resolution.local_size, crops.local_scale
    first, *others = (
        replace(group, teachers=tuple(one.name for one in teachers if group.name in one.sees))
        for group in dino_groups(*sizes, crops.num_local, masked=crops.mask != "none")
    )
    first = replace(first, hides=crops.mask_hides)
    own = (teacher.own_group(first, resolution) for teacher in teachers)
    return (first, *others, *(group for group in own if group is not None))


def term_problems(recipe: Recipe, unsure: Collection[str]) -> list[str]:
    """Options of terms and teachers that can't act, a line each. `unsure`: sections with mistakes."""
    problems = [
        problem
        for kind, sections in _TERMS.items()
        if not set(unsure) & set(sections.split())
        for problem in kind.problems(recipe)
    ]
    how = recipe.objective
    weights = [
        key for key in type(how).model_fields if key.endswith("_weight") and key != f"{dino.LOCAL_WEIGHT}_weight"
    ]
    if not unsure and how.terms == "{}" and not any(getattr(how, key) for key in weights):
        several = f"{', '.join(weights[:-1])} or {weights[-1]}"
        problems.append(f"objective: all weights are 0: give {several} one above 0")
    problems += own_problems(TERMS, how.terms, _NAMES)
    return problems + own_problems(TEACHERS, recipe.teacher.others, {EMA, distill.FROZEN, gram.GRAM, preserve.START})


def check_images_at_once(recipe: Recipe, micro_batch: int, ranks: int) -> None:
    """Raise ConfigError where a term that compares images gets one at a time: it would be a constant."""
    seen = {
        "koleo_weight": micro_batch * (ranks if recipe.objective.koleo_ranks == "all" else 1),
        "coding_rate_weight": micro_batch * ranks,
    }
    for key, images in seen.items():
        if getattr(recipe.objective, key) and images < 2:
            others = ", or set --objective.koleo_ranks all" if micro_batch * ranks > 1 else ""
            raise ConfigError(
                f"objective.{key} spreads images from each other, and a micro-batch of 1 image has no other: raise "
                f"train_micro_batch_size_per_gpu{others}"
            )


def accumulation_notes(recipe: Recipe, micro_batch: int, accumulation: int, ranks: int) -> tuple[list[str], list[str]]:
    """Notes and warnings on gradient accumulation, for terms and layers that look at several images at once."""
    if accumulation == 1:
        return [], []
    batch = Batch(micro_batch, accumulation, ranks)
    found = [term.accumulated(batch) for term in terms_of(recipe)]
    warnings = []
    if getattr(recipe.model.spec(), "has_batch_norm", False) or any(h.batch_norm for h in heads_of(recipe).values()):
        warnings.append(
            f"BatchNorm sees one micro-batch at a time: {accumulation} micro-batches are not one batch; networks with "
            "LayerNorm or GroupNorm (convnext_tiny, resnet50_gn) have no such limit"
        )
    warnings += [text for _, warned in found for text in warned]
    return list(dict.fromkeys(text for noted, _ in found for text in noted)), warnings


def _take_names(key: str, name: str, scheduled: Collection[str], taken: set[str]) -> None:
    """Add the names of a term or a teacher of a user's to `taken`. Raises ConfigError where one is there already: a
    weight or a teacher would take another's place."""
    if double := {name, *scheduled} & taken:
        raise ConfigError(f"{key} {name}: another has the name {', '.join(sorted(double))} already: take another one")
    taken |= {name, *scheduled}
