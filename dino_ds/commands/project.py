"""`dino-ds init`: a folder to edit and to train with: a recipe, a ds JSON that fits this machine, launch scripts."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from contextlib import suppress
from pathlib import Path

from dino_ds.basics.durable import why_not_writable
from dino_ds.basics.names import did_you_mean
from dino_ds.config.ds_config import find_ds_config, load_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.config.recipe_files import RECIPES, recipe_names
from dino_ds.costs.step_costs import model_flops
from dino_ds.data.root import check_root
from dino_ds.errors import ConfigError, DataError, NotEstimated
from dino_ds.options.run import InitOptions

_CPU_FLOPS, _SLOW_SECONDS = 120e9, 5
"""A second of two cores, by recipe small's 600,000 images in 12 minutes (docs/quickstart.md); of a step on a CPU."""
_LAUNCH = Path(__file__).parent.parent / "launch"
_IN_A_PROJECT = {
    'cd "$(dirname "$0")/.."': 'cd "$(dirname "$0")"',
    "launch/slurm.sh [options of train], in the checkout": "slurm.sh [options of train], in this folder",
    " # dino_ds/recipes, or your YAML file": " # what is learned",
}
"""Text of the launch scripts -> what stands there in a project."""
_RECIPE = """\
# The recipe of this project: what is learned. Written by `dino-ds init` from the shipped {name}, to be edited.
# All keys and their defaults: dino-ds train --help all. A key that is left out has its default.
"""
_DS = """\
# How fast, and on what hardware: DeepSpeed's JSON, chosen for this machine: {machine}.
# For another one: dino-ds plan --config recipe.yaml --gpu a100-80g --gpus 8 --write other.json
"""
_README = """\
# {title}

Self-supervised pre-training with dino_ds on {root}.

- `dino-ds look-data --config recipe.yaml --data.root {root}`: what the network will see
- `sh train.sh`: train on this machine; started again, it continues
- `sbatch slurm.sh`: on a Slurm cluster, with the shipped `ds_configs/zero2_bf16.json`; name yours with `DS_CONFIG`
- `dino-ds report {run}`: curves and pictures; `dino-ds export {run} --format timm`: the result

`recipe.yaml` says what is learned, `ds.json` how fast and on what hardware. On top of the scripts: images, run folder,
GPUs.
"""


def check(options: InitOptions) -> None:
    """Whether the folder can be written and the recipe is a shipped one, before torch is loaded. Raises ConfigError."""
    folder = Path(os.path.expanduser(options.dir))
    if options.recipe not in recipe_names():
        near = did_you_mean(options.recipe, recipe_names())
        raise ConfigError(f"--recipe {options.recipe}: begin with one of {', '.join(recipe_names())}.{near}")
    if load_recipe(options.recipe, {}).stage_start:
        raise ConfigError(f"--recipe {options.recipe} is a later stage of training: begin with its first one")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new folder, nothing is overwritten")
    if (folder.exists() and not folder.is_dir()) or (reason := why_not_writable(folder)):
        raise ConfigError(f"{folder} can't be written: {'a file is there' if folder.exists() else reason}")


def run(options: InitOptions) -> None:
    """Write the folder. Raises ConfigError, also where no micro-batch of the recipe fits this machine."""
    folder = Path(os.path.expanduser(options.dir))
    title, root = folder.resolve().name, str(Path(os.path.expanduser(options.root)).absolute())
    text = _RECIPE.format(name=options.recipe) + (RECIPES / f"{options.recipe}.yaml").read_text()
    values = {"DATA": root, "RUN": f"runs/{title}", "RECIPE": "recipe.yaml"}
    recipe = load_recipe(options.recipe, {})
    ranks, ds, on_cpu = _ds_config(recipe)
    files = {
        "recipe.yaml": re.sub(r"(?m)^( +source:) *\w+", r"\1 folder", text),
        "ds.json": ds,
        "train.sh": _filled("one_node.sh", values | {"GPUS": str(ranks), "DS_CONFIG": "ds.json"}),
        "slurm.sh": _filled("slurm.sh", values),
        "README.md": _README.format(title=title, root=shlex.quote(root), run=shlex.quote(values["RUN"])),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(content)
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error.strerror or error}") from None
    print(f"{folder} has {', '.join(files)}: edit them, then sh {shlex.quote(f'{folder}/train.sh')}")
    images = shlex.quote(options.root)
    try:
        check_root(options.root)
    except DataError as error:
        print(f"note: {error}; train.sh and slurm.sh say DATA={shlex.quote(root)}")
        images = "DIR"
    if on_cpu and (slow := _slow_on_cpu(recipe)):
        print(
            f"note: recipe {options.recipe} is for GPUs; without one {slow}. A CPU can train --recipe small, on "
            f"small images; which settings suit yours: dino-ds advise {images}"
        )


def _slow_on_cpu(recipe: Recipe) -> str:
    """A warning on the time of a step on a CPU if it is too long to train, else ""."""
    batch = recipe.data.global_batch
    with suppress(NotEstimated):
        seconds = batch * sum(model_flops(recipe).values()) / _CPU_FLOPS
        if seconds > _SLOW_SECONDS:
            return f"a step of {batch} images takes about {seconds / 60:.0f} minutes of two cores (rule of thumb)"
    return ""


def _filled(script: str, values: dict[str, str]) -> str:
    """A launch script for a project: with these values of its variables, in the folder that it lies in."""
    text = (_LAUNCH / script).read_text()
    for name, value in values.items():
        line = f"{name}={shlex.quote(value)} "
        if found := re.search(rf"(?m)^{name}=\S+ *", text):
            text = text.replace(found[0], line.ljust(len(found[0])), 1)
    for theirs, ours in _IN_A_PROJECT.items():
        text = text.replace(theirs, ours)
    return re.sub(r"(?m) +$", "", text)


def _ds_config(recipe: Recipe) -> tuple[int, str, bool]:
    """The number of ranks on this machine, the ds JSON that a run of the recipe would take, with its reason, and
    whether it is for a CPU."""
    import torch

    from dino_ds.planning.start import find_machine, fitting_start, named_start, planned_start

    ranks = max(1, torch.cuda.device_count())
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # found by DeepSpeed too, with a warning
    machine = dataclasses.replace(find_machine(), ranks=ranks, ranks_per_node=ranks)
    if machine.card_gib is None:
        path = find_ds_config("zero0_fp32")
        start = named_start(recipe, load_ds_config(path, {}), path, machine)
        about = f"no GPU, one process, {machine.host_gib:.1f} GiB to take"
    else:
        start, about = planned_start(recipe, {}, machine), f"{ranks} x {machine.card_gib:.1f} GiB"
    fit = fitting_start(recipe, start, machine)
    return ranks, _DS.format(machine=about) + json.dumps(fit.ds, indent=2) + "\n", machine.card_gib is None
