"""Reads the classes that declare settings: keys of a recipe or ds JSON and options of commands are pydantic fields,
with type, range, default and help. No torch here."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic import dataclasses as pydantic_dataclasses
from pydantic.fields import FieldInfo
from typing_extensions import dataclass_transform

from dino_ds.basics.names import as_written, did_you_mean
from dino_ds.config.fields import Drift, Length, Ramp, Section

Options = TypeVar("Options")
COMMAND_LINE = "command line"  # origin of a value that comes from no file
NONE_WORDS = ("none", "null")
MOST_PROBLEMS = 100  # shown for one file: finding the nearest names for more takes too long, and nobody reads on
_WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", list: "list of text"}
_WORDS |= {types.NoneType: "none", Length: "length", Ramp: "weight", Drift: "drift"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_BOUNDS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
_WANTED = {"int": "a whole number", "float": "a number", "finite": "a number", "bool": "true or false"}
_WANTED |= {"string": "text", "tuple": "a range such as 0.4,1", "list": "a list of text", "model": "a section"}
_WANTED |= {"dataclass": "a distance such as 'drift 0.1'"}


@dataclass(frozen=True)
class Option:
    """A setting: its name as it is typed (dotted in sections), and the pydantic field that declares it."""

    name: str
    info: FieldInfo

    @property
    def description(self) -> str:
        return self.info.description or ""

    def fact(self, name: str, default: Any = None) -> Any:
        """A fact that was passed to `config.fields.option`, or `default`."""
        facts = self.info.json_schema_extra
        return facts.get(name, default) if isinstance(facts, dict) else default

    @property
    def default(self) -> str:
        return "required" if self.info.is_required() else self.fact("shown") or show_value(self.info.default)

    @functools.cached_property
    def members(self) -> tuple[tuple[Any, list[Any]], ...]:
        """The types that a value may have (`X | None` has two), each with its limits and validators."""
        is_union = get_origin(self.info.annotation) in (Union, types.UnionType)
        parts = get_args(self.info.annotation) if is_union else (self.info.annotation,)
        members = []
        for part in parts:
            limits = [*self.info.metadata]
            if get_origin(part) is typing.Annotated:
                part, *more = get_args(part)
                limits += [limit for group in more for limit in getattr(group, "metadata", [group])]
            members.append((part, limits))
        return tuple(members)

    @property
    def type(self) -> str:
        """The type in words, with its limits or its allowed words."""
        return " or ".join(_type_text(part, limits) for part, limits in self.members)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words; a value is one of them, or a list of several."""
        parts = [get_args(part)[0] if get_origin(part) is tuple else part for part, _ in self.members]
        return tuple(word for part in parts if get_origin(part) is Literal for word in map(str, get_args(part)))

    @property
    def is_switch(self) -> bool:
        return self.members[0][0] is bool and not self.takes_none

    @property
    def takes_none(self) -> bool:
        return any(part is types.NoneType for part, _ in self.members)

    @property
    def takes_words(self) -> bool:
        """Whether the option takes all further words without a name, such as files that a shell lists."""
        return bool(self.fact("bare")) and self.takes_list

    @property
    def takes_list(self) -> bool:
        return get_origin(self.members[0][0]) is tuple

    def read(self, value: Any, show: Callable[[Any], str] = as_written) -> Any:
        """Convert a value to the option's type. Raises ValueError with the reason, in which `show` formats values."""
        if self.takes_none and isinstance(value, str) and value.strip().lower() in NONE_WORDS:
            return None
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            problems = error.errors()
            others = [problem for problem in problems if problem["type"] != "literal_error"]
            words = f" or {', '.join(self.choices)}" if 0 < len(others) < len(problems) else ""
            raise ValueError(_say((others or problems)[0], show) + words) from None

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        annotated, parts = typing.cast(Any, typing.Annotated), (self.info.annotation, None, *self.info.metadata)
        return TypeAdapter(annotated[parts], config=ConfigDict(allow_inf_nan=False))


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(cls: type[Options]) -> type[Options]:
    """Turn a class into a frozen dataclass of settings that validates its values."""
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    return pydantic_dataclasses.dataclass(frozen=True, kw_only=True, config=config)(cls)  # type: ignore[return-value]


def fields_of(schema: object) -> dict[str, FieldInfo]:
    """The fields that a pydantic model or dataclass declares; {} for another type."""
    fields: dict[str, FieldInfo] = getattr(schema, "model_fields", None) or getattr(schema, "__pydantic_fields__", {})
    return fields


