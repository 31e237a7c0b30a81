"""Builds a recipe's network, for student and teachers, on the meta device, and its optimizer options. Defines the
inputs from which specs build loss terms and teachers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dino_ds.config import crops, sections
from dino_ds.config.ds_schema import DsConfig, PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.engine.engine import Engine
from dino_ds.engine.optim import OptimizerOptions
from dino_ds.errors import ConfigError
from dino_ds.method.objective import Objective
from dino_ds.method.specs.own import heads_of
from dino_ds.models import batch_norm, foreign, fused, trained
from dino_ds.models.network import Network, Query
from dino_ds.models.prototypes import DinoHead, RegressionHead
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.weights.frozen import FrozenSource


def build_meta(
    recipe: Recipe, performance: PerformanceOptions, queries: Mapping[str, Query], outputs: Sequence[str]
) -> Network:
    """Build a recipe's network, without memory for weights, that returns the queries and features named in `outputs`.
    Weights outside the part that model.train names require no gradient. Raises ConfigError if the backbone has no such
    part, and for compiled blocks with batched stochastic depth that grows by block."""
    model = recipe.model
    grows = model.stochastic_depth == "batched" and model.drop_path_growth == "linear" and model.drop_path
    if performance.compile != "off" and grows:
        why = "dino_ds.compile does not go with model.stochastic_depth batched that grows"
        more = "each block keeps another number of crops and would be compiled anew"
        raise ConfigError(f"{why}: {more}; take model.drop_path_growth uniform, or remove one of the two")
    sizes, known = heads_of(recipe), BackboneOptions.__dataclass_fields__
    of_model = {name: value for name, value in model if name in known}
    options = BackboneOptions(mask_token=recipe.hides_patches, **of_model, **speed_options(performance))
    with torch.device("meta"):
        backbone = foreign.build_backbone(model.spec(), recipe.crops.global_size, options)
        for norm in batch_norm.batch_norms(backbone) if recipe.batch_norm == "frozen" else ():
            norm.frozen = True
        trained.keep_trained(backbone, model.trained)
        width, synced = backbone.spec.width, model.sync_batch_norm
        heads: dict[str, nn.Module] = {}
        for name, query in {query.head: query for query in queries.values()}.items():
            regresses = query.width > 0
            heads[name] = RegressionHead(width, query.width) if regresses else build_head(width, sizes[name], synced)
    asked = {name: query for name, query in queries.items() if name in outputs}
    features = [name for name in outputs if name not in queries]
    network = Network(backbone, heads, asked, features, freezes_backbone=model.freeze_backbone.value > 0)
    fused.fuse_as_in_training(network)
    return network


def speed_options(performance: PerformanceOptions) -> dict[str, Any]:
    """The options of a ds config that change only a backbone's speed, by name."""
    return {name: value for name, value in vars(performance).items() if name in BackboneOptions.__dataclass_fields__}


def build_head(width: int, head: sections.HeadSection, sync_batch_norm: bool = True) -> DinoHead:
    built = DinoHead(width, head.hidden, head.bottleneck, head.prototypes, head.layers, head.learned_lengths)
    built = built.free_prototypes() if head.free_prototypes else built
    return built.add_batch_norm(sync_batch_norm) if head.batch_norm else built


def optimizer_options(section: sections.OptimizerSection) -> OptimizerOptions:
    """The engine's options from a recipe's section `optimizer`; its other keys reach the engine by the schedules."""
    same = {name: value for name, value in section if name in OptimizerOptions.__dataclass_fields__}
    return OptimizerOptions(betas=(section.beta1, section.beta2), **same)


@dataclass(frozen=True)
class TermParts:
    """Inputs of a loss term: the recipe, the device of its statistics, and the file of the frozen teacher."""

    recipe: Recipe
    device: torch.device
    source: FrozenSource | None = None

    @property
    def taught_crops(self) -> int:
        """The number of crops of an image that the teacher of the targets sees."""
        return len(crops.teacher_sizes(self.recipe.groups, self.recipe.teacher.taught_by))


@dataclass(frozen=True)
class TeacherParts:
    """Inputs of a teacher: the student's engine, the objective, whose terms read the teacher's outputs, and the EMA
    teacher's network (None while that teacher is built)."""

    recipe: Recipe
    config: DsConfig
    engine: Engine
    objective: Objective
    source: FrozenSource | None = None
    ema: Network | None = None
