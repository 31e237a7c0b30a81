"""Compares images and settings of a start with its checkpoint's; refuses a resume that would learn something else."""

from __future__ import annotations

import hashlib
import json
import socket
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dino_ds.basics.names import did_you_mean
from dino_ds.checkpoint.manifest import Manifest
from dino_ds.config.begun_with import changed_settings, check_settings, is_free, learned
from dino_ds.config.ds_values import DsConfig, offloads_optimizer, offloads_weights
from dino_ds.config.recipe import Recipe
from dino_ds.config.schema import flat_values, flatten
from dino_ds.data.base import Source
from dino_ds.data.image_set import ImageSet
from dino_ds.data.images import evenly_spaced_indices
from dino_ds.engine import distributed
from dino_ds.engine.schedules import Schedules
from dino_ds.errors import CheckpointError, ConfigError, DataError
from dino_ds.method.build import build_schedules
from dino_ds.run.environment import own_code, versions

IMAGES = "images"
"""The name of the images in --allow_change."""
_PROBES = 500
_OPTIMIZER = "optimizer.kind"


def read_allowed(keys: str, recipe: Recipe, config: DsConfig) -> set[str]:
    """The keys in --allow_change, perhaps with IMAGES. Raises ConfigError for an unknown key or one that is free."""
    known = {*_learned(recipe, config), IMAGES}
    allowed = {key.strip() for key in keys.split(",")}
    for key in sorted(allowed - known):
        free = is_free(key) and key in flat_values(recipe)
        reason = "it may change freely, leave it out" if free else "it is not a key of the recipe"
        raise ConfigError(f"--allow_change {key}: {reason}.{'' if free else did_you_mean(key, known)}")
    return allowed


def changed_since(saved: Manifest, recipe: Recipe, config: DsConfig, began_in: str | None = None) -> dict[str, str]:
    """The differences from a checkpoint's settings that change what is learned, in words by dotted name. Relative paths
    of the checkpoint start at the folder `began_in`."""
    before = flatten(saved.recipe) | {"gradient_clipping": saved.gradient_clipping}
    return changed_settings(before, _learned(recipe, config), began_in)


def check_changed(changed: dict[str, str], saved: Manifest, allowed: Collection[str]) -> None:
    """Raises CheckpointError, naming every difference of `changed_since`, where one is not allowed."""
    if _OPTIMIZER in changed:
        raise CheckpointError(
            f"{changed[_OPTIMIZER]} since step {saved.step}, whose moments are of no use to another optimizer: set "
            "it back, or start a new run from these weights with --model.init_from"
        )
    check_settings(changed, f"step {saved.step}", allowed)


def notes_on_changes(saved: Manifest, recipe: Recipe, config: DsConfig, began_in: str | None = None) -> list[str]:
    """Human-readable lines on what differs from the start that saved a checkpoint: settings, versions, how it runs."""
    old, new = saved.model_dump(), describe_settings(recipe, config)
    changed = changed_since(saved, recipe, config, began_in)
    notes = [f"changed since step {saved.step}, as allowed: {how}" for how in changed.values()]
    other = {name: now for name, now in new["versions"].items() if saved.versions.get(name, now) != now}
    notes += [f"{name} was {saved.versions[name]} until step {saved.step}, is {now}" for name, now in other.items()]
    was, now = _computed(old, new), _computed(new, old)
    return [f"resumed from {was} under {now}", *notes] if was != now else notes


def describe_settings(recipe: Recipe, config: DsConfig) -> dict[str, Any]:
    """The settings of this start, as fields of a checkpoint's Manifest."""
    zero = config.raw.get("zero_optimization", {})
    return {
        "stage": config.stage,
        "world_size": distributed.world_size(),
        "precision": config.precision,
        "offload": offloads_optimizer(zero) or offloads_weights(zero),
        "micro_batch": config.micro_batch,
        "accumulation": config.accumulation,
        "gradient_clipping": config.clipping,
        "recipe": recipe.model_dump(mode="json"),
        "config_hash": hashlib.sha256(json.dumps(_learned(recipe, config), sort_keys=True).encode()).hexdigest(),
        "versions": versions() | own_code(recipe),
    }


