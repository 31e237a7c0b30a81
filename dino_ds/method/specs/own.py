"""Finds the loss terms, teachers and heads of a recipe, ours and the user's, and its crop groups with the teachers that
see them. Code about terms or teachers iterates over these lists, and names no single term or teacher.

    objective:
      terms:
        variance: {spec: "my_terms:Variance", weight: 0..0.5 over 100 steps, floor: 0.1}
    teacher:
      others:
        slow: {momentum: 0.9995}

`spec` names a dataclass, a subclass of `dino_ds.method.specs.base.TermSpec` or `TeacherSpec`, which is imported only
when needed; the keys next to it are its fields. A teacher without `spec` is another EMA teacher.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from dino_ds.basics.own_code import find_own
from dino_ds.config.crops import GLOBAL, LOCAL, CropGroup, Resolution, dino_groups
from dino_ds.config.fields import Ramp, parse_ramp
from dino_ds.config.sections import HeadSection, ObjectiveSection
from dino_ds.errors import ConfigError, one_line
from dino_ds.method.specs.base import RecipeSections, StepImages, TeacherSpec, TermSpec
from dino_ds.method.specs.ours import (
    GRAM,
    CodingRateSpec,
    DinoSpec,
    EmaSpec,
    FrozenSpec,
    GramSpec,
    GramTeacherSpec,
    IbotSpec,
    KoLeoSpec,
    PreserveSpec,
    StartSpec,
)

TERMS, TEACHERS = "objective.terms", "teacher.others"
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def code_of(recipe: RecipeSections) -> list[tuple[str, str]]:
    """Each key of a recipe that names a class of the user's, with its MODULE:CLASS."""
    pairs = [("data.source", recipe.data.source), ("model.backbone", recipe.model.backbone)]
    for key, text in ((TERMS, recipe.objective.terms), (TEACHERS, recipe.teacher.others)):
        pairs += [(f"{key} {name}", values.get("spec") or "") for name, values in json.loads(text).items()]
    return [(key, path) for key, path in pairs if ":" in path]


@functools.cache
def own_terms(text: str) -> list[TermSpec]:
    """The specs that the JSON of TERMS describes, without terms of weight 0. Raises ConfigError."""
    specs: list[TermSpec] = []
    for name, values in json.loads(text).items():
        key, path = f"{TERMS} {name}", str(values.pop("spec"))
        try:
            weight = parse_ramp(values.pop("weight"))
        except ValueError as error:
            raise ConfigError(f"{key}: weight {error}") from None
        if weight:
            specs.append(_made(key, path, TermSpec, {"name": name, "weight": weight, **values}))
    return specs


@functools.cache
def own_teachers(text: str) -> list[TeacherSpec]:
    """The specs that the JSON of TEACHERS describes. Raises ConfigError."""
    specs: list[TeacherSpec] = []
    for name, values in json.loads(text).items():
        key, path = f"{TEACHERS} {name}", values.pop("spec", None)
        spec: TeacherSpec = _made(key, path or EmaSpec, TeacherSpec, {"name": name, **values})
        if unknown := set(spec.sees) - {GLOBAL, LOCAL}:
            raise ConfigError(f"{key}: sees {', '.join(sorted(unknown))}: crop groups are {GLOBAL} and {LOCAL}")
        specs.append(spec)
    return specs


def counted_from(text: str, step: int) -> str:
    """The JSON of TERMS with the ramps of weights counted from `step`, where a stage of training begins."""
    terms = json.loads(text)
    for values in terms.values():
        weight = parse_ramp(values["weight"])
        if weight.length is not None:
            values["weight"] = str(dataclasses.replace(weight, length=dataclasses.replace(weight.length, begin=step)))
    return json.dumps(terms, sort_keys=True)


