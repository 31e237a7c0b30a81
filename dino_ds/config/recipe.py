"""The recipe's schema: what is learned; its sections are in `dino_ds.config.sections`.

This one schema makes validation, `--help` and the option table of docs/configs.md; `dino_ds.config.loading` loads it.
No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from pydantic import ValidationInfo, field_validator, model_validator

from dino_ds.config.crop_checks import crop_problems, gram_problems
from dino_ds.config.crops import (
    EMA,
    FROZEN,
    GRAM,
    CropGroup,
    Resolution,
    crop_sizes,
    dino_groups,
    gram_group,
    parse_resolutions,
)
from dino_ds.config.fields import (
    Count,
    Length,
    LengthField,
    Positive,
    Ramp,
    SaveEvery,
    Seconds,
    Section,
    Seed,
    StageLengthField,
    option,
    positive,
)
from dino_ds.config.model import ModelSection
from dino_ds.config.sections import (
    CropsSection,
    DataSection,
    EvalSection,
    GramSection,
    HeadSection,
    ObjectiveSection,
    OptimizerSection,
    TeacherSection,
)
from dino_ds.errors import ConfigError
from dino_ds.models.specs.backbones import FROM_SOURCE

UNSURE = "unsure"
"""In a validation's context: sections that are wrong already, so that nothing is said of what follows from them."""
_LEAST_STD = 1e-4
"""A fortieth of a level of 8 bits: the channel is empty."""


