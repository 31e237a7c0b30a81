"""Floating-point operations that one image costs in a training step.

A multiply-add is 2; matrix products and convolutions count, norms, activations and softmax don't, and nothing that is
computed twice (activation checkpointing, flash attention's backward pass), but for Sinkhorn-Knopp's passes over the
teacher's logits, which are part of the method: a CPU keeps some of its tiles from pass to pass instead. The backward
pass is twice the forward pass, but for the patch embedding, whose images need no gradient: once. Left out: KoLeo's
products of the images' features with each other, and the sum of the teacher's logits that moves the center, together
less than a thousandth. Of backbones other than ViTs the operators are counted (`dino_ds.costs.measured`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from dino_ds.config.crops import EMA, CropGroup, student_sizes, teacher_sizes
from dino_ds.config.recipe import Recipe
from dino_ds.costs.objective import HeadSizes, ObjectiveCosts, frozen_spec, groups_of_steps, last_tokens
from dino_ds.costs.parameters import mlp_widths
from dino_ds.errors import NotEstimated
from dino_ds.method.specs.gram import GRAM
from dino_ds.models.specs.backbones import ViTSpec


def vit_of(recipe: Recipe) -> ViTSpec:
    """The backbone that formulas are for. Raises NotEstimated for another kind."""
    spec = recipe.model.spec()
    if not isinstance(spec, ViTSpec):
        raise NotEstimated(f"model.backbone {recipe.model.backbone} is not one of our ViTs, which this is for")
    return spec


def recipe_step_flops(
    recipe: Recipe, cls_only_last_block: bool, precision: str = "fp32", images: int = 1
) -> dict[str, int]:
    """`step_flops` of a recipe, of several resolutions the mean over the steps; of a backbone that is not ours as one
    part of student and of teacher, counted in this precision, which changes nothing but what else is measured with it.

    images: of a micro-batch, for Gram anchoring over all of it. A frozen teacher of unknown architecture counts
    nothing. Raises NotEstimated.
    """
    spec, objective = recipe.model.spec(), ObjectiveCosts.of(recipe)
    if isinstance(spec, ViTSpec):
        return _of_all_resolutions(recipe, spec, cls_only_last_block, images)
    from dino_ds.costs.measured import measure_student, measure_teacher

    found: dict[str, int] = {}
    counted = {"student": measure_student(recipe, precision), "teacher": measure_teacher(recipe, precision)}
    for who, one in counted.items():
        found |= {f"{who}_backbone": one.flops, **_head_flops(who, spec.width, objective)}
    return found


def _of_all_resolutions(recipe: Recipe, arch: ViTSpec, cls_only: bool, images: int) -> dict[str, int]:
    mean: dict[str, float] = {}
    for share, groups in groups_of_steps(recipe):
        objective = ObjectiveCosts.of(recipe, groups)
        teacher = arch if recipe.teacher.source is None else frozen_spec(recipe)
        one = step_flops(arch, objective, groups, cls_only, teacher) | gram_flops(
            arch, objective, groups, images, cls_only
        )
        mean = {name: mean.get(name, 0.0) + share * n for name, n in one.items()}
    return {name: round(n) for name, n in mean.items()}


def step_flops(
    arch: ViTSpec,
    objective: ObjectiveCosts,
    crops: Sequence[CropGroup],
    cls_only_last_block: bool = False,
    teacher: ViTSpec | None = None,
) -> dict[str, int]:
    """Per image, by part; hidden patches by their expected number. teacher: who gives the targets, of a frozen one
    that is not known None.

    With `cls_only_last_block` what is done then, else the whole model's, the usual base of MFU.
    """
    if teacher is None and objective.teacher == EMA:
        teacher = arch
    found = _network_flops("student", arch, student_sizes(crops), objective, crops, cls_only_last_block)
    found |= _head_flops("student", arch.width, objective)
    if teacher is None:
        return found
    sizes = teacher_sizes(crops, objective.teacher)
    found |= _network_flops("teacher", teacher, sizes, objective, crops, cls_only_last_block)
    return found | _head_flops("teacher", teacher.width, objective)


def _network_flops(
    who: str, arch: ViTSpec, sizes: Sequence[int], objective: ObjectiveCosts, crops: Sequence[CropGroup], cls_only: bool
) -> dict[str, int]:
    # The backward pass costs twice the forward pass, that of the patch embedding once.
    times, patches = (3, objective.patches) if who == "student" else (1, objective.teacher_patches)
    kept = last_tokens(patches, crops, sizes, arch.patch_size) if cls_only else {}
    patch, linear, attention = zip(*(_forward(arch, side, kept) for side in sizes), strict=True)
    return {
        f"{who}_patch": min(times, 2) * sum(patch),
        f"{who}_linear": times * sum(linear),
        f"{who}_attention": times * sum(attention),
    }


def gram_flops(
    arch: ViTSpec, objective: ObjectiveCosts, crops: Sequence[CropGroup], images: int, cls_only: bool
) -> dict[str, int]:
    """Of Gram anchoring, per image: its teacher's pass, if it has one of its own, and the matrices of similarities
    of both, with one more product for the gradient."""
    gram = objective.gram
    if gram is None:
        return {}
    found = {"gram_matrices": 3 * 2 * gram.numbers(images) * arch.width // images}
    if sizes := teacher_sizes(crops, GRAM):
        kept = {side: 1 + (side // arch.patch_size) ** 2 for side in sizes} if cls_only else {}
        found["gram_teacher"] = sum(sum(_forward(arch, side, kept)) for side in sizes)
    return found


def _head_flops(who: str, width: int, objective: ObjectiveCosts) -> dict[str, int]:
    """Of the heads of the student, with their backward pass, or of the teacher."""
    times, passes = (3, 3) if who == "student" else (1, objective.teacher_passes)
    rows = [(getattr(one, f"{who}_rows"), one.sizes) for one in objective.cross_entropies]
    products = sum(n * 2 * head.bottleneck * head.prototypes for n, head in rows)
    heads = sum(n * mlp_flops(width, head) for n, head in rows)
    if who == "student":
        heads += sum(n * 2 * width * theirs for _, n, theirs in objective.regressions)
    return {
        f"{who}_head": round(times * heads),
        f"{who}_prototypes": round(passes * products),
    }


def mlp_flops(width: int, head: HeadSizes) -> int:
    """Of one feature vector to the head's bottleneck, forward."""
    sizes = [width, *[head.hidden] * (head.layers - 1), head.bottleneck]
    return 2 * sum(a * b for a, b in itertools.pairwise(sizes))


def tokens_of(arch: ViTSpec, side: int) -> int:
    """Tokens of a square crop of `side` pixels."""
    return (side // arch.patch_size) ** 2 + 1 + arch.registers


def ffn_weights(arch: ViTSpec) -> int:
    """Elements of the matrices of one block's MLP."""
    return arch.width * sum(mlp_widths(arch))


def _forward(arch: ViTSpec, side: int, kept: Mapping[int, int]) -> tuple[int, int, int]:
    """Of one crop: patch embedding, linear layers of all blocks, attention of all blocks.

    kept: by size the tokens for which the last block is computed to its end; keys and values are those of all tokens.
    """
    n, d = tokens_of(arch, side), arch.width
    patch = 2 * (side // arch.patch_size) ** 2 * arch.in_chans * arch.patch_size**2 * d
    linear, attention = 2 * n * (4 * d * d + ffn_weights(arch)), 4 * n * n * d
    last = kept.get(side, n)
    last_linear = 2 * n * 2 * d * d + 2 * last * (2 * d * d + ffn_weights(arch))
    return patch, (arch.depth - 1) * linear + last_linear, (arch.depth - 1) * attention + 4 * last * n * d
