"""The folder of one run: which recipe and ds config it has, on what it ran, and whether it may be written to."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dino_ds import distributed
from dino_ds.architectures import Architecture
from dino_ds.config import Recipe, dump_recipe
from dino_ds.ds_config import DsConfig
from dino_ds.errors import CheckpointError, ConfigError

# Recipe values that a resumed run may change: they do not change what is learned.
_FREE = (
    "log_every",
    "save_every",
    "keep_checkpoints",
    "max_bad_steps",
    "eval.every",
    "eval.root",
    "data.workers",
    "data.root",
    "data.download",
    "data.max_bad_fraction",
)
_PACKAGES = ("dino_ds", "torch", "torchvision", "deepspeed", "timm", "numpy", "pillow")


class RunFolder:
    """RUN/ with config.yaml, ds_config.json and environment.json; the log and the checkpoints lie beside them.

    Raises ConfigError if the folder holds a run and `resume` is False, or can't be written.
    """

    def __init__(self, path: Path, recipe: Recipe, config: DsConfig, resume: bool) -> None:
        self.path, self.recipe, self.config, self.resume = path, recipe, config, resume
        if not resume and (path / "config.yaml").exists():
            raise ConfigError(f"{path} already holds a run; add --resume to continue it, or give another --run_dir")
        if resume and not (path / "config.yaml").exists():
            raise CheckpointError(f"nothing to resume: {path} holds no run; start without --resume, or mend --run_dir")
        parent = next(p for p in (path, *path.absolute().parents) if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise ConfigError(
                f"run folder {path} can't be made: {parent} is no folder one may write to; mend --run_dir"
            )

    def write(self) -> None:
        """Rank 0 writes what the run is made of; all ranks wait for it.

        Raises ConfigError on all ranks if one of them does not see the folder.
        """
        distributed.barrier()
        if distributed.rank() == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "config.yaml").write_text(dump_recipe(self.recipe))
            (self.path / "ds_config.json").write_text(json.dumps(self.config.raw, indent=2) + "\n")
            (self.path / "environment.json").write_text(json.dumps(_environment(), indent=2) + "\n")
        distributed.barrier()
        with distributed.together():
            if not (self.path / "config.yaml").exists():
                raise ConfigError(
                    f"rank {distributed.rank()} does not see {self.path}, which rank 0 has made: "
                    "put --run_dir on a disk that all machines share"
                )

    def description(self) -> dict[str, Any]:
        """What a checkpoint says of the run it belongs to."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "world_size": distributed.world_size(),
            "stage": self.config.stage,
            "precision": self.config.precision,
            "gradient_clipping": self.config.clipping,
            "versions": versions(),
        }

    def check_same(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError, naming every difference, where a checkpoint can't continue under these settings."""
        mine = self.description()
        changed = [
            f"{key} was {state[key]}, is {mine[key]}"
            for key in ("world_size", "stage", "precision", "gradient_clipping")
            if state[key] != mine[key]
        ]
        old, new = _flatten(state["recipe"]), _flatten(mine["recipe"])
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key) and key not in _FREE:
                changed.append(f"{key} was {old.get(key)}, is {new.get(key)}")
        if changed:
            raise CheckpointError(
                f"the checkpoint in {self.path} is of other settings: {'; '.join(changed)}. "
                "Resume with the old ones, or start anew with another --run_dir"
            )

    def about_teacher(self, arch: Architecture, step: int) -> dict[str, Any]:
        """How teacher.safetensors was made and how timm builds the model for it."""
        name = self.recipe.model.backbone
        arguments = {**arch.timm_arguments(self.recipe.crops.global_size), "num_classes": 0}
        written = ", ".join(f"{key}={value}" for key, value in arguments.items())
        return {
            "load": f"model = timm.create_model({name!r}, {written}); "
            "model.load_state_dict(safetensors.torch.load_file('teacher.safetensors'))",
            "timm_name": name,
            "timm_arguments": arguments,
            "pos_embed_interpolation": self.recipe.model.pos_embed_interpolation,
            "step": step,
            "images": step * self.recipe.data.global_batch,
            "architecture": dataclasses.asdict(arch),
            "versions": versions(),
        }


def flat_values(recipe: Recipe) -> dict[str, Any]:
    """Dotted name -> plain value."""
    return _flatten(recipe.model_dump(mode="json"))


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def versions() -> dict[str, str]:
    """Of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            from dino_ds import __version__

            found[package] = __version__ if package == "dino_ds" else "absent"
    return found


def _environment() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "ranks": distributed.world_size(),
        "devices": torch.cuda.get_device_name() if cuda else "cpu",
        "cuda": torch.version.cuda if cuda else None,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
