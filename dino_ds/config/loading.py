"""Loads a recipe: defaults < a YAML file < overrides of the command line, all problems reported together.

No torch here: help and checks must start at once.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from dino_ds.config.fields import Length, Ramp, Section
from dino_ds.config.recipe import Recipe
from dino_ds.config.yaml_file import read_yaml
from dino_ds.errors import ConfigError
from dino_ds.hubs import weights_elsewhere
from dino_ds.names import MOST_PROBLEMS, RECIPE_HOMES, did_you_mean, ds_home, missing_file, nearest, suggestion
from dino_ds.text_file import is_file

RECIPES = Path(__file__).parent.parent / "recipes"
NONE_WORDS = ("none", "null")
_FAR, _SURE = 0.75, 0.85
"""Least similarity of a suggestion, and of a name that only other projects use."""


class Option(NamedTuple):
    """One key of the recipe, as `--help` and the docs show it."""

    name: str
    type: str
    default: str
    description: str


def load_recipe(config: str | None, overrides: Mapping[str, str]) -> Recipe:
    """The recipe `config` (a shipped name or a YAML path; None = the defaults) with `overrides` (dotted key -> text).

    Several, with commas between them: what each one sets replaces what those before it set. Raises ConfigError with
    one line per problem.
    """
    return _validate(_collect(config, overrides))


def change_recipe(recipe: Recipe, overrides: Mapping[str, str], config: str | None = None) -> Recipe:
    """`recipe` with what `config` sets, as of `load_recipe`, and with `overrides` (dotted key -> text).

    Raises ConfigError with one line per problem.
    """
    problems: list[str] = []
    given = {name: (value, "recipe") for name, value in _flatten(recipe.model_dump(), "", "recipe", problems)}
    given.update(_collect(config, {}))
    given.update(_read_overrides(overrides, problems))
    if problems:
        raise ConfigError("\n".join(problems))
    return _validate(given)


def keys_set_by(config: str | None, overrides: Mapping[str, str]) -> frozenset[str]:
    """The dotted names that a recipe and overrides set. Raises ConfigError as `load_recipe`."""
    return frozenset(_collect(config, overrides))


def dump_recipe(recipe: Recipe) -> str:
    """YAML that `load_recipe` reads back to an equal recipe."""
    return yaml.dump(recipe.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_options() -> list[Option]:
    """Every key of the recipe, in the order of the schema."""
    return [
        Option(name, _type_text(field), show_value(field.default), field.description or "") for name, field in _fields()
    ]


def show_value(value: object) -> str:
    """A value as one writes it in YAML and on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(show_value(part) for part in value)
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _collect(config: str | None, overrides: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Dotted name -> (raw value, where it came from); raises ConfigError for unknown names."""
    given: dict[str, tuple[Any, str]] = {}
    problems: list[str] = []
    for one in [] if config is None else [config] if is_file(config) else config.split(","):
        path = _find_recipe(one.strip())
        for name, value in _flatten(read_yaml(path), "", path, problems):
            given[name] = (value, path)
    given.update(_read_overrides(overrides, problems))
    if problems:
        raise ConfigError("\n".join(problems))
    return given


def _read_overrides(overrides: Mapping[str, str], problems: list[str]) -> Iterator[tuple[str, tuple[Any, str]]]:
    """As `_collect` has them; unknown names are added to `problems`."""
    fields = dict(_fields())
    for name, text in overrides.items():
        if name not in fields:
            problems.append(f"--{name}: {unknown_key(name)}")
            continue
        none = text.strip().lower() in NONE_WORDS and type(None) in _members(fields[name])
        yield name, (None if none else text, "command line")


def unknown_key(name: str) -> str:
    """The message for a name that is not a key of the recipe: where it belongs, or the nearest names."""
    known = [option for option, _ in _fields()]
    inside = [option for option in known if option.startswith(f"{name}.")]
    if inside:
        return f"this is a section of the recipe: set {', '.join(inside[:3])}, ..."
    home = ds_home(name)
    if home:
        return f"not a recipe key: {home}"
    return f"not a recipe key.{nearest_knobs(name)}"


def nearest_knobs(name: str, more: Iterable[str] = ()) -> str:
    """ " Did you mean ...?" with the nearest keys, sections and `more`, also by other projects' names; "" for none."""
    options = [option for option, _ in _fields()]
    known = [*more, *options, *dict.fromkeys(option.split(".")[0] for option in options if "." in option)]
    called = {other: home for other, home in RECIPE_HOMES.items() if home in options and other not in known}
    others = nearest(name.rsplit(".", 1)[-1], called, count=1, cutoff=_SURE)
    return suggestion([called[other] for other in others] or nearest(name, known, cutoff=_FAR))


def _find_recipe(config: str) -> str:
    if config.endswith((".json", ".hjson")):
        raise ConfigError(f"--config {config} is not a recipe: a DeepSpeed JSON is given with --ds_config")
    if config not in recipe_names() and is_file(run := f"{config}/config.yaml"):
        raise ConfigError(f"--config {config} is a run folder: its recipe is {run}")
    if config.endswith((".yaml", ".yml")) or "/" in config:
        if not is_file(config) and (answer := weights_elsewhere(config)):
            raise ConfigError(f"--config {config} is not a recipe; are weights meant? --model.init_from: {answer}")
        if not is_file(config):
            near = did_you_mean(Path(config).stem, recipe_names())
            shipped = f" Shipped recipes go by name alone.{near}" if near else ""
            raise ConfigError(f"{missing_file(config, ('.yaml', '.yml'))}{shipped}")
        return config
    if config not in recipe_names():
        near = did_you_mean(config, recipe_names())
        raise ConfigError(
            f"no recipe is named {config!r}: there are {', '.join(recipe_names())}; "
            f"a file of your own ends in .yaml.{near}"
        )
    return str(RECIPES / f"{config}.yaml")


class _Dumper(yaml.SafeDumper):
    """Writes ranges on one line."""


_Dumper.add_representer(tuple, lambda d, value: d.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True))


