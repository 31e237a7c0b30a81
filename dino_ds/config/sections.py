"""The sections of the recipe's schema, with the defaults of the DINO paper's ViT-S/16 (main_dino.py); the shares of a
mixture; and checks for settings of crops that are impossible or have no effect. No torch here."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from dino_ds.basics.files import unusable_text
from dino_ds.basics.names import as_written
from dino_ds.config import fields
from dino_ds.config.crops import AUGMENTATIONS, Augmentation, chances_by_kind, parse_resolutions
from dino_ds.config.fields import AreaRange, Count, Length, LengthField, Ramp, ScaleRange, Section, WeightField, option
from dino_ds.config.model import ArgumentsField, ModelSection
from dino_ds.config.schema import IdleKey
from dino_ds.models.specs.backbones import FROM_SOURCE

_ENTRY = re.compile(r"\s*(?P<place>\S.*?)\s*=\s*(?P<share>[0-9]*\.?[0-9]+)\s*(?:,|$)")


@dataclass(frozen=True)
class MixturePart:
    """A source of a mixture: its path, absolute or below data.root, and its share of the images of an epoch."""

    place: str
    share: Fraction


def parse_mixture(texts: Sequence[str]) -> tuple[MixturePart, ...]:
    """The parts of a mixture, whose shares add up to 1. Raises ValueError."""
    parts = list[MixturePart]()
    for text in texts:
        match = _ENTRY.fullmatch(text)
        if match is None or len(match["share"]) > 20 or "," in re.sub(r"\{[^{}]*\}", "", match["place"]):
            raise ValueError(f"mixture: {as_written(text)} is not PLACE=SHARE, such as mine=0.7,theirs=0.3")
        place, share = match["place"], Fraction(match["share"])
        if problem := unusable_text(place):
            raise ValueError(f"mixture: {problem}")
        if not share:
            raise ValueError(f"mixture: {place} has the share 0: leave it out")
        parts.append(MixturePart(place, share))
    if len(parts) == 1:
        raise ValueError(f"mixture {texts[0]}: there is one source; name it as data.root instead")
    if twice := [part.place for part in parts if [other.place for other in parts].count(part.place) > 1]:
        raise ValueError(f"mixture: {twice[0]} is named twice; give it once, with the sum of its shares")
    total = sum((part.share for part in parts), Fraction(0))
    if parts and abs(total - 1) > Fraction(1, 10**6):  # shares that are written in decimals are rounded
        raise ValueError(f"mixture: the shares add up to {float(total):.7g}, and must add up to 1")
    return tuple(MixturePart(part.place, part.share / total) for part in parts)


def _split(value: object) -> object:
    """The entries of a mixture: of a text with commas between them, of a list, or of a mapping from path to share."""
    if isinstance(value, Mapping):
        return tuple(f"{place}={share}" for place, share in value.items())
    if not isinstance(value, str):
        return value
    entries, begin = [], 0
    while match := _ENTRY.match(value, begin):
        entries.append(match[0].strip().removesuffix(","))
        begin = match.end()
    return (*entries, *[value[begin:]] * (begin < len(value)))


_FEW = fields.refuse(lambda texts: len(texts) > 1000 and f"mixture: {len(texts)} sources, at most 1000 are taken")
_FORMS = re.compile(r"none|classes|clusters:.+", re.DOTALL)
_BALANCE = fields.refuse(lambda text: not _FORMS.fullmatch(text) and f"{text!r} is not none, classes, or clusters:FILE")


class DataSection(Section):
    source: fields.SourceName = option(
        "folder", f"folder (your files in data.root), a dataset: {', '.join(fields.SOURCES[1:])}, or your module:Class"
    )
    root: fields.PathText | None = fields.free_option(
        None, f"{fields.IMAGE_FORMS} (patterns, s3:// too), or torchvision's folder"
    )
    mixture: Annotated[tuple[str, ...], BeforeValidator(_split), _FEW] = option(
        (),
        "several sources and their shares of each epoch, such as mine=0.7,theirs=0.3: folders in data.root, or paths",
    )
    balance: Annotated[fields.PathText, _BALANCE] = option(
        "none",
        "classes, or clusters:FILE (a .csv of name,cluster): those of a source are drawn equally often",
        by_content=True,
    )
    download: bool = fields.free_option(False, "let torchvision download its data set into data.root")
    global_batch: fields.BatchSize = option(512, "images of an optimizer step, over all ranks and micro-batches")
    workers: fields.Few | None = fields.free_option(None, "loading processes of each rank; none: as the cores allow")
    cache_gib: fields.CacheGib = fields.free_option(
        0.0, "GiB of memory on each machine for decoded files, shared by its ranks; worth it for small images; 0: none"
    )
    remote_cache_gib: fields.CacheGib = fields.free_option(
        0.0, "GiB of disk on each machine for images from buckets and web servers; 0: none"
    )
    augment: Literal["device", "worker"] = option(
        "device",
        "where colors are changed and crops blurred: device (a batch at once), or worker (in loading processes)",
    )
    max_pixels: Count = option(50_000_000, "images with more pixels are skipped, since they may be decompression bombs")
    value_range: fields.ValueRangeField = option(
        "auto", "values of black and white in images of more than 8 bits, such as 0,4095; auto: measured on a sample"
    )
    mean: fields.ChannelsField | None = option(
        None, "mean of each channel, black is 0 and white 1; none: as the weights say, ImageNet's or measured"
    )
    std: fields.ChannelsField | None = option(None, "standard deviation of each channel; none: as for data.mean")
    max_bad_fraction: fields.Fraction01 = fields.free_option(
        0.01, "largest share of unreadable images: beyond it the run stops; 0: at the first one"
    )

    @property
    def parts(self) -> tuple[MixturePart, ...]:
        return parse_mixture(self.mixture)

    @property
    def place(self) -> str:
        return ", ".join(self.mixture) or self.root or self.source

    @property
    def advise_command(self) -> str:
        source = [] if self.source == "folder" else ["--source", self.source]
        return shlex.join(["dino-ds", "advise", *([] if self.root is None else [self.root]), *source])

    @property
    def known_range(self) -> tuple[float, float] | None:
        """`value_range` if it is numbers, else None: the run then takes 8-bit images only."""
        return None if self.value_range == "auto" else self.value_range

    @property
    def is_deep(self) -> bool:
        """Whether crops leave the loader as FP32, also those of 8-bit images."""
        return self.known_range is not None

    @property
    def own_files(self) -> bool:
        """Whether data.root names the images. If so, evaluations may name others; else the source has test images."""
        return self.source == "folder" or ":" in self.source

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        if self.download and (self.source == "photos" or self.own_files):
            raise ValueError(f"download true needs a torchvision data.source, and '{self.source}' is none")
        parse_mixture(self.mixture)  # raises ValueError for impossible shares
        return self


_TURNS = "a chance, 0 to 1, of a turn by 90, 180 or 270 degrees"
_LIKELY = "0.75 makes all four directions equally likely (other angles would leave corners without an image)"
_NO_DEGREES = fields.refuse(lambda chance: not 0 <= chance <= 1 and f"{chance:g} is not {_TURNS}: {_LIKELY}")


class CropsSection(Section):
    global_size: fields.Side = option(224, "side of the two global crops in pixels, a multiple of the patch size")
    global_scale: AreaRange = option((0.4, 1.0), "smallest and largest area of a global crop, as shares of the image")
    local_size: fields.Side = option(96, "side of a local crop in pixels, a multiple of the patch size")
    local_scale: AreaRange = option((0.05, 0.4), "smallest and largest area of a local crop, as shares of the image")
    num_local: fields.Few = option(8, "number of local crops of each image")
    augment: Literal["dino", "dinov2_as_trained", "low_res"] = option(
        "dino",
        "preset for those of jitter, blur, grayscale, flip and solarize that are none; low_res: for 32 to 64 pixels",
    )
    jitter: fields.Numbers | None = option(
        None, "factor on the preset's color jitter (0: no jitter), or its brightness, contrast, saturation and hue"
    )
    blur: fields.Numbers | None = option(
        None, "chance that a crop is blurred, or three: of the first global crop, the second one, and local crops"
    )
    grayscale: fields.Fraction01 | None = option(None, "chance that a crop loses its colors")
    flip: fields.Fraction01 | None = option(None, "chance that a crop is mirrored left to right")
    solarize: fields.Numbers | None = option(None, "chance that bright pixels are inverted, or three as in crops.blur")
    vertical_flip: fields.Fraction01 = option(0.0, "chance that a crop is mirrored top to bottom")
    rotation: Annotated[float, _NO_DEGREES] = option(
        0.0, "chance that a crop is turned by 90, 180 or 270 degrees; 0.75: all four directions are equally likely"
    )
    mask: Literal["none", "dinov2", "dinov3"] = option(
        "none", "hide blocks of patches in global crops, as DINOv2 does, or an exact number of patches, as DINOv3 does"
    )
    mask_share: fields.Fraction01 = option(0.5, "chance that a global crop is masked")
    mask_ratio: ScaleRange = option((0.1, 0.5), "smallest and largest share of a masked crop's patches that are hidden")
    mask_hides: bool = option(
        True, "whether the student's patches are hidden; false: it sees them, and still predicts them (distillation)"
    )
    resolutions: Annotated[tuple[str, ...], BeforeValidator(fields.split_words)] = option(
        (), "crop sizes from which each step draws one: GLOBAL/LOCAL:SHARE or GLOBAL/LOCAL/GRAM:SHARE, ..."
    )
    idle: ClassVar = {"crops.num_local 0": "crops.local_size crops.local_scale"}
    idle |= {"crops.resolutions !": "crops.local_size", "crops.mask none": "crops.mask_share crops.mask_ratio"}
    refused: ClassVar = {"crops.mask none": "crops.mask_hides"}
    refused |= {"objective.ibot_weight 0, objective.terms {}": "crops.mask"}

    @property
    def augmentation(self) -> Augmentation:
        """The preset `augment`, changed by the values that this section sets. Raises ValueError."""
        preset = AUGMENTATIONS[self.augment]
        changes: dict[str, Any] = {"flip": self.flip, "gray": self.grayscale, "rotation": self.rotation}
        by_kind = {name: getattr(self, name) for name in ("blur", "solarize")}
        changes |= {name: chances_by_kind(name, some) for name, some in by_kind.items() if some is not None}
        changed = preset if self.jitter is None else preset.with_jitter(self.jitter)
        changes = {name: value for name, value in changes.items() if value is not None}
        return replace(changed, vertical_flip=self.vertical_flip, **changes)

    @model_validator(mode="after")
    def _check(self) -> CropsSection:
        _ = self.augmentation  # raises
        low, high = self.mask_ratio
        if not 0 < low <= high < 1:
            raise ValueError(f"mask_ratio {[low, high]} must be two parts of the patches, 0 < low <= high < 1")
        if self.mask != "none" and self.mask_share == 0:
            raise ValueError(f"mask {self.mask} with mask_share 0 masks nothing: set mask none, or a share above 0")
        parse_resolutions(self.resolutions)
        return self


class HeadSection(Section):
    prototypes: Annotated[int, Field(ge=2, le=2**24)] = option(65536, "number of outputs of the projection head")
    hidden: fields.Width = option(2048, "width of the head's hidden layers")
    bottleneck: fields.Width = option(256, "width before the prototypes, and of what coding_rate_weight compares")
    layers: fields.Depth = option(3, "number of linear layers before the prototypes")
    batch_norm: bool = option(False, "BatchNorm after each of the hidden layers")
    learned_lengths: bool = option(False, "train the lengths of the prototypes (DINOv2); false: all lengths are 1")
    free_prototypes: bool = option(
        False, "take the plain weights of a linear layer as prototypes (DINOv3); false: normalized weights"
    )

    @model_validator(mode="after")
    def _check(self) -> HeadSection:
        if self.learned_lengths and self.free_prototypes:
            raise ValueError("learned_lengths true and free_prototypes true: free ones have lengths; leave one out")
        return self


_OFF = Ramp(0.0)


class ObjectiveSection(Section):
    student_temp: fields.Temperature = option(0.1, "softmax temperature of the student")
    teacher_temp: fields.Temperature = option(0.04, "softmax temperature of the teacher after its warm-up")
    warmup_teacher_temp: fields.Temperature = option(0.04, "temperature at which the teacher's warm-up starts")
    teacher_temp_warmup: LengthField = option(
        Length(0, "epochs"), "length of the warm-up of the teacher's temperature", inside_run=True
    )
    centering: Literal["softmax", "sinkhorn"] = option(
        "softmax", "how targets are made: softmax after subtracting a running mean, or Sinkhorn-Knopp"
    )
    center_momentum: fields.Fraction01 = option(0.9, "momentum of the running mean of centering softmax")
    freeze_prototypes: LengthField = option(
        Length(1, "epochs"), "length at the start during which the prototypes stay as initialized", inside_run=True
    )
    frozen_prototypes: Literal["no_gradient", "zero_lr"] = option(
        "no_gradient",
        "what frozen prototypes give the optimizer: no gradient (DINO), or one that clipping and Adam see (DINOv2)",
    )
    dino_weight: WeightField = option(
        Ramp(1.0), "weight of DINO's loss of CLS tokens; all weights may be ramps, such as '0..1 over 1000 steps'"
    )
    dino_local_weight: WeightField = option(Ramp(1.0), "weight of local crops' pairs within DINO's loss (DINOv3)")
    ibot_weight: WeightField = option(_OFF, "weight of the loss of masked patches (iBOT); needs crops.mask")
    ibot_head: Literal["own", "shared"] = option(
        "own", "head of the masked patches: their own, ibot_head, or shared with DINO's loss"
    )
    coding_rate_weight: WeightField = option(
        _OFF, "weight of SimDINO's coding-rate loss of CLS tokens, which needs no prototypes"
    )
    koleo_weight: WeightField = option(_OFF, "weight of KoLeo, which spreads CLS features; summed over crops")
    preserve_weight: WeightField = option(
        _OFF, "weight of 1 - cosine to the CLS and patch features of model.init_from, on global crops"
    )
    koleo_ranks: Literal["own", "all"] = option(
        "own", "images that KoLeo spreads: the micro-batch of each rank by itself, or those of all ranks together"
    )
    terms: ArgumentsField = option("{}", 'your own loss terms: {"NAME": {"spec": "module:Class", "weight": 0.1, ...}}')
    idle: ClassVar = {
        "objective.dino_weight 0, objective.ibot_weight 0, teacher.distill none, objective.terms {}": (
            "head.prototypes objective.teacher_temp objective.student_temp objective.centering "
            "objective.freeze_prototypes objective.frozen_prototypes"
        ),
        "objective.teacher_temp_warmup 0": "objective.warmup_teacher_temp",
        "objective.freeze_prototypes 0": "objective.frozen_prototypes",
        "objective.koleo_weight 0": "objective.koleo_ranks",
        "objective.ibot_weight 0": "objective.ibot_head",
    }
    refused: ClassVar = {"objective.centering sinkhorn": "objective.center_momentum"}
    refused |= dict.fromkeys(("objective.dino_weight 0", "crops.num_local 0"), "objective.dino_local_weight")
    refused |= dict.fromkeys(("objective.ibot_weight 0", "objective.ibot_head shared"), "ibot_head")


class OptimizerSection(Section):
    kind: Literal["adamw", "muon", "sgd", "lars"] = option(
        "adamw", "muon: orthogonalized momentum for weight matrices, AdamW for the rest; sgd and lars are for ResNets"
    )
    lr: fields.Positive = option(0.0005, "peak learning rate for the batch that optimizer.lr_scaling names")
    lr_scaling: Literal["linear", "sqrt"] = option(
        "linear", "how lr follows data.global_batch: linear from 256 images (DINO), or its root from 1024 (DINOv2)"
    )
    layer_decay: Annotated[float, Field(gt=0, le=1)] = option(1.0, "learning rate of a block / the next block's")
    patch_embed_lr: Annotated[float, Field(gt=0, le=1)] = option(1.0, "factor on the patch embedding's learning rate")
    clip_by: Literal["network", "part"] = option(
        "network", "whose norm gradient_clipping bounds: the network's, or that of backbone and of each head (DINOv2)"
    )
    schedule: Literal["cosine", "constant"] = option("cosine", "course of the learning rate after its warm-up")
    min_lr: fields.NotNegative = option(1e-6, "learning rate at the end, not scaled by the batch")
    warmup: LengthField = option(Length(10, "epochs"), "length of the learning rate's warm-up from 0", inside_run=True)
    warmup_shape: Literal["linear", "cosine"] = option(
        "linear", "course of the warm-up; cosine: half a cosine, slow at first (DINOv3)"
    )
    weight_decay: fields.NotNegative = option(0.04, "weight decay at the start")
    weight_decay_end: fields.NotNegative = option(0.4, "weight decay at the end; a cosine leads there")
    beta1: fields.BelowOne = option(0.9, "AdamW's decay of the mean")
    beta2: fields.BelowOne = option(0.999, "AdamW's decay of the mean square")
    eps: Annotated[float, Field(gt=0, le=1)] = option(1e-8, "AdamW's epsilon")
    momentum: fields.BelowOne = option(0.9, "momentum of muon, sgd and lars")
    scale: Annotated[float, Field(gt=0, le=100)] = option(1.0, "length of Muon's steps as a multiple of AdamW's")
    idle: ClassVar = {"optimizer.warmup 0": "optimizer.warmup_shape", "optimizer.schedule constant": "optimizer.min_lr"}
    refused: ClassVar = {"optimizer.kind adamw": "optimizer.momentum"}
    refused |= {"optimizer.kind sgd|lars": "optimizer.beta1 optimizer.beta2 optimizer.eps"}
    refused |= {"optimizer.kind !muon": "optimizer.scale"}


def crop_problems(crops: CropsSection, model: ModelSection) -> list[str]:
    several, patch = parse_resolutions(crops.resolutions), model.side_multiple
    sizes = [("crops.global_size", crops.global_size)]
    problems: list[str] = []
    if model.in_chans != 3 and model.backbone != FROM_SOURCE:
        why = f"no effect on images of {model.in_chans} channels (model.in_chans), which are not RGB"
        problems += [IdleKey("crops.grayscale", crops.grayscale, f"has {why}")] if crops.grayscale else []
        if crops.jitter and any(crops.jitter[2:]):
            strengths = [f"{strength:g}" for strength in crops.jitter]
            instead = ",".join([*strengths[:2], "0", "0"])
            problems.append(f"crops.jitter {','.join(strengths)}: saturation and hue have {why}: write {instead}")
    smallest = min([resolution.global_size for resolution in several] or [crops.global_size])
    patches, (low, high) = (smallest // patch) ** 2, crops.mask_ratio
    if crops.mask != "none" and patches and not int(patches * high):
        none = f"hides none of the {patches} patches of a crop of {smallest} pixels"
        least = f"it must reach {math.ceil(1e4 / patches) / 1e4:g}, one patch"
        problems.append(f"crops.mask_ratio {low:g},{high:g} {none}: {least}")
    if crops.mask != "none" and model.backbone != FROM_SOURCE and "mask_token" not in model.spec().obeys:
        can_not = f"and {model.backbone} can't: take a ViT, or leave it out with the loss of masked patches"
        problems.append(f"crops.mask {crops.mask} needs a backbone that hides patches, {can_not}")
    if crops.num_local:
        sizes += [(f"crops.resolutions {resolution}: local size", resolution.local_size) for resolution in several]
        sizes += [] if several else [("crops.local_size", crops.local_size)]
    sizes += [(f"crops.resolutions {resolution}: global size", resolution.global_size) for resolution in several]
    return problems + side_problems(sizes, model.backbone, patch)


def side_problems(sizes: Iterable[tuple[str, int]], backbone: str, patch: int) -> list[str]:
    """Lines about (key, side) of crops whose sides are not multiples of the backbone's patch size."""
    return [
        f"{name} {size} is not a multiple of the patch size {patch} (model.backbone {backbone}): "
        f"use {' or '.join(str(s) for s in (size // patch * patch, size // patch * patch + patch) if s)}"
        for name, size in sizes
        if size % patch
    ]


def fitting_sizes(side: int, patch: int, most: int) -> tuple[int, int]:
    """(global, local) crop sizes for images of `side` pixels, in multiples of the patch. The global size is at most
    `most`; the local size is 96/224 of it, DINO's ratio, or half of it if `most` is below 224."""
    large, share = max(2, min(most, side) // patch) * patch, 0.5 if most < 224 else 96 / 224
    return large, min(max(1, round(share * large / patch)) * patch, large - patch)
