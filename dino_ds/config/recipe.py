"""The recipe's schema: what is learned, with the defaults of the DINO paper's ViT-S/16 (main_dino.py).

This one schema makes validation, `--help` and the option table of docs/configs.md; `dino_ds.config.loading` loads it.
No torch here.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dino_ds.backbones import BACKBONES, FROM_SOURCE, BackboneSpec, ViTSpec
from dino_ds.config.crops import CropGroup, crop_sizes, dino_groups
from dino_ds.config.fields import (
    BENCHMARKS,
    EVALUATIONS,
    SOURCES,
    BatchSize,
    BelowOne,
    Count,
    Depth,
    Evaluations,
    Few,
    Fraction01,
    Length,
    LengthField,
    NotNegative,
    PathText,
    Positive,
    SaveEvery,
    ScaleRange,
    Seconds,
    Seed,
    Side,
    SourceName,
    Temperature,
    ValueRangeField,
    Width,
    check_range,
    positive,
)
from dino_ds.errors import ConfigError
from dino_ds.names import nearest


def _field(default: Any, description: str) -> Any:
    return Field(default, description=description)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataSection(Section):
    source: SourceName = _field(
        "folder", f"folder (your files, whatever form data.root has), {', '.join(SOURCES[1:])}, or module:Class"
    )
    root: PathText | None = _field(
        None, "a folder of images, .txt list, .tar or .parquet files (patterns too), or torchvision's data folder"
    )
    download: bool = _field(False, "let torchvision download its data set into data.root")
    global_batch: BatchSize = _field(512, "images per optimizer step over all ranks and micro-batches")
    workers: Few | None = _field(None, "data loading processes per rank; none = by the cores")
    augment: Literal["device", "worker"] = _field(
        "device", "where colours, blur and normalisation are done: batched on the device, or by Pillow in the workers"
    )
    max_pixels: Count = _field(50_000_000, "pixels of an image beyond which it is skipped as a decompression bomb")
    value_range: ValueRangeField = _field(
        "auto",
        "black and white of images deeper than 8 bits, such as 0,4095; auto = the bits that a sample of them uses",
    )
    max_bad_fraction: Fraction01 = _field(
        0.01, "unreadable images, as a part of those drawn so far, beyond which the run stops; 0 = none"
    )

    @property
    def known_range(self) -> tuple[float, float] | None:
        """`value_range` where it is numbers. A run without one takes images of 8 bits only."""
        return None if self.value_range == "auto" else self.value_range

    @property
    def is_deep(self) -> bool:
        """Whether crops leave the loader as FP32, also those of 8-bit images."""
        return self.known_range is not None

    @property
    def own_files(self) -> bool:
        """Whether data.root says which images: others may then be named for tests. Else the source has its own."""
        return self.source == "folder" or ":" in self.source

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        if self.download and (self.source == "photos" or self.own_files):
            raise ValueError(f"download true needs a torchvision data.source, and '{self.source}' is none")
        return self


class CropsSection(Section):
    global_size: Side = _field(224, "side of the 2 global crops, pixels; a multiple of the patch size")
    global_scale: ScaleRange = _field((0.4, 1.0), "area of a global crop, as parts of the image")
    local_size: Side = _field(96, "side of a local crop, pixels; a multiple of the patch size")
    local_scale: ScaleRange = _field((0.05, 0.4), "area of a local crop, as parts of the image")
    num_local: Few = _field(8, "local crops per image")
    augment: Literal["dino", "dinov2_as_trained", "low_res"] = _field(
        "dino", "photometric augmentation; low_res (no blur) is for images of 32 to 64 pixels"
    )

    _ranges = field_validator("global_scale", "local_scale")(check_range)

    @property
    def groups(self) -> tuple[CropGroup, ...]:
        """What is cut from every image, in order."""
        return dino_groups(self.global_size, self.global_scale, self.local_size, self.local_scale, self.num_local)


class ModelSection(Section):
    backbone: str = _field("vit_small_patch16_224", "timm's name of the ViT; from_source = that of init_from's weights")
    patch_size: Side | None = _field(None, "pixels; none = the backbone's")
    width: Width | None = _field(None, "embedding dimension; none = the backbone's")
    depth: Depth | None = _field(None, "blocks; none = the backbone's")
    heads: Depth | None = _field(None, "attention heads; none = the backbone's")
    in_chans: Depth = _field(3, "channels of the images; the data source must give as many")
    drop_path: BelowOne = _field(0.1, "stochastic depth of the last block, growing linearly from 0")
    stochastic_depth: Literal["per_image", "batched"] = _field(
        "per_image", "batched computes only an exact part of the crops (faster, inexact: depends on the micro-batch)"
    )
    init_from: PathText | None = _field(
        None, "start from weights: a file or folder (ours, DINO's, DINOv2's, timm's, Hugging Face's), or a timm name"
    )
    freeze_backbone: LengthField = _field(Length(0, "steps"), "how long only the head is trained first; for init_from")
    pos_embed_interpolation: Literal["dino", "antialias"] = _field(
        "dino", "how local crops and init_from resize positions; dino is needed for DINO's released weights"
    )

    @field_validator("backbone")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in (*BACKBONES, FROM_SOURCE):
            kind = "backbone that dino_ds builds" if "vit" in name else "Vision Transformer: only these are trained"
            near = ", ".join(nearest(name, BACKBONES, cutoff=0.0, slack=1.0))
            raise ValueError(f"{name!r} is not a {kind}. The nearest are {near}")
        return name

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        if self.backbone == FROM_SOURCE and self.init_from is None:
            raise ValueError(f"backbone {FROM_SOURCE} is that of weights: name them with model.init_from")
        if self.backbone == FROM_SOURCE:
            return self
        spec = BACKBONES[self.backbone]
        foreign = [key for key in _SPEC_KEYS if getattr(self, key) is not None and not _has_field(spec, key)]
        if foreign:
            raise ValueError(f"model.{foreign[0]} is not something that {self.backbone} has: leave it out")
        arch = self.spec()
        if isinstance(arch, ViTSpec) and arch.width % arch.heads:
            raise ValueError(f"width {arch.width} is not a multiple of heads {arch.heads}")
        return self

    def spec(self) -> BackboneSpec:
        """The backbone's spec with the overrides of this section. Raises ConfigError for from_source."""
        if self.backbone == FROM_SOURCE:
            raise ConfigError(f"model.backbone {FROM_SOURCE} is known to commands that read the weights: name it here")
        changed = {key: value for key in (*_SPEC_KEYS, "in_chans") if (value := getattr(self, key)) is not None}
        spec: Any = BACKBONES[self.backbone]
        replaced: BackboneSpec = dataclasses.replace(spec, **changed)
        return replaced


