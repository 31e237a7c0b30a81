"""The run folder of a start that names none: runs/RECIPE, or runs/RECIPE-2, ... where that holds a run. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from dino_ds.config.stages import begun_stages, holds_run
from dino_ds.errors import ConfigError


def default_folder(name: str, resumes: bool, environment: Mapping[str, str]) -> tuple[str, str]:
    """The folder of recipe `name`, and a line that says so where there are several, else "".

    A new run gets the number after the newest one's; a start that `resumes` the newest one itself. All ranks of one
    machine see the same folders until the run begins. Those of several machines might not (a network disk's cache):
    there the first name alone is taken. Raises ConfigError where another one would be resumed there.
    """
    first = os.path.join("runs", name)
    numbers = sorted(_numbers(first))
    if not numbers:
        return first, ""
    last = numbers[-1]
    newest = first if last == 1 else f"{first}-{last}"
    if _several_machines(environment):
        if resumes and last > 1:
            several = f"there are {len(numbers)} runs of {name}"
            raise ConfigError(f"{several}: on several machines name the one to resume, --run_dir {newest}")
        return first, ""
    if resumes:
        return newest, f"run folder {newest}, the newest of {len(numbers)} of {name}" if len(numbers) > 1 else ""
    free = f"{first}-{last + 1}"
    return free, f"run folder {free}: {newest} holds a run, which --resume --run_dir {newest} would continue"


def _numbers(first: str) -> list[int]:
    """Numbers of the folders of this name that hold a run or stages of training, 1 for the one without a number."""
    path = Path(first)
    pattern = re.escape(path.name) + r"(?:-([1-9][0-9]{0,8}))?"
    found = [(folder, re.fullmatch(pattern, folder.name)) for folder in path.parent.glob("*")]
    taken = [match for folder, match in found if match and (holds_run(folder) or begun_stages(folder))]
    return [int(match[1] or 1) for match in taken if match[1] != "1"]


def _several_machines(environment: Mapping[str, str]) -> bool:
    """Whether the ranks of this start are on more than one machine, as far as their launcher says."""
    here = environment.get("LOCAL_SIZE") or environment.get("LOCAL_WORLD_SIZE") or "1"
    return environment.get("WORLD_SIZE", "1") != here
