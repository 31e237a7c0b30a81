"""Describes a run's environment for environment.json: versions, machine, and the command line of each start."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dino_ds import __version__
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import STARTED_IN
from dino_ds.engine import distributed
from dino_ds.health.beat import now
from dino_ds.method.specs.own import code_of

_PACKAGES = ("torch", "torchvision", "deepspeed", "timm", "numpy", "pillow")
_MOST_STARTS = 200
_LAUNCHERS = {"torchrun": "TORCHELASTIC_RUN_ID", "deepspeed": "CROSS_RANK"}
"""Launchers, and for each an environment variable of a rank that no other launcher sets."""


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


def own_code(recipe: Recipe) -> dict[str, str]:
    """Digests of the user's own modules that a recipe names, but not of the modules that these import."""
    digests = {}
    for module in [path.partition(":")[0] for _, path in code_of(recipe)]:
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and os.path.isfile(file):
            digests[f"the code of {module}"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    return digests


def describe_environment(run_dir: Path) -> dict[str, Any]:
    """The contents of environment.json on the machine and the starts; the last of its "starts" is this one."""
    cuda = torch.cuda.is_available()
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "ranks": distributed.world_size(),
        "devices": torch.cuda.get_device_name() if cuda else "cpu",
        "cuda": torch.version.cuda if cuda else None,
        "starts": [*read_starts(run_dir), describe_start()],
    }


def describe_start() -> dict[str, Any]:
    """Describe this start of a run; "launcher" is "" without a launcher, or for an unknown one."""
    return {
        "time": now(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "launcher": next((name for name, variable in _LAUNCHERS.items() if variable in os.environ), ""),
        "ranks": distributed.world_size(),
        STARTED_IN: os.getcwd(),
    }


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """The newest earlier starts of the run in this folder."""
    try:
        starts = json.loads((run_dir / "environment.json").read_text())["starts"]
        return [
            {name: start.get(name, "") for name in ("time", "command", "launcher", "ranks", STARTED_IN)}
            for start in starts[-_MOST_STARTS:]
            if isinstance(start, dict)
        ]
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return []