@functools.cache
def options_of(schema: type) -> dict[str, Option]:
    """The settings of a class and of its sections by dotted name, in the order of declaration."""
    infos: dict[str, FieldInfo] = {}
    for name, info in fields_of(schema).items():
        section: Any = info.annotation
        inside = options_of(section) if fields_of(section) else {}
        # from_: "from" is a keyword of Python
        infos |= {f"{name}.{key}": inner.info for key, inner in inside.items()} or {name.removesuffix("_"): info}
    return {name: Option(name, info) for name, info in infos.items()}


class IdleKey(str):
    """A line about a `key` that is set and has no effect beside other keys. `why`: the line without its advice."""

    key: str
    why: str

    def __new__(cls, key: str, value: object, reason: str) -> IdleKey:
        why = f"{key} {f'{value:g}' if isinstance(value, float) else value} {reason}"
        line = super().__new__(cls, f"{why}: leave it out")
        line.key, line.why = key, why
        return line


def named_values(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value in the schema's type) for all keys of a section."""
    for key, value in section:
        is_section = isinstance(value, Section)
        yield from named_values(value, f"{prefix}{key}.") if is_section else [(prefix + key, value)]


def idle_keys(recipe: Section, table: Literal["idle", "refused"]) -> list[IdleKey]:
    """Keys of a recipe that are not at their defaults and have no effect beside others, by its sections' `table`."""
    values, options = dict(named_values(recipe)), options_of(type(recipe))
    idle: dict[str, IdleKey] = {}
    for _, section in recipe:
        for case, names in getattr(section, table, {}).items():
            others = dict(part.split(" ") for part in case.split(", "))
            shown = {other: show_value(values[other]) for other in others}
            if any(
                (shown[other].partition(" ")[0] in words.removeprefix("!").split("|")) == words.startswith("!")
                for other, words in others.items()
            ):
                continue
            for key in (key for name in names.split() for key in options if f"{key}.".startswith(f"{name}.")):
                if key not in idle and values[key] != options[key].info.default:
                    beside = ", ".join(f"{other} {shown[other]}" for other in others if other != key)
                    why = f"has no effect with {beside.removesuffix(', objective.terms {}')}"
                    idle[key] = IdleKey(key, show_value(values[key]), why)
    return list(idle.values())


def flat_values(recipe: Section) -> dict[str, Any]:
    return flatten(recipe.model_dump(mode="json"))


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """The differences between two nested mappings, in words such as "seed 0 -> 1", sorted by dotted name."""
    old, new = flatten(before), flatten(now)
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return {key: f"{key} {old.get(key)} -> {new.get(key)}" for key in keys}


def show_value(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(show_value(part) for part in value)
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def problem_lines(error: ValidationError, origins: Mapping[str, str]) -> list[str]:
    """A line for each problem. origins: dotted name -> the file or COMMAND_LINE that sets it."""
    lines = list[str]()
    for problem in error.errors():
        name = ".".join(part for part in problem["loc"][:2] if isinstance(part, str))  # further: members of a union
        origin = origins.get(name)
        where = f"{origin}: {name}: " if origin else f"{name}: " if name else ""
        where = f"--{name}: " if origin == COMMAND_LINE else where
        lines += [where + line for line in _say(problem).splitlines()]
    return lines


def _say(problem: Any, show: Callable[[Any], str] = as_written) -> str:
    value, kind, context = problem["input"], problem["type"], problem.get("ctx", {})
    if kind == "value_error":
        return "\n".join(map(str, context["error"].args))
    if kind == "literal_error":
        allowed = [word.strip("' ") for word in context["expected"].replace(" or ", ", ").split(",")]
        return f"{show(value)} is not one of {', '.join(allowed)}.{did_you_mean(str(value), allowed)}"
    if kind in _BOUNDS:
        return f"{show_value(value)} must be {_BOUNDS[kind]} {show_value(next(iter(context.values())))}"
    if kind in ("missing", "too_long"):
        return f"{show(value)} is not a range of two numbers such as 0.4,1"
    wanted = next((words for start, words in _WANTED.items() if kind.startswith(start)), None)
    return f"{show(value)} is not {wanted}" if wanted else f"{show(value)}: {problem['msg']}"


def _type_text(part: Any, limits: list[Any]) -> str:
    if get_origin(part) is Literal:
        return ", ".join(map(str, get_args(part)))
    if get_origin(part) is tuple:
        first, second = (get_args(t)[0] if get_origin(t) is typing.Annotated else t for t in get_args(part))
        return "low,high" if second is float else "numbers" if first in (int, float) else "names"
    signs = [f"{sign} {show_value(getattr(m, key))}" for m in limits for key, sign in _SIGNS.items() if hasattr(m, key)]
    return _WORDS[get_origin(part) or part] + (f" {', '.join(signs)}" if signs else "")
