"""The recipe's section about the backbone. No torch here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any, Literal

from pydantic import field_validator, model_validator

from dino_ds.config.arguments import ArgumentsField
from dino_ds.config.fields import (
    AboveOne,
    BelowOne,
    Depth,
    Few,
    Length,
    LengthField,
    PathText,
    Positive,
    Section,
    Side,
    Width,
    option,
)
from dino_ds.errors import ConfigError
from dino_ds.models.specs.backbones import FROM_SOURCE, BackboneSpec, ViTSpec, backbone_spec


class ModelSection(Section):
    backbone: str = option("vit_small_patch16_224", "timm's name, module:Class, or from_source: that of init_from")
    arguments: ArgumentsField = option("{}", 'keywords of its class as JSON, such as {"layers": [1, 1, 1, 1]}')
    patch_size: Side | None = option(None, "pixels; none = the backbone's")
    width: Width | None = option(None, "embedding dimension; none = the backbone's")
    depth: Depth | None = option(None, "blocks; none = the backbone's")
    heads: Depth | None = option(None, "attention heads; none = the backbone's")
    registers: Few | None = option(None, "register tokens; none = the backbone's")
    layer_scale: Positive | None = option(None, "start of LayerScale, such as 1e-5; none = the backbone's")
    in_chans: Depth = option(3, "channels of the images: files must have as many; gray ones fit 1 and 3")
    sync_batch_norm: bool = option(True, "BatchNorm's statistics are those of all ranks' images, not of a rank's own")
    drop_path: BelowOne = option(0.1, "stochastic depth of the last block, growing linearly from 0")
    drop_path_growth: Literal["linear", "uniform"] = option(
        "linear", "drop_path of earlier blocks: from 0, or the same (DINOv2)"
    )
    local_cls_norm: bool | None = option(None, "CLS tokens of local crops have their own norm; none = the backbone's")
    rope_shift: Positive | None = option(
        None, "RoPE in training: coordinates (-1 to 1) move up to so far, in each block and step"
    )
    rope_jitter: AboveOne | None = option(None, "RoPE in training: each axis is scaled up to so many times")
    rope_rescale: AboveOne | None = option(None, "RoPE in training: both axes are, alike (DINOv3: 2)")
    stochastic_depth: Literal["per_image", "batched"] = option(
        "per_image", "batched skips an exact part of the crops (faster; depends on the micro-batch)"
    )
    init_from: PathText | None = option(
        None, "start from weights: a file or folder (ours, DINO's, timm's, Hugging Face's ...) or timm name"
    )
    freeze_backbone: LengthField = option(Length(0, "steps"), "how long only the head is trained first; for init_from")
    pos_embed_interpolation: Literal["dino", "antialias"] = option(
        "dino", "how positions are resized; DINO's released weights need dino"
    )

    @field_validator("backbone")
    @classmethod
    def _known(cls, name: str) -> str:
        if name != FROM_SOURCE:
            backbone_spec(name)
        return name

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        if self.backbone == FROM_SOURCE and self.init_from is None:
            raise ValueError(f"backbone {FROM_SOURCE} is that of weights: name them with model.init_from")
        if self.backbone == FROM_SOURCE:
            return self
        spec = backbone_spec(self.backbone)
        if self.arguments != "{}" and not has_option(spec, "arguments"):
            raise ValueError(
                f"model.arguments has no effect: dino_ds builds {self.backbone} itself (model.patch_size, width ...)"
            )
        if "drop_path_rate" in json.loads(self.arguments):
            raise ValueError("model.arguments may not have drop_path_rate: it is model.drop_path")
        foreign = [key for key in SPEC_KEYS if getattr(self, key) is not None and not has_option(spec, key)]
        if foreign:
            raise ValueError(f"model.{foreign[0]} is not something that {self.backbone} has: leave it out")
        for key, only in OF_ANY_BACKBONE.items():
            if getattr(self, key) != only and not isinstance(spec, ViTSpec):
                what = f"model.{key} {getattr(self, key)} is for ViTs that dino_ds builds"
                raise ValueError(f"{what}: {self.backbone} knows {only} alone; leave it out")
        self._check_vit(self.spec())
        return self

    def _check_vit(self, arch: BackboneSpec) -> None:
        if isinstance(arch, ViTSpec) and arch.width % arch.heads:
            raise ValueError(f"width {arch.width} is not a multiple of heads {arch.heads}")
        if not isinstance(arch, ViTSpec) or arch.rope is None:
            given = [key for key in OF_ROPE if getattr(self, key) is not None]
            if given:
                raise ValueError(
                    f"model.{given[0]} is for ViTs with rotary positions, and {self.backbone} has none: leave it out"
                )
            return
        if self.pos_embed_interpolation != "dino":
            resized = f"model.pos_embed_interpolation {self.pos_embed_interpolation}"
            raise ValueError(
                f"{resized} is for learned positions, and those of {self.backbone} are rotary: leave it out"
            )
        if arch.width // arch.heads % 4:
            each = f"width {arch.width} of {arch.heads} heads is {arch.width // arch.heads} each"
            raise ValueError(f"{each}, and rotary positions need a multiple of 4: change model.width or model.heads")

    def spec(self) -> BackboneSpec:
        """The backbone's spec with the overrides of this section. Raises ConfigError for from_source."""
        if self.backbone == FROM_SOURCE:
            raise ConfigError(f"model.backbone {FROM_SOURCE} is known to commands that read the weights: name it here")
        spec: Any = backbone_spec(self.backbone)
        keys = (*SPEC_KEYS, "in_chans", *(["arguments"] if has_option(spec, "arguments") else []))
        changed = {key: value for key in keys if (value := getattr(self, key)) is not None}
        replaced: BackboneSpec = dataclasses.replace(spec, **changed)
        return replaced


OF_ANY_BACKBONE = {"stochastic_depth": "per_image", "drop_path_growth": "linear", "pos_embed_interpolation": "dino"}
OF_ROPE = ("local_cls_norm", "rope_shift", "rope_jitter", "rope_rescale")
SPEC_KEYS = ("patch_size", "width", "depth", "heads", "registers", "layer_scale", "local_cls_norm")


def has_option(spec: Any, name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(spec))


def keys_not_of(backbone: object) -> list[str]:
    """Keys of a recipe for another network that `backbone` can't take over: arguments, and what it does not have."""
    keys = ["arguments"]
    with contextlib.suppress(ValueError):  # the schema refuses an unknown name
        spec = None if backbone == FROM_SOURCE else backbone_spec(str(backbone))
        keys += [key for key in SPEC_KEYS if spec and not has_option(spec, key)]
        keys += OF_ANY_BACKBONE if spec and not isinstance(spec, ViTSpec) else ()
        keys += OF_ROPE if spec and getattr(spec, "rope", None) is None else ()
    return [f"model.{key}" for key in dict.fromkeys(keys)]
