"""Specs of dino_ds's own loss terms and teachers: what they need, refuse and log, without torch. Source of Gram
anchoring: DINOv3, section 4 (arXiv 2508.10104); facebookresearch/dinov3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from dino_ds.config.crops import EMA, FROZEN, GLOBAL, CropGroup, Resolution
from dino_ds.config.fields import Length, Ramp
from dino_ds.config.model import SNAPSHOT
from dino_ds.config.sections import HeadSection, side_problems
from dino_ds.engine.schedules import Replacements, cosine_schedule
from dino_ds.method.specs.base import RecipeSections, StepImages, TeacherSpec, TermSpec

DINO, IBOT, LOCAL_WEIGHT = "dino", "ibot", "dino_local"
"""The names of the two terms, and of the weight of pairs with local crops in the DINO term."""
HEAD, IBOT_HEAD = "head", "ibot_head"
ONE = Ramp(1.0)


@dataclass(frozen=True)
class PrototypeSpec(TermSpec):
    """A cross-entropy over prototypes. head: its name and sizes; teacher: its logits become targets by Sinkhorn-Knopp,
    or by a softmax after their running mean is subtracted; center: the name of this mean in checkpoints."""

    head: tuple[str, HeadSection]
    sinkhorn: bool
    center_momentum: float
    student_temp: float
    teacher: str = EMA

    center: ClassVar[str]

    @classmethod
    def from_recipe(cls, name: str, weight: Ramp, recipe: RecipeSections) -> TermSpec:
        how = recipe.objective
        if regresses_features(recipe):
            return FeatureSpec(name, weight, patches=cls is IbotSpec)
        own_head = cls is IbotSpec and how.ibot_head == "own"
        head = (IBOT_HEAD, recipe.ibot_head) if own_head else (HEAD, recipe.head)
        local: dict[str, Any] = {"local_weight": how.dino_local_weight} if cls is DinoSpec else {}
        values = how.centering == "sinkhorn", how.center_momentum, how.student_temp, recipe.teacher.taught_by
        return cls(name, weight, head, *values, **local)

    @property
    def heads(self) -> Mapping[str, HeadSection]:
        return dict([self.head])

    def needs_images_together(self, step: StepImages) -> int | None:
        return step.total if self.sinkhorn else None

    def accumulated(self, step: StepImages) -> tuple[list[str], list[str]]:
        held = f"{step.accumulation} micro-batches are held at once"
        return [f"targets are balanced over all {step.total} images of a step; {held}"] if self.sinkhorn else [], []


@dataclass(frozen=True)
class DinoSpec(PrototypeSpec):
    """The DINO loss; `local_weight` weighs the pairs of crops that the teacher does not see."""

    local_weight: Ramp = ONE

    label: ClassVar[str] = "Loss of DINO"
    center: ClassVar[str] = "center"

    @property
    def weighs_local(self) -> bool:
        return self.local_weight != ONE

    @property
    def scheduled(self) -> Mapping[str, Ramp]:
        return {LOCAL_WEIGHT: self.local_weight}


@dataclass(frozen=True)
class IbotSpec(PrototypeSpec):
    """The iBOT loss: for each hidden patch the student predicts what the teacher sees there."""

    label: ClassVar[str] = "Masked patches (iBOT)"
    center: ClassVar[str] = "ibot_center"

    def problems(self, recipe: RecipeSections) -> list[str]:
        name, head = self.head
        unmasked = "objective.ibot_weight needs masked patches: set crops.mask dinov2"
        normed = f"{name}.batch_norm true: a rank may have no masked patches to average: leave it out"
        return [unmasked] * (recipe.crops.mask == "none") + [normed] * head.batch_norm


@dataclass(frozen=True)
class CodingRateSpec(TermSpec):
    """SimDINO's loss on the outputs, of `width` elements, of a linear head on CLS features: their coding rate, and the
    cosines between the student's crops and those of `teacher`."""

    width: int
    teacher: str

    label: ClassVar[str] = "Coding rate (SimDINO)"

    def needs_images_together(self, step: StepImages) -> int:
        return step.together

    @classmethod
    def from_recipe(cls, name: str, weight: Ramp, recipe: RecipeSections) -> TermSpec:
        return CodingRateSpec(name, weight, recipe.head.bottleneck, recipe.teacher.taught_by)

    def problems(self, recipe: RecipeSections) -> list[str]:
        if recipe.teacher.distill is None:
            return []
        why = "compares the student with its own average, not with a frozen teacher: set one of them 0 or none"
        return [f"objective.coding_rate_weight with teacher.distill {recipe.teacher.distill} {why}"]