class Recipe(Section):
    """What is learned. How fast and on what hardware is the ds JSON's."""

    seed: Seed = option(0, "seed of weights, data order and augmentation")
    stage_start: Literal["continue", "restart"] | None = option(
        None,
        "with --from RUN: continue = its whole state, steps count on; restart = its teacher's weights, from step 0",
    )
    length: StageLengthField = option(Length(100, "epochs"), "how long to train: epochs, steps or images")
    log_every: Count = option(10, "steps between lines of metrics")
    save_every: SaveEvery = option("auto", "how often to save; 0 steps = only at the end; auto = by what a save costs")
    expected_hours_between_failures: Positive = option(24.0, "of the whole job, for save_every auto")
    keep_checkpoints: Count = option(3, "newest checkpoints that are kept")
    keep_every: LengthField = option(Length(0, "steps"), "checkpoints at multiples of it are kept for good; 0 = none")
    save_in_background: bool = option(True, "write checkpoints while training goes on; false takes less host memory")
    max_bad_steps: Count = option(3, "non-finite losses in a row that stop the run")
    hang_seconds: Seconds = option(600, "no progress for so long ends the run (start, saves: 3 times); 0 = never")
    data: DataSection = DataSection()
    crops: CropsSection = CropsSection()
    model: ModelSection = ModelSection()
    head: HeadSection = HeadSection()
    ibot_head: HeadSection = HeadSection()
    objective: ObjectiveSection = ObjectiveSection()
    optimizer: OptimizerSection = OptimizerSection()
    gram: GramSection = GramSection()
    teacher: TeacherSection = TeacherSection()
    eval: EvalSection = EvalSection()

    _lengths = field_validator("length")(positive)

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Recipe:
        unsure = set((info.context or {}).get(UNSURE, ()))
        checks: dict[Callable[[], list[str]], str] = {
            self._crop_problems: "crops model gram teacher",
            self._length_problems: "length stage_start data model objective optimizer gram",
            self._objective_problems: "objective crops model teacher head ibot_head",
            self._optimizer_problems: "optimizer",
            self._channel_problems: "data model",
            self._teacher_problems: "objective teacher",
            self._eval_problems: "eval",
        }
        problems = [problem for check, of in checks.items() if not unsure & set(of.split()) for problem in check()]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def peak_lr(self) -> float:
        """The learning rate after its warm-up, scaled with the batch."""
        batch = self.data.global_batch
        scale = batch / 256 if self.optimizer.lr_scaling == "linear" else math.sqrt(batch / 1024)
        return self.optimizer.lr * scale

    @property
    def resolutions(self) -> tuple[Resolution, ...]:
        """The sizes that optimizer steps have, and how often; one where crops.resolutions is not given."""
        crops = self.crops
        return parse_resolutions(crops.resolutions) or (
            Resolution(crops.global_size, crops.local_size, self._gram_crop_size),
        )

    @property
    def taught_by(self) -> str:
        """The name of the teacher whose outputs are the targets."""
        return EMA if self.teacher.source is None else FROZEN

    @property
    def hides_patches(self) -> bool:
        """Whether patches are hidden from the student: what it has of them is then a token that is trained."""
        return self.crops.mask != "none" and self.crops.mask_hides

    @property
    def regresses_features(self) -> bool:
        """Whether the targets are a teacher's features, not its heads' outputs."""
        return self.teacher.source is not None and self.teacher.distill == "features"

    @property
    def groups(self) -> tuple[CropGroup, ...]:
        """What is cut from every image, in order, and who sees it; of several resolutions the one of most pixels,
        which memory must hold."""
        return max(map(self.groups_of, self.resolutions), key=lambda groups: sum(s**2 for s in crop_sizes(groups)))

    def groups_of(self, resolution: Resolution) -> tuple[CropGroup, ...]:
        """The `groups` of a step of this resolution: they differ in size alone."""
        crops, gram = self.crops, self.gram
        teachers: tuple[str, ...] = (self.taught_by,)
        if gram.weight and self._gram_crop_size is None and gram.teacher != EMA:
            teachers += (GRAM,)
        sizes = resolution.global_size, crops.global_scale, resolution.local_size, crops.local_scale
        first, *others = dino_groups(*sizes, crops.num_local, masked=crops.mask != "none")
        first = replace(first, teachers=teachers, hides=crops.mask_hides)
        size = resolution.gram_size
        return (first, *others) if size is None else (first, *others, gram_group(first, size))

    @property
    def _gram_crop_size(self) -> int | None:
        """Side in pixels of Gram anchoring's own crops, None where it has none."""
        return self.gram.crop_size if self.gram.weight and self.gram.teacher != EMA else None

    def batch_bytes(self, images: int) -> int:
        """The crops of `images` images as loader processes hand them over: bytes, or FP32 where they are augmented."""
        pixels = sum(size**2 for size in crop_sizes(self.groups)) * self.model.in_chans
        return images * pixels * (4 if self.data.augment == "worker" or self.data.is_deep else 1)

    def check_learning_rates(self) -> None:
        """For a run that is to be trained: tools also look at parts of its batch. Raises ConfigError."""
        peak = self.peak_lr
        if self.optimizer.min_lr > peak * (1 + 1e-9):
            low, why = f"{self.optimizer.min_lr:g}", "(optimizer.lr scaled by data.global_batch): lower it, or raise lr"
            raise ConfigError(f"optimizer.min_lr {low} is more than the peak learning rate {peak:g} {why}")

    def check_batch(self) -> None:
        """For a run that is to be trained, as above. Raises ConfigError where terms compare images and there is one."""
        if self.data.global_batch > 1:
            return
        if self.objective.centering == "sinkhorn":
            raise ConfigError(
                "objective.centering sinkhorn with data.global_batch 1 balances the crops of one image: raise the batch"
            )
        if self.objective.koleo_weight:
            raise ConfigError("objective.koleo_weight spreads images from each other: data.global_batch 1 has no other")

    def check_teacher(self) -> None:
        """For a run that is to be trained, as above. Raises ConfigError where a distillation has no teacher."""
        if self.teacher.distill is not None and self.teacher.source is None:
            distill = f"teacher.distill {self.teacher.distill}"
            raise ConfigError(f"{distill} needs a trained teacher: name one (--teacher.from RUN), or set it none")

    @property
    def _patch(self) -> int:
        """Sides of crops are multiples of it, as far as is known."""
        return 1 if self.model.backbone == FROM_SOURCE else self.model.spec().side_multiple

    def _crop_problems(self) -> list[str]:
        return [
            *crop_problems(self.crops, self.model, self._patch, self._gram_crop_size),
            *gram_problems(self.gram, self.crops, self.teacher, self._patch),
        ]

    def _eval_problems(self) -> list[str]:
        k, images = self.eval.k, self.eval.bank_images
        return [f"eval.k {k} is more than eval.bank_images {images}"] if k > images else []

    def _channel_problems(self) -> list[str]:
        given = {"data.mean": self.data.mean, "data.std": self.data.std}
        known = {name: values for name, values in given.items() if values is not None}
        if len(known) == 1:
            (there,), (missing,) = known, given.keys() - known
            return [f"{there} is given without {missing}: give both, or neither for ImageNet's"]
        bounds = {"data.mean": 0.0, "data.std": _LEAST_STD}
        if out := [name for name, values in known.items() if not all(bounds[name] <= x <= 1 for x in values)]:
            span = f"{bounds[out[0]]:g} to 1, in values whose black is 0 and whose white is 1"
            return [f"{out[0]} {_text(known[out[0]])} must be {span}: divide those of 8 bits by 255"]
        channels = self.model.in_chans
        return [
            f"{name} {_text(values)} has {len(values)} values, and model.in_chans is {channels}: give one a channel"
            f"{f', or set --model.in_chans {len(values)}' if values else ''}"
            for name, values in known.items()
            if len(values) != channels and (self.model.backbone != FROM_SOURCE or not values)
        ]

    def _objective_problems(self) -> list[str]:
        objective, problems = self.objective, list[str]()
        if not (objective.dino_weight or objective.ibot_weight or objective.koleo_weight):
            problems.append("objective: all weights are 0: give dino_weight, ibot_weight or koleo_weight one above 0")
        regressed = self.regresses_features
        if objective.ibot_weight and self.crops.mask == "none" and not regressed:
            problems.append("objective.ibot_weight needs masked patches: set crops.mask dinov2")
        if self.crops.mask != "none" and not objective.ibot_weight:
            problems.append(
                f"crops.mask {self.crops.mask} hides patches that no loss predicts: set objective.ibot_weight"
            )
        if not self.crops.mask_hides and self.crops.mask == "none":
            problems.append("crops.mask_hides false has no effect with crops.mask none: leave it out")
        local = objective.dino_local_weight
        if local != Ramp(1.0) and not (objective.dino_weight and self.crops.num_local):
            why = "has no effect without local crops and objective.dino_weight: leave it out"
            problems.append(f"objective.dino_local_weight {local} {why}")
        if objective.centering == "sinkhorn" and objective.center_momentum != ObjectiveSection().center_momentum:
            why = "has no effect with objective.centering sinkhorn: leave it out"
            problems.append(f"objective.center_momentum {objective.center_momentum:g} {why}")
        masks = (objective.ibot_weight and not regressed) or self.crops.mask != "none"
        if masks and self.model.backbone != FROM_SOURCE and not getattr(self.model.spec(), "hides_patches", False):
            cure = f"and {self.model.backbone} can't: take a ViT, or leave both out"
            problems.append(f"objective.ibot_weight and crops.mask need a backbone that hides patches, {cure}")
        if self.ibot_head != HeadSection() and not (objective.ibot_weight and objective.ibot_head == "own"):
            problems.append("ibot_head.* has no effect without objective.ibot_weight and objective.ibot_head own")
        head = "ibot_head" if objective.ibot_head == "own" else "head"
        if objective.ibot_weight and getattr(self, head).batch_norm:
            problems.append(f"{head}.batch_norm true: the masked patches of a rank vary, and may be none: leave it out")
        return problems

    def _teacher_problems(self) -> list[str]:
        objective, teacher = self.objective, self.teacher
        if teacher.source is None and teacher.distill == "features":
            return ["teacher.distill features has no effect without teacher.source: name one (--teacher.from RUN)"]
        if teacher.source is not None and not (objective.dino_weight or objective.ibot_weight):
            return ["teacher.source teaches nothing with objective.dino_weight and ibot_weight 0: give one a weight"]
        return []

    def _optimizer_problems(self) -> list[str]:
        defaults = OptimizerSection()
        unused = {
            "adamw": {"momentum": "of sgd and lars", "trust": "of lars"},
            "sgd": dict.fromkeys(("beta1", "beta2", "eps"), "of adamw") | {"trust": "of lars"},
            "lars": dict.fromkeys(("beta1", "beta2", "eps"), "of adamw"),
        }
        return [
            f"optimizer.{name} {getattr(self.optimizer, name):g} is {owners} and has no effect with optimizer.kind "
            f"{self.optimizer.kind}: leave it out"
            for name, owners in unused[self.optimizer.kind].items()
            if getattr(self.optimizer, name) != getattr(defaults, name)
        ]

    def _length_problems(self) -> list[str]:
        if self.stage_start == "continue" or self.length.begin:
            return []  # the length is the stage's, and the others may lie in the run before
        parts = {
            "optimizer.warmup": self.optimizer.warmup,
            "objective.freeze_prototypes": self.objective.freeze_prototypes,
            "objective.teacher_temp_warmup": self.objective.teacher_temp_warmup,
            "gram.start": self.gram.start,
        }
        longer = [
            f"{name} {part} is longer than length {self.length}: shorten it (a short trial keeps its schedules "
            "with --max_steps)"
            for name, part in parts.items()
            if part.unit == self.length.unit and part.value > self.length.value
        ]
        frozen = self.model.freeze_backbone
        if frozen.unit == self.length.unit and frozen.value >= self.length.value:
            why = f"is not shorter than length {self.length}: the backbone would never learn"
            longer.append(f"model.freeze_backbone {frozen} {why}")
        return longer


def _text(values: Iterable[float]) -> str:
    return ",".join(f"{value:g}" for value in values)
