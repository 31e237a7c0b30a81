"""The contracts of the specs of loss terms and of teachers, ours and users'. No torch here. The log's first lines,
metrics, plots, schedules, checks, predictions and resumes read only specs: to add a term or a teacher, write its spec
and the class that the spec builds, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

from typing_extensions import Self

from dino_ds.config.crops import GLOBAL, CropGroup, Resolution
from dino_ds.config.fields import Length, Ramp
from dino_ds.config.model import GramSection, ModelSection, TeacherSection
from dino_ds.config.sections import CropsSection, DataSection, HeadSection, ObjectiveSection
from dino_ds.engine.schedules import Replacements

OF_EVERY_RUN = frozenset(  # keys of metrics.jsonl in every run: no scalar of a term may have one of these names
    (
        *("bad_images", "checkpoint_gib", "collapsed", "constant_images", "data_wait_fraction", "epoch"),
        *("grad_norm", "host_free_gib", "host_memory_gib", "images", "images_per_second", "kl", "loss"),
        *("loss_scale", "lr", "memory_gib", "memory_predicted_gib", "save_seconds", "save_stall_seconds"),
        *("skipped_steps", "step", "teacher_momentum", "teacher_temp", "time", "weight_decay"),
    )
)


class RecipeSections(Protocol):
    """What specs read of a recipe, which `dino_ds.config.recipe` composes of these sections."""

    data: DataSection
    crops: CropsSection
    model: ModelSection
    head: HeadSection
    ibot_head: HeadSection
    objective: ObjectiveSection
    gram: GramSection
    teacher: TeacherSection

    @property
    def resolutions(self) -> tuple[Resolution, ...]: ...

    @property
    def batch_norm(self) -> str: ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...


@dataclass(frozen=True)
class StepImages:
    """How many images an optimizer step has, and how many of them are computed together."""

    micro_batch: int
    accumulation: int
    ranks: int

    @property
    def total(self) -> int:
        return self.micro_batch * self.accumulation * self.ranks

    @property
    def together(self) -> int:
        """The images that all ranks compute at the same time."""
        return self.micro_batch * self.ranks


@dataclass(frozen=True)
class TermSpec:
    """A loss term in plain numbers: `name` is its key in metrics, schedules, the log and plots. A term is a subclass
    with fields of its own and a `build`. The fields of a user's term come from the recipe, next to `spec` and `weight`
    (docs/flow.md); those of ours from keys objective.NAME_FIELD next to objective.NAME_weight."""

    name: str
    weight: Ramp

    label: ClassVar[str] = ""  # the loss in a few words, as a plot names it
    reads_patches: ClassVar[bool] = False  # whether the term needs a backbone with patch features

    @classmethod
    def from_recipe(cls, name: str, weight: Ramp, recipe: RecipeSections) -> TermSpec:
        values, names = dict(recipe.objective), [field.name for field in fields(cls) if field.name != "weight"]
        options = {field: values[f"{name}_{field}"] for field in names if f"{name}_{field}" in values}
        return cls(name=name, weight=weight, **options)

    def problems(self, recipe: RecipeSections) -> list[str]:
        """A line for each key of the recipe that does not go with the term."""
        return []

    def needs_images_together(self, step: StepImages) -> int | None:
        """The number of images of a step that the term compares with each other; None if it compares none."""
        return None

    @property
    def title(self) -> str:
        """`label`, or the name of a term without one."""
        return self.label or f"Loss term {self.name}"

    @property
    def start(self) -> Length:
        """When the term begins; its weight is 0 until then."""
        return Length(0, "steps")

    @property
    def scheduled(self) -> Mapping[str, Ramp]:
        """Further scheduled numbers, by their names in `ScheduleValues.weights`."""
        return {}

    @property
    def heads(self) -> Mapping[str, HeadSection]:
        """Heads with prototypes whose outputs the term compares, by name."""
        return {}

    def accumulated(self, step: StepImages) -> tuple[list[str], list[str]]:
        """Notes and warnings on a step of several micro-batches, if the term does not treat them as one batch."""
        images = self.needs_images_together(step)
        if images in (None, step.total):
            return [], []
        part = f"loss term {self.name} compares {images} images at a time, not the {step.total} of a step"
        return [], [f"{part}: with another accumulation it is another loss"]

    def build(self, parts: Any) -> Any:
        """Build the `dino_ds.method.objective.Term` from a `dino_ds.method.networks.TermParts`; may import torch. A
        user's class has one; `dino_ds.method.build` builds our terms."""
        raise NotImplementedError


@dataclass(frozen=True)
class TeacherSpec:
    """A teacher in plain numbers: `name` is its key in metrics, schedules and checkpoints. `sees`: names of the crop
    groups that the teacher sees, besides `own_group`."""

    name: str
    sees: tuple[str, ...] = (GLOBAL,)

    label: ClassVar[str] = ""  # the teacher in a few words, as predictions name it
    follows: ClassVar[bool] = False  # whether the teacher is an average of the student's weights

    @staticmethod
    def in_recipe(recipe: RecipeSections) -> list[TeacherSpec]:
        """The recipe's teachers of this kind, for our kinds; `own_teachers` finds those in teacher.others."""
        return []

    @staticmethod
    def problems(recipe: RecipeSections) -> list[str]:
        """A line for each key of the recipe that does not go with the teacher, or with its absence."""
        return []

    @property
    def title(self) -> str:
        """`label`, or the name of a teacher without one."""
        return self.label or f"{self.name} teacher"

    @property
    def of_file(self) -> bool:
        """Whether the weights come from a file and never change: a checkpoint then holds only their digest."""
        return False

    def changes_without_file(self, recipe: RecipeSections) -> dict[str, Any]:
        """Recipe sections, changed for a rehearsal that reads no weights: the teacher then begins like the student."""
        return {}

    def momentum_at(self, step: int, steps: int) -> float:
        """The EMA momentum, of a teacher that `follows`, after `step` of `steps` applied steps."""
        raise NotImplementedError

    def own_group(self, first: CropGroup, resolution: Resolution) -> CropGroup | None:
        """The crop group that only this teacher sees, derived from `first`, in a step of `resolution`; or None."""
        return None

    def replaced_after(self, recipe: RecipeSections, epoch_steps: int) -> Replacements | None:
        """When the EMA teacher's weights replace this teacher's, or None for never."""
        return None

    def notes(self, recipe: RecipeSections) -> list[str]:
        """Lines of the log if a run starts from randomly initialized weights."""
        return []

    def build_teacher(self, parts: Any) -> Any:
        """Build the `dino_ds.method.teacher.Teacher` on this process's device from a
        `dino_ds.method.networks.TeacherParts`; every rank must call this. A user's class has one."""
        raise NotImplementedError
