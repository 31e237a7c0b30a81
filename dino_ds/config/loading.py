"""Loads a recipe: defaults < YAML files (shipped ones by name, with those that they extend) < overrides of the command
line; all problems are reported together. No torch here."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from dino_ds.basics.files import FORMAT, check_format, is_file, read_text
from dino_ds.basics.names import as_written, did_you_mean, missing_file, unquoted, weights_elsewhere, words_elsewhere
from dino_ds.basics.own_code import CODE_KEYS, allow_code, code_in
from dino_ds.config import schema
from dino_ds.config.fields import Length
from dino_ds.config.model import keys_not_of
from dino_ds.config.recipe import Recipe
from dino_ds.errors import ConfigError, one_line

RECIPES = Path(__file__).parent.parent / "recipes"


class _Dumper(yaml.SafeDumper):
    """Writes ranges on one line."""


_Dumper.add_representer(tuple, lambda d, value: d.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True))


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def read_recipe_files(config: str) -> list[tuple[str, dict[str, Any]]]:
    """The paths and keys, without `extends` and `format`, of the files of `config` (a shipped name, a YAML path, or
    several with commas between them), each after those that it overrides. Raises ConfigError, also for a circle."""
    names = [config] if is_file(config) else config.split(",")
    return [file for name in names for file in _read_chain(_find(name.strip(), "--config "))]


def _read_chain(path: str) -> list[tuple[str, dict[str, Any]]]:
    chain: list[tuple[str, dict[str, Any]]] = []
    while True:
        content = read_yaml(path)
        base, number = content.pop("extends", None), content.pop("format", FORMAT)
        check_format(number, path, "write its keys into a recipe of your own")
        chain.insert(0, (path, content))
        if base is None:
            return chain
        start = f"{path}: extends: "
        if not isinstance(base, str) or (base not in recipe_names() and "," in base):
            how = "give a shipped recipe's name or a YAML file, which may extend another one"
            raise ConfigError(f"{start}{as_written(base)} is not one recipe: {how}")
        if base.endswith((".yaml", ".yml")) or "/" in base:
            base = str(Path(path).parent / os.path.expanduser(base))
        path = _find(base, start)
        if any(os.path.samefile(path, file) for file, _ in chain):
            circle = " extends ".join([*(file for file, _ in reversed(chain)), path])
            raise ConfigError(f"{circle}: a circle; take one of these lines out")


def _find(config: str, start: str) -> str:
    names = recipe_names()
    if config in names:
        return str(RECIPES / f"{config}.yaml")
    of_file = "" if start.startswith("--") else start
    if is_file(run := f"{config}/config.yaml"):
        raise ConfigError(f"{start}{config} is a run folder: its recipe is {run}")
    if config.endswith((".yaml", ".yml")) or "/" in config:
        if is_file(config):
            return config
        if answer := weights_elsewhere(config):
            raise ConfigError(f"{start}{config} is not a recipe; are weights meant? --model.init_from: {answer}")
        if os.path.isdir(config):
            raise ConfigError(f"{start}{config} is a folder, not a recipe: give a shipped name or a YAML file")
        raise ConfigError(f"{of_file}{missing_file(config, ('.yaml', '.yml'))}")
    known = "dino-ds train --help lists them; a file of your own ends in .yaml"
    raise ConfigError(f"{of_file}no recipe is named {config!r}: {known}.{did_you_mean(config, names)}")


def read_yaml(path: str) -> dict[str, Any]:
    """The keys and values of a YAML file. Raises ConfigError, with the line number if it is known."""
    text = read_text(path, "YAML")
    try:
        content = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = (error.problem or "not YAML").replace("'<stream end>'", "the end of the file")
        if problem.startswith("found character '\\t'"):
            problem = "a tab stands where spaces belong: indent with spaces"
        raise ConfigError(f"{path}{line}: {problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} cannot be read as YAML: {one_line(error)}") from None
    except (RecursionError, ValueError) as error:  # ValueError: from the converters of tags such as !!int
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path} cannot be read as YAML: {reason}") from None
    if not text.strip(" \t\r\n\0\ufeff"):
        raise ConfigError(f"{path} is empty (was it cut off?): write a recipe's 'key: value' lines into it")
    if not isinstance(content, dict | None):
        holds = f"it must hold 'key: value' lines, and it holds one {type(content).__name__}"
        raise ConfigError(f"{path} is not a recipe: {holds}")
    return content or {}


class _Loader(yaml.SafeLoader):
    """Leaves scalars as text for the schema to convert (YAML 1.1 reads `no` as False and 1e-4 as text); refuses
    duplicate keys (YAML keeps the last) and aliases (200 bytes can expand to gigabytes)."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (yaml declares it so)
        first: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(None, None, f"*{event.anchor}: aliases are not taken", event.start_mark)
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if re.search("[\ud800-\udfff\0]", text := super().construct_scalar(node)):
            problem = f"{text[:40]!r} has half a character or a NUL"
            raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)
        return text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(None, None, f"{key!r} is not a key", key_node.start_mark)
            if key in seen:
                problem = f"{key!r} is set twice, on lines {seen[key]} and {line}"
                raise yaml.MarkedYAMLError(None, None, problem, key_node.start_mark)
            seen[key] = line
        return super().construct_mapping(node, deep)


