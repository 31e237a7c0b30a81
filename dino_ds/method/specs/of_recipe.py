"""Finds the loss terms, teachers and heads of a recipe, and its crop groups with the teachers that see them.

Code about terms or teachers iterates over these lists, and names no single term or teacher.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dino_ds.config.crops import CropGroup, Resolution, dino_groups
from dino_ds.config.fields import Ramp
from dino_ds.config.sections import HeadSection, ObjectiveSection
from dino_ds.errors import ConfigError
from dino_ds.method.specs.base import RecipeSections, StepImages, TeacherSpec, TermSpec
from dino_ds.method.specs.coding_rate import CodingRateSpec
from dino_ds.method.specs.dino import DinoSpec, IbotSpec
from dino_ds.method.specs.distill import FrozenSpec
from dino_ds.method.specs.ema import EmaSpec
from dino_ds.method.specs.gram import GRAM, GramSpec, GramTeacherSpec
from dino_ds.method.specs.koleo import KoLeoSpec
from dino_ds.method.specs.own import TEACHERS, TERMS, own_problems, own_teachers, own_terms
from dino_ds.method.specs.preserve import PreserveSpec, StartSpec

_TERMS: dict[str, type[TermSpec]] = {
    "dino": DinoSpec,
    "ibot": IbotSpec,
    "coding_rate": CodingRateSpec,
    "koleo": KoLeoSpec,
    "gram": GramSpec,
    "preserve": PreserveSpec,
}
"""Our loss terms in the order of the objective."""
_TEACHERS: dict[str, type[TeacherSpec]] = {
    "ema": EmaSpec,
    "frozen": FrozenSpec,
    "gram": GramTeacherSpec,
    "start": StartSpec,
}
"""Our teachers, the exported one first."""


def _weights(recipe: RecipeSections) -> dict[str, Ramp]:
    """The weight of each of our terms, objective.NAME_weight or gram.weight, by the term's name."""
    return {
        name: recipe.gram.weight if name == GRAM else getattr(recipe.objective, f"{name}_weight") for name in _TERMS
    }


def _our_terms(recipe: RecipeSections) -> list[TermSpec]:
    weights = {name: weight for name, weight in _weights(recipe).items() if weight}
    return [_TERMS[name].from_recipe(name, weight, recipe) for name, weight in weights.items()]


def terms_of(recipe: RecipeSections) -> list[TermSpec]:
    """The loss terms of a recipe, in the order of the objective. Raises ConfigError for a user's term that can't be
    found."""
    ours, users = _our_terms(recipe), own_terms(recipe.objective.terms)
    taken = {name for spec in ours for name in (spec.name, *spec.scheduled)}
    for spec in users:
        _take_names(TERMS, spec.name, spec.scheduled, taken)
    return [*ours, *users]


def known_terms(recipe: RecipeSections) -> list[TermSpec]:
    """The loss terms of a recipe, without users' terms if any can't be found: the run may come from another machine."""
    try:
        return terms_of(recipe)
    except ConfigError:
        objective, teacher = recipe.objective, recipe.teacher
        alone: dict[str, object] = {"objective": objective.model_copy(update={"terms": "{}"})}
        alone["teacher"] = teacher.model_copy(update={"others": "{}"})
        return terms_of(recipe.model_copy(update=alone))


def teachers_of(recipe: RecipeSections) -> list[TeacherSpec]:
    """The teachers of a recipe, the EMA teacher first. Raises ConfigError for a user's teacher that can't be found."""
    ours: list[TeacherSpec] = [spec for kind in _TEACHERS.values() for spec in kind.in_recipe(recipe)]
    users, taken = own_teachers(recipe.teacher.others), {spec.name for spec in ours}
    for spec in users:
        _take_names(TEACHERS, spec.name, (), taken)
    return [*ours, *users]


def heads_of(recipe: RecipeSections) -> dict[str, HeadSection]:
    """The heads with prototypes that a recipe's student trains, by name."""
    return {name: head for term in terms_of(recipe) for name, head in term.heads.items()}


def groups_of(recipe: RecipeSections, resolution: Resolution) -> tuple[CropGroup, ...]:
    """The crop groups of every image in a step of this resolution, in order, with the teachers that see them."""
    crops, teachers = recipe.crops, teachers_of(recipe)
    sizes = resolution.global_size, crops.global_scale, resolution.local_size, crops.local_scale
    first, *others = (
        replace(group, teachers=tuple(spec.name for spec in teachers if group.name in spec.sees))
        for group in dino_groups(*sizes, crops.num_local, masked=crops.mask != "none")
    )
    first = replace(first, hides=crops.mask_hides)
    further = (teacher.own_group(first, resolution) for teacher in teachers)
    return (first, *others, *(group for group in further if group is not None))


def term_problems(recipe: RecipeSections) -> list[str]:
    """A line for each key of a recipe that does not go with its terms or teachers."""
    weights = _weights(recipe)
    problems = [problem for term in _our_terms(recipe) for problem in term.problems(recipe)]
    problems += [problem for kind in _TEACHERS.values() for problem in kind.problems(recipe)]
    if recipe.objective.terms == "{}" and not any(weights.values()):
        *others, last = (f"{name}_weight" for name in weights if f"{name}_weight" in ObjectiveSection.model_fields)
        problems.append(f"objective: all weights are 0: give {', '.join(others)} or {last} one above 0")
    return problems


def name_problems(recipe: RecipeSections) -> list[str]:
    """A line for each term and teacher of the user whose keys are wrong or missing, or whose name is one of ours."""
    weights = {key.removesuffix("_weight") for key in ObjectiveSection.model_fields if key.endswith("_weight")}
    problems = own_problems(TERMS, recipe.objective.terms, weights | _TERMS.keys())
    return problems + own_problems(TEACHERS, recipe.teacher.others, _TEACHERS.keys())


def check_images_together(recipe: RecipeSections, step: StepImages) -> None:
    """Raise ConfigError if a term that compares images gets one at a time: its loss would be constant."""
    key = "data.global_batch" if step.total == 1 else "train_micro_batch_size_per_gpu"
    for term in terms_of(recipe):
        if term.needs_images_together(step) == 1:
            raise ConfigError(f"loss term {term.name} compares images, and here sees 1 at a time: raise {key}")


def accumulation_notes(
    recipe: RecipeSections, micro_batch: int, accumulation: int, ranks: int
) -> tuple[list[str], list[str]]:
    """Notes and warnings on gradient accumulation, for terms and layers that combine several images."""
    if accumulation == 1:
        return [], []
    step = StepImages(micro_batch, accumulation, ranks)
    by_term = [term.accumulated(step) for term in terms_of(recipe)]
    warnings = []
    backbone = recipe.batch_norm != "frozen" and recipe.model.spec().has_batch_norm
    if backbone or any(head.batch_norm for head in heads_of(recipe).values()):
        warnings.append(
            f"BatchNorm sees one micro-batch at a time: {accumulation} micro-batches are not one batch; networks with "
            "LayerNorm or GroupNorm (convnext_tiny, resnet50_gn) have no such limit"
        )
    warnings += [text for _, warned in by_term for text in warned]
    return list(dict.fromkeys(text for noted, _ in by_term for text in noted)), warnings


def _take_names(key: str, name: str, scheduled: Collection[str], taken: set[str]) -> None:
    """Add the names of a user's term or teacher to `taken`. Raises ConfigError if a name is taken already: it would
    replace another weight or teacher."""
    if double := {name, *scheduled} & taken:
        raise ConfigError(f"{key} {name}: another has the name {', '.join(sorted(double))} already: take another one")
    taken |= {name, *scheduled}
