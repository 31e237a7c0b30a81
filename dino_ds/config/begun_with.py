"""Reads the run that a start continues: its recipe, changes of its settings, and the run that its stage began with.

`dino_ds.data.image_set` compares the images. No torch.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dino_ds.basics.file_format import check_format
from dino_ds.basics.text_file import is_url, read_object
from dino_ds.config.fields import PATH
from dino_ds.config.loading import change_recipe, recorded_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.config.recipe_files import read_yaml
from dino_ds.config.schema import differences, flatten, named_values, options_of
from dino_ds.errors import CheckpointError, ConfigError

ORIGIN = "from"
"""The key of environment.json with the `Origin` of a stage."""
ENVIRONMENT = "environment.json"
"""Name of the file in a run folder with the run's id, its origin and its starts."""
CONFIG_NAME = "config"
"""The key of environment.json with the --config that the run was begun with, null without one."""
STARTED_IN = "folder"
"""The key of a start in environment.json with the folder in which it was made."""


@dataclass(frozen=True)
class Origin:
    """The run that a stage began with: its folder and id, the step of the checkpoint, and what was taken over."""

    run: str
    run_id: str
    step: int
    stage_start: str

    @property
    def first_step(self) -> int:
        """The step from which the stage counts."""
        return self.step if self.stage_start == "continue" else 0

    @staticmethod
    def read(run_dir: Path) -> Origin | None:
        """The origin of the run in this folder, or None if it began with no other run, or its environment.json can't be
        read."""
        recorded = read_environment(run_dir, ORIGIN)
        try:
            run, run_id, stage_start = (str(recorded[name]) for name in ("run", "run_id", "stage_start"))
            return Origin(run, run_id, int(recorded["step"]), stage_start)
        except (ValueError, KeyError, TypeError, OverflowError):
            return None

    @staticmethod
    def of_stage(run_dir: Path) -> Origin:
        """The origin of the stage in this folder. Raises CheckpointError where its environment.json does not say."""
        origin = Origin.read(run_dir)
        if origin is None:
            raise CheckpointError(
                f"{run_dir / ENVIRONMENT} is missing or damaged, and it alone says which run this stage began with: "
                "bring it back from a copy"
            )
        return origin

    def check_is(self, run: Path, step: int | None) -> None:
        """Raises CheckpointError if the run in the folder `run`, or `step` if it is given, is not that of this origin.

        A folder without a readable run id, such as one that is gone, is compared by its path.
        """
        run_id = read_run_id(run)
        is_same = str(run) == self.run if run_id is None else run_id == self.run_id
        if is_same and step in (None, self.step):
            return
        named = f"{run}{'' if step is None else f', step {step}'}"
        which = "which can't be read" if run_id is None else f"run {run_id}"
        raise CheckpointError(
            f"--from {named} ({which}), and this stage began with {self.run}, step {self.step} (run {self.run_id}): "
            "leave --from out to continue it, or begin another stage in another --run_dir"
        )


def read_environment(run_dir: Path, key: str) -> Any:
    """The value of a key of a folder's environment.json, or None if it is missing or can't be read."""
    try:
        return read_object(run_dir / ENVIRONMENT)[key]
    except (OSError, ValueError, KeyError):
        return None


def read_run_id(run_dir: Path) -> str | None:
    """The run id in environment.json of a folder, or None if it is missing or can't be read."""
    run_id = read_environment(run_dir, "run_id")
    return run_id if isinstance(run_id, str) and re.fullmatch("[0-9a-f]{1,64}", run_id) else None


