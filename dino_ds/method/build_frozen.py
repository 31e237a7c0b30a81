"""Distillation: builds the frozen teacher of teacher.source, checks that it fits the recipe, and is a resumed run's.

Source: DINOv2 (arXiv 2304.07193), section 5: targets from the heads of a frozen larger teacher, for a student without
masks or stochastic depth, whose EMA is the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.checkpoint.manifest import Manifest
from dino_ds.config.crops import FROZEN, Masks, teacher_sizes
from dino_ds.config.recipe import Recipe
from dino_ds.data.normalization import Normalization
from dino_ds.engine import distributed
from dino_ds.engine.device import DTYPES
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.method.frozen import FrozenTeacher, meta_network, place_frozen
from dino_ds.method.objective import Measured, Needs, Objective, Outputs, StudentOutputs, Term
from dino_ds.method.parts import TeacherParts, TermParts
from dino_ds.method.specs.dino import HEAD, IBOT_HEAD
from dino_ds.method.specs.distill import FeatureSpec, FrozenSpec, regresses_features
from dino_ds.method.specs.of_recipe import heads_of
from dino_ds.method.teacher import Teachers
from dino_ds.models.base import cls_of, patches_of, resized_patches
from dino_ds.models.build import build_backbone
from dino_ds.models.network import Query
from dino_ds.weights.frozen import FrozenSource, find_frozen
from dino_ds.weights.normalization import notes_on_range


def find_teacher(recipe: Recipe) -> FrozenSource | None:
    """The weights of teacher.source, or None where the recipe has none. Every rank must call it.

    Raises CheckpointError for weights that can't be used, ConfigError if they don't fit the recipe.
    """
    if recipe.teacher.source is None:
        return None
    with distributed.raise_on_all_ranks():
        source = find_frozen(recipe.teacher.source)
        _check(source, recipe)
    return source


def _check(source: FrozenSource, recipe: Recipe) -> None:
    teacher, spec = source.name, source.spec
    source.check_channels(recipe.model.in_chans)
    with torch.device("meta"):
        backbone = build_backbone(spec, source.image_size)
    steps = [recipe.groups_of(resolution) for resolution in recipe.resolutions]
    for side in dict.fromkeys(side for groups in steps for side in teacher_sizes(groups, FROZEN)):
        try:
            backbone.check_image(side, side)
        except ConfigError as error:
            raise ConfigError(f"{teacher} can't take this run's crops: {error}; change crops.global_size") from None
    if recipe.teacher.distill != "features":
        _check_heads(source, recipe)
    elif recipe.objective.ibot_weight:
        for name, backbone_spec in ((teacher, spec), (f"model.backbone {recipe.model.backbone}", recipe.model.spec())):
            if not backbone_spec.patch_width:
                raise ConfigError(f"{name} gives no features of patches: set objective.ibot_weight 0")


def _check_heads(source: FrozenSource, recipe: Recipe) -> None:
    teacher, how, wanted = source.name, recipe.objective, heads_of(recipe)
    if not source.heads:
        why = next((f" ({note})" for note in source.notes if "head" in note), "")
        raise ConfigError(f"{teacher} has no heads{why}: set teacher.distill features, or give a run that has them")
    for name, ours in wanted.items():
        if name not in source.heads:
            weight = "objective.dino_weight 0" if name == HEAD else "objective.ibot_head shared"
            heads = ", ".join(source.heads)
            raise ConfigError(f"{teacher} has no {name}, only {heads}: set {weight}, or teacher.distill features")
        if (count := source.head(name).prototypes) != ours.prototypes:
            raise ConfigError(
                f"{name}.prototypes {ours.prototypes} must be those of {teacher}, {count}: set "
                f"--{name}.prototypes {count}, or teacher.distill features"
            )
    if how.ibot_weight and how.ibot_head == "shared" and IBOT_HEAD in source.heads:
        raise ConfigError(f"{teacher} has a head of its own for patches: set objective.ibot_head own")
    stride = recipe.model.spec().stride
    if how.ibot_weight and source.spec.stride != stride:
        raise ConfigError(
            f"{teacher} has patches of {source.spec.stride} pixels and the student of {stride}: the loss of masked "
            "patches needs equal ones; set objective.ibot_weight 0 and crops.mask none, or teacher.distill features"
        )


def build_features(spec: FeatureSpec, parts: TermParts) -> FeatureTerm:
    """The term that a spec describes, as wide as the teacher's features."""
    source = parts.source
    assert source is not None, "a distillation has a teacher"
    if spec.patches:
        return FeatureTerm(spec.name, patches_of(spec.group), "patch_regression", source.spec.patch_width)
    return FeatureTerm(spec.name, cls_of(spec.group), "cls_regression", source.spec.width)


