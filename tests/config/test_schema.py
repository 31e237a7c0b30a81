"""One declaration says all of a setting, for help, parsing, checks and Python; words of other programs are answered."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

import dino_ds
import dino_ds.cli.main as cli
from dino_ds.basics.names import words_elsewhere
from dino_ds.cli.main import parse
from dino_ds.config.ds_schema import key_names
from dino_ds.config.fields import Count, Listed, Positive, option
from dino_ds.config.loading import recipe_options
from dino_ds.errors import ConfigError
from dino_ds.options.commands import COMMANDS, find_command, help_text
from dino_ds.options.definition import Json, Model, Result, command


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> type:
    def count_toys(options: Any) -> Result:
        return Result({"rounds": options.rounds}, str(options), ["one is broken"])

    monkeypatch.setitem(COMMANDS, "toy", COMMANDS["train"])  # removed again afterwards
    monkeypatch.setattr(cli, "function_of", lambda name: count_toys)

    @command("toy", "look", loads_torch=False)
    class ToyOptions:
        """counts toys"""

        model: Model
        rounds: Annotated[Count, Field(le=9)] = option(2, "how often they are counted")
        ways: Listed[Literal["up", "down"]] = option(("up",), "comma-separated list of")
        seconds: Positive | None = option(None, "time for it", shown="as long as it takes")
        from_: str | None = option(None, "the toy to begin with")
        json: Json = False

    return ToyOptions


def test_a_command_is_declared_in_one_place(toy: type, capsys: pytest.CaptureFixture[str]):
    words = "toy ball --rounds=3 --ways down,up,down --from bear"
    cli.main(words.split())
    options = toy(model="ball", rounds=3, ways=("down", "up"), from_="bear")
    assert tuple(capsys.readouterr()) == (f"{options}\n", "one is broken\n")
    cli.main([*words.split(), "--json"])
    assert capsys.readouterr().out == '{"rounds": 3}\n'
    with pytest.warns(UserWarning, match="one is broken"):
        assert dino_ds.toy("ball", rounds=3, ways=["down", "up"], from_="bear") == {"rounds": 3}
    with pytest.raises(TypeError, match="takes 1 arguments without a name, and 2 are given"):
        dino_ds.toy("ball", "bear")
    assert "  toy  " in help_text([]) and "counts toys" in help_text([])
    for row in (
        "--ways X,X   comma-separated list of: up, down (up)",
        "--seconds N  time for it (as long as it takes)",
    ):
        assert f"  {row}\n" in help_text(["toy", "--help"])


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("toy a --rounds 10", "--rounds: 10 must be <= 9"),
        ("toy a --ways up,dwn", "--ways: 'dwn' is not one of up, down. Did you mean down?"),
        ("toy a --ways ,", "--ways: it names nothing"),
        ("toy a --seconds inf", "--seconds: 'inf' is not a number"),
        ("toy a --secnds 3", "--secnds: unknown option. Did you mean --seconds?"),
    ],
)
def test_values_are_checked_by_what_is_declared(toy: type, typed: str, says: str):
    with pytest.raises(ConfigError) as caught:
        cli.prepare(*cli.parse(typed.split()))
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="less than or equal to 9"):
        toy(model="a", rounds=10)


OPTIONS, MEANT = words_elsewhere("options"), words_elsewhere("same_option")


def _refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse([*words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_word_of_another_program_gets_its_answer():
    own = {name: {option.name for option in one.all_options} for name, one in COMMANDS.items()}
    own["train"] |= {option.name for option in recipe_options()}
    assert not [word for word, answer in OPTIONS.items() if answer not in _refusal("train", f"--{word}", "3")]
    assert not [word for word, answer in words_elsewhere("commands").items() if answer not in _refusal(word)]
    for word, answer in MEANT.items():
        for asked in ("train", "embed", "eval"):
            meant = next((name for name in answer.split() if name in own[asked]), None)
            if meant and word not in own[asked]:
                assert f"write --{meant}" in _refusal(asked, f"--{word}", "3"), (asked, word)


def test_answers_name_options_and_commands_that_there_are():
    known = {option.name for one in COMMANDS.values() for option in one.all_options}
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