def learned(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe that change what is learned, by dotted name."""
    return {key: value for key, value in flatten(dict(recipe)).items() if not is_free(key)}


def is_free(key: str) -> bool:
    """Whether a resumed run may change this key of the recipe, whose field says that it is not `learned`."""
    return not _fact(key, "learned", not key.startswith("eval."))


def _fact(key: str, name: str, default: Any) -> Any:
    """The fact `name` that a key of the recipe was declared with (see config.fields.option), or `default`."""
    declared = options_of(Recipe).get(key)
    return default if declared is None else declared.fact(name, default)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any], began_in: str | None = None) -> dict[str, str]:
    """The differences between two recipes that change what is learned: words such as "seed 0 -> 1", by dotted name.

    The same path in another spelling is no difference; relative paths of `before` start in the folder `began_in`.
    """
    old, new = learned(before), learned(now)
    changes = differences(old, new)
    return {key: how for key, how in changes.items() if not _is_same_place(key, old.get(key), new.get(key), began_in)}


def _is_same_place(key: str, old: Any, new: Any, began_in: str | None) -> bool:
    if key not in path_keys() or not isinstance(old, str) or not isinstance(new, str):
        return False
    (kind, there), (other, here) = split_place(old), split_place(new)
    if kind != other or not there or not here:
        return False
    there, here = (os.path.expanduser(path) for path in (there, here))
    if is_url(there) or is_url(here):
        return there == here
    return bool(_fact(key, "by_content", False)) or os.path.realpath(
        os.path.join(began_in or "", there)
    ) == os.path.realpath(here)


@functools.cache
def path_keys() -> tuple[str, ...]:
    """The dotted names of the keys whose values may be paths, as their types say."""
    options = options_of(Recipe).items()
    return tuple(name for name, option in options if any(PATH in limits for _, limits in option.members))


def split_place(value: str) -> tuple[str, str]:
    """A value of one of `path_keys` -> the prefix before its path, and the path; "" for a word that is no path."""
    kind, colon, file = value.partition(":")
    if kind == "clusters":
        return kind + colon, file
    return "", "" if value in ("none", "classes", "snapshot", "ema") else value


def check_settings(changed: Mapping[str, str], since: str, allowed: Collection[str]) -> None:
    """Raises CheckpointError that names every changed setting which is not allowed to change."""
    refused = {key: how for key, how in changed.items() if key not in allowed}
    if refused:
        raise CheckpointError(
            f"settings changed since {since}: {', '.join(refused.values())}; accept with --allow_change "
            f"{','.join(refused)}"
        )


def load_run_recipe(run_dir: Path) -> Recipe:
    """The recipe in a run folder's config.yaml. Raises ConfigError, and CheckpointError for a run of another format."""
    path = str(run_dir / "config.yaml")
    check_format(
        read_yaml(path).get("format"), path, "continue it with the dino_ds that began it, or begin another run"
    )
    return recorded_recipe(Path(path))


def own_recipe(run_dir: Path, replaced: Collection[str], notes: list[str], flag: str = "--data.root") -> Recipe:
    """The recipe of the run in `run_dir`; its relative paths start in the folder in which the run was started.

    replaced: keys whose values are not used; flag: the option that names other images. `notes` gets a line for each
    path that is taken from that folder instead of the current one.
    Raises ConfigError if config.yaml is not a recipe, or if the images are in neither folder.
    """
    recipe = load_run_recipe(run_dir)
    folder = started_in(run_dir)
    moved = {}
    for key, value in named_values(recipe):
        if key not in path_keys() or key in replaced or value is None:
            continue
        kind, value = split_place(value)
        if not value or is_url(value) or os.path.isabs(os.path.expanduser(value)):
            continue
        there = os.path.join(folder or "", value)
        if folder is not None and not os.path.samefile(folder, ".") and _is_there(there):
            moved[key] = kind + there
            notes.append(f"{key} {value} is {there}: {run_dir} was started in {folder}")
        elif key == "data.root" and not recipe.data.download and ":" not in recipe.data.source and not _is_there(value):
            places = f"{folder}, where it was started, nor in {os.getcwd()}" if folder else os.getcwd()
            raise ConfigError(
                f"{run_dir} was trained on data.root {value}, which is not in {places}: name it with {flag}"
            )
    return change_recipe(recipe, moved) if moved else recipe


def started_in(run_dir: Path) -> str | None:
    """The working folder of the run's newest start, or None if it is gone or not recorded."""
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
