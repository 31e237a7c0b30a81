"""The contracts of a loss term's and of a teacher's description, for ours and for those of users. No torch here.

The log's first lines, metrics, plots, schedules, checks, predictions and resumes go by these descriptions: who adds a
term or a teacher writes its spec and what the spec builds, and nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from dino_ds.config.crops import GLOBAL, CropGroup, Resolution
from dino_ds.config.fields import Length, Ramp
from dino_ds.config.sections import HeadSection
from dino_ds.engine.schedules import Replacements

if TYPE_CHECKING:
    from dino_ds.config.recipe import Recipe

OF_EVERY_RUN = frozenset(
    (
        *("bad_images", "checkpoint_gib", "collapsed", "constant_images", "data_wait_fraction", "epoch"),
        *("gpu_celsius", "gpu_joules_per_1000_images", "gpu_memory_gib", "gpu_utilization", "gpu_watts"),
        *("grad_norm", "host_free_gib", "host_memory_gib", "images", "images_per_second", "kl", "loss"),
        *("loss_scale", "lr", "memory_gib", "memory_predicted_gib", "rolling_data_wait_fraction"),
        *("rolling_images_per_second", "save_seconds", "save_stall_seconds", "skipped_steps", "step"),
        *("teacher_momentum", "teacher_temp", "throughput_of_best", "time", "weight_decay"),
    )
)
"""Keys of metrics.jsonl in every run: no scalar of a term may have their names."""


@dataclass(frozen=True)
class StepImages:
    """The images of an optimizer step, and how many of them are computed together."""

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
    """A loss term in plain numbers: `name` is its key in metrics, schedules, the log and plots.

    A term is a subclass with fields of its own and a `build`. A user's gets its fields from the recipe, next to `spec`
    and `weight` (docs/flow.md); one of ours from the keys objective.NAME_FIELD next to objective.NAME_weight.
    """

    name: str
    weight: Ramp

    builder: ClassVar[str] = ""
    """The "module:function" that `build` calls, so that a spec imports no torch."""
    label: ClassVar[str] = ""
    """The loss in a few words, as a plot names it."""
    reads_patches: ClassVar[bool] = False
    """Whether it needs a backbone that gives features of patches."""

    @classmethod
    def from_recipe(cls, name: str, weight: Ramp, recipe: Recipe) -> TermSpec:
        """The term of ours whose weight in the recipe is this one."""
        values, names = dict(recipe.objective), [field.name for field in fields(cls) if field.name != "weight"]
        options = {field: values[f"{name}_{field}"] for field in names if f"{name}_{field}" in values}
        return cls(name=name, weight=weight, **options)

    def problems(self, recipe: Recipe) -> list[str]:
        """A line for each key of the recipe that does not go with the term."""
        return []

    def needs_images_together(self, step: StepImages) -> int | None:
        """The number of images of a step that it compares with each other; None for a term that compares none."""
        return None

    @property
    def title(self) -> str:
        """`label`, or the name of a term without one."""
        return self.label or f"Loss term {self.name}"

    @property
    def start(self) -> Length:
        """When the term begins: before, its weight is 0."""
        return Length(0, "steps")

    @property
    def scheduled(self) -> Mapping[str, Ramp]:
        """Further numbers that move with the steps, by the name under which `ScheduleValues.weights` has them."""
        return {}

    @property
    def heads(self) -> Mapping[str, HeadSection]:
        """Heads of prototypes whose outputs it compares, by name."""
        return {}

    @property
    def targets(self) -> str:
        """The making of its targets over prototypes, in words, or "" for a term without such targets."""
        return ""

    def describe(self, recipe: Recipe) -> list[str]:
        """Lines of the log, after the one that lists the terms."""
        return []

    def accumulated(self, step: StepImages) -> tuple[list[str], list[str]]:
        """Notes and warnings on a step of several micro-batches, where they are not one batch to the term."""
        images = self.needs_images_together(step)
        if images in (None, step.total):
            return [], []
        part = f"loss term {self.name} compares {images} images at a time, not the {step.total} of a step"
        return [], [f"{part}: with another accumulation it is another loss"]

    def build(self, parts: Any) -> Any:
        """The `dino_ds.method.objective.Term`, from a `dino_ds.method.parts.TermParts`; torch may be imported here."""
        return _built(self, parts)


@dataclass(frozen=True)
class TeacherSpec:
    """A teacher in plain numbers: `name` is its key in metrics, schedules and checkpoints.

    `sees`: names of the crop groups that are shown to it, besides `own_group`.
    """

    name: str
    sees: tuple[str, ...] = (GLOBAL,)

    builder: ClassVar[str] = ""
    """The "module:function" that `build_teacher` calls, so that a spec imports no torch."""
    label: ClassVar[str] = ""
    """The teacher in a few words, as predictions name it."""
    follows: ClassVar[bool] = False
    """Whether it is an average of the student's weights."""

    @staticmethod
    def problems(recipe: Recipe) -> list[str]:
        """A line for each key of the recipe that does not go with the teacher, or with its absence."""
        return []

    @property
    def title(self) -> str:
        """`label`, or the name of a teacher without one."""
        return self.label or f"{self.name} teacher"

    @property
    def of_file(self) -> bool:
        """Whether its weights are a file's and never move: a checkpoint holds their digest alone."""
        return False

    def describe(self) -> list[str]:
        """Lines of the log, where it is not the EMA teacher of each run."""
        return []

    def without_file(self, recipe: Recipe) -> dict[str, Any]:
        """Recipe sections, changed for a rehearsal that reads no weights: the teacher begins as the student does."""
        return {}

    def momentum_at(self, step: int, steps: int) -> float:
        """The momentum of that average after `step` of `steps` applied steps."""
        raise NotImplementedError

    def own_group(self, first: CropGroup, resolution: Resolution) -> CropGroup | None:
        """Crops that only it sees, made from the first group's, in a step of one of the recipe's resolutions."""
        return None

    def replaced_after(self, recipe: Recipe, epoch_steps: int) -> Replacements | None:
        """When the EMA teacher's weights replace this teacher's, or None for never."""
        return None

    def notes(self, recipe: Recipe) -> list[str]:
        """Lines of the log where a run starts with drawn weights."""
        return []

    def build_teacher(self, parts: Any) -> Any:
        """The `dino_ds.method.teacher.Teacher` on this process's device, from a `dino_ds.method.parts.TeacherParts`;
        every rank must call it."""
        return _built(self, parts)


def _built(spec: TermSpec | TeacherSpec, parts: Any) -> Any:
    """The result of a spec's builder."""
    module, _, name = spec.builder.partition(":")
    return getattr(importlib.import_module(module), name)(spec, parts)
