"""A real training step of a recipe on crops in memory, to be timed, profiled or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dino_ds.basics.ranges import named_range
from dino_ds.config.ds_config import resolve_ds_config
from dino_ds.config.ds_values import DsConfig
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.step_costs import count_parameters
from dino_ds.data.feed import Position
from dino_ds.data.find_range import with_image_settings
from dino_ds.data.masks import synthetic_masks
from dino_ds.data.prefetcher import DevicePrefetcher
from dino_ds.data.sources import training_images
from dino_ds.engine import distributed
from dino_ds.engine.device import device, fp16_supported
from dino_ds.engine.process import init_distributed
from dino_ds.errors import ConfigError
from dino_ds.method.build import build_prefetcher, build_step
from dino_ds.method.step import Inputs, TrainingStep
from dino_ds.models.drop_path import sample_keys

EPOCH_STEPS = 1000
"""Steps of an epoch where no dataset gives them; only schedules depend on the number, no cost does."""

MEMORY_STEPS = 2
"""Steps after which the peak of memory is known: the second is the first with Adam's moments."""


@dataclass
class Trial:
    """A step and one micro-batch for it, on the device."""

    step: TrainingStep
    accumulation: int
    inputs: Inputs

    def run(self) -> Tensor:
        """One optimizer step; its loss (scalar on the device), the mean over the window. Does not synchronize."""
        if self.step.window > 1:
            self.step.prepare([self.inputs] * self.step.window)
        losses = [self.step.micro_batch(self.inputs).loss for _ in range(self.accumulation)]
        return torch.stack(losses).mean()


def run_on_data(trial: Trial, prefetcher: DevicePrefetcher, seed: int) -> None:
    """Take one optimizer step on real images; the wait for them is the part "data"."""
    step = trial.step
    for _ in range(trial.accumulation // step.window):
        with named_range("data"):
            batches = [next(prefetcher) for _ in range(step.window)]
        window = [Inputs(b.crops, sample_keys(seed, b.epoch, b.indices), b.masks) for b in batches]
        step.prepare(window)
        for inputs in window:
            step.micro_batch(inputs, prefetcher.prefetch)


def real_feed(recipe: Recipe, micro_batch: int) -> DevicePrefetcher:
    """The batches that `train` would take, from its first step on. Raises DataError."""
    source = training_images(recipe.data, recipe.eval.val_share)
    recipe, _ = with_image_settings(recipe, source)
    return build_prefetcher(recipe, source, micro_batch, device(), Position())


def begin(batch: int | None, threads: int, one_process: str = "") -> int:
    """Join the process group and return the images per process. `one_process` names a command for one process."""
    init_distributed()
    torch.set_num_threads(threads)
    if one_process and distributed.world_size() > 1:
        raise ConfigError(f"{one_process} measures in one process: start it without deepspeed or torchrun")
    return batch or (64 if torch.cuda.is_available() else 8)


def resolve(recipe: Recipe, ds: Mapping[str, Any], ds_path: str, batch: int) -> tuple[Recipe, DsConfig]:
    """Resolve recipe and ds config for `batch` images per process and optimizer step. Raises ConfigError."""
    ranks = distributed.world_size()
    recipe = change_recipe(recipe, {"data.global_batch": str(batch * ranks)})
    weights, images = count_parameters(recipe), batch * ranks
    try:
        config = resolve_ds_config(dict(ds), ds_path, images, ranks, fp16_supported(), weights)
    except ConfigError as error:
        raise ConfigError(f"{error} (the global batch is here --batch {batch} x ranks {ranks})") from None
    return recipe, config


def build_trial(recipe: Recipe, config: DsConfig) -> Trial:
    """The step that `train` would make, past the frozen prototypes and the warm-up; every rank must call it."""
    step = build_step(recipe, config, EPOCH_STEPS)
    step.restore(step.state(), max(step.schedules.warmup_steps, step.schedules.freeze_steps + 1))
    return Trial(step, config.accumulation, synthetic_inputs(recipe, config.micro_batch, step.engine.device))


def synthetic_inputs(recipe: Recipe, images: int, device: torch.device) -> Inputs:
    """A micro-batch of normal noise, different on each rank, with masks drawn as the recipe says."""
    first = distributed.rank() * images
    keys = sample_keys(recipe.seed, 0, torch.arange(first, first + images, device=device))
    generator = torch.Generator(device).manual_seed(recipe.seed * 1000 + distributed.rank())
    channels = recipe.model.in_chans
    crops = {
        group.name: [
            torch.randn(images, channels, group.size, group.size, device=device, generator=generator)
            for _ in range(group.count)
        ]
        for group in recipe.groups
    }
    return Inputs(crops, keys, synthetic_masks(recipe, images, device))
