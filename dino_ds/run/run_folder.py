"""The run folder: checks that a start may begin or continue there, on all ranks alike, with the images and settings of
the checkpoint; and writes its files, such as the newest teacher (teacher.*), the best one by a metric (best_teacher.*),
and versions, machine and the command line of each start (environment.json)."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import secrets
import socket
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_ds import __version__
from dino_ds.basics.files import discard, discard_left_over, hash_code, replace_file, why_not_writable
from dino_ds.basics.names import BEST_TEACHER, did_you_mean, sidecar_of, step_name
from dino_ds.checkpoint.manifest import MANIFEST, WHOLE, Manifest, write_tensors
from dino_ds.config import fields, schema, stages
from dino_ds.config.ds_schema import DsConfig, offloads_optimizer, offloads_weights
from dino_ds.config.loading import dump_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.data.image_set import ImageSet
from dino_ds.data.images import Source, evenly_spaced_indices
from dino_ds.engine import distributed
from dino_ds.errors import CheckpointError, ConfigError, DataError, unwritable
from dino_ds.health import beat
from dino_ds.method.build import build_schedules
from dino_ds.method.specs.own import code_of
from dino_ds.models.trained import merged
from dino_ds.weights.sidecar import about_teacher, open_checkpoint, read_sidecar, write_with_sidecar

_IMAGES = "images"  # the name of images in --allow_change
_FILES = (
    *("config.yaml", "ds_config.json", stages.ENVIRONMENT, "metrics.jsonl", "log.txt", "events.jsonl"),
    *("teacher.safetensors", "teacher.json", BEST_TEACHER, "best_teacher.json", "evaluations.json"),
    "bad_batches.jsonl",
)
_FOLDERS = ("checkpoints", "tensorboard", "pictures")
_PACKAGES = ("torch", "torchvision", "deepspeed", "timm", "numpy", "pillow")
_LAUNCHERS = {"torchrun": "TORCHELASTIC_RUN_ID", "deepspeed": "CROSS_RANK"}
"""Launchers, and for each an environment variable of a rank that no other launcher sets."""


def _computed(this: dict[str, Any], other: dict[str, Any]) -> str:
    """How a run is computed, such as "ZeRO 2 bf16 on 2 ranks"; the batch's parts only where those of `other` differ."""
    ranks = f"{this['world_size']} rank{'s' if this['world_size'] > 1 else ''}"
    offload = ", offloaded" if this["offload"] else ""
    parts = [(run["micro_batch"], run["accumulation"]) for run in (this, other)]
    batch = f", micro-batch {parts[0][0]} x accumulation {parts[0][1]}" if parts[0] != parts[1] else ""
    return f"ZeRO {this['stage']} {this['precision']} on {ranks}{offload}{batch}"


def describe_images(source: Source, root: str | None) -> ImageSet:
    """Describe all images, on rank 0 for all ranks. Raises DataError, on all ranks, where ranks differ in the number of
    images or in some of their names: they would train on different data and wait for each other forever."""
    names = "".join(Path(source.name(i)).name for i in evenly_spaced_indices(len(source), 1000))
    counts = distributed.gather_objects((len(source), zlib.crc32(names.encode()), socket.gethostname()))
    for rank, (count, names_of_rank, host) in enumerate(counts):
        if (count, names_of_rank) != counts[0][:2]:
            raise DataError(
                f"rank 0 on {counts[0][2]} finds {counts[0][0]} images, rank {rank} on {host} {count}, other ones: "
                "data.root must hold the same files on all machines",
                said_by_me=distributed.rank() == 0,
            )
    return distributed.gather_objects(ImageSet.of(source, root) if distributed.rank() == 0 else None)[0]


def check_same_start(run_dir: Path, recipe: Recipe, ds: Mapping[str, Any]) -> None:
    """Raises ConfigError, on all ranks, where a rank starts something else than rank 0; names the first difference.
    Paths may differ, as those of a disk may by machine; images are compared by content later."""
    mine: dict[str, Any] = {**versions(), "the code of dino_ds": hash_code(), "the run folder's name": run_dir.name}
    mine |= {key: value for key, value in schema.flat_values(recipe).items() if key not in stages.path_keys()}
    mine |= {f"ds.{key}": value for key, value in schema.flatten(dict(ds)).items()}
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True, default=str).encode()).hexdigest()
    starts = distributed.gather_objects((socket.gethostname(), digest))
    first_host, expected = starts[0]
    rank, host = next(((rank, host) for rank, (host, digest) in enumerate(starts) if digest != expected), (0, ""))
    if not rank:
        return
    first, facts = (distributed.gather_objects(mine)[number] for number in (0, rank))
    name = next(key for key in {**first, **facts} if first.get(key) != facts.get(key))
    raise ConfigError(
        f"{name} is {facts.get(name)} for rank {rank} on {host}, and {first.get(name)} for rank 0 on {first_host}: "
        "make it the same for all ranks",
        said_by_me=distributed.rank() == 0,
    )