_SPEC_KEYS = ("patch_size", "width", "depth", "heads")


def _has_field(spec: Any, name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(spec))


class HeadSection(Section):
    prototypes: Annotated[int, Field(ge=2, le=2**24)] = _field(65536, "outputs of the projection head")
    hidden: Width = _field(2048, "width of the head's hidden layers")
    bottleneck: Width = _field(256, "width before the prototypes")
    layers: Depth = _field(3, "linear layers before the prototypes")


class ObjectiveSection(Section):
    student_temp: Temperature = _field(0.1, "softmax temperature of the student")
    teacher_temp: Temperature = _field(0.04, "softmax temperature of the teacher after its warm-up")
    warmup_teacher_temp: Temperature = _field(0.04, "temperature at which the teacher's warm-up starts")
    teacher_temp_warmup: LengthField = _field(Length(0, "epochs"), "length of the teacher temperature's warm-up")
    center_momentum: Fraction01 = _field(0.9, "momentum of the running mean of the teacher's logits")
    freeze_prototypes: LengthField = _field(Length(1, "epochs"), "how long the prototypes stay as initialised")


class OptimizerSection(Section):
    lr: Positive = _field(0.0005, "peak learning rate for 256 images; scaled linearly with data.global_batch")
    min_lr: NotNegative = _field(1e-6, "learning rate at the end; not scaled")
    warmup: LengthField = _field(Length(10, "epochs"), "linear warm-up of the learning rate from 0")
    weight_decay: NotNegative = _field(0.04, "weight decay at the start")
    weight_decay_end: NotNegative = _field(0.4, "weight decay at the end (cosine in between)")
    beta1: BelowOne = _field(0.9, "AdamW's decay of the mean")
    beta2: BelowOne = _field(0.999, "AdamW's decay of the mean square")
    eps: Annotated[float, Field(gt=0, le=1)] = _field(1e-8, "AdamW's epsilon")


class TeacherSection(Section):
    momentum: Fraction01 = _field(0.996, "EMA momentum of the teacher at the start")
    momentum_end: Fraction01 = _field(1.0, "EMA momentum at the end (cosine in between)")


