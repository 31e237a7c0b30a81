"""Answers to words that mean something in other programs, or that a shell has split."""

from __future__ import annotations

import os
import re

from dino_ds.config.fields import UNITS
from dino_ds.options.definition import Command

_LAUNCHER = "the launcher starts the processes: deepspeed --num_gpus {value} dino_ds/train.py ..., or dino-ds launch"
_METRICS = "metrics are written to RUN/metrics.jsonl and RUN/tensorboard; --ds.wandb.enabled true sends them on"
_STRENGTHS = (
    "--crops.augment names an augmentation; --crops.jitter, blur, grayscale, flip, solarize, vertical_flip, rotation "
    "change it; --data.transform adds a function of yours (docs/data.md)"
)
_METHOD = "the objective is DINO's; its settings are --objective.KEY (docs/configs.md)"
_WEIGHTS = "existing weights: --model.init_from FILE, or timm's name; a stopped run continues with --resume"
_DEVICE = "a GPU is taken where there is one; CUDA_VISIBLE_DEVICES=1 names another, an empty one leaves the CPU"
_SIZE = "sizes are those of the crops: --crops.global_size {value}, --crops.local_size"
_OPTIONS = {
    **dict.fromkeys(("data", "dataset", "data_dir", "input", "images", "train_dir"), "write --data.root {value}"),
    "model": "a recipe names the network: --config vits16; --model.backbone NAME takes another (docs/backbones.md)",
    "ds": "--ds_config FILE names the DeepSpeed JSON; --ds.KEY VALUE changes a key of it",
    **dict.fromkeys(("output", "output_dir", "out_dir", "save_dir", "workdir"), "write --run_dir {value}"),
    **dict.fromkeys(("pretrained", "weights", "checkpoint", "ckpt", "resume_from"), _WEIGHTS),
    **dict.fromkeys(("device", "cuda", "cpu", "gpu", "accelerator"), _DEVICE),
    **dict.fromkeys(("image_size", "img_size", "crop_size", "input_size", "resolution"), _SIZE),
    **dict.fromkeys(("epochs", "epoch", "max_epochs", "num_train_epochs"), 'write --length "{value} epochs"'),
    **dict.fromkeys(("steps", "iterations", "iters", "num_steps"), 'write --length "{value} steps"'),
    **dict.fromkeys(("gpus", "num_gpus", "devices", "nproc_per_node", "num_nodes", "ranks"), _LAUNCHER),
    **dict.fromkeys(("logger", "loggers", "wandb", "tensorboard", "mlflow", "log_dir"), _METRICS),
    **dict.fromkeys(("color_jitter", "jitter", "blur", "grayscale", "flip", "hflip", "solarize"), _STRENGTHS),
    **dict.fromkeys(("vflip", "vertical_flip", "rotation", "rotate", "transform", "transforms"), _STRENGTHS),
    **dict.fromkeys(("brightness", "contrast", "saturation", "hue", "gray", "gaussian_blur"), _STRENGTHS),
    **dict.fromkeys(("method", "loss", "ibot", "koleo"), _METHOD),
}
"""What other programs call an option (its last part) -> what to do here."""
COMMANDS_ELSEWHERE = {
    **dict.fromkeys(
        ("predict", "extract", "features", "infer", "encode"),
        "dino-ds embed MODEL --root DIR --out x.parquet writes features",
    ),
    **dict.fromkeys(("visualize", "visualise", "plot", "show"), "dino-ds pictures MODEL, or dino-ds report RUN"),
    **dict.fromkeys(("list", "recipes", "models"), "dino-ds train --help lists the recipes"),
    **dict.fromkeys(("push", "upload", "publish"), "dino-ds export RUN --format hf --push OWNER/NAME"),
    "download": "weights by timm's name come by themselves; others: hf download OWNER/NAME --local-dir DIR",
    "resume": "dino-ds train --resume --run_dir RUN",
    "finetune": "python -m dino_ds.examples.finetune_classification, or _segmentation (docs/finetuning.md)",
    "test": "dino-ds eval evaluates a model; make test runs this project's tests",
}
CHOICES_ELSEWHERE = {
    **dict.fromkeys(("tensorrt", "trt"), "for TensorRT: --format onnx, and trtexec builds the engine"),
    "openvino": "for OpenVINO: --format onnx, which it reads",
    "coreml": "for Core ML: --format torchscript, which coremltools reads",
    **dict.fromkeys(("huggingface", "transformers"), "write hf"),
}
_NOTHING_MEANT = "options are written --key value"
_WITHOUT_NAME = {"root": "images are given with", "compare": "other runs are given with", "out": "what is written with"}
"""Options of which people leave the name out."""


def option_elsewhere(name: str, value: str) -> str | None:
    """What to use here for an option that other programs have; None if the option is unknown."""
    answer = _OPTIONS.get(name.rsplit(".", 1)[-1].replace("-", "_").lower())
    return answer and answer.format(value=value or "N")


def stray_word(word: str, before: tuple[str, str] | None, command: Command, first: bool = True) -> str:
    """What a word without an option's name was meant as.

    before: the option (without dashes) that was read before it and its value. first: of such words.
    """
    name, value = before or ("", "")
    if name == "resume" and value == "true":
        return (
            "--resume takes no file: it continues the run in --run_dir from its newest checkpoint, --resume N from the "
            "one of step N; weights alone start a new run: --model.init_from FILE"
        )
    if _is_number(value) and _is_number(word):
        return f"two numbers have a comma between: --{name} {value},{word}"
    if value and (word.rstrip("s") in [unit[:-1] for unit in UNITS] or os.path.exists(f"{value} {word}")):
        return f'quote it: --{name} "{value} {word}"'
    if re.match(r"[A-Za-z_][\w.]*=", word) and not os.path.exists(word):
        return f"options begin with two dashes: --{word}"
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
    named = {option.name: option for option in command.own_options if not option.help.bare}
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
