"""Keywords of a Python call as the words of a command line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from dino_ds.errors import ConfigError
from dino_ds.options.definition import Command, field_of


def words_of(command: Command, own: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """The command line that says the same. Raises ConfigError for a value that none can say."""
    known = {name: option for option in command.all_options for name in (field_of(option), option.name)}
    words: list[str] = []
    for name, value in _flat("", {**own, **options}, known):
        option = known.get(name)
        if name in ("json", "debug", "print") or "=" in name:
            raise ConfigError(f"{name}: not an option in Python")
        if value is None and (option is not None or name == "ds"):
            continue
        name = option.name if option else name
        several = value if option and option.takes_words and isinstance(value, list | tuple) else [value]
        words += [f"--{name}={_text(name, one)}" for one in several]
    return words


def _flat(prefix: str, values: Mapping[Any, Any], known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """data={"root": X} is "data.root": X."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if not isinstance(value, Mapping):
            yield name, value
        elif name in known:
            raise ConfigError(f"{name}: a dict is not a value; {_SECTIONS}")
        else:
            yield from _flat(f"{name}.", value, known)


_SECTIONS = """name a file, and set keys beside it: data={"root": X}, ds={"zero_optimization": {"stage": 1}}"""


def _text(name: str, value: Any) -> str:
    """A value as one writes it on the command line. Raises ConfigError for what can't be written there."""
    if getattr(value, "shape", None) == ():
        value = value.item()  # a number of numpy's or torch's
    if value is None:
        return "null" if name.startswith("ds.") else "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | os.PathLike):
        text = str(os.fspath(value))
        return os.path.expanduser(text) if text.startswith("~/") else text  # as a shell does it
    if isinstance(value, list | tuple):
        parts = [_text(name, one) for one in value]
        if name.startswith("ds."):  # lists of numbers alone
            return f"[{', '.join(parts)}]"
        if not any("," in part for part in parts):
            return ",".join(parts)
    given = f"{value!r:.80}" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
    raise ConfigError(
        f"{name}: {given} can't be given; a value is text, a number, True, False, None, a path, or a list of those "
        "without commas in them"
    )
