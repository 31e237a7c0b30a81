"""EMA teachers from their specs: the run's product, and further ones with a momentum of their own."""

from __future__ import annotations

import torch

from dino_ds.config.crops import teacher_sizes
from dino_ds.engine.device import DTYPES, device
from dino_ds.method.ema import EmaTeacher, TeacherOptions
from dino_ds.method.networks import build_meta
from dino_ds.method.parts import NetworkParts, TeacherParts
from dino_ds.method.specs.base import TeacherSpec
from dino_ds.models.network import Network


def build_network(spec: TeacherSpec, parts: NetworkParts) -> Network:
    """A copy of the student, with the outputs that terms read of this teacher, on the meta device."""
    outputs = parts.objective.teacher_features(spec.name)
    return build_meta(parts.recipe, parts.performance, parts.objective.queries, outputs)


def build_teacher(spec: TeacherSpec, parts: TeacherParts) -> EmaTeacher:
    """The teacher, equal to the student; every rank must call it."""
    recipe, config, engine = parts.recipe, parts.config, parts.engine
    network = build_network(spec, parts.for_network).to_empty(device=device())
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
