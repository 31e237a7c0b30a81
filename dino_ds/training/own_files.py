"""The names in a run folder that are a run's own, and what else may lie under them."""

from __future__ import annotations

import stat
from pathlib import Path

from dino_ds.durable import discard
from dino_ds.errors import ConfigError

_FILES = (
    "config.yaml",
    "ds_config.json",
    "environment.json",
    "metrics.jsonl",
    "log.txt",
    "teacher.safetensors",
    "teacher.json",
    "evaluations.json",
    "bad_batches.jsonl",
)
_FOLDERS = ("checkpoints", "tensorboard", "pictures")


def check_kinds(path: Path) -> None:
    """Raises ConfigError where a folder is in the way of a file, or something else in that of a folder."""
    for name in (*_FILES, *_FOLDERS):
        try:
            mode = (path / name).stat().st_mode
        except OSError:
            continue  # not there
        if stat.S_ISDIR(mode) != (name in _FOLDERS) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            wanted = "a folder" if name in _FOLDERS else "a file"
            found = "a folder" if stat.S_ISDIR(mode) else "a file" if stat.S_ISREG(mode) else "a pipe or device"
            raise ConfigError(f"{path / name} is {found} where a run has {wanted}: remove or rename it")


def clear_leftovers(path: Path) -> None:
    """What a process that was killed had not put in place yet."""
    for name in _FILES:
        discard(path / f"{name}.tmp")
