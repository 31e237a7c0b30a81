"""Finds images for commands that examine a model, by their options or by the model's run, and the value range."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dino_ds.config.begun_with import own_recipe
from dino_ds.config.fields import IMAGE_FORMS
from dino_ds.config.loading import recorded_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import holds_run, home_of
from dino_ds.data.base import Source, UnreadableImage
from dino_ds.data.decode import MAX_PIXELS, open_image
from dino_ds.data.find_range import find_misfits, look_at_values
from dino_ds.data.images import ValueRange, evenly_spaced_indices
from dino_ds.data.sources import build_source, recipe_images
from dino_ds.data.tiff import note_stacks
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, UserError
from dino_ds.weights.load import Backbone

_LOOKED_AT = 16
"""Images of a run whose sizes are looked at."""


def recipe_of(model: str, source: str | None, root: str | None) -> Recipe | None:
    """The recipe of the run that `model` is or is a checkpoint of; None without a run, or if options name images. Its
    relative paths are looked for first in the folder where the run was started."""
    home = home_of(model)
    if source is not None or root is not None or not home.is_run:
        return None
    recipe = own_recipe(home.folder, (), notes := list[str](), "--root")
    if distributed.rank() == 0:
        for note in notes:
            print(f"dino_ds: note: {note}", file=sys.stderr, flush=True)
    return recipe


def find_images(model: str, source: str | None, root: str | None) -> Source:
    """The images that the options name, else the training images of the run `model`. Raises ConfigError,
    DataError."""
    if recipe := recipe_of(model, source, root):
        if recipe.data.mixture:
            return recipe_images(recipe.data)
        source, root = recipe.data.source, recipe.data.root
    if source is None and root is None:
        file = home_of(model).folder / "config.yaml"
        lost = f"{file}, which names the run's images, is missing or no file: " if holds_run(file.parent) else ""
        raise ConfigError(f"{lost}name images, --root PLACE ({IMAGE_FORMS}), or --source photos")
    return build_source(source or "folder", root, "train", False)


def crop_pct_of(model: str, side: int) -> float | None:
    """timm's crop_pct for most images of the run `model`, as evaluations at `side` pixels cut them; None without a run,
    or where its images are not on this machine or of the user's own source."""
    home = home_of(model)
    try:
        data = recorded_recipe(home.folder / "config.yaml").data if home.is_run else None
        if data is None or ":" in f"{data.source} {data.place}":
            return None
        source = find_images(model, None, None)
        images = [open_image(source, i, MAX_PIXELS) for i in evenly_spaced_indices(len(source), _LOOKED_AT)]
    except (UserError, UnreadableImage, OSError):
        return None
    uncut = sum(min(image.width, image.height) <= side for image in images)
    return 1.0 if 2 * uncut > len(images) else 0.875


def range_for(backbone: Backbone, sources: Sequence[Source]) -> tuple[ValueRange | None, list[str]]:
    """The model's value range for images of over 8 bits, else one found in these images; and notes for the user. Every
    rank calls it. Raises ConfigError for an unknown range, or if images have other channels than the model."""
    range_and_notes: tuple[ValueRange | None, list[str]] = (None, [])
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:
            wanted = len(backbone.normalization.mean)
            sample = look_at_values(sources, wanted)
            if sample.channels and wanted not in sample.channels:
                there = " or ".join(map(str, sorted(sample.channels)))
                raise ConfigError(
                    f"{backbone.source} takes images of {wanted} channels, and those looked at have {there}, such as "
                    f"{sources[0].name(0)}: give images of {wanted} channels, or a model that was trained on {there}"
                )
            chosen, words, remedy = backbone.value_range, "", "store them as the training images were"
            if chosen is None:
                chosen, words = sample.decide("the model has no range of its own, so make them images of 8 bits first")
                remedy = "store all images alike"
            notes = [f"{words}: the model has no range of its own"] if words else []
            notes += [f"WARNING: {text}" for text in find_misfits(sample.deep, chosen, remedy)]
            range_and_notes = chosen, notes + note_stacks(sample.stacks)
    return distributed.gather_objects(range_and_notes)[0]