_RUN_BEFORE = "recipe"  # the origin of values of the recipe that `RecipeSettings.applied_to` changes


@dataclass
class RecipeSettings:
    """The settings of files and of the command line, before they are checked.

    Attributes:
        values: raw values by dotted name.
        origins: dotted name of each value -> the file or the command line that it comes from.
        problems: a line for each unknown name.
        invalid: the sections of the unknown names, whose other keys can't be judged.
        notes: a line for each value that was left out.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    invalid: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def collect(config: str | None, overrides: Mapping[str, Any]) -> RecipeSettings:
        """Gather what the files of `config`, in their order, and then `overrides` set. Raises ConfigError."""
        settings, options, values = RecipeSettings(), schema.options_of(Recipe), dict[str, Any]()
        for path, content in [] if config is None else read_recipe_files(config):
            settings._add(dict(_flatten(content, "", path, settings)), path)
        for name, value in overrides.items():
            if name not in options:
                settings.refuse(name, "--")
            else:
                is_none_word = isinstance(value, str) and value.strip().lower() in schema.NONE_WORDS
                values[name] = None if is_none_word and options[name].takes_none else value
        settings._add(values, schema.COMMAND_LINE)
        return settings

    def _add(self, values: Mapping[str, Any], origin: str) -> None:
        """Add values, which replace earlier ones; a new backbone drops earlier keys that only other networks have."""
        current = self.values.get("model.backbone", Recipe().model.backbone)
        if (backbone := values.get("model.backbone", current)) != current:
            others = [key for key in keys_not_of(backbone) if key in self.origins and key not in values]
            dropped = {key: self.values.pop(key) for key in others}
            self.origins = {key: origin for key, origin in self.origins.items() if key not in dropped}
            if said := [f"{key} {unquoted(value)}" for key, value in dropped.items() if value not in (None, {}, "{}")]:
                self.notes.append(f"left out for model.backbone {backbone}, as it is {current}'s: {', '.join(said)}")
        self.values |= values
        self.origins |= dict.fromkeys(values, origin)

    def allow_code(self) -> None:
        """Allow the import of the code that the settings name, since the user has typed or written it."""
        allow_code(self.values[key] for key in CODE_KEYS if key in self.origins)

    def names(self) -> frozenset[str]:
        """The dotted names of the keys that are set. Raises ConfigError for names that are no keys."""
        if self.problems:
            raise ConfigError("\n".join(self.problems))
        return frozenset(self.origins)

    def load(self, notes: list[str] | None = None) -> Recipe:
        self.allow_code()
        settings = copy.deepcopy(self)
        recipe = _validate(settings)
        if notes is not None:
            idle = (line.why for line in schema.idle_keys(recipe, "idle") if settings.is_users(line.key))
            notes += [*settings.notes, *idle]
        return recipe

    def applied_to(self, recipe: Recipe) -> Recipe:
        """A copy of `recipe`, changed by these settings. Raises ConfigError with one line per problem."""
        origins = dict.fromkeys(schema.options_of(Recipe), _RUN_BEFORE) | self.origins
        values = schema.flatten(recipe.model_dump()) | self.values
        return _validate(RecipeSettings(values, origins, [*self.problems], {*self.invalid}))

    def is_users(self, key: str) -> bool:
        """Whether the command line or a file of the user's sets `key`, not a shipped recipe or the run before."""
        origin = self.origins.get(key, _RUN_BEFORE)
        return origin != _RUN_BEFORE and Path(origin).parent != RECIPES

    def refuse(self, name: str, where: str) -> None:
        """Note the problem that `name` is no key; `where`: the beginning of its line."""
        if len(self.problems) < schema.MOST_PROBLEMS:
            answer = key_elsewhere(name)
            known = f": {answer}" if answer else f".{did_you_mean(name, schema.options_of(Recipe))}"
            self.problems.append(f"{where}{name}: not a recipe key{known}")
            self.invalid.add(name.split(".")[0])


