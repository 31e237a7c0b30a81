"""Finds what a user meant by another program's option, by a paper's name of a network, or by a stray word."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from dino_ds.basics.hubs import weights_elsewhere
from dino_ds.basics.names import words_elsewhere
from dino_ds.basics.text_file import is_file
from dino_ds.config.fields import UNITS
from dino_ds.config.recipe_files import recipe_names
from dino_ds.errors import ConfigError
from dino_ds.options.definition import Command

_NOTHING_MEANT = "options are written --key value"
_WITHOUT_NAME = {"root": "images are given with", "out": "what is written with"}
"""Options whose names users leave out, and the beginning of the answer."""


def option_elsewhere(name: str, value: str, command: Command) -> str | None:
    """Return a sentence that says what to use here instead of another program's option; None for an unknown option."""
    word = name.replace("-", "_").lower()
    leaf = word.rpartition(".")[-1]
    if word.startswith("no_") and (switch := _switch(word[3:], command)):
        return f"write --{switch}=false"
    own_options, names = {option.name: option for option in command.all_options}, command.known_options
    same, answers = words_elsewhere("same_option"), words_elsewhere("options")
    answer = answers.get(f"{command.name} {word}")
    if not answer and (
        meant := next((name for name in (same.get(word) or same.get(leaf, "")).split() if name in names), None)
    ):
        if meant in own_options and own_options[meant].fact("bare"):
            return f"give it without a name: dino-ds {command.name} {value or meant.upper()}"
        return f"write --{meant}" if names[meant].type == "true or false" else f"write --{meant} {value or 'X'}"
    if answer is None and command.takes_recipe:
        answer = answers.get(word) or answers.get(leaf)
    return answer and answer.format(value=value or "X", n=value if _is_number(value) else "N")


def _switch(word: str, command: Command) -> str | None:
    """Find the switch that `word` names, with or without the section."""
    switches = [name for name, option in command.known_options.items() if option.is_switch]
    return next((name for name in switches if word in (name, name.rpartition(".")[-1])), None)


def stray_word(word: str, before: tuple[str, str] | None, command: Command, first: bool = True) -> str:
    """Return a sentence about what a word without an option's name was probably meant to be.

    before: name (without dashes) and value of the option before the word. first: whether it is the first such word.
    """
    name, value = before or ("", "")
    if name == "resume" and value == "true":
        return (
            "--resume takes no file: it continues the run in --run_dir from its newest checkpoint, --resume N from the "
            "one of step N; weights alone start a new run: --model.init_from FILE"
        )
    known = command.known_options
    if value and name in known and known[name].takes_list and not os.path.exists(word):
        return f"several have commas between: --{name} {value},{word}"
    if value and (word.rstrip("s") in [unit[:-1] for unit in UNITS] or os.path.exists(f"{value} {word}")):
        return f'quote it: --{name} "{value} {word}"'
    if re.match(r"[A-Za-z_][\w.]*=", word) and not os.path.exists(word):
        key, _, text = word.partition("=")
        answer = None if key in known else option_elsewhere(key, text, command)
        return answer or f"options begin with two dashes: --{word}"
    if not command.takes_recipe:
        return _own_option(word, command, first)
    if word.endswith((".yaml", ".yml")):
        return f"a recipe is given with --config {word}"
    if word.endswith((".json", ".hjson")):
        return f"a ds JSON is given with --ds_config {word}"
    if os.path.exists(word) or "/" in word:
        return f"images are given with --data.root {word}"
    if before is None:
        return f"{_NOTHING_MEANT}, images --data.root {word}"
    return f'{_NOTHING_MEANT}, a value with spaces in quotes: --{name} "{value} {word}"'


def _own_option(word: str, command: Command, first: bool) -> str:
    named = {option.name: option for option in command.own_options if not option.fact("bare")}
    for name, option in named.items():
        if word in option.choices:
            return f"write --{name} {word}"
    is_file = bool(os.path.splitext(word)[1]) and not os.path.exists(word)
    for name, answer in _WITHOUT_NAME.items():
        if name in named and (name == "out" or (not is_file and (first or name != "root"))):
            return f"{answer} --{name} {word}"
    return _NOTHING_MEANT


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", text) is not None


_NETWORK = re.compile(r"(facebook/)?(dino(v[23])?[-_ ]?)?(vit|deit)[-_ ]?[a-z]*([-_/ ][\w/]+)?")
"""A network as papers and other projects name it: ViT-S/16, vit_small, dino_vits16."""


def check_networks(recipes: Iterable[str], backbone: str | None) -> None:
    """Raises ConfigError if a network is named as the recipe, or if the backbone does not have timm's name."""
    for name in recipes:
        weights = None if "/" in name else weights_elsewhere(name)
        if name not in recipe_names() and not is_file(name) and (weights or _NETWORK.fullmatch(name.lower())):
            weights = f"; are weights meant? --model.init_from: {weights}" if weights else ""
            raise ConfigError(
                f"no recipe is named {name!r}: they are called by project, size and patch, such as vits16, vitb16, "
                f"dinov2_vits14 and dinov3_vitl16 (dino-ds train --help){weights}"
            )
    # Names with "patch" follow timm; whether such a backbone exists is checked elsewhere.
    is_network = backbone and "patch" not in backbone and _NETWORK.fullmatch(backbone.lower())
    if is_network and not weights_elsewhere(str(backbone)):
        timm = "vit_small_patch16_224, vit_base_patch14_dinov2, vit_large_patch16_dinov3"
        raise ConfigError(f"--model.backbone: {backbone!r} is not timm's name, as these are: {timm}")
