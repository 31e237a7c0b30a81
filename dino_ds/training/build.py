"""From a recipe to its network and its schedules: components take plain numbers, this page knows which."""

from __future__ import annotations

import torch

from dino_ds.config.ds_config import PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.errors import ConfigError
from dino_ds.models.head import DinoHead
from dino_ds.models.network import DinoNetwork
from dino_ds.models.vit import VisionTransformer
from dino_ds.models.weights import Placer, init_weights_in_pieces
from dino_ds.schedules import Schedules
from dino_ds.weights.start import InitialWeights, find_start


def build_network(recipe: Recipe, performance: PerformanceOptions, place: Placer = lambda module: None) -> DinoNetwork:
    """The student of a recipe, FP32, on the CPU; the same weights on every rank and whatever the levers.

    `place` gets each module as soon as its weights are drawn: what it moves elsewhere is never in memory as a whole.
    Raises ConfigError for batched stochastic depth in compiled blocks, CheckpointError for model.init_from that does
    not fit.
    """
    network = _build_meta(recipe, performance)
    if recipe.model.init_from is not None:
        place = InitialWeights(network, find_start(recipe.model), recipe.model.init_from, place)
        network.started_from = str(place)
    torch.manual_seed(recipe.seed)
    init_weights_in_pieces(network.backbone, place)
    init_weights_in_pieces(network.head, place)
    return network


def build_zeros(recipe: Recipe, performance: PerformanceOptions, device: torch.device) -> DinoNetwork:
    """A network as `build_network`'s, FP32, all zeros: for the teacher, which takes its weights from the student."""
    network = _build_meta(recipe, performance).to_empty(device=device)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    return network


def _build_meta(recipe: Recipe, performance: PerformanceOptions) -> DinoNetwork:
    if performance.compile != "off" and recipe.model.stochastic_depth == "batched":
        raise ConfigError(
            "dino_ds.compile does not go with model.stochastic_depth batched: each block keeps another number of crops "
            "and would be compiled anew; remove one of the two"
        )
    arch = recipe.model.architecture()
    model, head = recipe.model, recipe.head
    with torch.device("meta"):
        backbone = VisionTransformer(
            arch,
            recipe.crops.global_size,
            model.drop_path,
            model.pos_embed_interpolation,
            model.stochastic_depth,
            attention=performance.attention,
            attention_backend=performance.attention_backend,
            packed=performance.packed,
            cls_only_last_block=performance.cls_only_last_block,
        )
        whole_head = DinoHead(arch.width, head.hidden, head.bottleneck, head.prototypes, head.layers)
        return DinoNetwork(backbone, whole_head, freezes_backbone=model.freeze_backbone.value > 0)


def build_schedules(recipe: Recipe, epoch_steps: int) -> Schedules:
    """The recipe's lengths in optimizer steps; an epoch is `epoch_steps` of them."""
    batch = recipe.data.global_batch
    objective, optimizer = recipe.objective, recipe.optimizer
    warmup = objective.teacher_temp_warmup
    by_epoch = warmup.unit == "epochs" and warmup.value == int(warmup.value)
    return Schedules(
        steps=recipe.length.in_steps(batch, epoch_steps),
        lr=optimizer.lr * batch / 256,
        min_lr=optimizer.min_lr,
        warmup_steps=optimizer.warmup.in_steps(batch, epoch_steps),
        weight_decay=optimizer.weight_decay,
        weight_decay_end=optimizer.weight_decay_end,
        momentum=recipe.teacher.momentum,
        momentum_end=recipe.teacher.momentum_end,
        teacher_temp=objective.teacher_temp,
        warmup_teacher_temp=objective.warmup_teacher_temp,
        teacher_temp_treads=int(warmup.value) if by_epoch else warmup.in_steps(batch, epoch_steps),
        teacher_temp_tread_steps=epoch_steps if by_epoch else 1,
        freeze_steps=objective.freeze_prototypes.in_steps(batch, epoch_steps),
        freeze_backbone_steps=recipe.model.freeze_backbone.in_steps(batch, epoch_steps),
    )
