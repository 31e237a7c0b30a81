"""What a micro-batch makes a GPU do: matrix products and convolutions, bytes moved beside them, operators.

Of ViTs by arithmetic; of other backbones counted on the meta device (`dino_ds.costs.measured`).
"""

from __future__ import annotations

from dataclasses import dataclass

from dino_ds.config.crops import EMA, student_sizes, teacher_sizes
from dino_ds.config.ds_config import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.costs.activations import element_bytes, recomputed_blocks
from dino_ds.costs.flops import recipe_step_flops, tokens_of, vit_of
from dino_ds.costs.objective import frozen_spec, groups_of_steps
from dino_ds.costs.parameters import recipe_sizes
from dino_ds.method.specs.distill import FROZEN
from dino_ds.method.specs.gram import GRAM
from dino_ds.models.specs.backbones import ViTSpec

ASSUMPTIONS = {
    "launches_per_block": 74,  # of student and teacher, forward and backward
    "launches_of_head_and_loss": 165,
    "bucket_launches_per_block": 26,  # DeepSpeed copies gradients into buckets, at stages 1 to 3
    "bucket_launches_per_tensor": 2,  # as the former, of a backbone that is not ours
    "optimizer_launches_per_block": 5,  # in a step, at stages 1 to 3
    "elementwise_bytes": 159,  # per token, block and unit of width: norms, activation, residuals and their gradients
    "compiled_share": 0.5,  # of those bytes, in compiled blocks
}


@dataclass(frozen=True)
class Again:
    """What activation checkpointing computes again in a micro-batch."""

    flops: float
    moved: float
    operators: float


@dataclass(frozen=True)
class Work:
    """Of a micro-batch: `flops` by part; bytes `moved` beside matrix products, without those of logits; `operators`;
    `in_step`: those of an optimizer step; `kept`: bytes of the inputs of recomputed segments."""

    flops: dict[str, int]
    moved: float
    operators: int
    in_step: int
    again: Again
    kept: float

    @staticmethod
    def of(recipe: Recipe, config: DsConfig) -> Work:
        """Raises NotEstimated."""
        return _of_vit(recipe, config) if isinstance(recipe.model.spec(), ViTSpec) else _counted(recipe, config)


def _of_vit(recipe: Recipe, config: DsConfig) -> Work:
    arch, images, in_engine = vit_of(recipe), config.micro_batch, config.stage > 0
    flops = recipe_step_flops(recipe, config.performance.cls_only_last_block, images=images)
    steps = groups_of_steps(recipe)
    tokens = sum(share * sum(tokens_of(arch, side) for side in student_sizes(groups)) for share, groups in steps)
    by_teacher = [
        (
            spec,
            sum(share * sum(tokens_of(spec, side) for side in teacher_sizes(groups, name)) for share, groups in steps),
        )
        for name, spec in ((EMA, arch), (GRAM, arch), (FROZEN, frozen_spec(recipe)))
        if spec is not None
    ]
    # In tokens of the student.
    seen = sum(n * spec.width * spec.depth for spec, n in by_teacher) / (arch.width * arch.depth)
    passes = sum(spec.depth for spec, n in by_teacher if n)
    moved = ASSUMPTIONS["elementwise_bytes"] * arch.width * arch.depth * element_bytes(config) / 2
    moved *= ASSUMPTIONS["compiled_share"] if config.performance.compile != "off" else 1.0
    per_block = ASSUMPTIONS["launches_per_block"] + in_engine * ASSUMPTIONS["bucket_launches_per_block"]
    segments = recomputed_blocks(recipe, config)
    share = segments / arch.depth
    again = Again(
        share * images * (flops["student_linear"] + flops["student_attention"]) / 3,
        share * images * moved * tokens / 3,
        # The student's forward pass is a fifth of the blocks' launches.
        segments * ASSUMPTIONS["launches_per_block"] / 5,
    )
    return Work(
        {name: images * n for name, n in flops.items()},
        images * moved * (tokens + seen / 3),
        # Those of a teacher's forward pass are a fifth of a block's.
        int(
            arch.depth * per_block
            + (passes - arch.depth) * ASSUMPTIONS["launches_per_block"] / 5
            + ASSUMPTIONS["launches_of_head_and_loss"]
        ),
        int(in_engine * arch.depth * ASSUMPTIONS["optimizer_launches_per_block"]),
        again,
        segments * images * tokens * arch.width * element_bytes(config),
    )


def _counted(recipe: Recipe, config: DsConfig) -> Work:
    """Convolutions and matrix products are among what moves memory here: of a CNN's many are bound by it."""
    from dino_ds.costs.measured import measure_student, measure_teacher

    images, in_engine, segments = config.micro_batch, config.stage > 0, recomputed_blocks(recipe, config)
    precision, depth = config.precision, max(1, recipe.model.spec().depth)
    student, teacher = measure_student(recipe, precision), measure_teacher(recipe, precision)
    compiled = ASSUMPTIONS["compiled_share"] if config.performance.compile != "off" else 1.0
    share, tensors = segments / depth, len(recipe_sizes(recipe))
    buckets = in_engine * tensors * ASSUMPTIONS["bucket_launches_per_tensor"]
    operators = student.operators + teacher.operators + ASSUMPTIONS["launches_of_head_and_loss"] + buckets
    return Work(
        {name: images * n for name, n in recipe_step_flops(recipe, False, precision).items()},
        images * compiled * (student.moved + teacher.moved),
        int(operators),
        int(in_engine * depth * ASSUMPTIONS["optimizer_launches_per_block"]),
        Again(
            share * images * student.forward_flops,
            share * images * compiled * student.forward_moved,
            share * student.forward_operators,
        ),
        share * images * student.inputs,
    )