@dataclass(frozen=True)
class KoLeoSpec(TermSpec):
    """KoLeo among the images of a rank's own micro-batch, or of all ranks'."""

    ranks: Literal["own", "all"] = "own"

    label: ClassVar[str] = "KoLeo, sum over the global crops"

    def needs_images_together(self, step: StepImages) -> int:
        return step.together if self.ranks == "all" else step.micro_batch


GRAM = "gram"  # the name of the term, of its teacher and of the crop group that only this teacher sees


@dataclass(frozen=True)
class GramSpec(TermSpec):
    """Gram anchoring: similarities of patches stay as `teacher` has them, on global crops or on crops for it alone."""

    teacher: str
    begin: Length

    label: ClassVar[str] = "Gram anchoring"
    reads_patches: ClassVar[bool] = True

    @property
    def start(self) -> Length:
        return self.begin

    @classmethod
    def from_recipe(cls, name: str, weight: Ramp, recipe: RecipeSections) -> TermSpec:
        return GramSpec(name, weight, EMA if recipe.gram.teacher == EMA else GRAM, recipe.gram.start)

    def problems(self, recipe: RecipeSections) -> list[str]:
        gram, side, patch = recipe.gram, recipe.crops.global_size, recipe.model.side_multiple
        if self.teacher == EMA:
            unseen = "gram.teacher ema in a distillation: the EMA teacher sees no crops then"
            return [] if recipe.teacher.taught_by == EMA else [f"{unseen}; take snapshot, a run or weights"]
        if gram.crop_size is None:
            return []
        size = f"gram.crop_size {gram.crop_size}"
        if not side <= gram.crop_size <= 2 * side:
            return [f"{size} must be 1 to 2 times crops.global_size {side}: {side} to {2 * side}, or none"]
        if gram.crop_size % patch and (gram.teacher == SNAPSHOT or gram.refresh_every.value):
            below = gram.crop_size // patch * patch
            return [f"{size} is not a multiple of the patch size {patch}: use {below} or {below + patch}"]
        return []


@dataclass(frozen=True)
class GramTeacherSpec(TeacherSpec):
    """Gram anchoring's teacher, if it is not the EMA teacher itself. source: "snapshot", or the file of its weights;
    refreshed: the EMA teacher's weights replace them at intervals."""

    source: str = SNAPSHOT
    refreshed: bool = False

    label: ClassVar[str] = "Gram teacher"

    @property
    def of_file(self) -> bool:
        return self.source != SNAPSHOT and not self.refreshed

    def changes_without_file(self, recipe: RecipeSections) -> dict[str, Any]:
        return {"gram": recipe.gram.model_copy(update={"teacher": SNAPSHOT})}

    def own_group(self, first: CropGroup, resolution: Resolution) -> CropGroup | None:
        """The crops of `first` in another size and without colors (DINOv3)."""
        if resolution.gram_size is None:
            return None
        alike = replace(first, name=GRAM, size=resolution.gram_size, teachers=(self.name,), like=first.name)
        return replace(alike, student=False, masked=False, augmented=False)

    def replaced_after(self, recipe: RecipeSections, epoch_steps: int) -> Replacements:
        gram, batch = recipe.gram, recipe.data.global_batch
        start, every = (length.in_steps(batch, epoch_steps) for length in (gram.start, gram.refresh_every))
        return Replacements(start, gram.teacher == SNAPSHOT, every, gram.refreshes)

    def notes(self, recipe: RecipeSections) -> list[str]:
        if recipe.gram.teacher != SNAPSHOT or recipe.gram.start.value:
            return []
        return ["gram.teacher snapshot at gram.start 0 is of the weights that the run begins with: give gram.start"]

    @staticmethod
    def in_recipe(recipe: RecipeSections) -> list[TeacherSpec]:
        gram = recipe.gram
        if not gram.weight or gram.teacher == EMA:
            return []
        sees = () if gram.own_crop_size else (GLOBAL,)
        return [GramTeacherSpec(GRAM, sees, gram.teacher, gram.refresh_every.value > 0)]

    @staticmethod
    def problems(recipe: RecipeSections) -> list[str]:
        """The first resolution whose Gram size is missing, out of range, or given although there are no Gram crops; and
        Gram sizes that are no multiples of the patch size."""
        several, gram_size = recipe.resolutions if recipe.crops.resolutions else (), recipe.gram.own_crop_size
        sizes = [(f"crops.resolutions {step}", step.gram_size, step.global_size) for step in several]
        problems = []
        for name, size, side in sizes:
            if size and not gram_size:
                why = "has a Gram size, and Gram anchoring has no crops of its own here"
                problems.append(f"{name} {why}: set gram.weight and gram.crop_size, or leave out the third number")
            elif gram_size and not size:
                why = f"has no Gram size, and gram.crop_size is {gram_size}"
                problems.append(f"{name} {why}: write GLOBAL/LOCAL/GRAM:SHARE, or set gram.crop_size none")
            elif size and not side <= size <= 2 * side:
                problems.append(f"{name}: Gram size {size} must be 1 to 2 times the global size {side}")
        sides = [(f"{name}: Gram size", size) for name, size, _ in sizes if size]
        return problems[:1] + side_problems(sides, recipe.model.backbone, recipe.model.side_multiple)


