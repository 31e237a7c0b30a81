"""The files of a run folder that say what it is, and what may lie in it under their names."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

from dino_ds.basics.durable import discard, replace_file, why_not_writable
from dino_ds.basics.names import BEST_TEACHER
from dino_ds.config.begun_with import ENVIRONMENT, ORIGIN, Origin
from dino_ds.config.ds_values import DsConfig
from dino_ds.config.loading import dump_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, unwritable
from dino_ds.run.environment import describe_environment

_FILES = (
    "config.yaml",
    "ds_config.json",
    ENVIRONMENT,
    "metrics.jsonl",
    "log.txt",
    "teacher.safetensors",
    "teacher.json",
    BEST_TEACHER,
    "best_teacher.json",
    "evaluations.json",
    "bad_batches.jsonl",
)
_FOLDERS = ("checkpoints", "tensorboard", "pictures")
_SECONDS_TO_SEE = 40.0


def check_place(path: Path) -> None:
    """Raises ConfigError where a run can't be written: a folder is in the way of a file, or something else in that of a
    folder, or the disk refuses; also for a link to nothing, such as a disk that is not mounted: a run without its
    checkpoints would start anew."""
    for name in (*_FILES, *_FOLDERS):
        try:
            mode = (path / name).stat().st_mode
        except OSError:
            if not (path / name).is_symlink():
                continue  # not there
            raise ConfigError(
                f"{path / name} is a link to {os.readlink(path / name)}, which is not there: bring that back, such as "
                "its disk, or remove the link"
            ) from None
        if stat.S_ISDIR(mode) != (name in _FOLDERS) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            wanted = "a folder" if name in _FOLDERS else "a file"
            found = "a folder" if stat.S_ISDIR(mode) else "a file" if stat.S_ISREG(mode) else "a pipe or device"
            raise ConfigError(f"{path / name} is {found} where a run has {wanted}: remove or rename it")
    if reason := why_not_writable(path / "config.yaml"):
        raise ConfigError(f"run folder {path} can't be made: {reason}; fix --run_dir")


def write_description(path: Path, recipe: Recipe, config: DsConfig, run_id: str, origin: Origin | None) -> None:
    """Write config.yaml, ds_config.json and environment.json, by rank 0; all ranks wait for it.

    Raises ConfigError on all ranks if one of them does not see the folder, StorageError if it can't be written to.
    """
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:
            about = {"run_id": run_id, **({ORIGIN: vars(origin)} if origin else {}), **describe_environment(path)}
            for name in _FILES:
                discard(path / f"{name}.tmp")  # what a killed process had not put in place yet
            try:
                replace_file(path / "ds_config.json", json.dumps(config.raw, indent=2) + "\n")
                replace_file(path / ENVIRONMENT, json.dumps(about, indent=2) + "\n")
                replace_file(path / "config.yaml", dump_recipe(recipe))  # last: it says that here is a run
            except OSError as error:
                raise unwritable(f"run folder {path}", error) from None
    with distributed.raise_on_all_ranks():
        if not _becomes_visible(path / "config.yaml"):
            raise ConfigError(
                f"rank {distributed.rank()} does not see {path}, which rank 0 has made: "
                "put --run_dir on a disk that all machines share"
            )


def _becomes_visible(path: Path) -> bool:
    """Whether another machine's file becomes visible: NFS caches for half a minute that it was absent."""
    end = time.monotonic() + _SECONDS_TO_SEE
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
