"""The recipe of the run in a folder, for a start that continues it from any working folder. No torch here."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from dino_ds.config.begun_with import read_environment
from dino_ds.config.flat import named_values, path_keys, split_place
from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.errors import ConfigError

STARTED_IN = "folder"
"""The key of a start in environment.json with the folder in which it was made."""


def own_recipe(run_dir: Path, given: Collection[str], notes: list[str], flag: str = "--data.root") -> Recipe:
    """The recipe of the run in `run_dir`, whose relative paths begin in the folder in which that was started.

    given: keys that another value takes the place of; flag: the option that names other images. `notes` gets a line
    for each path that is so found elsewhere.
    Raises ConfigError for a file that is not a recipe, and for images that are in neither folder.
    """
    recipe = load_recipe(str(run_dir / "config.yaml"), {})
    folder = started_in(run_dir)
    moved = {}
    for key, value in named_values(recipe):
        if key not in path_keys() or key in given or value is None:
            continue
        before, value = split_place(value)
        if not value or os.path.isabs(os.path.expanduser(value)):
            continue
        there = os.path.join(folder or "", value)
        if folder is not None and not os.path.samefile(folder, ".") and _is_there(there):
            moved[key] = before + there
            notes.append(f"{key} {value} is {there}: {run_dir} was started in {folder}")
        elif key == "data.root" and not recipe.data.download and ":" not in recipe.data.source and not _is_there(value):
            places = f"{folder}, where it was started, nor in {os.getcwd()}" if folder else os.getcwd()
            raise ConfigError(
                f"{run_dir} was trained on data.root {value}, which is not in {places}: name it with {flag}"
            )
    return change_recipe(recipe, moved) if moved else recipe


def started_in(run_dir: Path) -> str | None:
    """The working folder of the run's newest start, or None if it is gone or not written down."""
    try:
        folder = read_environment(run_dir, "starts")[-1][STARTED_IN]
    except (LookupError, TypeError):
        return None
    return folder if isinstance(folder, str) and os.path.isdir(folder) else None


def _is_there(path: str) -> bool:
    """Whether a file or a folder is at `path`, at the beginning of a pattern, or before the name of a dataset."""
    path = path.partition(":/")[0]
    plain = re.split(r"[*?\[{]", path)[0]
    return os.path.lexists(path) or (plain != path and os.path.isdir(os.path.dirname(plain) or "."))
