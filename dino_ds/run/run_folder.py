"""The run folder: whether a start may begin or continue there, the facts on which all ranks agree, and its files."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from dino_ds.basics.durable import discard, replace_file, why_not_writable
from dino_ds.basics.names import BEST_TEACHER
from dino_ds.checkpoint.manifest import Manifest
from dino_ds.config.begun_with import (
    CONFIG_NAME,
    ENVIRONMENT,
    ORIGIN,
    Origin,
    load_run_recipe,
    read_environment,
    read_run_id,
    started_in,
)
from dino_ds.config.ds_values import DsConfig
from dino_ds.config.fields import Resume
from dino_ds.config.loading import dump_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import holds_checkpoint, holds_run, nothing_to_resume
from dino_ds.engine import distributed
from dino_ds.errors import CheckpointError, ConfigError, unwritable
from dino_ds.run.environment import describe_environment
from dino_ds.run.resume_checks import IMAGES, changed_since, check_changed, read_allowed


class RunFolder:
    """The run folder as a start finds it: it holds a run already, or one begins there with `recipe` and `config`.

    allow_change: comma-separated keys whose values may differ from those of the checkpoint. Raises ConfigError if
    `resume` does not fit what the folder holds, if the folder can't be written, or for an unknown key.
    """

    def __init__(
        self, path: Path, recipe: Recipe, config: DsConfig, resume: Resume, allow_change: str | None = None
    ) -> None:
        self.path, self.recipe, self.config = path, recipe, config
        there = holds_run(path)
        if resume is False and there:
            how = "--resume to continue it" if holds_checkpoint(path) else "--resume auto: it made no checkpoint"
            raise ConfigError(f"{path} already holds a run; add {how}, or give another --run_dir")
        if resume not in (False, "auto") and not there:
            raise nothing_to_resume(path)
        if resume is False and allow_change is not None:
            raise ConfigError(f"--allow_change {allow_change} acts only with --resume: there is nothing to change yet")
        self.resume = there and resume is not False
        self.wanted_step = None if isinstance(resume, (bool, str)) else resume
        self.may_start_anew = resume in (False, "auto")
        self.run_id = read_run_id(path) if self.resume else None
        self.origin = Origin.read(path) if self.resume else None
        self.began_in = started_in(path) if self.resume else None
        self.config_name = read_environment(path, CONFIG_NAME) if self.resume else None
        self._allowed = set[str]() if allow_change is None else read_allowed(allow_change, recipe, config)
        check_place(path)

    def earlier_recipe(self) -> Recipe | None:
        """The recipe of the resumed run, with the image settings that it began with; None if it can't be read."""
        try:
            return load_run_recipe(self.path) if self.resume else None
        except ConfigError:
            return None

    def agree(self) -> None:
        """Adopt what rank 0 has found in the folder; every rank must call this."""
        mine = (self.resume, self.run_id, self.origin, secrets.token_hex(8))
        self.resume, self.run_id, self.origin, self._new_id = distributed.gather_objects(mine)[0]

    def adopt_run_id(self, saved: Manifest | None) -> str:
        """Adopt and return the id of the checkpoint, else of the folder, else a new one."""
        self.run_id = saved.run_id if saved is not None else self.run_id or self._new_id
        return self.run_id

    @property
    def allows_other_images(self) -> bool:
        return IMAGES in self._allowed

    def changed(self, saved: Manifest) -> dict[str, str]:
        """The settings that change what is learned and differ from a checkpoint's, in words by dotted name."""
        return changed_since(saved, self.recipe, self.config, self.began_in)

    def check_settings(self, saved: Manifest) -> None:
        """Raises CheckpointError, naming every difference, where resuming would learn something else."""
        check_changed(self.changed(saved), saved, self._allowed)

    def check_nothing_saved(self) -> None:
        """Raises CheckpointError, on all ranks, if a run without checkpoints has a teacher's file: it had one then."""
        with distributed.raise_on_all_ranks():
            if (teacher := self.path / "teacher.safetensors").exists():
                raise CheckpointError(
                    f"{self.path} has no checkpoint, and had one: {teacher} was written with it. Bring "
                    f"{self.path / 'checkpoints'} back; to start from the beginning, name another --run_dir, or move "
                    "that file away"
                )

    def last_step(self, epoch_steps: int, max_steps: int | None) -> int:
        """The step at which training ends, after at most `max_steps` steps from the first one of the run or stage.

        Raises ConfigError for a stage that would end before its first step.
        """
        first = self.origin.first_step if self.origin else 0
        last = self.recipe.length.in_steps(self.recipe.data.global_batch, epoch_steps)
        if self.origin and last <= first:
            raise ConfigError(
                f"{self.origin.run} has done {first} steps, and length {self.recipe.length} ends at step {last}: give "
                "the stage a length, which counts from there"
            )
        return min(last, first + max_steps) if max_steps else last


_FILES = (
    "config.yaml",
    "ds_config.json",
    ENVIRONMENT,
    "metrics.jsonl",
    "log.txt",
    "events.jsonl",
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
    """Raises ConfigError if a run can't be written at `path`: the folder is not writable, or one of a run's files is a
    folder there, one of its folders a file, or either a broken link. A link to a disk that is not mounted is refused
    because a run without its checkpoints would start anew."""
    for name in (*_FILES, *_FOLDERS):
        entry = path / name
        if entry.is_symlink() and not entry.exists():
            raise ConfigError(
                f"{entry} is a link to {os.readlink(entry)}, which is not there: bring that back, such as its disk, or "
                "remove the link"
            )
        if entry.is_fifo() or (entry.exists() and entry.is_dir() != (name in _FOLDERS)):
            kind = "a folder" if entry.is_dir() else "a pipe or device" if entry.is_fifo() else "a file"
            wanted = "a folder" if name in _FOLDERS else "a file"
            raise ConfigError(f"{entry} is {kind} where a run has {wanted}: remove or rename it")
    if reason := why_not_writable(path / "config.yaml"):
        raise ConfigError(f"run folder {path} can't be made: {reason}; fix --run_dir")


def write_description(folder: RunFolder) -> None:
    """Write config.yaml, ds_config.json and environment.json, on rank 0; all ranks wait for them.

    Raises ConfigError on all ranks if one of them does not see the folder, StorageError if it can't be written to.
    """
    path, origin = folder.path, folder.origin
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:
            about: dict[str, Any] = {"run_id": str(folder.run_id), CONFIG_NAME: folder.config_name}
            about |= {**({ORIGIN: vars(origin)} if origin else {}), **describe_environment(path)}
            for name in _FILES:
                discard(path / f"{name}.tmp")  # left by a killed process
            try:
                replace_file(path / "ds_config.json", json.dumps(folder.config.raw, indent=2) + "\n")
                replace_file(path / ENVIRONMENT, json.dumps(about, indent=2) + "\n")
                replace_file(path / "config.yaml", dump_recipe(folder.recipe))  # last: it marks the folder as a run
            except OSError as error:
                raise unwritable(f"run folder {path}", error) from None
    with distributed.raise_on_all_ranks():
        if not _becomes_visible(path / "config.yaml"):
            raise ConfigError(
                f"rank {distributed.rank()} on {socket.gethostname()} does not see {path}, which rank 0 has made: "
                "put --run_dir on a disk that all machines share"
            )


def _becomes_visible(path: Path) -> bool:
    """Whether a file of another machine becomes visible in time: NFS caches its absence for half a minute."""
    end = time.monotonic() + _SECONDS_TO_SEE
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
