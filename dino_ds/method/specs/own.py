"""Users' own loss terms and teachers: objective.terms and teacher.others of a recipe.

    objective:
      terms:
        variance: {spec: "my_terms:Variance", weight: 0..0.5 over 100 steps, floor: 0.1}
    teacher:
      others:
        slow: {momentum: 0.9995}

`spec` names a dataclass, a subclass of `dino_ds.method.specs.base.TermSpec` or `TeacherSpec`; the keys next to it are
the fields of this class. A teacher without `spec` is another EMA teacher. Specs are imported only when needed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Collection
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from dino_ds.basics.own_code import find_own
from dino_ds.config.crops import GLOBAL, LOCAL
from dino_ds.config.fields import parse_ramp
from dino_ds.errors import ConfigError, one_line
from dino_ds.method.specs.base import RecipeSections, TeacherSpec, TermSpec
from dino_ds.method.specs.ema import EmaSpec

TERMS, TEACHERS = "objective.terms", "teacher.others"


def own_problems(key: str, text: str, taken: Collection[str]) -> list[str]:
    """Problems of the JSON of TERMS or TEACHERS, found without importing anything; `taken`: names of our own."""
    problems = []
    for name, values in json.loads(text).items():
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
            problems.append(
                f"{subject}: teacher_momentum of metrics is the teacher's that is exported: take another name"
            )
        elif key == TERMS and "spec" not in values:
            problems.append(f"{subject} has no spec: add its class as module:Class")
        elif "spec" in values and not _names_class(values["spec"]):
            problems.append(f"{subject}: spec {values['spec']!r} names no class: write module:Class")
        elif key == TERMS and "weight" not in values:
            problems.append(f"{subject} has no weight: give it one, such as 0.1 or '0..1 over 1000 steps'")
    return problems


def code_of(recipe: RecipeSections) -> list[tuple[str, str]]:
    """Each key of a recipe that names a class of the user's, with its MODULE:CLASS."""
    pairs = [("data.source", recipe.data.source), ("model.backbone", recipe.model.backbone)]
    for key, text in ((TERMS, recipe.objective.terms), (TEACHERS, recipe.teacher.others)):
        pairs += [(f"{key} {name}", values.get("spec") or "") for name, values in json.loads(text).items()]
    return [(key, path) for key, path in pairs if ":" in path]


def _names_class(spec: object) -> bool:
    return isinstance(spec, str) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", spec) is not None


@functools.cache
def own_terms(text: str) -> list[TermSpec]:
    """The specs that the JSON of TERMS describes, without terms of weight 0. Raises ConfigError."""
    specs: list[TermSpec] = []
    for name, values in json.loads(text).items():
        values = dict(values)
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
        values = dict(values)
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
    """Make the dataclass that `spec` is or names, with `values`. Raises ConfigError, one line for each bad value."""
    if isinstance(spec, str):

        def fits(found: object) -> bool:
            return isinstance(found, type) and issubclass(found, base) and dataclasses.is_dataclass(found)

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
