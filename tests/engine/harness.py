"""Small real training runs: a tiny network, a DeepSpeed engine, a teacher, and crops made from sample indices."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from dino_ds.basics.seeds import crop_seed, sample_keys
from dino_ds.config.crops import dino_groups
from dino_ds.config.ds_config import resolve_ds_config
from dino_ds.config.ds_schema import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.data.feed import Batch
from dino_ds.data.multicrop import MaskOptions, draw_masks
from dino_ds.engine import distributed
from dino_ds.engine.engine import Engine, Progress
from dino_ds.engine.optim import ONE_RATE, OptimizerOptions
from dino_ds.engine.process import DTYPES
from dino_ds.engine.schedules import Schedules
from dino_ds.method.ema import EmaTeacher, TeacherOptions
from dino_ds.method.objective import Objective
from dino_ds.method.step import MicroStep, TrainingStep
from dino_ds.method.teacher import Teachers
from dino_ds.models.network import Network
from dino_ds.models.prototypes import DinoHead
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.trained import keep_values
from dino_ds.models.vit import VisionTransformer
from tests.reference import centered, copied, dino_network

PROTOTYPES = 40
OPTIMIZERS = {
    "adamw": ONE_RATE,
    "sgd": OptimizerOptions(kind="sgd"),
    "lars": OptimizerOptions(kind="lars", trust=0.5),  # so much that the few steps of a test move weights
    "muon": OptimizerOptions(kind="muon", eps=1e-2, momentum=0.95),  # its AdamW must not magnify roundings
}
GROUPS = dino_groups(32, (0.4, 1.0), 16, (0.1, 0.4), 2)


def tiny_network(drop_path: float = 0.2, prototypes: int = PROTOTYPES) -> Network:
    """Width 32, two blocks, patch 8, 32-pixel native crops; the same weights at every call."""
    torch.manual_seed(3)
    backbone = VisionTransformer(ViTSpec(8, 32, 2, 2), 32, BackboneOptions(drop_path=drop_path))
    return dino_network(backbone, DinoHead(32, 48, 16, prototypes, 3))


def tiny_schedules(freeze_steps: int = 0, **changes: Any) -> Schedules:
    settings: dict[str, Any] = {
        "steps": 20, "lr": 2e-3, "min_lr": 1e-5, "warmup_steps": 2, "weight_decay": 0.04, "weight_decay_end": 0.4,
        "momentum": 0.9, "momentum_end": 1.0, "teacher_temp": 0.07, "warmup_teacher_temp": 0.04,
        "teacher_temp_treads": 3, "teacher_temp_tread_steps": 1, "freeze_steps": freeze_steps,
    }  # fmt: skip
    return Schedules(**{**settings, **changes})


def ds_config(stage: int, precision: str, global_batch: int, accumulation: int = 1, **sections: Any) -> DsConfig:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100000, **sections.pop("zero", {})},
        **sections,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True, **config.pop(f"{precision}_settings", {})}
    return resolve_ds_config(config, "test.json", global_batch, distributed.world_size(), fp16_supported=True)


def crops(indices: Tensor, sizes: tuple[int, ...] = (32, 32, 16, 16)) -> dict[str, list[Tensor]]:
    """One crop (b, 3, size, size) a size, the first two global ones; each image a function of its index alone."""
    found = []
    for v, size in enumerate(sizes):
        rows = []
        for index in indices.tolist():
            generator = torch.Generator().manual_seed(1000 * index + v)
            rows.append(torch.randn(3, size, size, generator=generator))
        found.append(torch.stack(rows))
    return {"global": found[:2], "local": found[2:]}


def build_step(
    config: DsConfig,
    network: Network | None = None,
    schedules: Schedules | None = None,
    options: OptimizerOptions = ONE_RATE,
) -> TrainingStep:
    """A training step of the tiny network, built as a run builds its own; options of the network itself are its own."""
    network = network or tiny_network()
    prototypes = network.head.prototypes.weight.shape[0]
    copied = copy.deepcopy(network)
    for module in network.modules():
        keep_values(module)
    engine = Engine(network, config, options)
    teacher_options = TeacherOptions(DTYPES[config.precision], config.keeps_teacher_copy(on_gpu=False, weights=0))
    teacher = EmaTeacher(copied, engine.masters(), teacher_options)
    objective = Objective({"dino": centered(prototypes, student_temp=0.1, center_momentum=0.9)})
    teachers = Teachers({"ema": teacher}, GROUPS)
    return TrainingStep(engine, teachers, objective, schedules or tiny_schedules(), GROUPS)


def run_windows(
    step: TrainingStep, first: int, count: int, global_batch: int = 8, sizes: tuple[int, ...] = (32, 32, 16, 16)
) -> list[float]:
    """Train on windows [first, first + count) of the same global batches, whatever ranks and micro-batches are. Returns
    the loss of each window, averaged over micro-batches and ranks."""
    losses = []
    for window in range(first, first + count):
        parts = _micro_batches(step, window, global_batch)
        outs = [step.micro_batch(Batch(crops(indices, sizes), sample_keys(0, 0, indices))) for indices in parts]
        assert outs[-1].progress is not Progress.ACCUMULATING
        losses.append(mean_over_ranks([out.loss for out in outs]))
    return losses


def _micro_batches(step: TrainingStep, window: int, global_batch: int) -> list[Tensor]:
    """The indices of this rank's images in each micro-batch of a window."""
    micro, world, rank = step.engine.config.micro_batch, distributed.world_size(), distributed.rank()
    starts = [global_batch * window + micro * (m * world + rank) for m in range(step.engine.config.accumulation)]
    return [torch.arange(start, start + micro) for start in starts]


def inputs_of(recipe: Recipe, indices: Tensor) -> Batch:
    """The inputs that these images are in a run of the recipe: crops of each of its groups, masks, drop keys."""
    masks = draw_masks(recipe.groups, MaskOptions.of(recipe), [crop_seed(0, 0, index) for index in indices.tolist()])
    cut = crops(indices) | {"gram": crops(indices, (48, 48))["global"]}
    return Batch({group.name: cut[group.name] for group in recipe.groups}, sample_keys(0, 0, indices), masks)


def run_step(step: TrainingStep, recipe: Recipe, window: int, global_batch: int = 8) -> list[MicroStep]:
    """One optimizer step on the same images whatever ranks and micro-batches are; what each micro-batch gave."""
    batches = [inputs_of(recipe, indices) for indices in _micro_batches(step, window, global_batch)]
    if step.window > 1:
        step.prepare(batches)
    return [step.micro_batch(inputs) for inputs in batches]


def mean_over_ranks(values: list[Tensor]) -> float:
    return float(distributed.sum_across_ranks(torch.stack(values).mean()) / distributed.world_size())


def max_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((float((a[name].float() - b[name].float()).abs().max()) for name in a), default=0.0)


def fp32_student(engine: Engine, like: Network) -> dict[str, Tensor]:
    """The student's FP32 master weights, whole, by name: a teacher with momentum 0. `like` is overwritten."""
    return copied(EmaTeacher(like, engine.masters(), buffers=engine.buffers).state())