def load_recipe(config: str | None, overrides: Mapping[str, Any], notes: list[str] | None = None) -> Recipe:
    """Load the recipe `config` with `overrides` (dotted key -> text, or a Python value). config: a shipped name, a YAML
    path, several of these with commas between them, of which later ones replace keys of earlier ones, or None for the
    defaults. `notes` gets a line for each value that is left out, and for each key without effect that the user has
    set. The code that the recipe names may be imported from then on. Raises ConfigError with one line per problem."""
    return RecipeSettings.collect(config, overrides).load(notes)


def change_recipe(recipe: Recipe, overrides: Mapping[str, Any], config: str | None = None) -> Recipe:
    """A copy of `recipe`, changed by `config` and `overrides` as in `load_recipe`. Raises ConfigError."""
    return RecipeSettings.collect(config, overrides).applied_to(recipe)


def recorded_recipe(path: Path) -> Recipe:
    """Load the recipe that a run has recorded in its folder, which allows no code. Raises as `load_recipe` does."""
    return _validate(RecipeSettings.collect(str(path), {}))


def code_of(recipe: Recipe) -> list[str]:
    """Each MODULE:NAME that a recipe names; the user allows their import by giving its file to --config."""
    return code_in([recipe.data.source, recipe.model.backbone, recipe.objective.terms, recipe.teacher.others])


