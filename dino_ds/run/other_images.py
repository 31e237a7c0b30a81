"""Compares a run's images with those of its checkpoint, and refuses to resume where the schedules would change."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path

from dino_ds.checkpoint.manifest import Manifest
from dino_ds.config.recipe import Recipe
from dino_ds.data.base import Source, UnreadableImage
from dino_ds.data.image_set import ImageSet
from dino_ds.data.images import evenly_spaced_indices
from dino_ds.engine import distributed
from dino_ds.engine.schedules import Schedules
from dino_ds.errors import CheckpointError, DataError
from dino_ds.method.build import build_schedules

IMAGES = "images"
"""The name of the images in --allow_change."""
_PROBES = 500
_COMPARED = 16


class OtherImages:
    """Compares the images of this start with a checkpoint's; with `allowed`, schedules may change with them."""

    def __init__(self, recipe: Recipe, now: ImageSet, allowed: bool) -> None:
        self._recipe, self._now, self._allowed = recipe, now, allowed

    def check(self, saved: Manifest) -> None:
        """Raises CheckpointError where lengths in epochs are now another number of steps, or the same images are
        balanced otherwise."""
        before, balance = ImageSet.from_json(saved.images), self._recipe.data.balance
        if before is None or self._allowed:
            return
        if before.groups and self._now.groups not in ("", before.groups) and before.names == self._now.names:
            raise CheckpointError(
                f"the {balance.partition(':')[0]} of data.balance {balance} are others than those since step "
                f"{saved.step}: bring them back, or accept with --allow_change {IMAGES}"
            )
        batch = self._recipe.data.global_batch
        old, new = (build_schedules(self._recipe, max(1, one.count // batch)) for one in (before, self._now))
        if moved := _moved(old, new, saved.step):
            raise CheckpointError(
                f"images changed since step {saved.step} ({before.changes(self._now)}), and lengths in epochs with "
                f"them: {moved}; accept with --allow_change {IMAGES}, or bring the images back"
            )

    def notes(self, saved: Manifest) -> list[str]:
        """Human-readable lines on the images that have changed."""
        before = ImageSet.from_json(saved.images)
        if before is None:
            return [f"whether the images are those of step {saved.step} is not known: its checkpoint does not say"]
        changes = before.changes(self._now)
        return [f"images changed since step {saved.step}: {changes}"] if changes else []


def _moved(old: Schedules, new: Schedules, step: int) -> str:
    """The differences of training from `step` on, in words; "" without any."""
    last = max(old.steps, new.steps, step + 1)
    edges = [
        edge
        for one in (old, new)
        for length in (
            one.warmup_steps,
            one.teacher_temp_treads * one.teacher_temp_tread_steps,
            one.freeze_steps,
            one.freeze_backbone_steps,
        )
        for edge in (length - 1, length)
        if step <= edge < last
    ]
    places = sorted({*range(step, last, max(1, (last - step) // _PROBES)), *edges})
    first = next((place for place in places if old.at(place) != new.at(place)), None)
    if old.steps == new.steps and first is None:
        return ""
    parts = [f"length {old.steps} -> {new.steps} steps"] if old.steps != new.steps else []
    if first is not None:
        before, after = dataclasses.asdict(old.at(first)), dataclasses.asdict(new.at(first))
        differ = [name for name in before if before[name] != after[name]]
        values = [f"{name.replace('_', ' ')} {before[name]:.4g} -> {after[name]:.4g}" for name in differ]
        parts.append(f"at step {first} {', '.join(values)}")
    return "; ".join(parts)


def _check_same_images(source: Source) -> None:
    """Raises DataError, on all ranks, where ranks differ in the number of images or in some of their names.

    Such ranks would train on different data and wait for each other for ever.
    """
    names = "".join(Path(source.name(i)).name for i in evenly_spaced_indices(len(source), 1000))
    found = distributed.gather_objects((len(source), zlib.crc32(names.encode())))
    for other, images in enumerate(found):
        if images != found[0]:
            raise DataError(
                f"rank 0 finds {found[0][0]} images, rank {other} {images[0]}, not the same ones: "
                "data.root must hold the same files on all machines"
            )


def same_images(source: Source, images: ImageSet) -> list[str]:
    """A note where all files seem to be copies of one: equal sizes, and equal bytes of those that are compared."""
    sizes = set(images.sample.values())
    read = getattr(source, "read", None)
    if images.count < 2 or len(sizes) > 1 or min(sizes) <= 0 or read is None:
        return []
    indices = evenly_spaced_indices(images.count, _COMPARED)
    try:
        if len({read(index) for index in indices}) > 1:
            return []
    except UnreadableImage:
        return []
    first, last = source.name(indices[0]), source.name(indices[-1])
    return [f"{len(indices)} images that were compared are the same file, {first} to {last}: is data.root right?"]


def describe_images(source: Source, root: str | None) -> ImageSet:
    """A description of all images, by rank 0, for all ranks. Raises DataError where a rank has other images."""
    _check_same_images(source)
    mine = ImageSet.of(source, root) if distributed.rank() == 0 else None
    found: ImageSet = distributed.gather_objects(mine)[0]
    return found
