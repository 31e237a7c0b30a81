"""The recipe's sections about the backbone, `teacher` and `gram`. No torch here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dino_ds.config import fields
from dino_ds.config.crops import EMA, FROZEN
from dino_ds.config.fields import Length, LengthField, Listed, Positive, Section, StageLengthField, option
from dino_ds.errors import ConfigError
from dino_ds.models.specs.backbones import FROM_SOURCE, TrainedPart, backbone_spec, parse_trained
from dino_ds.models.specs.base import BackboneSpec


def _parse_arguments(value: object) -> str:
    try:
        arguments = _from_json(value) if isinstance(value, str) else _from_text(value)
        if not isinstance(arguments, dict):
            raise TypeError
        json.dumps(arguments, ensure_ascii=False).encode()  # no lone surrogate
        return json.dumps(arguments, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f'{str(value)[:80]!r} is not keywords as JSON, such as {{"layers": [1, 1, 1, 1]}}') from None


def _from_text(value: object) -> object:
    """Convert YAML's spellings of numbers, true, false and null (False, .5) in a value that is read as text."""
    if isinstance(value, dict):
        return {key: _from_text(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_from_text(inner) for inner in value]
    if not isinstance(value, str):
        return value
    constant = "null" if value == "~" else value.lower()
    try:
        return _from_json(constant if constant in ("true", "false", "null") else value)
    except ValueError:
        is_float = re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+\.?[0-9]*)([eE][-+]?[0-9]+)?", value)
        return float(value) if is_float else value


def _from_json(text: str) -> object:
    """Parse JSON. Raises ValueError, also for a duplicate key, and for NaN and infinities, which are not JSON."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(mapping := dict(pairs)) < len(pairs):
            raise ValueError
        return mapping

    return json.loads(text, object_pairs_hook=once, parse_constant=int)  # which raises ValueError


ArgumentsField = Annotated[str, BeforeValidator(_parse_arguments)]  # keyword arguments as JSON, or as a YAML mapping


_NEVER = Length(0, "steps")


def _known(backbone: str) -> str:
    if backbone != FROM_SOURCE:
        backbone_spec(backbone)  # raises ValueError
    return backbone


class ModelSection(Section):
    backbone: Annotated[str, AfterValidator(_known)] = option(
        "vit_small_patch16_224", "a timm name, your module:Class, or from_source: that of model.init_from"
    )
    arguments: ArgumentsField = option("{}", 'keyword arguments of its class as JSON, such as {"layers": [1, 1, 1, 1]}')
    patch_size: fields.Side | None = option(None, "side of a patch in pixels; none: the backbone's own")
    width: fields.Width | None = option(None, "embedding dimension; none: the backbone's own")
    depth: fields.Depth | None = option(None, "number of blocks; none: the backbone's own")
    heads: fields.Depth | None = option(None, "number of attention heads; none: the backbone's own")
    registers: fields.Few | None = option(None, "number of register tokens; none: the backbone's own")
    layer_scale: Positive | None = option(None, "initial value of LayerScale, such as 1e-5; none: the backbone's own")
    in_chans: fields.Depth = option(3, "number of channels that the images must have; gray images fit 1 and 3")
    sync_batch_norm: bool = option(True, "compute BatchNorm's statistics over all ranks; false: on each rank")
    drop_path: fields.BelowOne = option(0.1, "stochastic depth: chance that the last block is skipped")
    drop_path_growth: Literal["linear", "uniform"] = option(
        "linear", "drop_path of the earlier blocks: linear from 0, or uniform, the same in all blocks (DINOv2)"
    )
    local_cls_norm: bool | None = option(None, "local crops' CLS tokens have their own norm; none: as in the backbone")
    rope_rescale: Annotated[float, Field(gt=1)] | None = option(
        None, "largest factor by which RoPE's axes are scaled at random in training, in each block and step (DINOv3: 2)"
    )
    stochastic_depth: Literal["per_image", "batched"] = option(
        "per_image", "per_image: each image by chance; batched: an exact share of each micro-batch, which is faster"
    )
    init_from: fields.PathText | None = option(
        None, "weights to start from: a file or folder (ours, DINO's, timm's, Hugging Face's), or a timm name"
    )
    freeze_backbone: LengthField = option(
        _NEVER, "length at the start during which only the heads are trained; with model.init_from"
    )
    train: Annotated[str, BeforeValidator(parse_trained)] = option(
        "all", "part of the backbone that is trained, besides heads: all, 'last N blocks', norms_and_biases or lora"
    )
    lora_rank: Annotated[int, Field(ge=1, le=4096)] = option(8, "rank of each LoRA adapter, with model.train lora")
    lora_alpha: Annotated[float, Field(gt=0, le=1e6)] = option(
        16.0, "LoRA adapters are scaled by lora_alpha / lora_rank"
    )
    lora_layers: Listed[str] = option(("all",), "linear layers of each block that get LoRA adapters, such as qkv,proj")
    pos_embed_interpolation: Literal["dino", "antialias"] = option(
        "dino", "how position embeddings are resized; DINO's released weights need dino"
    )
    idle: ClassVar = {"model.drop_path 0": "model.drop_path_growth model.stochastic_depth"}
    refused: ClassVar = {"model.train !lora": "model.lora_rank model.lora_alpha model.lora_layers"}
    refused |= {"crops.num_local 0, model.local_cls_norm true": "model.local_cls_norm"}

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        if self.backbone == FROM_SOURCE:
            if self.init_from is None:
                raise ValueError(f"backbone {FROM_SOURCE} is that of weights: name them with model.init_from")
            return self
        spec = backbone_spec(self.backbone)
        if self.arguments != "{}" and "arguments" not in spec.obeys:
            how = f"dino_ds builds {self.backbone} itself (model.patch_size, width ...)"
            raise ValueError(f"model.arguments has no effect: {how}")
        if "drop_path_rate" in json.loads(self.arguments):
            raise ValueError("model.arguments may not have drop_path_rate: it is model.drop_path")
        for key, networks in _NOT_OF_ALL.items():
            value = getattr(self, key)
            if key not in spec.obeys and value != ModelSection.model_fields[key].default:
                why = f"is for {networks}: {self.backbone} has no use for it; leave it out"
                raise ValueError(f"model.{key} {value} {why}")
        if problem := self.spec().problem:
            raise ValueError(problem)
        return self

    @property
    def side_multiple(self) -> int:
        """Crop sizes must be multiples of this number of pixels; 1 while the backbone is not known."""
        return 1 if self.backbone == FROM_SOURCE else self.spec().side_multiple

    @property
    def trained(self) -> TrainedPart:
        layers = () if self.lora_layers == ("all",) else self.lora_layers
        return TrainedPart(self.train, self.lora_rank, self.lora_alpha, layers)

    def spec(self) -> BackboneSpec:
        """The backbone's spec with the overrides of this section. Raises ConfigError for from_source."""
        if self.backbone == FROM_SOURCE:
            raise ConfigError(f"model.backbone {FROM_SOURCE} is known to commands that read the weights: name it here")
        spec: Any = backbone_spec(self.backbone)
        keys = spec.obeys & {*SPEC_KEYS, "in_chans", "arguments"}
        changed = {key: value for key in keys if (value := getattr(self, key)) is not None}
        return cast(BackboneSpec, dataclasses.replace(spec, **changed))


