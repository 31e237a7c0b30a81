"""Whole training jobs, small enough for a test: a folder of 20 noise images, a ViT of two narrow blocks."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from dino_ds.config import ds_config, loading
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import Request, TrainOptions
from dino_ds.errors import UserError
from dino_ds.planning import start
from tests.ranks import run_on_ranks

REPOSITORY = Path(__file__).parent.parent.parent
TINY = {
    "data.global_batch": "8", "data.workers": "0", "crops.global_size": "32", "crops.local_size": "16",
    "crops.num_local": "2", "model.backbone": "vit_tiny_patch16_224", "model.patch_size": "8", "model.width": "32",
    "model.depth": "2", "model.heads": "2", "model.drop_path": "0.2", "head.prototypes": "48", "head.hidden": "48",
    "head.bottleneck": "16", "optimizer.lr": "0.02", "optimizer.warmup": "2 steps",
    "objective.freeze_prototypes": "1 epochs", "length": "12 steps", "log_every": "1", "save_every": "0 steps",
    "eval.every": "0 steps", "eval.pictures_every": "0 steps",
}  # fmt: skip
MASKED = {
    "crops.mask": "dinov2", "objective.ibot_weight": "1", "ibot_head.prototypes": "40", "ibot_head.hidden": "48",
    "ibot_head.bottleneck": "16",
}  # fmt: skip
"""A loss of masked patches too, with a head of their own that is small: the recipe's usual one takes seconds."""


def image_folder(root: Path, images: int = 20, classes: int = 0, seed: int = 0) -> Path:
    """Noise photographs of unequal sizes, in `classes` class folders or none."""
    generator = np.random.default_rng(seed)
    for i in range(images):
        folder = root / f"class{i % classes}" if classes else root
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (40 + i, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03d}.png")
    return root


@contextlib.contextmanager
def unpredicted() -> Iterator[None]:
    """In this block a start predicts no memory: the rehearsal takes longer than a short training job."""
    with mock.patch.object(start, "predict", return_value=None):
        yield


def train_tiny(
    root: Path,
    run_dir: Path,
    ds: str = "zero0_fp32.json",
    max_steps: int | None = None,
    resume: bool | int | str = False,
    changes: dict[str, str] | None = None,
    ds_changes: dict[str, str] | None = None,
    allow_change: str | None = None,
    ds_overrides: dict[str, str] | None = None,
    predicts: bool = False,
    recipe: Recipe | None = None,
    **more: Any,
) -> str | None:
    """One job in this process; returns the message of a UserError, "stopped" for exit code 75, else None."""
    from dino_ds.train import train

    overrides = {**TINY, "data.root": str(root), **(changes or {})}
    path = str(REPOSITORY / "ds_configs" / ds)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.nullcontext() if predicts else unpredicted():
        try:
            train(
                TrainOptions(
                    run_dir=str(run_dir), max_steps=max_steps, resume=resume, allow_change=allow_change, **more
                ),
                recipe=recipe or loading.load_recipe(None, overrides),
                ds=ds_config.load_ds_config(path, ds_changes or {}),
                ds_path=path,
                request=Request({"ds_config": path}) if ds_overrides is None else Request(ds=ds_overrides),
            )
        except UserError as error:
            return str(error)
        except SystemExit as stop:
            return "stopped" if stop.code == 75 else f"exit code {stop.code}"
    return None


def train_alone(*where: Any, **how: Any) -> str | None:
    (said,) = run_on_ranks(train_tiny, *where, **how, world=1)
    return said


def copy_until(step: int, run_dir: Path, copy: Path) -> Path:
    """A copy of a run as it stands if it dies after its save of `step`; lines of metrics may be of later steps."""
    shutil.copytree(run_dir, copy)
    for folder in (copy / "checkpoints").glob("step_*"):
        if folder.name > f"step_{step:08d}":
            shutil.rmtree(folder)
    return copy


def whole_tensors(run_dir: Path, step: int) -> dict[str, Tensor]:
    parts = (run_dir / f"checkpoints/step_{step:08d}").glob("whole_*.safetensors")
    return {name: tensor for part in parts for name, tensor in load_file(part).items()}


def read_manifest(run_dir: Path, step: int) -> dict[str, Any]:
    return json.loads((run_dir / f"checkpoints/step_{step:08d}/manifest.json").read_text())


def log_of(run_dir: Path) -> str:
    return (run_dir / "log.txt").read_text()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses_of(run_dir: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in read_metrics(run_dir) if "loss" in r]
