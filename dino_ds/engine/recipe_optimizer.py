"""The optimizer of a recipe in plain values: the engine itself knows no recipe."""

from __future__ import annotations

from dino_ds.config.sections import OptimizerSection
from dino_ds.engine.optim import OptimizerOptions


def optimizer_options(section: OptimizerSection) -> OptimizerOptions:
    """The options that a recipe's section `optimizer` gives the engine; the others come with the schedules."""
    return OptimizerOptions(
        section.layer_decay,
        section.patch_embed_lr,
        section.clip_by,
        section.kind,
        (section.beta1, section.beta2),
        section.eps,
        section.momentum,
        section.trust,
    )
