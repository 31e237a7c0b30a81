"""Words of other programs are answered in one line by what to type here."""

from __future__ import annotations

import re

import pytest

from dino_ds.basics.names import words_elsewhere
from dino_ds.cli.main import parse
from dino_ds.config.ds_schema import key_names
from dino_ds.config.loading import recipe_options
from dino_ds.errors import ConfigError
from dino_ds.options.commands import COMMANDS, find_command

OPTIONS, MEANT = words_elsewhere("options"), words_elsewhere("same_option")


def _refusal(words: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_word_of_another_program_gets_its_answer():
    own = {name: {option.name for option in command.all_options} for name, command in COMMANDS.items()}
    own["train"] |= {option.name for option in recipe_options()}
    for word, answer in OPTIONS.items():
        assert answer in _refusal(["train", f"--{word}", "3"]), word
    for word, answer in MEANT.items():
        for command in ("train", "embed", "eval"):
            meant = next((name for name in answer.split() if name in own[command]), None)
            if meant and word not in own[command]:
                assert f"write --{meant}" in _refusal([command, f"--{word}", "3"]), (command, word)
    for word, answer in words_elsewhere("commands").items():
        assert answer in _refusal([word]), word


def test_answers_name_options_and_commands_that_there_are():
    known = {option.name for command in COMMANDS.values() for option in command.all_options}
    known |= {option.name for option in recipe_options()} | {f"ds.{key}" for key in key_names()}
    known |= {"ds.KEY", "objective.KEY", "num_gpus", "nproc_per_node", "max_restarts", "help"}
    known |= {"local"}  # hf has --local-dir
    for answer in (*OPTIONS.values(), *words_elsewhere("commands").values()):
        assert {name.rstrip(".") for name in re.findall(r"--([\w.]+)", answer)} <= known, answer
        assert all(find_command(name.split()) for name in re.findall(r"dino-ds ([a-z-]+(?: [a-z-]+)?)", answer)), answer
    assert {option for answer in MEANT.values() for option in answer.split()} <= known
    ds, recipe = words_elsewhere("ds_keys"), words_elsewhere("recipe_keys")
    assert set(ds.values()) <= {*key_names()} and not {o.name.split(".")[-1] for o in recipe_options()} & set(ds)
    assert {word.strip(",") for home in recipe.values() for word in home.split() if "." in word.strip(",.")} <= known
