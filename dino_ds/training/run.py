"""Builds what a run trains with: the step of a recipe, and its images on the device."""

from __future__ import annotations

import torch

from dino_ds import distributed
from dino_ds.config.ds_config import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.costs.flops import tokens_of
from dino_ds.data.batches import batch_bytes
from dino_ds.data.loader import Position, build_loader
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.prefetcher import DevicePrefetcher
from dino_ds.data.sources import Source
from dino_ds.data.workers import check_shared_memory
from dino_ds.engine.device import DTYPES, device, use_deterministic_kernels
from dino_ds.engine.engine import Engine
from dino_ds.engine.placement import Placement
from dino_ds.models.attention import chosen_kernel
from dino_ds.objective.dino import DinoLoss
from dino_ds.teacher import Teacher
from dino_ds.training.build import build_network, build_schedules, build_zeros
from dino_ds.training.step import DinoStep


def attention_kernels(recipe: Recipe, config: DsConfig, where: torch.device) -> str:
    """Which kernel runs for each crop size, such as "sdpa: flash at 197 and 37 tokens"."""
    performance, arch, crops = config.performance, recipe.model.architecture(), recipe.crops
    if performance.attention != "sdpa":
        return performance.attention
    sizes = [crops.global_size, *([crops.local_size] if crops.num_local else [])]
    kernels: dict[str, list[str]] = {}
    for tokens in [tokens_of(arch, size) for size in sizes]:
        kernel = performance.attention_backend
        if kernel == "auto":
            kernel = chosen_kernel(arch.heads, arch.width // arch.heads, tokens, DTYPES[config.precision], where)
        kernels.setdefault(kernel, []).append(str(tokens))
    return "sdpa: " + ", ".join(f"{name} at {' and '.join(tokens)} tokens" for name, tokens in kernels.items())


def build_prefetcher(
    recipe: Recipe, source: Source, micro_batch: int, where: torch.device, start: Position
) -> DevicePrefetcher:
    """This rank's micro-batches on the device `where`, from `start` on; every rank calls it.

    Raises DataError where shared memory is too small for them.
    """
    data, channels, crops = recipe.data, recipe.model.in_chans, MultiCrop(**recipe.crops.model_dump())
    with distributed.raise_on_all_ranks():
        check_shared_memory(batch_bytes(crops, micro_batch, channels, data.augment, data.is_deep), data.workers)
    loader = build_loader(
        source,
        crops,
        recipe.seed,
        data.global_batch,
        micro_batch,
        distributed.rank(),
        distributed.world_size(),
        data.workers,
        start,
        augment=data.augment,
        max_pixels=data.max_pixels,
        channels=channels,
        device=where,
        value_range=data.known_range,
        # A third: the first restart and the error after it come before the monitor ends a rank that only waits.
        patience=recipe.hang_seconds / 3 or None,
    )
    return DevicePrefetcher(loader, where)


def build_step(recipe: Recipe, config: DsConfig, epoch_steps: int) -> DinoStep:
    """Student, teacher and objective of a recipe, new, on this process group; every rank must call it."""
    optimizer = recipe.optimizer
    if config.performance.deterministic:
        use_deterministic_kernels()
    network = build_network(recipe, config.performance, Placement(config))
    if config.performance.compile != "off":
        # Blocks, so that the engine finds plain modules; before it, so that its hooks stay outside.
        network.backbone.compile_blocks(config.performance.compile)
    engine = Engine(network, config, (optimizer.beta1, optimizer.beta2), optimizer.eps)
    network = build_zeros(recipe, config.performance, device())
    weights = sum(p.numel() for p in network.parameters())
    teacher = Teacher(
        network,
        engine.masters(),
        DTYPES[config.precision],
        keep_copy=config.keeps_teacher_copy(device().type == "cuda", weights),
        compiled=config.performance.compile,
    )
    objective = DinoLoss(
        recipe.head.prototypes, recipe.objective.student_temp, recipe.objective.center_momentum, engine.device
    )
    return DinoStep(engine, teacher, objective, build_schedules(recipe, epoch_steps))
