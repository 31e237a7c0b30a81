"""Words for mistakes in a recipe's values: what was given, what is allowed. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from dino_ds.basics.names import as_written, did_you_mean

COMMAND_LINE = "command line"
"""The origin of a value that no file has."""


def show_value(value: object) -> str:
    """A value as one writes it in YAML and on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(show_value(part) for part in value)
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def problem_lines(error: ValidationError, given: Mapping[str, tuple[Any, str]]) -> list[str]:
    """A line for each problem. given: dotted name -> (raw value, where it came from)."""
    return [line for problem in error.errors() for line in _lines(problem, given)]


def _lines(problem: Any, given: Mapping[str, tuple[Any, str]]) -> list[str]:
    name = ".".join(part for part in problem["loc"] if isinstance(part, str))
    origin = given[name][1] if name in given else None
    where = (
        f"--{name}: " if origin == COMMAND_LINE else f"{origin}: {name}: " if origin else f"{name}: " if name else ""
    )
    return [where + line for line in _say(problem).splitlines()]


def _say(problem: Any) -> str:
    """pydantic's error in our words."""
    value, kind, context = problem["input"], problem["type"], problem.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        allowed = [word.strip("' ") for word in context["expected"].replace(" or ", ", ").split(",")]
        return f"{as_written(value)} is not one of {', '.join(allowed)}.{did_you_mean(str(value), allowed)}"
    bounds = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
    if kind in bounds:
        limit = next(iter(context.values()))
        return f"{show_value(value)} must be {bounds[kind]} {show_value(limit)}"
    wanted = {"int": "a whole number", "float": "a number", "finite": "a number", "bool": "true or false"}
    wanted |= {"string": "text", "tuple": "a range such as 0.4,1", "model": "a section"}
    for start, words in wanted.items():
        if kind.startswith(start):
            return f"{as_written(value)} is not {words}"
    if kind in ("missing", "too_long"):
        return f"{as_written(value)} is not a range of two numbers such as 0.4,1"
    return f"{as_written(value)}: {problem['msg']}"