PRESERVE, START = "preserve", "start"  # the names of the term and of its teacher


@dataclass(frozen=True)
class PreserveSpec(TermSpec):
    """1 - cosine between features of the student's global crops and those of the weights that it started from."""

    label: ClassVar[str] = "Distance from the start's features"

    def problems(self, recipe: RecipeSections) -> list[str]:
        if recipe.model.init_from is not None:
            return []
        return ["objective.preserve_weight keeps features of the weights of model.init_from: give that, or set it 0"]


@dataclass(frozen=True)
class StartSpec(TeacherSpec):
    """The teacher with the weights of model.init_from, which never change."""

    label: ClassVar[str] = "frozen start"
    of_file = True

    @staticmethod
    def in_recipe(recipe: RecipeSections) -> list[TeacherSpec]:
        return [StartSpec(START)] if recipe.objective.preserve_weight else []


def regresses_features(recipe: RecipeSections) -> bool:
    """Whether the targets are a teacher's features, not its heads' outputs."""
    return recipe.teacher.source is not None and recipe.teacher.distill == "features"


@dataclass(frozen=True)
class FrozenSpec(TeacherSpec):
    """The teacher of a distillation, whose weights never change."""

    of_file = True

    @staticmethod
    def in_recipe(recipe: RecipeSections) -> list[TeacherSpec]:
        return [] if recipe.teacher.source is None else [FrozenSpec(FROZEN)]

    @staticmethod
    def problems(recipe: RecipeSections) -> list[str]:
        objective = recipe.objective
        if recipe.teacher.source is not None and not (objective.dino_weight or objective.ibot_weight):
            return ["teacher.source teaches nothing with objective.dino_weight and ibot_weight 0: give one a weight"]
        return []


@dataclass(frozen=True)
class FeatureSpec(TermSpec):
    """Regression of the student's features to the frozen teacher's on global crops: CLS features, or `patches`."""

    patches: bool

    @property
    def title(self) -> str:
        return f"Distillation of {'patches' if self.patches else 'CLS features'}"


@dataclass(frozen=True)
class EmaSpec(TeacherSpec):
    """An exponential moving average of the student; a cosine takes its momentum from `momentum` to `momentum_end`."""

    momentum: float = 0.996
    momentum_end: float = 1.0

    follows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("momentum", "momentum_end"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} {value:g} is not between 0 and 1")

    @property
    def title(self) -> str:
        return "EMA teacher" if self.name == EMA else super().title

    def momentum_at(self, step: int, steps: int) -> float:
        return cosine_schedule(step, self.momentum, self.momentum_end, steps)

    @staticmethod
    def in_recipe(recipe: RecipeSections) -> list[TeacherSpec]:
        """The EMA teacher, which every run has; it sees no crops if a frozen teacher is distilled."""
        teacher = recipe.teacher
        sees = (GLOBAL,) if teacher.taught_by == EMA else ()
        return [EmaSpec(EMA, sees, teacher.momentum, teacher.momentum_end)]