SPEC_KEYS = ("patch_size", "width", "depth", "heads", "registers", "layer_scale", "local_cls_norm")  # of the spec
_NOT_OF_ALL = {  # for each key that some backbones ignore, the networks that obey it
    **dict.fromkeys((*SPEC_KEYS, "stochastic_depth", "drop_path_growth"), "ViTs that dino_ds builds"),
    "pos_embed_interpolation": "ViTs with learned positions",
    **dict.fromkeys(("local_cls_norm", "rope_rescale"), "ViTs with rotary positions"),
}


def keys_not_of(backbone: object) -> list[str]:
    """Keys of another network's recipe that `backbone` can't take over: arguments, and keys without effect on it."""
    keys = ["arguments"]
    with contextlib.suppress(ValueError):  # the schema refuses an unknown name
        obeyed = _NOT_OF_ALL if backbone == FROM_SOURCE else backbone_spec(str(backbone)).obeys
        keys += [key for key in _NOT_OF_ALL if key not in obeyed]
    return [f"model.{key}" for key in keys]


SNAPSHOT = "snapshot"  # the value of gram.teacher for the EMA teacher as it is at gram.start


class TeacherSection(Section):
    source: fields.PathText | None = option(
        None,
        "frozen teacher to distil: a run, weights or a timm name; none: the student's EMA is the teacher",
        learned=False,  # but the digest of its weights must stay the same
    )
    distill: Literal["heads", "features"] | None = option(
        None, "targets that teacher.source gives: outputs of its heads, which none means too, or its features"
    )
    momentum: fields.Fraction01 = option(0.996, "EMA momentum of the teacher at the start of training")
    momentum_end: fields.Fraction01 = option(1.0, "EMA momentum at the end of training; a cosine leads there")
    batch_norm: Literal["auto", "reference", "ema", "frozen"] = option(
        "auto",
        "statistics of the teacher's BatchNorm: its batch's (reference), the student's (ema), the start's (frozen)",
    )
    others: ArgumentsField = option("{}", 'more EMA teachers, for objective.terms: {"NAME": {"momentum": 0.9995, ...}}')

    @model_validator(mode="after")
    def _check(self) -> TeacherSection:
        if self.source is None and self.distill == "features":
            raise ValueError("distill features has no effect without source: name a teacher (--teacher.source RUN)")
        return self

    @property
    def taught_by(self) -> str:
        """The name of the teacher whose outputs are the targets."""
        return EMA if self.source is None else FROZEN


class GramSection(Section):
    weight: fields.WeightField = option(
        fields.Ramp(0.0),
        "weight of Gram anchoring: keeps similarities of patches near a teacher's; a ramp begins at gram.start",
    )
    teacher: fields.PathText = option(
        SNAPSHOT,
        "teacher of Gram anchoring: snapshot (the EMA teacher at gram.start), ema (as it is now), or a run",
        by_content=True,
    )
    start: StageLengthField = option(_NEVER, "when the snapshot is taken; weight is 0 before", inside_run=True)
    refresh_every: LengthField = option(
        _NEVER, "length between replacements of the snapshot by the EMA teacher, from gram.start on; 0: never"
    )
    refreshes: fields.Count = option(3, "largest number of replacements of the snapshot")
    crop_size: fields.Side | None = option(
        None, "side of the Gram teacher's own crops, 1 to 2 times crops.global_size; none: it sees the global crops"
    )
    refused: ClassVar = {"gram.weight 0": "gram", "gram.refresh_every 0": "gram.refreshes"}
    refused |= {"gram.teacher ema": "gram.crop_size gram.refresh_every"}

    @property
    def own_crop_size(self) -> int | None:
        """Side in pixels of the crops that only the Gram teacher sees, or None without such crops."""
        return self.crop_size if self.weight and self.teacher != EMA else None
