"""EMA teachers from their specs: the run's product, and further ones with a momentum of their own."""

from __future__ import annotations

import torch

from dino_ds.config.crops import teacher_sizes
from dino_ds.engine.device import DTYPES, device
from dino_ds.method.ema import EmaTeacher, TeacherOptions
from dino_ds.method.networks import build_meta
from dino_ds.method.parts import TeacherParts
from dino_ds.method.specs.base import TeacherSpec


def build_teacher(spec: TeacherSpec, parts: TeacherParts) -> EmaTeacher:
    """The teacher, equal to the student; every rank must call it."""
    recipe, config, engine = parts.recipe, parts.config, parts.engine
    objective = parts.objective
    network = build_meta(recipe, config.performance, objective.queries, objective.teacher_features(spec.name))
    network = network.to_empty(device=device())
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.zero_()  # the student's values take their place
    weights = sum(p.numel() for p in network.parameters())
    sees_crops = bool(teacher_sizes(recipe.groups, spec.name))
    options = TeacherOptions(
        DTYPES[config.precision],
        keep_copy=config.keeps_teacher_copy(device().type == "cuda", weights) and sees_crops,
        compiled=config.performance.compile,
        batch_norm=recipe.teacher.batch_norm,
        name=spec.name,
    )
    return EmaTeacher(network, engine.masters(), options, engine.buffers)
