"""Reads a YAML file of `key: value` lines as text, for a schema to convert."""

from __future__ import annotations

from typing import Any

import yaml

from dino_ds.basics.text_file import read_text
from dino_ds.errors import ConfigError, one_line


def read_yaml(path: str) -> dict[str, Any]:
    """The content of a recipe. Raises ConfigError, with the line where there is one."""
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


def _problem(said: str | None) -> str:
    """The parser's words, plainer for a tab and for a file that ends too early."""
    if said and said.startswith("found character '\\t'"):
        return "a tab stands where spaces belong: indent with spaces"
    return (said or "not YAML").replace("'<stream end>'", "the end of the file")


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