def _flatten(content: dict[str, Any], prefix: str, path: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """(dotted name, raw value) of the known keys; the others are added to `problems`."""
    known = dict(_fields())
    sections = {name.split(".")[0] for name in known if "." in name}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if name in known:
            yield name, value
        elif name in sections and value is None:
            continue  # a section whose lines are all commented out
        elif name in sections and isinstance(value, dict):
            yield from _flatten(value, f"{name}.", path, problems)
        elif len(problems) < MOST_PROBLEMS:
            problems.append(f"{path}: {name}: {unknown_key(name)}")


def _validate(given: Mapping[str, tuple[Any, str]]) -> Recipe:
    nested: dict[str, Any] = {}
    for name, (value, _) in given.items():
        section, _, leaf = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[leaf] = value
    try:
        return Recipe.model_validate(nested)
    except ValidationError as error:
        lines = [line for problem in error.errors() for line in _problem_lines(problem, given)]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _problem_lines(problem: Any, given: Mapping[str, tuple[Any, str]]) -> list[str]:
    name = ".".join(part for part in problem["loc"] if isinstance(part, str))
    origin = given[name][1] if name in given else None
    where = (
        f"--{name}: " if origin == "command line" else f"{origin}: {name}: " if origin else f"{name}: " if name else ""
    )
    return [where + line for line in _say(problem).splitlines()]


def _say(problem: Any) -> str:
    """pydantic's error in our words: what was given, what is allowed."""
    value, kind, context = problem["input"], problem["type"], problem.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        allowed = [word.strip("' ") for word in context["expected"].replace(" or ", ", ").split(",")]
        return f"{value!r} is not one of {', '.join(allowed)}.{did_you_mean(str(value), allowed)}"
    bounds = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
    if kind in bounds:
        limit = next(iter(context.values()))
        return f"{show_value(value)} must be {bounds[kind]} {show_value(limit)}"
    wanted = {"int": "a whole number", "float": "a number", "finite": "a number", "bool": "true or false"}
    wanted |= {"string": "text", "tuple": "a range such as 0.4,1", "model": "a section"}
    for start, words in wanted.items():
        if kind.startswith(start):
            return f"{value!r} is not {words}"
    if kind in ("missing", "too_long"):
        return f"{value!r} is not a range of two numbers such as 0.4,1"
    return f"{value!r}: {problem['msg']}"


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    """(dotted name, field) of every key."""
    for name, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            for leaf, inner in field.annotation.model_fields.items():
                yield f"{name}.{leaf}", inner
        else:
            yield name, field


def _members(field: FieldInfo) -> tuple[Any, ...]:
    """The types of a field; `X | None` has two."""
    is_union = get_origin(field.annotation) in (Union, types.UnionType)
    return get_args(field.annotation) if is_union else (field.annotation,)


def _type_text(field: FieldInfo) -> str:
    words = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "none"}
    words |= {Length: "length", Ramp: "weight"}
    texts = []
    for member in _members(field):
        limits = [*field.metadata]
        if get_origin(member) is typing.Annotated:
            member, *extra = get_args(member)
            limits += [m for e in extra for m in getattr(e, "metadata", [e])]
        if get_origin(member) is Literal:
            texts.append(", ".join(get_args(member)))
        elif get_origin(member) is tuple:
            texts.append({(float, float): "low,high", (float, ...): "numbers"}.get(get_args(member), "names"))
        else:
            texts.append(words[member] + _limits_text(limits))
    return " or ".join(texts)


def _limits_text(limits: list[Any]) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = [f"{sign} {show_value(getattr(m, key))}" for m in limits for key, sign in signs.items() if hasattr(m, key)]
    return f" {', '.join(found)}" if found else ""
