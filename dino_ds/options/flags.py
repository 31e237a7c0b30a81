"""Reads the command line of `train` and refuses what it does not know, before anything starts.

fire runs a command before it complains about a bad flag: a mistyped one would train for days with defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dino_ds.config import nearest_knobs, recipe_options, unknown_key
from dino_ds.ds_check import wrong_key
from dino_ds.ds_schema import SECTIONS, key_names
from dino_ds.errors import ConfigError
from dino_ds.names import did_you_mean, ds_home


@dataclass(frozen=True)
class Flag:
    """kind: text, int or switch (needs no value)."""

    name: str
    kind: str
    default: str
    description: str


TRAIN_FLAGS = (
    Flag("ds_config", "text", "ds_configs/zero0_fp32.json", "DeepSpeed's JSON: how fast and on what hardware"),
    Flag(
        "config", "text", "the ViT-S/16 of the DINO paper", "the recipe: a shipped name or a YAML file: what is learned"
    ),
    Flag("run_dir", "text", "runs/RECIPE", "folder of this run: metrics, checkpoints, teacher"),
    Flag("max_steps", "int", "the recipe's length", "stop after N optimizer steps; the schedules stay as they are"),
    Flag("resume", "switch", "false", "continue the run in --run_dir from its last checkpoint"),
    Flag("debug", "switch", "false", "show tracebacks of errors"),
)
ALIASES = {"deepspeed_config": "ds_config"}
_SWITCH_WORDS = {"true": True, "false": False}


@dataclass
class Flags:
    """What was given: fixed options (text), recipe overrides and ds JSON overrides (dotted key -> text)."""

    fixed: dict[str, str] = field(default_factory=dict)
    recipe: dict[str, str] = field(default_factory=dict)
    ds: dict[str, str] = field(default_factory=dict)


def parse_flags(argv: Sequence[str]) -> Flags:
    """The words after `train`. Raises ConfigError with one line per problem."""
    flags, problems = Flags(), list[str]()
    switches = {flag.name for flag in TRAIN_FLAGS if flag.kind == "switch"}
    switches |= {option.name for option in recipe_options() if option.type == "true or false"}
    for name, value in _pairs(list(argv), switches, problems):
        _store(flags, name, value, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return flags


def drop_local_rank(argv: Sequence[str]) -> list[str]:
    """Without the --local_rank=N that DeepSpeed's launcher adds; the environment says it too."""
    words, kept = list(argv), []
    while words:
        word = words.pop(0)
        if word in ("--local_rank", "--local-rank"):
            if words and words[0].isdigit():
                words.pop(0)
        elif not word.startswith(("--local_rank=", "--local-rank=")):
            kept.append(word)
    return kept


def _pairs(words: list[str], switches: set[str], problems: list[str]) -> Iterator[tuple[str, str]]:
    """(flag without dashes, value) from `--key value`, `--key=value` and switches."""
    while words:
        word = words.pop(0)
        if not _is_flag(word):
            problems.append(f"unexpected word {word!r}: options are written --key value")
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--"):
            if not equals and words and not _is_flag(words[0]):
                words.pop(0)
            long = next((f"; write --{flag.name}" for flag in TRAIN_FLAGS if flag.name.startswith(name)), "")
            problems.append(f"{word}: one-letter options are not accepted{long}")
        elif equals:
            yield name, value
        elif name in switches:
            yield name, words.pop(0) if words and words[0].lower() in _SWITCH_WORDS else "true"
        elif words and not _is_flag(words[0]):
            yield name, words.pop(0)
        else:
            yield name, ""


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-[0-9.].*|-", word)


def _store(flags: Flags, name: str, value: str, problems: list[str]) -> None:
    name = ALIASES.get(name, name)
    fixed = next((flag for flag in TRAIN_FLAGS if flag.name == name), None)
    if fixed is not None:
        target, key, unknown = flags.fixed, name, None
    elif name.startswith("ds."):
        section, _, leaf = (key := name[3:]).rpartition(".")
        target = flags.ds
        unknown = None if leaf in SECTIONS.get(section, {}) else wrong_key(section, leaf)
    else:
        target, key = flags.recipe, name
        unknown = None if any(option.name == name for option in recipe_options()) else _unknown(name)
    if unknown is not None:
        problems.append(f"--{name}: {unknown}")
    elif not value.strip():
        problems.append(f"--{name} has no value: write --{name} VALUE")
    elif key in target:
        problems.append(f"--{name} is given twice: {target[key]!r} and {value!r}")
    else:
        target[key] = value
        if fixed is not None:
            problems += _check_fixed(fixed, value)


def _check_fixed(flag: Flag, value: str) -> list[str]:
    if flag.kind == "int" and not (value.isdecimal() and int(value) > 0):
        return [f"--{flag.name} {value!r} is not a whole number > 0"]
    if flag.kind == "switch" and value.lower() not in _SWITCH_WORDS:
        return [f"--{flag.name} {value!r} is not true or false"]
    return []


def _unknown(name: str) -> str:
    """The sentence for a flag that nothing knows."""
    home = ds_home(name)
    if home:
        return f"unknown option: {home}"
    if any(option.name.startswith(f"{name}.") for option in recipe_options()):
        return unknown_key(name)
    near = nearest_knobs(name, [flag.name for flag in TRAIN_FLAGS] + [*ALIASES])
    near = near or did_you_mean(name, [f"ds.{key}" for key in key_names()])
    return f"unknown option.{near.replace(' mean ', ' mean --').replace(', ', ', --').replace(' or ', ' or --')}"
