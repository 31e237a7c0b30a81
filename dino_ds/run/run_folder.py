"""The folder of one run: its recipe, ds config and environment, and whether a new start may continue in it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dino_ds.basics.durable import discard, replace_file, why_not_writable
from dino_ds.basics.names import did_you_mean
from dino_ds.checkpoint.files import write_tensors
from dino_ds.checkpoint.manifest import Manifest
from dino_ds.config.begun_with import ORIGIN, Origin, changed_settings, check_settings, is_free, learned, read_run_id
from dino_ds.config.ds_values import DsConfig
from dino_ds.config.fields import Resume
from dino_ds.config.flat import flat_values, flatten
from dino_ds.config.loading import dump_recipe, load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import holds_run
from dino_ds.engine import distributed
from dino_ds.errors import CheckpointError, ConfigError, unwritable
from dino_ds.run.environment import describe_environment, own_code, versions
from dino_ds.run.other_images import IMAGES
from dino_ds.weights.about import about_teacher
from dino_ds.weights.sidecar import write_with_sidecar

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
_SECONDS_TO_SEE = 40.0
_OPTIMIZER = "optimizer.kind"


class RunFolder:
    """RUN/ with config.yaml, ds_config.json and environment.json; the log and the checkpoints lie beside them.

    allow_change: keys, with commas between them, whose values may differ from those of the checkpoint. Raises
    ConfigError if the folder holds a run that is not to be resumed, or can't be written, or a key is unknown.
    """

    def __init__(
        self, path: Path, recipe: Recipe, config: DsConfig, resume: Resume, allow_change: str | None = None
    ) -> None:
        self.path, self.recipe, self.config = path, recipe, config
        there = holds_run(path)
        if resume is False and there:
            raise ConfigError(f"{path} already holds a run; add --resume to continue it, or give another --run_dir")
        if resume not in (False, "auto") and not there:
            raise CheckpointError(f"nothing to resume: {path} holds no run; start without --resume, or fix --run_dir")
        self.resume = there and resume is not False
        self.wanted_step = None if isinstance(resume, (bool, str)) else resume
        self.may_start_anew = resume in (False, "auto")
        self.run_id = read_run_id(path) if self.resume else None
        self.origin = Origin.read(path) if self.resume else None
        self._allowed = self._read_allowed(allow_change, resume)
        _check_kinds(path)
        if reason := why_not_writable(path / "config.yaml"):
            raise ConfigError(f"run folder {path} can't be made: {reason}; fix --run_dir")

    def _read_allowed(self, keys: str | None, resume: Resume) -> set[str]:
        if keys is None:
            return set()
        if resume is False:
            raise ConfigError(f"--allow_change {keys} acts only with --resume: there is nothing to change yet")
        known = {*self._learned(), IMAGES}
        allowed = {key.strip() for key in keys.split(",")}
        for key in sorted(allowed - known):
            free = is_free(key) and key in flat_values(self.recipe)
            what = "it may change freely, leave it out" if free else "it is not a key of the recipe"
            raise ConfigError(f"--allow_change {key}: {what}.{'' if free else did_you_mean(key, known)}")
        return allowed

    def earlier_value_range(self) -> tuple[float, float] | None:
        """The data.value_range that the run to be resumed found at its start."""
        try:
            return load_recipe(str(self.path / "config.yaml"), {}).data.known_range if self.resume else None
        except ConfigError:
            return None

    def check_nothing_saved(self) -> None:
        """Raises CheckpointError, on all ranks, where the run has a teacher and so had a checkpoint, which is gone."""
        with distributed.raise_on_all_ranks():
            if (teacher := self.path / "teacher.safetensors").exists():
                raise CheckpointError(
                    f"{self.path} has no checkpoint, and had one: {teacher} was written with it. Bring "
                    f"{self.path / 'checkpoints'} back; to start from the beginning, name another --run_dir, or move "
                    "that file away"
                )

    @property
    def allows_other_images(self) -> bool:
        return IMAGES in self._allowed

    def agree(self) -> None:
        """Adopt what rank 0 has found in the folder; every rank must call it."""
        mine = (self.resume, self.run_id, self.origin, secrets.token_hex(8))
        self.resume, self.run_id, self.origin, self._new_id = distributed.gather_objects(mine)[0]

    def adopt_run_id(self, saved: Manifest | None) -> None:
        """Take the id of the checkpoint, or that of the folder; a new run gets a new id."""
        self.run_id = saved.run_id if saved is not None else self.run_id or self._new_id

    def last_step(self, epoch_steps: int, max_steps: int | None) -> int:
        """At which training ends, after `max_steps` optimizer steps at most; a stage counts them from its first one.

        Raises ConfigError for a stage that has none.
        """
        first = self.origin.first_step if self.origin else 0
        last = self.recipe.length.in_steps(self.recipe.data.global_batch, epoch_steps)
        if self.origin and last <= first:
            raise ConfigError(
                f"{self.origin.run} has done {first} steps, and length {self.recipe.length} ends at step {last}: give "
                "the stage a length, which counts from there"
            )
        return min(last, first + max_steps) if max_steps else last

    def write(self) -> None:
        """Write config.yaml, ds_config.json and environment.json, by rank 0; all ranks wait for it.

        Raises ConfigError on all ranks if one of them does not see the folder, StorageError if it can't be written to.
        """
        with distributed.raise_on_all_ranks():
            if distributed.rank() == 0:
                self._write_files()
        with distributed.raise_on_all_ranks():
            if not _becomes_visible(self.path / "config.yaml"):
                raise ConfigError(
                    f"rank {distributed.rank()} does not see {self.path}, which rank 0 has made: "
                    "put --run_dir on a disk that all machines share"
                )

    def _write_files(self) -> None:
        origin = {ORIGIN: vars(self.origin)} if self.origin else {}
        about = {"run_id": self.run_id, **origin, **describe_environment(self.path)}
        for name in _FILES:
            discard(self.path / f"{name}.tmp")  # what a killed process had not put in place yet
        try:
            replace_file(self.path / "ds_config.json", json.dumps(self.config.raw, indent=2) + "\n")
            replace_file(self.path / "environment.json", json.dumps(about, indent=2) + "\n")
            replace_file(self.path / "config.yaml", dump_recipe(self.recipe))  # last: it says that here is a run
        except OSError as error:
            raise unwritable(f"run folder {self.path}", error) from None

    def description(self) -> dict[str, Any]:
        """What a checkpoint says of its run: fields of Manifest."""
        config, zero = self.config, self.config.raw.get("zero_optimization", {})
        learned = json.dumps(self._learned(), sort_keys=True)
        return {
            "run_id": self.run_id,
            "stage": config.stage,
            "world_size": distributed.world_size(),
            "precision": config.precision,
            "offload": any(
                zero.get(key, {}).get("device", "none") != "none" for key in ("offload_optimizer", "offload_param")
            ),
            "micro_batch": config.micro_batch,
            "accumulation": config.accumulation,
            "gradient_clipping": config.clipping,
            "recipe": self.recipe.model_dump(mode="json"),
            "config_hash": hashlib.sha256(learned.encode()).hexdigest(),
            "versions": versions() | own_code(self.recipe),
        }

    def _learned(self) -> dict[str, Any]:
        """Everything that changes what is learned, by its dotted name."""
        return learned(self.recipe.model_dump(mode="json")) | {"gradient_clipping": self.config.clipping}

    def check_settings(self, saved: Manifest) -> None:
        """Raises CheckpointError, naming every difference, where resuming would learn something else."""
        changed = self.changed(saved)
        if _OPTIMIZER in changed:
            raise CheckpointError(
                f"{changed[_OPTIMIZER]} since step {saved.step}, whose moments are of no use to another optimizer: set "
                "it back, or start a new run from these weights with --model.init_from"
            )
        check_settings(changed, f"step {saved.step}", self._allowed)

    def changed(self, saved: Manifest) -> dict[str, str]:
        """What of the settings that change what is learned differs from those that a checkpoint was saved with."""
        # A run from before an option did what the option's default does.
        before = flat_values(Recipe()) | flatten(saved.recipe) | {"gradient_clipping": saved.gradient_clipping}
        return changed_settings(before, self._learned())

    def notes_on(self, saved: Manifest) -> list[str]:
        """Differences from the start that saved a checkpoint, in lines for people."""
        old, new = saved.model_dump(), self.description()
        notes = [f"changed since step {saved.step}, as allowed: {how}" for how in self.changed(saved).values()]
        other = {name: now for name, now in new["versions"].items() if saved.versions.get(name, now) != now}
        notes += [f"{name} was {saved.versions[name]} until step {saved.step}, is {now}" for name, now in other.items()]
        was, now = _computed(old, new), _computed(new, old)
        return [f"resumed from {was} under {now}", *notes] if was != now else notes

    def write_teacher(self, distilled: dict[str, Any] | None, backbone: Mapping[str, Tensor], step: int) -> None:
        """teacher.safetensors: the teacher's backbone after `step` steps, FP32 with timm's names; teacher.json: how it
        was made, `distilled` from what. Raises OSError."""
        facts = about_teacher(self.recipe, distilled, step, versions())
        place = self.path / "teacher.safetensors"
        write_with_sidecar(place, lambda path: write_tensors(path, backbone, {"format": "pt"}), facts)


def _becomes_visible(path: Path) -> bool:
    """Whether another machine's file becomes visible: NFS caches for half a minute that it was absent."""
    end = time.monotonic() + _SECONDS_TO_SEE
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _computed(this: dict[str, Any], other: dict[str, Any]) -> str:
    """How a run is computed, such as "ZeRO 2 bf16 on 2 ranks"; the batch's parts only where they differ."""
    ranks = f"{this['world_size']} rank{'s' if this['world_size'] > 1 else ''}"
    offload = ", offloaded" if this["offload"] else ""
    parts = [(run["micro_batch"], run["accumulation"]) for run in (this, other)]
    batch = f", micro-batch {parts[0][0]} x accumulation {parts[0][1]}" if parts[0] != parts[1] else ""
    return f"ZeRO {this['stage']} {this['precision']} on {ranks}{offload}{batch}"


def _check_kinds(path: Path) -> None:
    """Raises ConfigError where a folder is in the way of a file, or something else in that of a folder; also for a link
    to nothing, such as a disk that is not mounted: a run without its checkpoints would start anew."""
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
