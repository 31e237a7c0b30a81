"""Keeps the features of a run near those of the weights that it started from.

Source: distillation of features as in AM-RADIO (arXiv 2312.06709), with the starting weights as the teacher and without
a layer between student and loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.basics.ranges import rehearsing
from dino_ds.config.crops import GLOBAL, Masks
from dino_ds.data.normalization import Normalization
from dino_ds.engine import distributed
from dino_ds.engine.process import DTYPES
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.errors import ConfigError
from dino_ds.method.frozen import FixedTeacher, meta_network, place_frozen
from dino_ds.method.networks import TeacherParts, TermParts
from dino_ds.method.objective import Needs, Outputs, StudentOutputs, Term, TermLoss
from dino_ds.method.specs.ours import PRESERVE, START, PreserveSpec, StartSpec
from dino_ds.models.base import cls_of, patches_of
from dino_ds.weights.frozen import FrozenSource, find_frozen


class PreserveTerm(Term):
    """1 - cosine of CLS features, averaged with that of patch features if the backbone has these. FP32."""

    def __init__(self, has_patches: bool) -> None:
        self._features = (cls_of(GLOBAL), *([patches_of(GLOBAL)] if has_patches else []))
        self.needs = Needs(self._features, {START: self._features})

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> Sequence[Any]:
        return [teachers.get(START) for teachers in window]

    def loss(self, student: StudentOutputs, targets: Mapping[str, Tensor] | None, schedule: ScheduleValues) -> TermLoss:
        parts = [_distance(student[name], None if targets is None else targets[name]) for name in self._features]
        return TermLoss(torch.stack(parts).mean(), {})


def _distance(features: object, wanted: Tensor | None) -> Tensor:
    assert isinstance(features, Tensor)
    with torch.autocast(features.device.type, enabled=False):
        if wanted is None:  # every parameter must have a gradient: ZeRO 3 would repeat an old one
            return 0.0 * features.float().sum()
        return (1 - F.cosine_similarity(features.float(), wanted.float(), dim=-1)).mean()


class StartTeacher(FixedTeacher):
    """The frozen teacher with the weights of model.init_from."""

    term, key = PRESERVE, "model.init_from"


def build_preserve(spec: PreserveSpec, parts: TermParts) -> PreserveTerm:
    """Build the term that a spec describes."""
    return PreserveTerm(parts.recipe.model.spec().patch_width > 0)


def build_teacher(spec: StartSpec, parts: TeacherParts) -> StartTeacher:
    """Build the frozen teacher of the start; every rank must call this.

    Raises CheckpointError for weights that can't be used, ConfigError if they take another number of channels.
    """
    recipe, config = parts.recipe, parts.config
    ours, weights = Normalization.of(recipe), str(recipe.model.init_from)
    with distributed.raise_on_all_ranks():
        if rehearsing():
            side, how = recipe.crops.global_size, recipe.model.pos_embed_interpolation
            source = FrozenSource(weights, recipe.model.spec(), side, how, {}, {}, ours)
        else:
            source = find_frozen(weights, "objective.preserve_weight, model.init_from", recipe.model.heads)
            known, ours_in = source.spec.in_chans, recipe.model.in_chans
            if known != ours_in:
                why = f"is for images of {known} channels, and has no features of these of {ours_in} (model.in_chans)"
                raise ConfigError(f"{source.name} {why}: add --objective.preserve_weight 0")
        network = meta_network(source, config.performance, parts.objective.teacher_features(spec.name))
    about = {"source": weights, "digest": place_frozen(network, source, config)}
    return StartTeacher(network, DTYPES[config.precision], about, source.normalization, ours)
