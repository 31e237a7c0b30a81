"""What a recipe's loss terms compute, in plain numbers: which heads, and how many rows of logits each image has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dino_ds.basics.text_file import read_object
from dino_ds.config.crops import EMA, CropGroup, student_sizes, teacher_sizes
from dino_ds.config.recipe import Recipe
from dino_ds.config.sections import HeadSection
from dino_ds.config.stages import home_of
from dino_ds.method.specs.distill import FROZEN, regresses_features
from dino_ds.method.specs.gram import GRAM
from dino_ds.models.specs.backbones import BACKBONES, BackboneSpec, ViTSpec

HEAD, IBOT_HEAD = "head", "ibot_head"
# As of method/centering.py.
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
class GramCosts:
    """Gram anchoring compares the `patches` of each of an image's `crops` with each other; whole_batch: with those of
    all images of a micro-batch."""

    crops: int
    patches: int
    whole_batch: bool

    def rows(self, images: int) -> int:
        """Of each square matrix of similarities."""
        return self.patches * (self.crops * images if self.whole_batch else 1)

    def numbers(self, images: int) -> int:
        """Of all matrices of one network in a micro-batch."""
        return self.rows(images) * self.patches * self.crops * images


@dataclass(frozen=True)
class ObjectiveCosts:
    """The terms of a recipe. patches: the names of the crop groups whose patches the student computes to the end;
    teacher: who gives the targets, and teacher_patches: those that it does; koleo_crops: of an image, 0 without the
    term; koleo_all: over all ranks' images; regressions: linear layers to a teacher's features: the name of the
    head, the rows of an image, their width."""

    cross_entropies: tuple[CrossEntropy, ...]
    sinkhorn: bool = False
    patches: tuple[str, ...] = ()
    koleo_crops: int = 0
    koleo_all: bool = False
    gram: GramCosts | None = None
    teacher: str = EMA
    teacher_patches: tuple[str, ...] = ()
    regressions: tuple[tuple[str, int, int], ...] = ()

    @staticmethod
    def of(recipe: Recipe, groups: Sequence[CropGroup] | None = None) -> ObjectiveCosts:
        """groups: of a step of one of several resolutions; None: the recipe's."""
        how, found = recipe.objective, list[CrossEntropy]()
        groups = recipe.groups if groups is None else groups
        teacher, regresses = recipe.taught_by, regresses_features(recipe)
        seen = len(teacher_sizes(groups, teacher))
        if how.dino_weight and not regresses:
            rows = len(student_sizes(groups))
            found.append(CrossEntropy("dino", HEAD, HeadSizes.of(recipe.head), rows, seen, seen, rows))
        if how.ibot_weight and not regresses:
            own = how.ibot_head == "own"
            sizes = HeadSizes.of(recipe.ibot_head if own else recipe.head)
            hidden = hidden_patches(recipe, groups)
            found.append(CrossEntropy("ibot", IBOT_HEAD if own else HEAD, sizes, hidden, hidden))
        patched = (group.name for group in groups if (teacher in group.teachers if regresses else group.masked))
        patches = tuple(patched) if how.ibot_weight else ()
        koleo = seen if how.koleo_weight else 0
        gram = _gram_groups(recipe, groups)
        side = gram[0].size // recipe.model.spec().stride if gram else 0
        count = sum(group.count for group in gram)
        compared = tuple(group.name for group in gram)
        return ObjectiveCosts(
            tuple(found),
            how.centering == "sinkhorn" and not regresses,
            tuple(dict.fromkeys(patches + compared)),
            koleo,
            koleo > 0 and how.koleo_ranks == "all",
            GramCosts(count, side**2, recipe.gram.whole_batch) if gram else None,
            teacher,
            tuple(dict.fromkeys(patches + (compared if recipe.gram.teacher == EMA else ()))),
            _regressions(recipe, groups) if regresses else (),
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


def frozen_spec(recipe: Recipe) -> ViTSpec | None:
    """The backbone of teacher.source, as far as its name or the JSON beside it says; None: another kind, or unknown."""
    return None if recipe.teacher.source is None else _stated(recipe.teacher.source)


@functools.cache
def _stated(source: str) -> ViTSpec | None:
    base, path = source.partition(".")[0], Path(source)
    spec: BackboneSpec | None = BACKBONES.get(base) if not path.exists() else None
    if isinstance(spec, ViTSpec):
        return spec
    beside = home_of(source).folder / "teacher.json" if path.is_dir() else path.with_suffix(".json")
    try:
        about = read_object(beside)
        return replace(ViTSpec(**about["architecture"]), local_cls_norm=False)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _regressions(recipe: Recipe, groups: Sequence[CropGroup]) -> tuple[tuple[str, int, int], ...]:
    """None for a teacher whose architecture is not known."""
    spec, how, found = frozen_spec(recipe), recipe.objective, list[tuple[str, int, int]]()
    sizes = teacher_sizes(groups, FROZEN)
    if spec is not None and how.dino_weight:
        found.append(("cls_regression", len(sizes), spec.width))
    if spec is not None and how.ibot_weight:
        patches = sum((size // recipe.model.spec().stride) ** 2 for size in sizes)
        found.append(("patch_regression", patches, spec.width))
    return tuple(found)


def groups_of_steps(recipe: Recipe) -> list[tuple[float, tuple[CropGroup, ...]]]:
    """The crops of each resolution that optimizer steps have, with its share of them."""
    return [(one.share, recipe.groups_of(one)) for one in recipe.resolutions]


def last_tokens(
    patches: Sequence[str], groups: Sequence[CropGroup], sides: Sequence[int], patch_size: int
) -> dict[int, int]:
    """By size of a crop the tokens that a last block reduced to what is read computes: CLS, and its patches where it is
    of a group that is named."""
    whole = {group.size for group in groups if group.name in patches}
    return {side: 1 + (side // patch_size) ** 2 if side in whole else 1 for side in sides}


def _gram_groups(recipe: Recipe, groups: Sequence[CropGroup]) -> list[CropGroup]:
    """Those whose patches the student gives to Gram anchoring."""
    if not recipe.gram.weight:
        return []
    seeing = EMA if recipe.gram.teacher == EMA else GRAM
    names = {group.like or group.name for group in groups if seeing in group.teachers}
    return [group for group in groups if group.student and group.name in names]


def hidden_patches(recipe: Recipe, groups: Sequence[CropGroup] | None = None) -> float:
    """Expected number of hidden patches of an image. Masks of the law dinov2 fall about 1 % short of it."""
    crops, stride = recipe.crops, recipe.model.spec().stride
    groups = recipe.groups if groups is None else groups
    patches = sum(group.count * (group.size // stride) ** 2 for group in groups if group.masked)
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
    if recipe.gram.weight and recipe.gram.whole_batch:
        warnings.append(
            f"gram.whole_batch compares the patches of a micro-batch of {micro_batch} images at a time, not of the "
            f"{batch} of a step: with another accumulation it is another loss"
        )
    if objective.koleo_crops:
        images = micro_batch * (ranks if objective.koleo_all else 1)
        warnings.append(
            f"KoLeo sees a micro-batch of {images} images at a time, not the {batch} of a step: with another "
            "accumulation it is another loss"
        )
    return notes, warnings
