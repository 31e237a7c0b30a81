"""Words of other programs are answered in one line by what to type here, or by what comes nearest."""

from __future__ import annotations

import re
import shlex

import pytest

from dino_ds.basics.hubs import hub_id
from dino_ds.basics.names import words_elsewhere
from dino_ds.config.ds_schema import key_names
from dino_ds.config.loading import recipe_options
from dino_ds.config.recipe_files import recipe_names
from dino_ds.errors import ConfigError
from dino_ds.models.specs.backbones import BACKBONES
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
        ("train --saveckp_freq 20", '--save_every "20 epochs"'),
        ("train --momentum_teacher 0.99", "--teacher.momentum 0.99"),
        ("train train.dataset_path=/x", "write --data.root /x"),
        # Hugging Face.
        ("train --per_device_train_batch_size 8", "--ds.train_micro_batch_size_per_gpu"),
        ("train --data.sampler balanced", "rare ones come more often with --data.balance classes"),
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
        ("pictures m --queries a.jpg", "dino-ds embed writes features to search in"),
        ("pictures m --only neighbours", "write neighbors"),
        ("pictures m --map umap", "leave it out"),
        ("pictures m --only curves", "dino-ds report RUN"),
        # Other commands name what they have.
        ("embed --ckpt_path x", "give it without a name: dino-ds embed x"),
        ("launch --num_gpus 2 -- --config vits16", "write --ranks 2"),
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


def test_answers_name_options_and_commands_that_there_are():
    known = {option.name for command in COMMANDS.values() for option in command.all_options}
    known |= {option.name for option in recipe_options()} | {f"ds.{key}" for key in key_names()}
    known |= {"ds.KEY", "objective.KEY", "num_gpus", "nproc_per_node", "help", "local"}  # hf has --local-dir
    for answer in (*OPTIONS.values(), *words_elsewhere("commands").values()):
        assert {name.rstrip(".") for name in re.findall(r"--([\w.]+)", answer)} <= known, answer
        assert all(find_command(name.split()) for name in re.findall(r"dino-ds ([a-z-]+(?: [a-z-]+)?)", answer)), answer
    assert {option for answer in MEANT.values() for option in answer.split()} <= known


@pytest.mark.parametrize(
    ("name", "recipe", "backbone"),
    [
        ("ViT-S/16", "vits16", "vit_small_patch16_224"),
        ("ViT-B/8", "vitb16 --model.patch_size 8", "vit_base_patch8_224"),
        ("ViT-H/14", "vith14", "vit_huge_patch14_224"),
        ("vit-b", "vitb16", "vit_base_patch16_224"),
        ("DINOv2 ViT-B/14", "dinov2_vitb14", "vit_base_patch14_dinov2"),
        ("dinov3_vitb", "dinov3_vitb16", "vit_base_patch16_dinov3"),
        ("vit_small_patch14_dinov2", "dinov2_vits14", None),
        ("dino_vits16", "vits16; are weights meant? --model.init_from: that is torch.hub's name", None),
    ],
)
def test_a_network_s_name_in_a_paper_leads_to_a_recipe_and_to_timm_s_name(name, recipe, backbone):
    with pytest.raises(ConfigError) as caught:
        check_networks([name], None)
    assert str(caught.value).startswith(f"no recipe is named {name!r}: write --config {recipe}")
    assert recipe.split()[0].rstrip(";") in recipe_names() and hub_id(name) is None
    if backbone is not None:
        assert backbone in BACKBONES
        with pytest.raises(ConfigError, match=f"--model.backbone: .* is {backbone} here$"):
            check_networks(["vits16"], name)


def test_a_network_is_answered_wherever_a_recipe_or_a_backbone_is_read():
    for words, said in (
        ("plan --config vit_small", "write --config vits16$"),
        ("plan --backbone ViT-S/16", "_224 here$"),
    ):
        command, rest = find_command(words.split())
        with pytest.raises(ConfigError, match=said):
            read(command, parse_flags(command, rest))
