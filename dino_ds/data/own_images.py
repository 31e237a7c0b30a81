"""Adapts a recipe written for other images to the user's own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection

from dino_ds.basics.text_file import is_url
from dino_ds.config.evaluation import BENCHMARKS
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.data.formats import EXTENSIONS, split_part
from dino_ds.data.root import ENDINGS

_LOOKED_AT = 2000
"""Files of a folder tree, at most, that are looked at to find an image."""
_SETS = {
    "cifar10": "cifar-10-",
    "cifar100": "cifar-100-",
    "stl10": "stl10_binary",
    "imagenette": "imagenette2",
    "food101": "food-101",
    "flowers102": "flowers-102",
    "pets": "oxford-iiit-pet",
    "eurosat": "eurosat",
}
"""How the name of each torchvision dataset's folder or archive begins."""
_WITHOUT_LABELS = ("statistics", *BENCHMARKS)
"""Evaluations that need no labeled test images."""


def with_own_images(recipe: Recipe, keys: Collection[str], notes: list[str]) -> Recipe:
    """Adapt `recipe` if it names the user's own images: set data.source folder, and leave out evaluations that need
    labeled test images, unless eval.root names such images.

    keys: the keys given on the command line, which are never changed. `notes` gets a line for each change.
    """
    changes, data, settings = dict[str, str](), recipe.data, recipe.eval
    root = data.root
    asked = "data.source" not in keys and not data.own_files
    if asked and (data.mixture or (root is not None and _holds_images(root, data.source))):
        changes["data.source"] = "folder"
        images = "data.mixture" if data.mixture else f"data.root {root}"
        notes.append(f"{images} names images: data.source is folder, not {data.source} as in the recipe")
    has_own_images = changes or (data.own_files and {"data.root", "data.source", "data.mixture"} & set(keys))
    if has_own_images and settings.root is None and settings.evals != "auto" and "eval.evals" not in keys:
        kept = [name for name in settings.evals if name in _WITHOUT_LABELS]
        if left_out := [name for name in settings.evals if name not in kept]:
            changes["eval.evals"] = ",".join(kept) or "auto"
            notes.append(
                f"the recipe's eval.evals {', '.join(left_out)} are left out: they need labeled test images "
                "(--eval.root FOLDER)"
            )
    return change_recipe(recipe, changes) if changes else recipe


def _holds_images(root: str, source: str) -> bool:
    """Whether `root` has image files other than those of torchvision's dataset `source`."""
    path, _ = split_part(os.path.expanduser(root))
    if source == "photos" or is_url(root):
        return True  # the package's photographs have no root
    if not os.path.isdir(path):
        return path.lower().endswith(ENDINGS)
    try:
        if any(name.startswith(_SETS[source]) for name in os.listdir(path)):
            return False
    except OSError:
        return False  # opening the source reports why
    names = (name for _, _, files in os.walk(path) for name in files)
    return any(name.lower().endswith((*EXTENSIONS, *ENDINGS)) for name in itertools.islice(names, _LOOKED_AT))
