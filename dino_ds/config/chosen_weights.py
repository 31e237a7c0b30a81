"""Chooses weights of a run by name: the newest teacher, the best one, or that of a step. All commands that take a run
have the same names. No torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from dino_ds.basics.hubs import weights_elsewhere
from dino_ds.basics.names import BEST_TEACHER, MODEL_FORMS, did_you_mean, sidecar_of, step_name
from dino_ds.basics.text_file import read_step
from dino_ds.config.stages import home_of, near_run, split_origin
from dino_ds.errors import CheckpointError, ConfigError, one_line
from dino_ds.models.specs.backbones import BACKBONES

NEWEST, BEST = "newest", "best"


def _check_name(name: str) -> str:
    if name not in (NEWEST, BEST) and not re.fullmatch(r"step_[0-9]{1,12}", name):
        raise ValueError(
            f"{name!r} is not newest, best, or step_N such as step_1500, which choose among those of a run; other "
            "weights are the MODEL itself, or --model.init_from FILE to train"
        )
    return name


WeightsName = Annotated[str, AfterValidator(_check_name)]


def chosen_model(model: str | os.PathLike[str], weights: str) -> str:
    """The path of the chosen weights of a run: the run itself for its newest teacher, a checkpoint, or the file of the
    best teacher if there is no checkpoint of its step. Raises ConfigError, CheckpointError."""
    path, home = os.fspath(model), home_of(os.fspath(model))
    if _check_named(weights) == NEWEST:
        return path
    if not home.is_run or home.name:
        raise ConfigError(f"--weights {weights} chooses among a run's teachers, and {path} is not a run folder")
    folder = _checkpoint(home.folder, step_of_weights(home.folder, weights))
    if folder.is_dir():
        return str(folder)
    if weights == BEST:
        return str(home.folder / BEST_TEACHER)
    there = sorted(path.name for path in folder.parent.glob("step_*"))
    raise CheckpointError(f"{home.folder} has no checkpoint {folder.name}; found: {', '.join(there) or 'none'}")


def missing_model(model: str) -> CheckpointError:
    """The error for a missing model, with a hint where to get it, or the nearest name."""
    near = near_run(model) or f".{did_you_mean(model, BACKBONES)}"
    return CheckpointError(
        f"{one_line(model, 300)} does not exist; {weights_elsewhere(model) or f'give {MODEL_FORMS}{near}'}"
    )


def check_model_path(model: str) -> None:
    """Raises CheckpointError for a path to a missing model in a folder that exists, before torch is loaded."""
    path = Path(os.path.expanduser(model))
    if "/" in model and path.parent.is_dir() and not os.path.lexists(path):
        raise missing_model(model)


def step_of_weights(run: Path, weights: str) -> int:
    """The step of the weights "best" or "step_N" of a run. Raises CheckpointError if no best teacher was kept."""
    if weights != BEST:
        return int(weights.removeprefix("step_"))
    about = sidecar_of(run / BEST_TEACHER)
    missing = next((file for file in (run / BEST_TEACHER, about) if not file.is_file()), None)
    if missing is not None:
        raise CheckpointError(
            f"{missing} is missing: {run} has kept no best teacher (eval.keep_best); take --weights newest"
        )
    try:
        return read_step(about)
    except (OSError, ValueError):
        raise CheckpointError(
            f"{about} is damaged: it does not say the step; take --weights newest or step_N"
        ) from None


def step_to_begin_with(origin: str, weights: str) -> int | None:
    """The step of the checkpoint that a stage from `origin` begins with, or None for the newest. Raises ConfigError,
    CheckpointError."""
    run, step = split_origin(origin)
    if weights == NEWEST:
        return step
    if step is not None:
        raise ConfigError(f"--from {origin} and --weights {weights} both name a checkpoint: leave one out")
    step = step_of_weights(run, weights)
    if weights == BEST and not _checkpoint(run, step).is_dir():
        raise CheckpointError(
            f"the best teacher of {run} is of step {step}, of which there is no checkpoint (of its start there never "
            f"is): take --weights newest, or begin a run with --model.init_from {run / BEST_TEACHER}"
        )
    return step


def _checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / step_name(step)


def _check_named(weights: str) -> str:
    try:
        return _check_name(weights)
    except ValueError as error:
        raise ConfigError(f"weights: {error}") from None
