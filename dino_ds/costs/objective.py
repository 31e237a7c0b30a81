"""What a recipe's loss terms compute, in plain numbers: which heads, and how many rows of logits each image has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dino_ds.config.crops import CropGroup, student_sizes, teacher_sizes
from dino_ds.config.recipe import Recipe
from dino_ds.config.sections import HeadSection

HEAD, IBOT_HEAD = "head", "ibot_head"
# As of objectives/centering.py.
SINKHORN_ITERATIONS = 3


@dataclass(frozen=True)
class HeadSizes:
    """A projection head: `layers` linear layers to `bottleneck`, then the prototypes."""

    prototypes: int
    hidden: int
    bottleneck: int
    layers: int
    learned_lengths: bool = False
    free_prototypes: bool = False
    batch_norm: bool = False

    @staticmethod
    def of(section: HeadSection) -> HeadSizes:
        return HeadSizes(**section.model_dump())


@dataclass(frozen=True)
class CrossEntropy:
    """One cross-entropy over prototypes. Rows are those of an image: `student_rows` of the student's and
    `teacher_rows` of the teacher's, `crops` of which belong together, as `dino_ds.models.prototypes.Comparison` says.
    """

    term: str
    head: str
    sizes: HeadSizes
    student_rows: float
    teacher_rows: float
    crops: int = 1
    student_crops: int = 1

    @property
    def groups(self) -> float:
        """What the tiles are cut by, of an image: itself, or each of its hidden patches."""
        return self.teacher_rows / self.crops


@dataclass(frozen=True)
class ObjectiveCosts:
    """The terms of a recipe. patches: the names of the crop groups whose patches are computed to the end; koleo_crops:
    of an image, 0 without the term; koleo_all: over all ranks' images."""

    cross_entropies: tuple[CrossEntropy, ...]
    sinkhorn: bool = False
    patches: tuple[str, ...] = ()
    koleo_crops: int = 0
    koleo_all: bool = False

    @staticmethod
    def of(recipe: Recipe) -> ObjectiveCosts:
        how, groups, found = recipe.objective, recipe.groups, list[CrossEntropy]()
        seen, heads = len(teacher_sizes(groups, recipe.taught_by)), not recipe.regresses_features
        if how.dino_weight and heads:
            rows = len(student_sizes(groups))
            found.append(CrossEntropy("dino", HEAD, HeadSizes.of(recipe.head), rows, seen, seen, rows))
        if how.ibot_weight and heads:
            own = how.ibot_head == "own"
            sizes = HeadSizes.of(recipe.ibot_head if own else recipe.head)
            hidden = hidden_patches(recipe)
            found.append(CrossEntropy("ibot", IBOT_HEAD if own else HEAD, sizes, hidden, hidden))
        patched = (group.name for group in groups if (group.masked if heads else recipe.taught_by in group.teachers))
        patches = tuple(patched) if how.ibot_weight else ()
        koleo = seen if how.koleo_weight else 0
        return ObjectiveCosts(
            tuple(found), how.centering == "sinkhorn", patches, koleo, koleo > 0 and how.koleo_ranks == "all"
        )

    @property
    def heads(self) -> dict[str, HeadSizes]:
        """By name, each once."""
        return {one.head: one.sizes for one in self.cross_entropies}

    @property
    def centers(self) -> list[int]:
        """Elements of each running mean of the teacher's logits: Sinkhorn-Knopp has none."""
        return [] if self.sinkhorn else [one.sizes.prototypes for one in self.cross_entropies]

    @property
    def teacher_passes(self) -> int:
        """How often the teacher's logits are multiplied out: for the targets, and for each pass of Sinkhorn-Knopp."""
        return 1 + (SINKHORN_ITERATIONS if self.sinkhorn else 0)

    def last_tokens(self, groups: Sequence[CropGroup], sides: Sequence[int], patch_size: int) -> dict[int, int]:
        """By size of a crop the tokens that a last block reduced to what is read computes: CLS, or with its patches."""
        whole = {group.size for group in groups if group.name in self.patches}
        return {side: 1 + (side // patch_size) ** 2 if side in whole else 1 for side in sides}


def hidden_patches(recipe: Recipe) -> float:
    """Expected number of hidden patches of an image. Masks of the law dinov2 fall about 1 % short of it."""
    crops, stride = recipe.crops, recipe.model.spec().stride
    patches = sum(group.count * (group.size // stride) ** 2 for group in recipe.groups if group.masked)
    return patches * crops.mask_share * sum(crops.mask_ratio) / 2


def accumulation_notes(recipe: Recipe, micro_batch: int, accumulation: int, ranks: int) -> tuple[list[str], list[str]]:
    """What gradient accumulation means for what looks at several images at once: (notes, warnings)."""
    objective, batch = ObjectiveCosts.of(recipe), recipe.data.global_batch
    notes, warnings = list[str](), list[str]()
    if accumulation == 1:
        return notes, warnings
    if objective.sinkhorn and objective.heads:
        notes.append(
            f"targets are balanced over all {batch} images of a step; {accumulation} micro-batches are held at once"
        )
    if getattr(recipe.model.spec(), "has_batch_norm", False) or any(
        head.batch_norm for head in objective.heads.values()
    ):
        warnings.append(
            f"BatchNorm sees one micro-batch at a time: {accumulation} micro-batches are not one batch; networks with "
            "LayerNorm or GroupNorm (convnext_tiny, resnet50_gn) have no such limit"
        )
    if objective.koleo_crops:
        images = micro_batch * (ranks if objective.koleo_all else 1)
        warnings.append(
            f"KoLeo sees a micro-batch of {images} images at a time, not the {batch} of a step: with another "
            "accumulation it is another loss"
        )
    return notes, warnings
