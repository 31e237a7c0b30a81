"""Compares a start with the run that it continues: the settings, and the run that a stage of training began with.

`dino_ds.data.image_set` compares the images. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dino_ds.basics.text_file import read_object
from dino_ds.config.flat import differences, flatten
from dino_ds.config.recipe import Recipe
from dino_ds.errors import CheckpointError

ORIGIN = "from"
"""The key of environment.json with the `Origin` of a stage."""
ENVIRONMENT = "environment.json"
"""Name of the file in a run folder with the run's id, its origin and its starts."""


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
        """The origin of the run in this folder, or None if it began with nothing or its environment.json can't be
        read."""
        found = read_environment(run_dir, ORIGIN)
        try:
            run, run_id, stage_start = (str(found[name]) for name in ("run", "run_id", "stage_start"))
            return Origin(run, run_id, int(found["step"]), stage_start)
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
        """Raises CheckpointError where the run in this folder, or its step if one is named, is another than this one.

        A folder that is gone may be the one that is recorded, under its name.
        """
        found = read_run_id(run)
        is_same = str(run) == self.run if found is None else found == self.run_id
        if is_same and step in (None, self.step):
            return
        named = f"{run}{'' if step is None else f', step {step}'}"
        what = "which can't be read" if found is None else f"run {found}"
        raise CheckpointError(
            f"--from {named} ({what}), and this stage began with {self.run}, step {self.step} (run {self.run_id}): "
            "leave --from out to continue it, or begin another stage in another --run_dir"
        )


def read_environment(run_dir: Path, key: str) -> Any:
    """The value of a key of a folder's environment.json, or None if it is not there or can't be read."""
    try:
        return read_object(run_dir / ENVIRONMENT)[key]
    except (OSError, ValueError, KeyError):
        return None


def read_run_id(run_dir: Path) -> str | None:
    """The run id in environment.json of a folder, or None if it is not there or can't be read."""
    found = read_environment(run_dir, "run_id")
    return found if isinstance(found, str) and re.fullmatch("[0-9a-f]{1,64}", found) else None


def learned(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe that change what is learned, by dotted name."""
    return {key: value for key, value in flatten(dict(recipe)).items() if not is_free(key)}


def is_free(key: str) -> bool:
    """Whether a resumed run may change this key of the recipe, whose field says that it is not `learned`."""
    section, _, leaf = key.rpartition(".")
    schema = Recipe.model_fields[section].annotation if section in Recipe.model_fields else Recipe
    field = getattr(schema, "model_fields", {}).get(leaf)
    facts = field.json_schema_extra if field is not None else None
    return not (facts if isinstance(facts, dict) else {}).get("learned", section != "eval")


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """The differences between two recipes in what changes learning: words such as "seed 0 -> 1", by dotted name."""
    return differences(learned(before), learned(now))


def check_settings(changed: Mapping[str, str], since: str, allowed: Collection[str]) -> None:
    """Raises CheckpointError that names every changed setting which is not allowed to change."""
    refused = {key: how for key, how in changed.items() if key not in allowed}
    if refused:
        raise CheckpointError(
            f"settings changed since {since}: {', '.join(refused.values())}; accept with --allow_change "
            f"{','.join(refused)}"
        )