@dataclass(frozen=True)
class TeacherFiles:
    """Writes the teacher's files into the run folder `path`; distilled: the frozen teacher's facts, or None."""

    path: Path
    recipe: Recipe
    distilled: dict[str, Any] | None

    def write(self, backbone: Mapping[str, Tensor], step: int, best: Mapping[str, Any] | None = None) -> None:
        """Write the backbone after `step` steps (FP32, timm's names, adapters merged) to teacher.safetensors, and how
        it was made to teacher.json; with `best`, the facts of the best teacher, to best_teacher.*. Raises OSError."""
        facts, name = about_teacher(self.recipe, self.distilled, step, versions()), "teacher.safetensors"
        if best is not None:
            facts["best"], name = {key: best[key] for key in ("metric", "value", "start")}, BEST_TEACHER
            if "load" in facts:
                facts["load"] = facts["load"].replace("teacher.safetensors", BEST_TEACHER)
        whole = merged(backbone, self.recipe.model.lora_alpha)
        write_with_sidecar(self.path / name, lambda file: write_tensors(file, whole, {"format": "pt"}), facts)

    def settle(
        self, best: Mapping[str, Any], start: int, exported: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    ) -> list[str]:
        """Make the best teacher's file agree with a run that continues at step `start`; returns lines for the log.
        If it is not of the step of `best`, as after a crash, `exported` takes the teacher from that step's checkpoint.
        Without this checkpoint, a file of a step after `start` is removed. Raises OSError."""
        there, step = best_step(self.path), best["step"]
        folder = self.path / "checkpoints" / step_name(step or 0)
        if there == step:
            return []
        if step and (folder / MANIFEST).is_file():
            try:
                saved = open_checkpoint(folder, WHOLE)
            except CheckpointError as error:
                return [f"the best teacher is lost: {error}"]
            self.write(exported(saved.whole()), step, best)
            return [f"{BEST_TEACHER} is written again, of step {step}"]
        if there is None or there <= start:
            return []
        discard(self.path / BEST_TEACHER)
        discard(sidecar_of(self.path / BEST_TEACHER))
        return [f"{BEST_TEACHER}, of step {there}, is removed: training continues from step {start}"]


def best_step(run: Path) -> int | None:
    """The step of the best teacher in a run folder, or None if there is none or it is damaged."""
    try:
        step = read_sidecar(run / BEST_TEACHER).get("step") if (run / BEST_TEACHER).is_file() else None
    except CheckpointError:
        return None
    return step if isinstance(step, int) else None


def earlier_recipe(path: Path, resume: fields.Resume) -> Recipe | None:
    """The recipe of the resumed run, with the image settings that it began with; None if it can't be read."""
    try:
        return stages.load_run_recipe(path) if stages.holds_run(path) and resume is not False else None
    except ConfigError:
        return None


