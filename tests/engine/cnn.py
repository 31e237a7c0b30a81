"""Small networks of timm's through a recipe and the real engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dino_ds.basics.seeds import sample_keys
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.data.feed import Batch
from dino_ds.engine import distributed
from dino_ds.engine.engine import Progress
from dino_ds.method.build import build_network, build_step
from dino_ds.method.step import TrainingStep
from tests.engine.harness import crops, ds_config, fp32_student
from tests.reference import copied

BATCH, SIZES = 8, (64, 64, 32, 32)
CNNS = {
    "resnet": ("resnet18", '{"channels": [8, 16, 16, 24], "layers": [1, 1, 1, 1], "zero_init_last": false}'),
    "convnext": ("convnext_atto", '{"depths": [1, 1, 2, 1], "dims": [8, 16, 16, 24], "ls_init_value": 0.5}'),
}


def foreign_recipe(name: str, arguments: str = "{}", **changes: str) -> Recipe:
    """Stochastic depth and clipping take part; Adam's epsilon is so large that it does not magnify roundings."""
    values = {
        "model__backbone": name, "model__arguments": arguments, "model__drop_path": "0.2",
        "data__global_batch": str(BATCH), "crops__global_size": "64", "crops__local_size": "32",
        "crops__num_local": "2", "head__prototypes": "64", "head__hidden": "48", "head__bottleneck": "16",
        "length": "20 steps", "objective__freeze_prototypes": "1 steps", "optimizer__warmup": "2 steps",
        "optimizer__lr": "0.05", "optimizer__eps": "1e-2", "teacher__momentum": "0.9", **changes,
    }  # fmt: skip
    return load_recipe("vitti16", {key.replace("__", "."): value for key, value in values.items()})


def cnn_recipe(kind: str, **changes: str) -> Recipe:
    return foreign_recipe(*CNNS[kind], **changes)


def images(indices: Tensor, sizes: tuple[int, ...] = SIZES) -> Batch:
    return Batch(crops(indices, sizes), sample_keys(0, 0, indices))


def build(recipe: Recipe, stage: int, precision: str = "fp32", accumulation: int = 1, **sections: Any) -> TrainingStep:
    config = ds_config(stage, precision, BATCH, accumulation, gradient_clipping=1.0, **sections)
    return build_step(recipe, config, 10)


def run_window(step: TrainingStep, window: int) -> tuple[Progress, float]:
    """One optimizer step on the same images whatever ranks and micro-batches are; its mean loss over them."""
    micro, world, rank = step.engine.config.micro_batch, distributed.world_size(), distributed.rank()
    starts = [window * BATCH + m * micro * world + rank * micro for m in range(step.engine.config.accumulation)]
    outs = [step.micro_batch(images(torch.arange(start, start + micro))) for start in starts]
    losses = torch.stack([out.loss for out in outs]).mean()
    return outs[-1].progress, float(distributed.sum_across_ranks(losses) / world)


class Trained(NamedTuple):
    """Losses by window, and by name the tensors of teacher (as saved), student and its buffers."""

    losses: list[float]
    teacher: dict[str, Tensor]
    student: dict[str, Tensor]
    buffers: dict[str, Tensor]


def train(recipe: Recipe, step: TrainingStep, first: int, count: int) -> Trained:
    results = [run_window(step, window) for window in range(first, first + count)]
    assert all(progress is Progress.STEPPED for progress, _ in results)
    return taken(recipe, step, [loss for _, loss in results])


def taken(recipe: Recipe, step: TrainingStep, losses: list[float]) -> Trained:
    student = fp32_student(step.engine, build_network(recipe, step.engine.config.performance))
    return Trained(
        losses,
        copied(step.teachers["ema"].state()),
        {name: tensor for name, tensor in student.items() if name not in step.engine.buffers()},
        copied(step.engine.buffers()),
    )
