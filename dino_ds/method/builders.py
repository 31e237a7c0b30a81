"""Builds a loss term or a teacher from its spec: ours by the functions of this package, a user's by the spec itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dino_ds.errors import ConfigError
from dino_ds.method import build_frozen, ema, gram_teacher, preserve
from dino_ds.method.coding_rate import build_coding_rate
from dino_ds.method.dino import build_dino
from dino_ds.method.gram import build_gram
from dino_ds.method.ibot import build_ibot
from dino_ds.method.koleo import build_koleo
from dino_ds.method.objective import Term
from dino_ds.method.parts import TeacherParts, TermParts
from dino_ds.method.specs.base import TeacherSpec, TermSpec
from dino_ds.method.specs.coding_rate import CodingRateSpec
from dino_ds.method.specs.dino import DinoSpec, IbotSpec
from dino_ds.method.specs.distill import FeatureSpec, FrozenSpec
from dino_ds.method.specs.ema import EmaSpec
from dino_ds.method.specs.gram import GramSpec, GramTeacherSpec
from dino_ds.method.specs.koleo import KoLeoSpec
from dino_ds.method.specs.preserve import PreserveSpec, StartSpec
from dino_ds.method.teacher import Teacher

_Builder = TypeVar("_Builder")
_TERMS: dict[type, Callable[[Any, TermParts], Term]] = {
    DinoSpec: build_dino,
    IbotSpec: build_ibot,
    FeatureSpec: build_frozen.build_features,
    CodingRateSpec: build_coding_rate,
    KoLeoSpec: build_koleo,
    GramSpec: build_gram,
    PreserveSpec: preserve.build_preserve,
}
_TEACHERS: dict[type, Callable[[Any, TeacherParts], Teacher]] = {
    EmaSpec: ema.build_teacher,
    FrozenSpec: build_frozen.build_teacher,
    GramTeacherSpec: gram_teacher.build_teacher,
    StartSpec: preserve.build_teacher,
}


def build_term(spec: TermSpec, parts: TermParts) -> Term:
    """Build a term: by `spec.build` if its class has one."""
    has_own = type(spec).build is not TermSpec.build
    term: Term = spec.build(parts) if has_own else _builder_of(spec, _TERMS)(spec, parts)
    return term


def build_teacher(spec: TeacherSpec, parts: TeacherParts) -> Teacher:
    """Build a teacher on this process's device: by `spec.build_teacher` if its class has one. Every rank calls it."""
    has_own = type(spec).build_teacher is not TeacherSpec.build_teacher
    teacher: Teacher = spec.build_teacher(parts) if has_own else _builder_of(spec, _TEACHERS)(spec, parts)
    return teacher


def _builder_of(spec: object, builders: Mapping[type, _Builder]) -> _Builder:
    """The builder of the class of `spec`, or of the nearest class from which that is derived. Raises ConfigError."""
    for kind in type(spec).__mro__:
        if kind in builders:
            return builders[kind]
    raise ConfigError(f"{type(spec).__name__} has no build: give it one, which returns the term or teacher")
