"""Schema of the recipe, which says what is learned; its sections are in `dino_ds.config.sections`. Validation, `--help`
and the site's table of options all come from this schema; `dino_ds.config.loading` loads recipes. No torch here."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import ValidationInfo, field_validator, model_validator

from dino_ds.config import fields, sections
from dino_ds.config.crops import EMA, CropGroup, Resolution, crop_sizes, parse_resolutions
from dino_ds.config.evaluation import EvalSection, eval_problems
from dino_ds.config.fields import Length, Section, StageLengthField, free_option, option
from dino_ds.config.model import GramSection, ModelSection, TeacherSection
from dino_ds.config.schema import idle_keys, named_values, options_of
from dino_ds.errors import ConfigError, DataError
from dino_ds.method.specs.own import groups_of, name_problems, term_problems
from dino_ds.models.specs.backbones import FROM_SOURCE


class Recipe(Section):
    """A recipe says what is learned; the ds JSON says how fast and on what hardware."""

    seed: fields.Seed = option(0, "seed of weights, data order and augmentation")
    stage_start: Literal["continue", "restart"] | None = option(
        None,
        "with --from RUN: continue takes its whole state and counts its steps on; restart takes its teacher, at step 0",
    )
    length: StageLengthField = option(Length(100, "epochs"), "length of the training in epochs, steps or images")
    log_every: fields.Count = free_option(10, "steps between lines of metrics")
    save_every: fields.AutoLength = free_option(
        "auto", "length between saves; 0 steps: only at the end; auto: after 5 steps, then every 10 minutes"
    )
    keep_checkpoints: fields.Count = free_option(3, "number of newest checkpoints that are kept")
    keep_every: fields.LengthField = free_option(
        Length(0, "steps"), "checkpoints at multiples of this length are never removed; 0: none of them"
    )
    save_in_background: bool = free_option(True, "write checkpoints while training goes on; false: less host memory")
    hang_seconds: fields.Seconds = free_option(
        600, "seconds without progress that end the run (three times as many while starting or saving); 0: never"
    )
    data: sections.DataSection = sections.DataSection()
    crops: sections.CropsSection = sections.CropsSection()
    model: ModelSection = ModelSection()
    head: sections.HeadSection = sections.HeadSection()
    ibot_head: sections.HeadSection = sections.HeadSection()
    objective: sections.ObjectiveSection = sections.ObjectiveSection()
    optimizer: sections.OptimizerSection = sections.OptimizerSection()
    gram: GramSection = GramSection()
    teacher: TeacherSection = TeacherSection()
    eval: EvalSection = EvalSection()

    _lengths = field_validator("length")(fields.positive)

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Recipe:
        problems, invalid = name_problems(self), set[str](info.context or ())  # the sections with problems so far
        if not invalid & {"crops", "model"}:
            problems += sections.crop_problems(self.crops, self.model)
        if not invalid & {"data", "model"}:
            problems += channel_problems(self.data, self.model)
        if not invalid & {"eval", "data", "objective"}:
            problems += eval_problems(self.eval, self.data, self.objective)
        if not invalid:
            problems += [*_length_problems(self), *idle_keys(self, "refused"), *term_problems(self)]
        if problems:
            raise ValueError(*problems)
        return self

    @property
    def peak_lr(self) -> float:
        """The learning rate at the end of its warm-up, scaled by the global batch size."""
        batch, is_linear = self.data.global_batch, self.optimizer.lr_scaling == "linear"
        return self.optimizer.lr * (batch / 256 if is_linear else math.sqrt(batch / 1024))

    @property
    def batch_norm(self) -> str:
        """teacher.batch_norm, with "auto" resolved: "frozen" keeps the statistics of weights that a run starts from."""
        starts_from_weights = self.model.init_from is not None or self.stage_start == "restart"
        auto = "frozen" if starts_from_weights else "reference" if self.teacher.taught_by == EMA else "ema"
        return auto if self.teacher.batch_norm == "auto" else self.teacher.batch_norm

    @property
    def outlasting_start(self) -> dict[str, str]:
        """Settings that follow from how a run began, which a stage from it keeps although it drops that beginning."""
        frozen = self.batch_norm == "frozen" and self.model.spec().has_batch_norm
        return {"teacher.batch_norm": "frozen"} if frozen else {}

    @property
    def resolutions(self) -> tuple[Resolution, ...]:
        """The crop sizes of optimizer steps, and how often each is used; a single one without crops.resolutions."""
        single = Resolution(self.crops.global_size, self.crops.local_size, self.gram.own_crop_size)
        return parse_resolutions(self.crops.resolutions) or (single,)

    @property
    def hides_patches(self) -> bool:
        """Whether patches are hidden from the student, which sees a learned mask token in their place."""
        return self.crops.mask != "none" and self.crops.mask_hides

    @property
    def groups(self) -> tuple[CropGroup, ...]:
        """The crop groups of an image at the largest resolution, for which memory must suffice."""
        return max(map(self.groups_of, self.resolutions), key=lambda groups: sum(s**2 for s in crop_sizes(groups)))

    def groups_of(self, resolution: Resolution) -> tuple[CropGroup, ...]:
        """The `groups` of a step at `resolution`: resolutions differ only in crop sizes."""
        return groups_of(self, resolution)

    def batch_bytes(self, images: int) -> int:
        """Bytes of the crops of `images` images from the loader: uint8, or FP32 if augmented there or `is_deep`."""
        pixels = sum(size**2 for size in crop_sizes(self.groups)) * self.model.in_chans
        return images * pixels * (4 if self.data.augment == "worker" or self.data.is_deep else 1)

    def check_learning_rates(self) -> None:
        """Raises ConfigError if min_lr exceeds the peak learning rate. For training: tools may lower the batch size."""
        low, peak = self.optimizer.min_lr, self.peak_lr
        if self.optimizer.schedule != "constant" and low > peak * (1 + 1e-9):
            why = "(optimizer.lr scaled by data.global_batch): lower it, or raise lr"
            raise ConfigError(f"optimizer.min_lr {low:g} is more than the peak learning rate {peak:g} {why}")

    def check_count(self, images: int) -> None:
        """Raises DataError for fewer images than a global batch, with the command that adapts settings to them."""
        batch = self.data.global_batch
        if images < batch:
            how = f"set --data.global_batch to {images} or less, or add images"
            few = f"settings for few images: {self.data.advise_command}"
            raise DataError(f"{images} images < one global batch of {batch}: {how}; {few}")

    def check_teacher(self) -> None:
        """Raises ConfigError if the recipe distills and names no trained teacher. For training."""
        if self.teacher.distill is not None and self.teacher.taught_by == EMA:
            distill = f"teacher.distill {self.teacher.distill}"
            raise ConfigError(f"{distill} needs a trained teacher: name one (--teacher.source RUN), or set it none")


def _length_problems(recipe: Recipe) -> list[str]:
    length, frozen, options = recipe.length, recipe.model.freeze_backbone, options_of(Recipe)
    if recipe.stage_start == "continue" or length.begin:
        return []  # length is the stage's; the other lengths may have ended in the run before
    longer = [
        f"{name} {part} is longer than length {length}: shorten it, such as --{name} '10 %' (a short trial keeps its "
        "schedules with --max_steps)"
        for name, part in named_values(recipe)
        if options[name].fact("inside_run") and part.unit == length.unit and part.value > length.value
    ]
    why = f"is not shorter than length {length}: the backbone would never learn"
    never = frozen.unit == length.unit and frozen.value >= length.value
    return [*longer, *[f"model.freeze_backbone {frozen} {why}"] * never]


def channel_problems(data: sections.DataSection, model: ModelSection) -> list[str]:
    """Problems of data.mean and data.std, if they can't be those of the images' channels."""
    values_of = {"data.mean": data.mean, "data.std": data.std}
    known = {name: values for name, values in values_of.items() if values is not None}
    if len(known) == 1:
        (there,), (missing,) = known, values_of.keys() - known
        return [f"{there} is given without {missing}: give both or neither"]
    # With a smaller deviation than a fortieth of an 8-bit level, a channel is empty.
    bounds = {"data.mean": 0.0, "data.std": 1e-4}
    texts = {name: ",".join(f"{value:g}" for value in values) for name, values in known.items()}
    if out := [name for name, values in known.items() if not all(bounds[name] <= x <= 1 for x in values)]:
        span = f"{bounds[out[0]]:g} to 1, in values whose black is 0 and whose white is 1"
        return [f"{out[0]} {texts[out[0]]} must be {span}: divide those of 8 bits by 255"]
    return [
        f"{name} {texts[name]} has {len(values)} values, and model.in_chans is {model.in_chans}: give one a channel"
        f"{f', or set --model.in_chans {len(values)}' if values else ''}"
        for name, values in known.items()
        if len(values) != model.in_chans and (model.backbone != FROM_SOURCE or not values)
    ]
