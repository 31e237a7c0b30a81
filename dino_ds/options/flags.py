"""Reads a command line, or the keywords of a call in Python, and refuses unknown options before anything starts.

fire runs a command before it complains about a bad flag: after a typo, a run would train for days with defaults.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dino_ds.basics.names import as_written, nearest, suggestion, unquoted, words_elsewhere
from dino_ds.basics.text_file import is_url, unusable_text
from dino_ds.config.ds_check import wrong_key
from dino_ds.config.ds_schema import key_names
from dino_ds.config.loading import ds_home, nearest_knobs, recipe_options, unknown_key
from dino_ds.config.schema import Option
from dino_ds.errors import ConfigError
from dino_ds.options.commands import TRAIN
from dino_ds.options.definition import Command, field_of, meaning
from dino_ds.options.elsewhere import option_elsewhere, stray_word

ALIASES = {"deepspeed_config": "ds_config"}


@dataclass
class Flags:
    """The options of a call: the command's own, converted, and overrides of the recipe and the ds JSON by dotted key,
    as text from a command line or as Python values.

    train_words, train: the words after "--" for a command that takes `train`'s options, and the same words parsed.
    """

    fixed: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    ds: dict[str, Any] = field(default_factory=dict)
    train_words: tuple[str, ...] = ()
    train: Flags | None = None


def parse_flags(command: Command, argv: Sequence[str]) -> Flags:
    """Read the words after the command's name. Raises ConfigError with one line per problem."""
    if command.takes_train:
        return _parse_both(command, list(argv))
    flags, problems = Flags(), list[str]()
    for name, value in _pairs(command, list(argv), problems):
        _store(command, flags, name, value, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return flags


def flags_of_call(command: Command, keywords: Mapping[str, Any]) -> Flags:
    """Read the keywords of a call in Python; None is an option that is not given. Raises ConfigError with one line
    per problem."""
    by_name = {name: option for option in command.all_options for name in (field_of(option), option.name)}
    flags, problems = Flags(), list[str]()
    for name, value in _flat("", keywords, command):
        option = by_name.get(name)
        if name in ("json", "debug", "print"):
            problems.append(f"{name}: not an option in Python")
        elif option is None:
            if name != "ds" or value is not None:
                _store(command, flags, name, value, problems)
        elif isinstance(value, dict):
            problems.append(
                f"{name}: a dict is not a value; name a file, and set keys beside it: "
                'data={"root": X}, ds={"zero_optimization": {"stage": 1}}'
            )
        elif isinstance(value, tuple) and option.takes_words:
            for part in value:
                _store(command, flags, option.name, part, problems)
        elif value is not None:
            is_text = isinstance(value, tuple) and not option.takes_list
            _store(command, flags, option.name, ",".join(map(unquoted, value)) if is_text else value, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return flags


def _flat(prefix: str, values: Mapping[Any, Any], command: Command) -> Iterator[tuple[str, Any]]:
    """Yield pairs of dotted name and value: data={"root": X} becomes ("data.root", X)."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in command.known_options:
            yield from _flat(f"{name}.", value, command)
        else:
            yield name, _plain(name, value)


def _plain(name: str, value: Any) -> Any:
    """Convert a value to the types that schemas read: scalars of NumPy and torch to numbers, paths to text, lists to
    tuples. Raises ConfigError for any other type."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, str | os.PathLike):
        text = str(os.fspath(value))
        return os.path.expanduser(text) if text.startswith("~/") else text  # as a shell does it
    if isinstance(value, list | tuple):
        return tuple(_plain(name, part) for part in value)
    if isinstance(value, Mapping):
        return {str(key): _plain(name, part) for key, part in value.items()}
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ConfigError(
        f"{name}: a {type(value).__name__} can't be given; a value is text, a number, True, False, None, a path, or a "
        "list or dict of those"
    )


def check_required(command: Command, flags: Flags) -> None:
    """Raises ConfigError for an option that has no default and was not given."""
    for option in command.own_options:
        if option.info.is_required() and option.name not in flags.fixed:
            words = f"dino-ds {command.name} {' '.join(command.bare).upper()}"
            how = words if option.fact("bare") else f"--{option.name} X"
            raise ConfigError(f"no {option.name} is given: {how}, {meaning(option)}")


def _parse_both(command: Command, words: list[str]) -> Flags:
    """Read the words of the command itself, "--", and the words of `train`."""
    end = words.index("--") if "--" in words else len(words)
    parts: list[Flags] = []
    problems: list[str] = []
    for part, part_words in ((dataclasses.replace(command, takes_train=False), words[:end]), (TRAIN, words[end + 1 :])):
        try:
            parts.append(parse_flags(part, part_words))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        if end == len(words):
            problems.append(f"options of train follow a --: dino-ds {command.name} ... -- --config vits16")
        raise ConfigError("\n".join(problems))
    return dataclasses.replace(parts[0], train_words=tuple(words[end + 1 :]), train=parts[1])


def drop_local_rank(argv: Sequence[str]) -> list[str]:
    """Remove the --local_rank=N that DeepSpeed's launcher adds: the environment has the local rank too."""
    words, kept = list(argv), []
    while words:
        word = words.pop(0)
        if word in ("--local_rank", "--local-rank"):
            if words and words[0].isdigit():
                words.pop(0)
        elif not word.startswith(("--local_rank=", "--local-rank=")):
            kept.append(word)
    return kept


def _pairs(command: Command, words: list[str], problems: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (flag without dashes, value) from `--key value`, `--key=value` and switches."""
    bare, strays, known = list(command.bare), list[str](), command.known_options
    read: tuple[str, str] | None = None
    while words:
        word = words.pop(0)
        if not _is_flag(word) and bare:
            yield bare[0], word
            bare = bare[not known[bare[0]].takes_words :]
            continue
        if not _is_flag(word):
            secret = unusable_text(word) if is_url(word) else ""
            answer = secret or stray_word(word, read, command, first=not strays)
            strays.append(f"unexpected word{'' if secret else f' {as_written(word)}'}: {answer}")
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--"):
            if not equals and words and not _is_flag(words[0]):
                words.pop(0)
            problems.append(f"{word}: {_one_dash(command, name)}")
        elif equals:
            yield name, value
        elif name in known and known[name].is_switch:
            read = name, words.pop(0) if words and _is_for_switch(known[name], words[0]) else "true"
            yield read
        elif words and not _is_flag(words[0]):
            read = name, words.pop(0)
            yield read
        else:
            yield name, ""
    if strays:
        problems.append("; ".join(strays))


def _one_dash(command: Command, name: str) -> str:
    if len(name) > 1:
        answer = option_elsewhere(name, "", command) or _dashed(nearest_knobs(name, _names(command))).strip()
        return f"options begin with two dashes; {answer}".removesuffix("; ")
    long = next((f"; write --{o.name}" for o in command.all_options if o.name.startswith(name)), "")
    return f"one-letter options are not accepted{long}"


def _names(command: Command) -> list[str]:
    return [option.name for option in command.all_options]


def _is_for_switch(option: Option, word: str) -> bool:
    """Whether the word after a switch is the switch's value: true, false, or another value that it takes."""
    if len(option.members) == 1:
        return word.lower() in ("true", "false")
    try:
        option.read(word)
    except ValueError:
        return False
    return True


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-[0-9.].*|-", word)


def _store(command: Command, flags: Flags, name: str, value: Any, problems: list[str]) -> None:
    name = ALIASES.get(name, name)
    fixed = next((option for option in command.all_options if option.name == name), None)
    target: dict[str, Any]
    if fixed is not None:
        target, key, unknown = flags.fixed, name, None
    elif command.takes_ds and name.startswith("ds."):
        section, _, leaf = (key := name[3:]).rpartition(".")
        target = flags.ds
        unknown = None if key in key_names() else wrong_key(section, leaf)
    else:
        target, key = flags.recipe, name
        unknown = None if name in command.known_options else _unknown(command, name, unquoted(value))
    if unknown is not None:
        problems.append(f"--{name if len(name) < 100 else f'{name[:50]}...'}: {unknown}")
    elif isinstance(value, str) and (unusable := unusable_text(value)):
        problems.append(f"--{name}: {unusable}")
    elif isinstance(value, str) and not value.strip():
        problems.append(f"--{name} has no value: write --{name} VALUE")
    elif fixed is not None and fixed.takes_words:
        flags.fixed[key] = (*flags.fixed.get(key, ()), value)
    elif key in target:
        problems.append(f"--{name} is given twice: {as_written(str(target[key]))} and {as_written(value)}")
    elif fixed is None:
        target[key] = value
    else:
        try:
            target[key] = fixed.read(value)
        except ValueError as error:
            answers = words_elsewhere("choices") | words_elsewhere("evaluations") if fixed.choices else {}
            words = re.split(r"[][,\s]+", unquoted(value).lower())
            hint = next((answers[word] for word in words if word in answers), None)
            said = f"{str(error).partition(' Did you mean')[0]} {hint}" if hint else str(error)
            problems.append(f"--{name}: {said}")


def _unknown(command: Command, name: str, value: str) -> str:
    """Describe an unknown flag: what to use instead, or which options there are."""
    if answer := option_elsewhere(name, value, command):
        return f"unknown option: {answer}"
    names = _names(command)
    if not command.takes_recipe:
        there_are = f" There are {', '.join(f'--{name}' for name in names)}"
        near = suggestion(nearest(name, [*names, "help"], cutoff=0.7))
        return f"unknown option.{_dashed(near) or there_are}"
    home = ds_home(name)
    if home and command.takes_ds:
        return f"unknown option: {home}"
    if name in words_elsewhere("fixed_keys") or any(key.name.startswith(f"{name}.") for key in recipe_options()):
        return unknown_key(name)
    near = nearest_knobs(name, [*names, "help", *(ALIASES if command.takes_ds else ())])
    return f"unknown option.{_dashed(near or (_nearest_ds_keys(name) if command.takes_ds else ''))}"


def _nearest_ds_keys(name: str) -> str:
    """Suggest the nearest keys of the ds JSON; keys whose last part is one word (device) only for dotted names."""
    keys = [key for key in key_names() if "." in name or "_" in key.rsplit(".", 1)[-1]]
    return suggestion([f"ds.{key}" for key in nearest(name, keys, cutoff=0.85)])


def _dashed(near: str) -> str:
    return near.replace(" mean ", " mean --").replace(", ", ", --").replace(" or ", " or --")