class RunFolder:
    """The run folder as a start finds it: it holds a run already, or one begins there with `recipe` and `config`.
    Raises ConfigError if `resume` does not fit what the folder holds, if the folder can't be written, or for an unknown
    key in `allow_change`."""

    images: ImageSet  # those of this start

    def __init__(
        self, path: Path, recipe: Recipe, config: DsConfig, resume: fields.Resume, allow_change: str | None = None
    ) -> None:
        self.path, self.recipe, self.config = path, recipe, config
        stages.check_may_begin(path, resume)
        if resume is False and allow_change is not None:
            raise ConfigError(f"--allow_change {allow_change} acts only with --resume: there is nothing to change yet")
        self.resume = stages.holds_run(path) and resume is not False
        self.wanted_step = None if isinstance(resume, (bool, str)) else resume
        self.may_start_anew = resume in (False, "auto")
        self.run_id = stages.read_run_id(path) if self.resume else None
        self.origin = stages.Origin.read(path) if self.resume else None
        self.began_in = stages.started_in(path) if self.resume else None
        self.config_name = stages.read_environment(path, stages.CONFIG_NAME) if self.resume else None
        self._allowed = set() if allow_change is None else {key.strip() for key in allow_change.split(",")}
        known = {*self._learned(), _IMAGES}
        for key in sorted(self._allowed - known):
            free = stages.is_free(key) and key in schema.flat_values(recipe)
            reason = "it may change freely, leave it out" if free else "it is not a key of the recipe"
            raise ConfigError(f"--allow_change {key}: {reason}.{'' if free else did_you_mean(key, known)}")
        check_place(path)

    def _learned(self) -> dict[str, Any]:
        return stages.learned(self.recipe.model_dump(mode="json")) | {"gradient_clipping": self.config.clipping}

    def agree(self) -> None:
        """Adopt what rank 0 has found in the folder, and its id for a new run; every rank must call this."""
        mine = (self.resume, self.run_id, self.origin, secrets.token_hex(8))
        self.resume, self.run_id, self.origin, self.new_id = distributed.gather_objects(mine)[0]

    @property
    def first_step(self) -> int:
        """The step at which a stage began, else 0."""
        return self.origin.first_step if self.origin else 0

    def changed(self, saved: Manifest) -> dict[str, str]:
        """The settings that change what is learned and differ from a checkpoint's, in words by dotted name."""
        before = schema.flatten(saved.recipe) | {"gradient_clipping": saved.gradient_clipping}
        return stages.changed_settings(before, self._learned(), self.began_in)

    def check(self, saved: Manifest) -> None:
        """Raises CheckpointError, naming the differences, where resuming would learn something else: settings differ,
        lengths in epochs are other numbers of steps, or images are balanced by other groups."""
        changed = self.changed(saved)
        if optimizer := changed.get("optimizer.kind"):
            said = f"{optimizer} since step {saved.step}, whose moments are of no use to another optimizer"
            raise CheckpointError(f"{said}: set it back, or start a new run from these weights with --model.init_from")
        if refused := {key: how for key, how in changed.items() if key not in self._allowed}:
            problem = f"settings changed since step {saved.step}: {', '.join(refused.values())}"
            raise CheckpointError(f"{problem}; accept with --allow_change {','.join(refused)}")
        if _IMAGES in self._allowed:
            return
        before, now, data = ImageSet.from_json(saved.images), self.images, self.recipe.data
        if before.groups and now.groups not in ("", before.groups) and before.names == now.names:
            others = f"the {data.balance.partition(':')[0]} of data.balance {data.balance} are others than those since"
            remedy = f"bring them back, or accept with --allow_change {_IMAGES}"
            raise CheckpointError(f"{others} step {saved.step}: {remedy}")
        old, new = (build_schedules(self.recipe, max(1, some.count // data.global_batch)) for some in (before, now))
        moved = [f"length {old.steps} -> {new.steps} steps"] if old.steps != new.steps else []
        # Schedules are compared at their edges, and at steps between.
        last, step = max(old.steps, new.steps, saved.step + 1), saved.step
        lengths = ("warmup_steps", "teacher_temp_tread_steps", "freeze_steps", "freeze_backbone_steps")
        ends = [getattr(schedules, name) for schedules in (old, new) for name in lengths]
        edges = {edge for end in ends for edge in (end - 1, end) if step <= edge < last}
        for probe in sorted({*range(step, last, max(1, (last - step) // 500)), *edges}):
            if old.at(probe) != new.at(probe):
                moved.append(f"schedules differ from step {probe} on")
                break
        if moved:
            problem = f"images changed since step {saved.step} ({before.changes(now)}), and lengths in epochs with them"
            remedy = f"accept with --allow_change {_IMAGES}, or bring the images back"
            raise CheckpointError(f"{problem}: {'; '.join(moved)}; {remedy}")

    def image_notes(self, saved: Manifest) -> list[str]:
        """Human-readable lines on the images that have changed."""
        changes = ImageSet.from_json(saved.images).changes(self.images)
        return [f"images changed since step {saved.step}: {changes}"] if changes else []

    def notes(self, saved: Manifest) -> list[str]:
        """Lines on what differs from the start that saved a checkpoint: how it runs, settings, versions, images."""
        old, new = saved.model_dump(), self.settings()
        notes = [f"changed since step {saved.step}, as allowed: {how}" for how in self.changed(saved).values()]
        other = {name: now for name, now in new["versions"].items() if saved.versions.get(name, now) != now}
        notes += [f"{name} was {saved.versions[name]} until step {saved.step}, is {now}" for name, now in other.items()]
        was, now = _computed(old, new), _computed(new, old)
        return [*([f"resumed from {was} under {now}"] if was != now else []), *notes, *self.image_notes(saved)]

    def settings(self) -> dict[str, Any]:
        """The settings of this start, as fields of a checkpoint's Manifest."""
        config, zero = self.config, self.config.raw.get("zero_optimization", {})
        by_name = dict(versions())
        for module in [path.partition(":")[0] for _, path in code_of(self.recipe)]:  # without what these import
            file = getattr(sys.modules.get(module), "__file__", None)
            if file and os.path.isfile(file):
                by_name[f"the code of {module}"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
        settings = {name: getattr(config, name) for name in ("stage", "precision", "micro_batch", "accumulation")}
        offload = offloads_optimizer(zero) or offloads_weights(zero)
        settings |= {"world_size": distributed.world_size(), "offload": offload, "gradient_clipping": config.clipping}
        return settings | {"recipe": self.recipe.model_dump(mode="json"), "versions": by_name}

    def last_step(self, epoch_steps: int, max_steps: int | None, done: int) -> int:
        """The step at which training ends, after at most `max_steps` steps from the first one of the run or stage.
        Raises ConfigError for a stage that would end before its first step, and where more steps are `done` already."""
        last = self.recipe.length.in_steps(self.recipe.data.global_batch, epoch_steps)
        if self.origin and last <= self.first_step:
            problem = f"{self.origin.run} has done {self.first_step} steps, and length {self.recipe.length} ends at"
            raise ConfigError(f"{problem} step {last}: give the stage a length, which counts from there")
        last = min(last, self.first_step + max_steps) if max_steps else last
        if done > last:
            ends = f"--max_steps {max_steps}" if max_steps else f"length {self.recipe.length}"
            problem = f"{ends} lies behind: {self.path} has done {done} steps, and would end at {last}"
            raise ConfigError(f"{problem}; give more, or leave it out")
        return last


def check_place(path: Path) -> None:
    """Raises ConfigError if a run can't be written at `path`: the folder is not writable, or holds a broken link or
    another kind of file in the place of a run's. Ignoring a link to a missing disk would start the run anew."""
    for name in (*_FILES, *_FOLDERS):
        entry = path / name
        if entry.is_symlink() and not entry.exists():
            problem = f"{entry} is a link to {os.readlink(entry)}, which is not there"
            raise ConfigError(f"{problem}: bring that back, such as its disk, or remove the link")
        if entry.is_fifo() or (entry.exists() and entry.is_dir() != (name in _FOLDERS)):
            kind = "a folder" if entry.is_dir() else "a pipe or device" if entry.is_fifo() else "a file"
            wanted = "a folder" if name in _FOLDERS else "a file"
            raise ConfigError(f"{entry} is {kind} where a run has {wanted}: remove or rename it")
    if reason := why_not_writable(path / "config.yaml"):
        raise ConfigError(f"run folder {path} can't be made: {reason}; fix --run_dir")


def write_description(folder: RunFolder) -> None:
    """Write config.yaml, ds_config.json and environment.json, on rank 0; all ranks wait for them.
    Raises ConfigError on all ranks if one of them does not see the folder, StorageError if it can't be written to."""
    path, origin = folder.path, folder.origin
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:
            about: dict[str, Any] = {"run_id": str(folder.run_id), stages.CONFIG_NAME: folder.config_name}
            about |= {**({stages.ORIGIN: vars(origin)} if origin else {}), **_describe_environment(path)}
            for name in _FILES:
                discard_left_over(path / name)
            try:
                replace_file(path / "ds_config.json", json.dumps(folder.config.raw, indent=2) + "\n")
                replace_file(path / stages.ENVIRONMENT, json.dumps(about, indent=2) + "\n")
                replace_file(path / "config.yaml", dump_recipe(folder.recipe))  # last: it marks the folder as a run
            except OSError as error:
                raise unwritable(f"run folder {path}", error) from None
    with distributed.raise_on_all_ranks():
        end = time.monotonic() + 40  # NFS caches the absence of another machine's file for half a minute
        while not (path / "config.yaml").exists():
            if time.monotonic() > end:
                this_rank = f"rank {distributed.rank()} on {socket.gethostname()}"
                remedy = "put --run_dir on a disk that all machines share"
                raise ConfigError(f"{this_rank} does not see {path}, which rank 0 has made: {remedy}")
            time.sleep(0.2)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    by_package = {"python": platform.python_version(), "dino_ds": __version__}
    for package in _PACKAGES:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            by_package[package] = "absent"
    return by_package


def _describe_environment(run_dir: Path) -> dict[str, Any]:
    """The part of environment.json on versions, the machine and the run's "starts", of which this one is the last.
    "launcher" is "" for none, or an unknown one."""
    cuda = torch.cuda.is_available()
    this_start = {
        "time": beat.now(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "launcher": next((name for name, variable in _LAUNCHERS.items() if variable in os.environ), ""),
        "ranks": distributed.world_size(),
        stages.STARTED_IN: os.getcwd(),
    }
    try:
        starts = [
            {name: start.get(name, "") for name in this_start}
            for start in json.loads((run_dir / stages.ENVIRONMENT).read_text())["starts"][-200:]
            if isinstance(start, dict)
        ]
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        starts = []
    device = torch.cuda.get_device_name() if cuda else "cpu"
    about = {"versions": versions(), "platform": platform.platform(), "ranks": distributed.world_size()}
    about |= {"devices": device, "cuda": torch.version.cuda if cuda else None}
    return about | {"starts": [*starts, this_start]}
