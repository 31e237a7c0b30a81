"""Words of other programs are answered in one line by what to type here, or by what comes nearest."""

from __future__ import annotations

import re
import shlex

import pytest

from dino_ds.basics.names import words_elsewhere
from dino_ds.cli.main import parse
from dino_ds.config.ds_schema import key_names
from dino_ds.config.loading import recipe_options
from dino_ds.config.recipe_files import recipe_names
from dino_ds.errors import ConfigError
from dino_ds.options.commands import COMMANDS, find_command
from dino_ds.options.elsewhere import check_networks
from dino_ds.options.flags import parse_flags
from dino_ds.options.reading import read

OPTIONS, MEANT = words_elsewhere("options"), words_elsewhere("same_option")


def _refusal(words: list[str]) -> str:
    command, rest = find_command(words)
    with pytest.raises(ConfigError) as caught:
        parse_flags(command, rest)
    return str(caught.value)


@pytest.mark.parametrize(
    ("typed", "do"),
    [
        # DINO and DINOv2.
        ("train train.dataset_path=/x", "write --data.root /x"),
        # Hugging Face.
        # Without dashes; a key of the recipe keeps its own answer.
        ("train data=/x", "unexpected word 'data=/x': write --data.root /x"),
        ("train data.root=/x", "options begin with two dashes: --data.root=/x"),
        # Slips of the hand.
        ("train --no-save_in_background", "write --save_in_background=false"),
        ("train --eval.evals knn linear", "several have commas between: --eval.evals knn,linear"),
        ("eval m --k 20 50", "several have commas between: --k 20,50"),
        ("train -lr 3", "-lr: options begin with two dashes; Did you mean --optimizer.lr?"),
        ("train --help-all", "write --help all"),
        ("export m --format pth", "for PyTorch: --format safetensors, one file"),
        ("export m --format torchscript", "torch has deprecated TorchScript: --format onnx"),
        # What dino_ds had.
        ("pictures m --only neighbours", "write neighbors"),
        # Other commands name what they have.
        ("embed --ckpt_path x", "give it without a name: dino-ds embed x"),
    ],
)
def test_an_option_of_another_program_is_answered_by_what_to_type(typed: str, do: str):
    refused = _refusal(shlex.split(typed))
    assert do in refused and "\n" not in refused


def test_every_word_of_another_program_gets_its_answer():
    own = {name: {option.name for option in command.all_options} for name, command in COMMANDS.items()}
    own["train"] |= {option.name for option in recipe_options()}
    for word, answer in OPTIONS.items():
        *command, name = word.split()
        assert answer.partition("{")[0] in _refusal([*(command or ["train"]), f"--{name}", "3"]), word
    for word, answer in MEANT.items():
        for command in ("train", "embed", "eval", "launch"):
            meant = next((name for name in answer.split() if name in own[command]), None)
            if meant and word not in own[command]:
                said = _refusal([command, f"--{word}", "3"])
                assert f"--{meant}" in said or f"dino-ds {command} 3" in said, (command, word)


def test_every_command_that_there_is_not_gets_its_answer():
    for words, answer in words_elsewhere("commands").items():
        with pytest.raises(ConfigError) as caught:
            parse(words.split())
        assert answer in str(caught.value), words


def test_answers_name_options_and_commands_that_there_are():
    known = {option.name for command in COMMANDS.values() for option in command.all_options}
    known |= {option.name for option in recipe_options()} | {f"ds.{key}" for key in key_names()}
    known |= {"ds.KEY", "objective.KEY", "num_gpus", "nproc_per_node", "help", "local"}  # hf has --local-dir
    for answer in (*OPTIONS.values(), *words_elsewhere("commands").values()):
        assert {name.rstrip(".") for name in re.findall(r"--([\w.]+)", answer)} <= known, answer
        assert all(find_command(name.split()) for name in re.findall(r"dino-ds ([a-z-]+(?: [a-z-]+)?)", answer)), answer
    assert {option for answer in MEANT.values() for option in answer.split()} <= known


@pytest.mark.parametrize("name", ["ViT-S/16", "vit-b", "DINOv2 ViT-B/14", "dinov3_vitb", "vit_small", "dino_vits16"])
def test_a_network_s_name_in_a_paper_leads_to_recipes_and_to_timm_s_names(name):
    with pytest.raises(ConfigError) as caught:
        check_networks([name], None)
    assert str(caught.value).startswith(f"no recipe is named {name!r}: they are called by project, size and patch")
    assert ("are weights meant?" in str(caught.value)) == (name == "dino_vits16")
    if name != "dino_vits16":
        with pytest.raises(ConfigError, match=r"--model.backbone: .* is not timm's name, as these are: vit_small"):
            check_networks(["vits16"], name)
    recipes = re.findall(r"\w*vit\w+", str(caught.value).partition("such as")[2].partition("(")[0])
    assert len(recipes) == 4 and set(recipes) <= {*recipe_names()}


def test_a_network_is_answered_wherever_a_recipe_or_a_backbone_is_read():
    for words, said in (
        ("plan --config vit_small", "such as vits16"),
        ("plan --backbone ViT-S/16", "is not timm's name"),
    ):
        command, rest = find_command(words.split())
        with pytest.raises(ConfigError, match=said):
            read(command, parse_flags(command, rest))
