"""Checks before the slow imports: launchers, hostfile, torchvision, and what is clearly wrong with a start."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dino_ds.basics.hubs import weights_elsewhere
from dino_ds.basics.own_code import explaining_interrupted
from dino_ds.config.ds_config import resolve_ds_config
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import holds_run
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.health.lock import RunLock
from dino_ds.launching.plan import read_hostfile
from dino_ds.method.specs.base import StepImages
from dino_ds.method.specs.of_recipe import check_images_together

_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# The same variables as they are named by programs that start ranks without setting ours.
_RANK_VARIABLES = {
    "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def forget_empty_ranks(environment: MutableMapping[str, str]) -> None:
    """Remove variables of ranks that are empty strings, as a shell script may leave them: they count as unset."""
    for name in (*_OURS, *itertools.chain.from_iterable(_RANK_VARIABLES.values())):
        if environment.get(name) == "":
            del environment[name]


def adopt_ranks(environment: MutableMapping[str, str]) -> None:
    """Set the variables of torch's launchers from those of `mpirun` or `srun`; else each process would train alone.

    Raises ConfigError if MASTER_ADDR is missing.
    """
    if "RANK" in environment:
        return
    for program, names in _RANK_VARIABLES.items():
        if int(environment.get(names[1], "1")) == 1:
            continue
        if "MASTER_ADDR" not in environment:
            raise ConfigError(
                f"{program} has started {environment[names[1]]} processes, and MASTER_ADDR is not set: "
                "export MASTER_ADDR, the first machine's name, and MASTER_PORT to them, as in launch/"
            )
        environment.setdefault("MASTER_PORT", "29500")
        for ours, launchers in zip(_OURS, names, strict=True):
            if launchers in environment:
                environment[ours] = environment[launchers].partition("(")[0].partition(",")[0]  # srun's "8(x2),4"
        return


def check_hostfile() -> None:
    """Raises ConfigError if the hostfile that DeepSpeed's launcher was given is missing or has a wrong line.

    Without the file the launcher, an ancestor of this process, only warns and trains on this machine alone.
    """
    import psutil

    try:
        ancestors = psutil.Process().parents()
    except psutil.Error:
        return
    for process in ancestors:
        try:
            hostfile = hostfile_of(process.cmdline())
            folder = process.cwd() if hostfile else ""
        except psutil.Error:
            continue
        if hostfile and not Path(folder, hostfile).is_file():
            raise ConfigError(
                f"hostfile {hostfile} does not exist: deepspeed would train on this machine alone. "
                "Give the right --hostfile, or none to train here"
            )
        if hostfile:
            read_hostfile(Path(folder, hostfile))


def check_start(recipe: Recipe, run_dir: str, files: Mapping[str, Any]) -> None:
    """Check values and paths that would otherwise stop the start half a minute later. Raises UserError."""
    from dino_ds.data.root import check_photos

    check_photos(recipe.data.source, recipe.data.root)
    recipe.check_learning_rates()
    check_images_together(recipe, StepImages(recipe.data.global_batch, 1, 1))
    recipe.check_teacher()
    resolve_ds_config(files["ds"], files["ds_path"], recipe.data.global_batch, int(os.environ.get("WORLD_SIZE", 1)))
    for key, name in (("model.init_from", recipe.model.init_from), ("teacher.source", recipe.teacher.source)):
        if name is not None and (answer := weights_elsewhere(name)):
            raise CheckpointError(f"{key} {name} does not exist; {answer}")
    # Ranks of other machines check later, with all ranks: if one failed here, the first machine would wait for it.
    if os.environ.get("RANK", "0") == os.environ.get("LOCAL_RANK", "0"):
        _check_images(recipe, Path(run_dir))
    RunLock(Path(run_dir)).check_free(int(os.environ.get("RANK", 0)))


def _check_images(recipe: Recipe, run_dir: Path) -> None:
    """Raises DataError if images of the user's are missing."""
    from dino_ds.data.mixture import place_of
    from dino_ds.data.root import check_root, check_split

    data, root = recipe.data, recipe.data.root
    if data.source != "folder":
        return
    for root_or_part in [place_of(part, root) for part in data.parts] or [root or ""]:
        check_root(root_or_part)
        if not holds_run(run_dir):  # a run continues with the images it began with
            check_split(root_or_part)
    for key, other in {"eval.root": recipe.eval.root, "eval.val_root": recipe.eval.val_root}.items():
        if other is not None and recipe.eval.every.value:
            check_root(other, key)


def hostfile_of(command: Sequence[str]) -> str | None:
    """The --hostfile in a command line of DeepSpeed's launcher; None without one, or for another program."""
    start = next((i + 1 for i, word in enumerate(command[:4]) if _is_launcher(word)), None)
    if start is None:
        return None
    # Options after the script are ours.
    words = itertools.takewhile(lambda word: not word.endswith(".py"), command[start:])
    parser = argparse.ArgumentParser(add_help=False)  # accepts abbreviated long options, as DeepSpeed's does
    parser.add_argument("-H", "--hostfile")
    return parser.parse_known_args(list(words))[0].hostfile


def _is_launcher(word: str) -> bool:
    return (
        Path(word).name in ("deepspeed", "ds", "deepspeed.pt")
        or word == "deepspeed.launcher.runner"
        or word.endswith(os.path.join("deepspeed", "launcher", "runner.py"))
    )


def check_torchvision() -> None:
    """Raises ConfigError if torchvision was built for another torch, which would be a cryptic error when it loads, or
    if an import of one of the two was interrupted in this process."""
    try:
        with explaining_interrupted("torch", "torchvision"):
            import torchvision  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install torch torchvision") from None
    except (RuntimeError, ImportError, OSError) as error:
        raise ConfigError(
            f"torch {_version('torch')} with torchvision {_version('torchvision')} does not load "
            f"({' '.join(str(error).split())[:120]}): install builds that match, both from the same index"
        ) from None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(unknown version)"