def dump_recipe(recipe: Recipe) -> str:
    """The config.yaml of a run: YAML that `load_recipe` reads back to an equal recipe."""
    return yaml.dump({"format": FORMAT, **recipe.model_dump()}, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def write_recipe(path: str, config: str | None, overrides: Mapping[str, Any]) -> None:
    """Write the keys that `config` (None: vits16) and `overrides` set, with their meanings. Raises ConfigError."""
    config = config or "vits16"
    settings = RecipeSettings.collect(config, overrides)
    values, written = schema.flatten(settings.load().model_dump()), settings.names()
    lines = [f"# What is learned: recipe {config}, to edit. All keys and their defaults: dino-ds train --help all."]
    for option in recipe_options():
        section, _, leaf = option.name.rpartition(".")
        if option.name in written:
            lines += [f"{section}:"] if section and f"{section}:" not in lines else []
            text = yaml.dump({leaf: values[option.name]}, Dumper=_Dumper, width=1000, allow_unicode=True).strip()
            lines.append(f"{'  ' * bool(section)}{text}  # {option.description}")
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except OSError as error:
        raise ConfigError(f"--print {path} can't be written: {error.strerror}; name a new file") from None


def recipe_options() -> list[schema.Option]:
    return [*schema.options_of(Recipe).values()]


def key_elsewhere(name: str) -> str | None:
    """The sentence for a name that is not a key of the recipe, but a section or a known word; None for other names."""
    if inside := [option for option in schema.options_of(Recipe) if option.startswith(f"{name}.")]:
        return f"this is a section of the recipe: set {', '.join(inside[:3])}, ..."
    leaf = name.rpartition(".")[2]
    if section := words_elsewhere("ds_keys").get(leaf):
        return f"it belongs to the ds JSON: {section} (--ds.{section})"
    if removed := words_elsewhere("options").get(name if "." in name else ""):
        return removed
    key = words_elsewhere("recipe_keys").get(leaf, name)
    return None if key == name else f"here it is {key}"


def _flatten(content: dict[str, Any], prefix: str, path: str, settings: RecipeSettings) -> Iterator[tuple[str, Any]]:
    known = schema.options_of(Recipe)
    sections = {name.split(".")[0] for name in known if "." in name}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if name in known:
            yield name, value
        elif name in sections and isinstance(value, dict | None):  # None: its lines are all commented out
            yield from _flatten(value or {}, f"{name}.", path, settings)
        else:
            settings.refuse(name, f"{path}: ")


def _shorten_warm_ups(settings: RecipeSettings, length: Length) -> None:
    """Shorten a shipped recipe's warm-ups to a third of a `length` that the user has set, where they are longer."""
    if not settings.is_users("length") or length.begin or settings.values.get("stage_start") == "continue":
        return
    defaults, longest = dict(schema.named_values(Recipe())), Length.parse(length.share("33 %"))
    batch = float(settings.values.get("data.global_batch", defaults["data.global_batch"]))
    others = ("objective.teacher_temp_warmup", "objective.freeze_prototypes")
    for name in ("optimizer.warmup", *(name for name in others if name in settings.origins)):
        part, origin = Length.parse(settings.values.get(name, defaults[name])), settings.origins.get(name)
        units = {part.unit: 1.0, length.unit: 1.0} if part.unit == length.unit else {"steps": batch, "images": 1.0}
        longer = units.get(part.unit, 0.0) * part.value > units.get(length.unit, math.inf) * longest.value
        if longer and (origin is None or Path(origin).parent == RECIPES):
            settings._add({name: str(longest)}, origin or schema.COMMAND_LINE)
            settings.notes.append(f"{name} is {longest}, a third of length {length}: the recipe's {part} are longer")


def _validate(settings: RecipeSettings) -> Recipe:
    """Build the recipe, or raise a ConfigError with all problems. pydantic compares sections only when each is valid by
    itself: so invalid ones are left out, and the others are checked again. A length such as "10 %" becomes that part of
    the run's; keys without effect that the user did not set return to their defaults."""
    options = schema.options_of(Recipe)
    with suppress(ValueError):  # the run's length is wrong itself
        length = Length.parse(settings.values.get("length", Recipe.model_fields["length"].default))
        for name, value in settings.values.items():
            kinds, (ramp, over, text) = options[name].type.split(" or "), str(value).rpartition("over ")
            if name != "length" and ("weight" if over else "length") in kinds and (share := length.share(text)):
                settings.values[name] = f"{ramp}{over}{share}"
        _shorten_warm_ups(settings, length)
    lines, values, invalid = list(settings.problems), dict[str, Any](), set(settings.invalid)
    for name, value in settings.values.items():
        section, _, leaf = name.rpartition(".")
        (values.setdefault(section, {}) if section else values)[leaf] = value
    recipe, wrong = None, {""}
    while recipe is None and wrong:
        try:
            recipe = Recipe.model_validate(values, context=invalid)
        except ValidationError as error:
            causes = [problem.get("ctx", {}).get("error") for problem in error.errors()]
            said = [line for cause in causes for line in getattr(cause, "args", ())]
            idle = [line for line in said if isinstance(line, schema.IdleKey) and line.key in settings.origins]
            if others := [line for line in idle if not settings.is_users(line.key)]:
                for line in others:
                    del settings.origins[line.key], settings.values[line.key]
                    settings.notes.append(f"left out of the recipe: {line.why}")
                return _validate(settings)
            lines += schema.problem_lines(error, settings.origins)
            wrong = {str(problem["loc"][0]) for problem in error.errors() if problem["loc"]}
            invalid |= wrong
            values = {name: value for name, value in values.items() if name not in wrong}
    if recipe is None or lines:
        raise ConfigError("\n".join(dict.fromkeys(lines)))
    return recipe