def _learned(recipe: Recipe, config: DsConfig) -> dict[str, Any]:
    """All settings that change what is learned, by dotted name."""
    return learned(recipe.model_dump(mode="json")) | {"gradient_clipping": config.clipping}


def _computed(this: dict[str, Any], other: dict[str, Any]) -> str:
    """How a run is computed, such as "ZeRO 2 bf16 on 2 ranks"; the batch's parts only where those of `other` differ."""
    ranks = f"{this['world_size']} rank{'s' if this['world_size'] > 1 else ''}"
    offload = ", offloaded" if this["offload"] else ""
    parts = [(run["micro_batch"], run["accumulation"]) for run in (this, other)]
    batch = f", micro-batch {parts[0][0]} x accumulation {parts[0][1]}" if parts[0] != parts[1] else ""
    return f"ZeRO {this['stage']} {this['precision']} on {ranks}{offload}{batch}"


class OtherImages:
    """Compares the images of this start with a checkpoint's; if `allowed`, they may change schedules."""

    def __init__(self, recipe: Recipe, now: ImageSet, allowed: bool) -> None:
        self._recipe, self._now, self._allowed = recipe, now, allowed

    def check(self, saved: Manifest) -> None:
        """Raises CheckpointError where lengths in epochs now have another number of steps, or the same images are
        balanced differently."""
        before, balance = ImageSet.from_json(saved.images), self._recipe.data.balance
        if self._allowed:
            return
        if before.groups and self._now.groups not in ("", before.groups) and before.names == self._now.names:
            raise CheckpointError(
                f"the {balance.partition(':')[0]} of data.balance {balance} are others than those since step "
                f"{saved.step}: bring them back, or accept with --allow_change {IMAGES}"
            )
        batch = self._recipe.data.global_batch
        old, new = (
            build_schedules(self._recipe, max(1, image_set.count // batch)) for image_set in (before, self._now)
        )
        if moved := _moved(old, new, saved.step):
            raise CheckpointError(
                f"images changed since step {saved.step} ({before.changes(self._now)}), and lengths in epochs with "
                f"them: {moved}; accept with --allow_change {IMAGES}, or bring the images back"
            )

    def notes(self, saved: Manifest) -> list[str]:
        """Human-readable lines on the images that have changed."""
        changes = ImageSet.from_json(saved.images).changes(self._now)
        return [f"images changed since step {saved.step}: {changes}"] if changes else []


def _moved(old: Schedules, new: Schedules, step: int) -> str:
    """The differences between the schedules from `step` on, in words, or "" without any."""
    last = max(old.steps, new.steps, step + 1)
    lengths = ("warmup_steps", "teacher_temp_tread_steps", "freeze_steps", "freeze_backbone_steps")
    ends = [getattr(schedules, name) for schedules in (old, new) for name in lengths]
    edges = {edge for end in ends for edge in (end - 1, end)}
    places = sorted({*range(step, last, max(1, (last - step) // _PROBES)), *(e for e in edges if step <= e < last)})
    first = next((probe for probe in places if old.at(probe) != new.at(probe)), None)
    parts = [f"length {old.steps} -> {new.steps} steps"] if old.steps != new.steps else []
    return "; ".join(parts + ([] if first is None else [f"schedules differ from step {first} on"]))


def _check_same_images(source: Source) -> None:
    """Raises DataError, on all ranks, where ranks differ in the number of images or in some of their names.

    Such ranks would train on different data and wait for each other forever.
    """
    names = "".join(Path(source.name(i)).name for i in evenly_spaced_indices(len(source), 1000))
    counts = distributed.gather_objects((len(source), zlib.crc32(names.encode()), socket.gethostname()))
    for rank, (count, names_of_rank, host) in enumerate(counts):
        if (count, names_of_rank) != counts[0][:2]:
            raise DataError(
                f"rank 0 on {counts[0][2]} finds {counts[0][0]} images, rank {rank} on {host} {count}, other ones: "
                "data.root must hold the same files on all machines",
                said_by_me=distributed.rank() == 0,
            )


def describe_images(source: Source, root: str | None) -> ImageSet:
    """Describe all images, on rank 0 for all ranks. Raises DataError where a rank has other images."""
    _check_same_images(source)
    mine = ImageSet.of(source, root) if distributed.rank() == 0 else None
    images: ImageSet = distributed.gather_objects(mine)[0]
    return images