def _made(key: str, spec: str | type, base: type, values: dict[str, Any]) -> Any:
    """Make an instance of the class that `spec` is or names. Raises ConfigError, one line for each bad value."""
    if isinstance(spec, str):

        def fits(value: object) -> bool:
            return isinstance(value, type) and issubclass(value, base) and dataclasses.is_dataclass(value)

        spec = find_own(key, spec, f"dataclass that is a {base.__name__}", fits)
    assert isinstance(spec, type)
    known = {field.name for field in dataclasses.fields(spec)}
    if unknown := sorted(values.keys() - known):
        others = ", ".join(sorted(known - {"name", "weight"})) or "none"
        raise ConfigError(f"{key}: {', '.join(unknown)} is no field of {spec.__name__}: it has {others}")
    try:
        return TypeAdapter(spec).validate_python(values)
    except ValidationError as error:
        lines = [f"{key}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError("\n".join(lines)) from None
    except (PydanticUserError, NameError) as error:
        raise ConfigError(f"{key}: the fields of {spec.__name__} can't be checked: {one_line(error)}") from None


_TERMS: dict[str, type[TermSpec]] = {  # our loss terms in the order of the objective
    "dino": DinoSpec,
    "ibot": IbotSpec,
    "coding_rate": CodingRateSpec,
    "koleo": KoLeoSpec,
    "gram": GramSpec,
    "preserve": PreserveSpec,
}
_TEACHERS: dict[str, type[TeacherSpec]] = {  # our teachers, the exported one first
    "ema": EmaSpec,
    "frozen": FrozenSpec,
    "gram": GramTeacherSpec,
    "start": StartSpec,
}


def _weights(recipe: RecipeSections) -> dict[str, Ramp]:
    """The weight of each of our terms, objective.NAME_weight or gram.weight, by the term's name."""
    return {
        name: recipe.gram.weight if name == GRAM else getattr(recipe.objective, f"{name}_weight") for name in _TERMS
    }


def _our_terms(recipe: RecipeSections) -> list[TermSpec]:
    weights = {name: weight for name, weight in _weights(recipe).items() if weight}
    return [_TERMS[name].from_recipe(name, weight, recipe) for name, weight in weights.items()]


def terms_of(recipe: RecipeSections) -> list[TermSpec]:
    """The loss terms of a recipe, in order. Raises ConfigError for a user's term that can't be found."""
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
    """A line for each term and teacher of the user with wrong or missing keys or a name of ours; imports no code."""
    weights = {key.removesuffix("_weight") for key in ObjectiveSection.model_fields if key.endswith("_weight")}
    terms, others = recipe.objective.terms, recipe.teacher.others
    parts = [(TERMS, weights | _TERMS.keys(), *pair) for pair in json.loads(terms).items()]
    parts += [(TEACHERS, {*_TEACHERS}, *pair) for pair in json.loads(others).items()]
    problems = []
    for key, taken, name, values in parts:
        subject = f"{key} {name}"
        if not re.fullmatch("[a-z][a-z0-9_]*", name):
            problems.append(f"{subject}: a name has small letters, digits and _ alone: it becomes that of metrics")
        elif name in taken:
            problems.append(f"{subject}: the name is one of ours ({', '.join(sorted(taken))}): take another")
        elif not isinstance(values, dict):
            problems.append(f'{subject}: {values!r} are not its values, such as {{"spec": "my_code:MySpec"}}')
        elif "name" in values:
            problems.append(f"{subject}: name {values['name']!r} is a second one: its key names it already")
        elif key == TEACHERS and name == "teacher":
            said = "teacher_momentum of metrics is the teacher's that is exported: take another name"
            problems.append(f"{subject}: {said}")
        elif key == TERMS and "spec" not in values:
            problems.append(f"{subject} has no spec: add its class as module:Class")
        elif "spec" in values and not _CLASS.fullmatch(str(values["spec"])):
            problems.append(f"{subject}: spec {values['spec']!r} names no class: write module:Class")
        elif key == TERMS and "weight" not in values:
            problems.append(f"{subject} has no weight: give it one, such as 0.1 or '0..1 over 1000 steps'")
    return problems


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
