"""Finds the files of a recipe: a shipped recipe by its name, or YAML files, with the files that they extend. Reads
their values as text, which the schema converts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dino_ds.basics.file_format import FORMAT, check_format
from dino_ds.basics.hubs import weights_elsewhere
from dino_ds.basics.names import as_written, did_you_mean, missing_file
from dino_ds.basics.text_file import is_file, read_text
from dino_ds.errors import ConfigError, one_line

RECIPES = Path(__file__).parent.parent / "recipes"
EXTENDS = "extends"
"""Key by which a file names the recipe that it changes: a shipped recipe, or a path relative to the file."""


class RecipeFile(NamedTuple):
    """The path of a recipe's file, and its keys without `extends` and a run's `format`."""

    path: str
    content: dict[str, Any]


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def read_recipe_files(config: str) -> list[RecipeFile]:
    """The files of `config` (a shipped name, a YAML path, or several separated by commas), each after those that it
    overrides. Raises ConfigError for a file that can't be found or read, and for a circle of extended files.
    """
    names = [config] if is_file(config) else config.split(",")
    return [file for name in names for file in _read_chain(_find(name.strip(), "--config "))]


def _read_chain(path: str) -> list[RecipeFile]:
    chain: list[RecipeFile] = []
    while True:
        content = read_yaml(path)
        base, number = content.pop(EXTENDS, None), content.pop("format", FORMAT)
        check_format(number, path, "write its keys into a recipe of your own")
        chain.insert(0, RecipeFile(path, content))
        if base is None:
            return chain
        path = _find_base(base, path)
        if any(os.path.samefile(path, file.path) for file in chain):
            circle = " extends ".join([*(file.path for file in reversed(chain)), path])
            raise ConfigError(f"{circle}: a circle; take one of these lines out")


def _find_base(base: object, path: str) -> str:
    """Find the file `base` that the file at `path` extends; relative paths start in the folder of `path`."""
    start = f"{path}: {EXTENDS}: "
    if not isinstance(base, str) or (base not in recipe_names() and "," in base):
        raise ConfigError(
            f"{start}{as_written(base)} is not one recipe: give a shipped recipe's name or a YAML file, which may "
            "extend another one"
        )
    if base.endswith((".yaml", ".yml")) or "/" in base:
        base = str(Path(path).parent / os.path.expanduser(base))
    return _find(base, start)


def _find(config: str, start: str) -> str:
    """Find the file of one recipe. Raises ConfigError, whose message begins with `start`."""
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
        raise ConfigError(f"{path}{line}: {_problem(error.problem)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} cannot be read as YAML: {one_line(error)}") from None
    except (RecursionError, ValueError) as error:  # ValueError: from the converters of tags such as !!int
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path} cannot be read as YAML: {reason}") from None
    if not text.strip(" \t\r\n\0\ufeff"):
        raise ConfigError(f"{path} is empty (was it cut off?): write a recipe's 'key: value' lines into it")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} is not a recipe: it must hold 'key: value' lines, and it holds one {type(content).__name__}"
        )
    return content


def _problem(message: str | None) -> str:
    """The YAML parser's message, in plainer words for a tab and for a file that ends too early."""
    if message and message.startswith("found character '\\t'"):
        return "a tab stands where spaces belong: indent with spaces"
    return (message or "not YAML").replace("'<stream end>'", "the end of the file")


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
            raise yaml.composer.ComposerError(None, None, f"*{event.anchor}: aliases are not taken", event.start_mark)
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if re.search("[\ud800-\udfff\0]", text := super().construct_scalar(node)):
            problem = f"{text[:40]!r} has half a character or a NUL"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is not a key", key_node.start_mark)
            if key in seen:
                problem = f"{key!r} is set twice, on lines {seen[key]} and {key_node.start_mark.line + 1}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)