class EvalSection(Section):
    every: LengthField = _field(Length(5, "epochs"), "how often the teacher is evaluated; 0 steps = never")
    evals: Evaluations = _field("auto", f"{', '.join(EVALUATIONS)}; auto = knn where there are labelled test images")
    root: PathText | None = _field(
        None, "labelled test images in a form that data.root may have, with the same classes"
    )
    k: Count = _field(20, "neighbours")
    temperature: Temperature = _field(0.07, "weights of the neighbours: exp(similarity / temperature)")
    bank_images: Count = _field(10000, "labelled training images that evaluations use, at most")
    test_images: Count = _field(2000, "test images, at most")
    benchmark_root: PathText | None = _field(None, f"folder of the data of {', '.join(BENCHMARKS)}")
    pictures_every: LengthField = _field(
        Length(5, "epochs"), "how often attention and PCA of a few training images are drawn; 0 steps = never"
    )


class Recipe(Section):
    """What is learned. How fast and on what hardware is the ds JSON's."""

    seed: Seed = _field(0, "seed of weights, data order and augmentation")
    length: LengthField = _field(Length(100, "epochs"), "how long to train: epochs, steps or images")
    log_every: Count = _field(10, "steps between lines of metrics")
    save_every: SaveEvery = _field("auto", "how often to save; 0 steps = only at the end; auto = by what a save costs")
    expected_hours_between_failures: Positive = _field(
        24.0, "of the whole job; save_every auto weighs saves against it"
    )
    keep_checkpoints: Count = _field(3, "newest checkpoints that are kept")
    keep_every: LengthField = _field(Length(0, "steps"), "checkpoints at multiples of it are kept for good; 0 = none")
    save_in_background: bool = _field(
        True, "write checkpoints while training goes on; false needs no second copy of their tensors in host memory"
    )
    max_bad_steps: Count = _field(3, "non-finite losses in a row that stop the run")
    hang_seconds: Seconds = _field(600, "no progress for so long ends the run (start, saves: 3 times); 0 = never")
    data: DataSection = DataSection()
    crops: CropsSection = CropsSection()
    model: ModelSection = ModelSection()
    head: HeadSection = HeadSection()
    objective: ObjectiveSection = ObjectiveSection()
    optimizer: OptimizerSection = OptimizerSection()
    teacher: TeacherSection = TeacherSection()
    eval: EvalSection = EvalSection()

    _lengths = field_validator("length")(positive)

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        problems = [*self._crop_problems(), *self._length_problems()]
        if self.eval.k > self.eval.bank_images:
            problems.append(f"eval.k {self.eval.k} is more than eval.bank_images {self.eval.bank_images}")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def batch_bytes(self, images: int) -> int:
        """The crops of `images` images as loader processes hand them over: bytes, or FP32 where they are augmented."""
        pixels = sum(size**2 for size in crop_sizes(self.crops.groups)) * self.model.in_chans
        return images * pixels * (4 if self.data.augment == "worker" or self.data.is_deep else 1)

    def check_learning_rates(self) -> None:
        """For a run that is to be trained: tools also look at parts of its batch. Raises ConfigError."""
        peak = self.optimizer.lr * self.data.global_batch / 256
        if self.optimizer.min_lr > peak * (1 + 1e-9):
            low, why = f"{self.optimizer.min_lr:g}", "(optimizer.lr x data.global_batch / 256): lower it, or raise lr"
            raise ConfigError(f"optimizer.min_lr {low} is more than the peak learning rate {peak:g} {why}")

    def _crop_problems(self) -> list[str]:
        patch = 1 if self.model.backbone == FROM_SOURCE else self.model.spec().stride
        sizes = {"crops.global_size": self.crops.global_size}
        if self.crops.num_local:
            sizes["crops.local_size"] = self.crops.local_size
        return [
            f"{name} {size} is not a multiple of the patch size {patch} (model.backbone {self.model.backbone}): "
            f"use {' or '.join(str(s) for s in (size // patch * patch, size // patch * patch + patch) if s)}"
            for name, size in sizes.items()
            if size % patch
        ]

    def _length_problems(self) -> list[str]:
        parts = {
            "optimizer.warmup": self.optimizer.warmup,
            "objective.freeze_prototypes": self.objective.freeze_prototypes,
            "objective.teacher_temp_warmup": self.objective.teacher_temp_warmup,
        }
        return [
            f"{name} {part} is longer than length {self.length}: shorten it (a short trial keeps its schedules "
            "with --max_steps)"
            for name, part in parts.items()
            if part.unit == self.length.unit and part.value > self.length.value
        ]