def begin_centers(objective: Objective, source: FrozenSource) -> None:
    """Set the running means of the frozen teacher's logits to those that its training saved."""
    for name, statistic in objective.statistics.items():
        if name in source.centers and source.centers[name].shape == statistic.value.shape:
            statistic.load(source.centers[name])


def build_teacher(spec: FrozenSpec, parts: TeacherParts) -> FrozenTeacher:
    """The teacher on this process's device; every rank must call it.

    Raises CheckpointError for tensors that do not fit the network, and if ranks have read different tensors.
    """
    source, recipe, config = parts.source, parts.recipe, parts.config
    assert source is not None
    objective = parts.objective
    network = meta_network(source, config.performance, objective.teacher_features(spec.name), objective.queries)
    about = {"source": source.path, "digest": place_frozen(network, source, config)}
    teacher = FrozenTeacher(network, DTYPES[config.precision], about, source.normalization, Normalization.of(recipe))
    teacher.notes = [*source.notes, *notes_on_range(source.range, recipe.data.known_range)]
    return teacher


def describe_distillation(teachers: Teachers, recipe: Recipe) -> list[str]:
    """Lines of the log about the distillation: its teacher and targets; none without a frozen teacher."""
    teacher = teachers.get(FROZEN)
    if not isinstance(teacher, FrozenTeacher):
        return []
    how = "heads"
    if regresses_features(recipe):
        how = "features, through a linear layer each: head.*, objective.centering and temperatures have no effect"
    lines = []
    if regresses_features(recipe) and recipe.crops.num_local:
        lines = ["local crops are computed, and no loss compares their features: set crops.num_local 0"]
    return [*lines, "; ".join([f"distilled from {teacher.about['source']} by its {how}", *teacher.notes])]


def distilled(teachers: Teachers) -> dict[str, Any] | None:
    """The origin of a run's frozen teacher and the digest of its tensors, or None where it has none."""
    teacher = teachers.get(FROZEN)
    return teacher.about if isinstance(teacher, FrozenTeacher) else None


def check_same_teacher(saved: Manifest, now: dict[str, Any] | None) -> None:
    """Raise CheckpointError if a run would resume with another frozen teacher; only its path may differ."""
    earlier = saved.frozen_teacher
    if (earlier or {}).get("digest") == (now or {}).get("digest"):
        return
    was, now_source = ((about or {}).get("source") or "none" for about in (earlier, now))
    difference = (
        f"the same path {was} with other weights" if was == now_source else f"teacher.source {now_source}, not {was}"
    )
    raise CheckpointError(
        f"step {saved.step} was distilled from another teacher: this start has {difference}; give the one that the run "
        "began with, or start a new run (--run_dir)"
    )


class FeatureTerm(Term):
    """Regression to the teacher's features: 1 - cosine, mean over crops and patches. FP32.

    name: of the output of `head`, a linear layer from the student's `feature` ("cls/GROUP" or "patches/GROUP") to the
    `width` of the teacher's. Teacher's patches on another grid are resized to the student's grid.
    """

    def __init__(self, name: str, feature: str, head: str, width: int) -> None:
        self.needs = Needs((name,), {FROZEN: (feature,)}, {name: Query(head, feature, width)})
        self._name, self._feature = name, feature

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Tensor]:
        return [_tensor(teachers[FROZEN][self._feature]) for teachers in window]

    def loss(self, student: StudentOutputs, targets: Tensor, schedule: ScheduleValues) -> Measured:
        features = _tensor(student[self._name])
        with torch.autocast(features.device.type, enabled=False):
            wanted = targets.float()
            if wanted.ndim == 3:
                wanted = resized_patches(wanted, features.shape[1])
            return Measured((1 - F.cosine_similarity(features.float(), wanted, dim=-1)).mean(), {})


def _tensor(output: object) -> Tensor:
    assert isinstance(output, Tensor)
    return output
