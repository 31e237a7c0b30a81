"""The function of each command, which is imported when the command is given: help and checks need no torch.

Checks before the slow imports: launchers, torchvision, and what is clearly wrong with a start.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from dino_ds.basics.names import weights_elsewhere
from dino_ds.basics.own_code import check_allowed
from dino_ds.config.ds_config import check_ds_config
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import check_may_begin, holds_run
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.health.processes import RunLock
from dino_ds.method.specs.base import StepImages
from dino_ds.method.specs.own import check_images_together, code_of
from dino_ds.options.definition import Result
from dino_ds.run.train_options import TrainOptions

Function = Callable[..., Result | None]
"""Gets the options and files of a command; returns its result, or None where it has printed what it does."""


def function_of(command: str) -> Function:
    """The function of a command. Imports its module alone."""
    run: Function
    match command:
        case "train":
            from dino_ds.train import train as run
        case "report":
            from dino_ds.report.single_run import run
        case "pictures":
            from dino_ds.report.pictures import run
        case "advise":
            from dino_ds.planning.advise import run
        case "doctor":
            from dino_ds.planning.doctor import run
        case "plan":
            from dino_ds.planning.command import run
        case "bench step":
            from dino_ds.planning.bench.step import run
        case "bench ladder":
            from dino_ds.planning.bench.ladder import run
        case "bench tune":
            from dino_ds.commands.tune import run
        case "bench inference":
            from dino_ds.planning.bench.inference import run
        case "look-data":
            from dino_ds.commands.look_data import run
        case "shard":
            from dino_ds.commands.shard import run
        case "eval":
            from dino_ds.commands.evaluate import run
        case "embed":
            from dino_ds.commands.embed import run
        case "find":
            from dino_ds.commands.find import run
        case "curate":
            from dino_ds.commands.curate import run
        case "export":
            from dino_ds.commands.export import run
        case _:
            raise AssertionError(f"the command {command} has no function")
    return run


def check_options(command: str, options: Any) -> None:
    """Raises UserError for wrong options that a command checks before torch is loaded."""
    match command:
        case "embed":
            from dino_ds.commands import embed

            embed.check(options)
        case "curate":
            from dino_ds.commands import curate

            curate.check(options)
        case "find":
            from dino_ds.commands import embed

            embed.find_features(options.features)
        case "export":
            from dino_ds.commands import export

            export.check(options)
    if (root := getattr(options, "root", None)) and getattr(options, "source", None) in (None, "folder"):
        from dino_ds.data.root import check_root

        check_root(root)


_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# The same variables as they are named by programs that start ranks without setting ours.
_RANK_VARIABLES = {
    "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


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


def check_start(recipe: Recipe, options: TrainOptions, files: Mapping[str, Any]) -> None:
    """Check values and paths that would otherwise stop the start half a minute later. Raises UserError."""
    from dino_ds.data.root import check_photos

    for key, path in code_of(recipe):
        check_allowed(key, path)
    check_photos(recipe.data.source, recipe.data.root)
    recipe.check_learning_rates()
    check_images_together(recipe, StepImages(recipe.data.global_batch, 1, 1))
    recipe.check_teacher()
    ranks, run_dir = int(os.environ.get("WORLD_SIZE", 1)), Path(options.run_dir)
    check_ds_config(files["ds"], files["ds_path"], recipe.data.global_batch, ranks, not _surely_lacks_fp16())
    for key, name in (("model.init_from", recipe.model.init_from), ("teacher.source", recipe.teacher.source)):
        if name is not None and (answer := weights_elsewhere(name)):
            raise CheckpointError(f"{key} {name} does not exist; {answer}")
    # Ranks of other machines check later, with all ranks: if one failed here, the first machine would wait for it.
    if os.environ.get("RANK", "0") == os.environ.get("LOCAL_RANK", "0"):
        _check_images(recipe, run_dir)
        check_may_begin(run_dir, options.resume)
    RunLock(run_dir).check_free(int(os.environ.get("RANK", 0)))


def _surely_lacks_fp16() -> bool:
    """Whether this machine has no accelerator's device file and an x86 CPU without instructions for fp16. False where
    torch is loaded, which is asked later."""
    devices = ("nvidia*", "kfd", "dri", "accel*", "davinci*")
    if "torch" in sys.modules or any(next(Path("/dev").glob(name), None) for name in devices):
        return False
    with contextlib.suppress(OSError):
        flags = set(Path("/proc/cpuinfo").read_text().split())
        return "sse2" in flags and not flags & {"avx512_fp16", "amx_fp16", "avx_ne_convert"}
    return False


def _check_images(recipe: Recipe, run_dir: Path) -> None:
    """Raises DataError if images of the user's are missing."""
    from dino_ds.data.mixture import roots_of
    from dino_ds.data.root import check_root, check_split

    if recipe.data.source != "folder":
        return
    for root in roots_of(recipe.data):
        check_root(root)
        if not holds_run(run_dir):  # a run continues with the images it began with
            check_split(root)
    for key, other in {"eval.root": recipe.eval.root, "eval.val_root": recipe.eval.val_root}.items():
        if other is not None and recipe.eval.every.value:
            check_root(other, key)


def check_torchvision() -> None:
    """Raises ConfigError if torchvision was built for another torch, which would be a cryptic error when it loads."""
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install torch torchvision") from None
    except (RuntimeError, ImportError, OSError) as error:
        raise ConfigError(
            f"torch and torchvision do not load together ({' '.join(str(error).split())[:160]}): install builds that "
            "match, both from the same index"
        ) from None
