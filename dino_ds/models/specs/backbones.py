"""The backbones that dino_ds builds, by timm's names, and the part of a network that is trained, as plain numbers: no
torch, so that help and planner stay light."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dino_ds.models.specs.base import BackboneSpec

ALL, NORMS, LORA = "all", "norms_and_biases", "lora"
_OBEYS = frozenset(
    (
        *("patch_size", "width", "depth", "heads", "registers", "layer_scale", "in_chans", "mask_token"),
        *("drop_path", "drop_path_growth", "stochastic_depth"),
        *("attention", "packed", "cls_only_last_block"),
    )
)
_LEARNED = _OBEYS | {"pos_embed_interpolation"}
_ROTARY = _OBEYS | {"local_cls_norm", "rope_rescale"}
FROM_SOURCE = "from_source"
"""Value of model.backbone: the architecture of the weights of model.init_from, which the command line looks up."""
_DINOV2 = {"small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}


@dataclass(frozen=True)
class TrainedPart:
    """The part of a backbone that is trained; heads always are. kind: "all", "last N blocks", "norms_and_biases" or
    "lora": adapters of `rank`, scaled by `alpha` / `rank`, in the linear layers named `layers`, or in all."""

    kind: str = ALL
    rank: int = 8
    alpha: float = 16.0
    layers: tuple[str, ...] = ()

    @property
    def blocks(self) -> int:
        """N of "last N blocks", else 0."""
        match = re.fullmatch(r"last (\d+) blocks?", self.kind)
        return int(match[1]) if match else 0


def describe_trained(part: TrainedPart, trained: int, weights: int) -> str:
    """The trained part in words, and its share of the weights of backbone and heads."""
    layers = ", ".join(part.layers) or "all linear layers"
    name = f"{LORA}, rank {part.rank}, alpha {part.alpha:g}, in {layers}" if part.kind == LORA else part.kind
    share = f"{trained:,} of {weights:,} weights ({trained / weights:.1%}), heads included"
    return f"{name} of the backbone: {share}; the others keep their values"


def parse_trained(text: str) -> str:
    """A value of model.train in its canonical spelling. Raises ValueError."""
    words = re.sub(r"[\s_]+", " ", str(text)).strip().lower()
    if match := re.fullmatch(r"last (\d{1,4}) blocks?", words):
        if int(match[1]):
            return f"last {int(match[1])} blocks"
    elif words.replace(" ", "_") in (ALL, NORMS, LORA):
        return words.replace(" ", "_")
    raise ValueError(f"{str(text)[:40]!r} is not {ALL}, 'last N blocks' (such as 'last 2 blocks'), {NORMS} or {LORA}")


@dataclass(frozen=True)
class ViTSpec(BackboneSpec):
    """A ViT as timm's `VisionTransformer` describes it; its stride is the patch size. `mlp_ratio` is timm's: SwiGLU's
    packed first layer has `int(width * mlp_ratio)` outputs, gate and value together. `layer_scale` is the initial value
    of LayerScale, None for none. `rope`: rotary positions (DINOv3) instead of learned ones, with coordinates normalized
    by each side ("separate") or the larger or smaller one ("max", "min"), and periods from 1 to `rope_base`, or from
    `rope_min_period` to `rope_max_period`. `qkv_bias`, with RoPE, is a bias of queries and values; keys have none.
    `rms_norm` replaces LayerNorm; `cls_norm`: the CLS token has its own final norm; `local_cls_norm`: in training the
    CLS token of local crops has another. With `registers` tokens (after the CLS token) the position embedding covers
    the patches only: timm's `no_embed_class`, as in its DINOv2 models. `timm`, for a ViT that timm has no name for, is
    the timm model that becomes this ViT with these numbers. `norm_eps` is LayerNorm's epsilon; other projects' weights
    may have another."""

    told_by_tensors: ClassVar[bool] = True
    title = "Vision Transformer"
    timm_layers: ClassVar[dict[str, Any]] = {"first_conv": "patch_embed.proj", "classifier": "head"}
    patch_size: int
    width: int
    depth: int
    heads: int
    mlp_ratio: float = 4.0
    swiglu: bool = False
    layer_scale: float | None = None
    registers: int = 0
    in_chans: int = 3
    timm: str | None = None
    norm_eps: float = 1e-6
    rope: str | None = None
    rope_base: float = 100.0
    rope_min_period: float | None = None
    rope_max_period: float | None = None
    qkv_bias: bool = True
    rms_norm: bool = False
    cls_norm: bool = False
    local_cls_norm: bool = False

    @property
    def obeys(self) -> frozenset[str]:
        return _LEARNED if self.rope is None else _ROTARY

    @property
    def sizes(self) -> str:
        return f"patch {self.patch_size}, width {self.width}, depth {self.depth}, {self.heads} heads"

    @property
    def problem(self) -> str:
        head_width, rest = divmod(self.width, self.heads)
        if rest:
            return f"width {self.width} is not a multiple of heads {self.heads}"
        if self.rope is None or head_width % 4 == 0:
            return ""
        each = f"width {self.width} of {self.heads} heads is {head_width} each"
        return f"{each}, and rotary positions need a multiple of 4: change model.width or model.heads"

    @property
    def stride(self) -> int:
        return self.patch_size

    def tokens(self, side: int) -> int:
        """Tokens of a square crop of `side` pixels."""
        return (side // self.patch_size) ** 2 + 1 + self.registers

    @property
    def mlp_widths(self) -> tuple[int, int]:
        """Outputs of a block's first MLP layer and inputs of its second: SwiGLU packs gate and value into the first."""
        packed = int(self.width * self.mlp_ratio)
        return packed, packed // 2 if self.swiglu else packed

    def attention(self, side: int) -> tuple[int, int, int]:
        return self.heads, self.width // self.heads, self.tokens(side)

    def timm_model(self, name: str, image_size: int | None = None) -> tuple[str, dict[str, Any]] | None:
        arguments: dict[str, Any] = {"patch_size": self.patch_size, "embed_dim": self.width, "depth": self.depth}
        arguments |= {"num_heads": self.heads, "in_chans": self.in_chans}
        size = {} if image_size is None else {"img_size": image_size}
        if self.rope is not None:  # timm's functions for DINOv3 fix norms and positions, and have LayerScale
            like = VITS.get(name, _DINOV3)
            if like.rope is None or name not in VITS:
                name, like = "vit_small_patch16_dinov3", _DINOV3
            fixed = ("rope", "rms_norm", "cls_norm", "norm_eps", "rope_min_period", "rope_max_period")
            if self.layer_scale is None or any(getattr(self, key) != getattr(like, key) for key in fixed):
                return None
            wanted, named = self._eva_arguments(), like._eva_arguments()
            arguments |= {key: value for key, value in wanted.items() if value != named[key]}
            if self.swiglu and (not like.swiglu or self.mlp_widths[1] % 64):
                arguments["swiglu_align_to"] = 1  # no rounding; with 0 one layer would make gate and value
            return name, arguments | {"global_pool": "token"} | size
        if self.timm is not None:
            name, arguments = self.timm, arguments | {"mlp_ratio": self.mlp_ratio}
        as_named = VITS.get(name)
        if as_named is None or as_named.layer_scale != self.layer_scale:
            arguments["init_values"] = self.layer_scale or 0  # create_model drops None, for the default of the name
        if as_named is None or as_named.registers != self.registers:
            arguments |= {"reg_tokens": self.registers, "no_embed_class": self.registers > 0}
        return name, arguments | size

    def _eva_arguments(self) -> dict[str, Any]:
        return {
            "mlp_ratio": self.mlp_ratio / 2 if self.swiglu else self.mlp_ratio,
            "swiglu_mlp": self.swiglu,
            "num_reg_tokens": self.registers,
            "init_values": self.layer_scale,
            "qkv_bias": self.qkv_bias,
            "rope_temperature": self.rope_base,
        }


_S16 = ViTSpec(16, 384, 12, 6)
# timm: mlp_ratio = 2.66667 * 2, SwiGLUPacked
_GIANT = ViTSpec(14, 1536, 40, 24, mlp_ratio=2.66667 * 2, swiglu=True, layer_scale=1e-5)
# DINOv3's block, with SwiGLU's two layers counted in the ratio: timm's mlp_ratio is half of it.
_DINOV3 = ViTSpec(16, 384, 12, 6, layer_scale=1e-5, registers=4, norm_eps=1e-5, rope="separate", qkv_bias=False)
_DINOV3_SIZES = {
    "small": _DINOV3,
    "small_plus": replace(_DINOV3, mlp_ratio=8.0, swiglu=True),
    "base": replace(_DINOV3, width=768, heads=12),
    "large": replace(_DINOV3, width=1024, depth=24, heads=16),
    "huge_plus": replace(_DINOV3, width=1280, depth=32, heads=20, mlp_ratio=8.0, swiglu=True),
}

VITS: dict[str, ViTSpec] = {
    "vit_tiny_patch16_224": ViTSpec(16, 192, 12, 3),
    "vit_small_patch16_224": _S16,
    "vit_small_patch8_224": ViTSpec(8, 384, 12, 6),
    "vit_base_patch16_224": ViTSpec(16, 768, 12, 12),
    "vit_base_patch8_224": ViTSpec(8, 768, 12, 12),
    "vit_large_patch16_224": ViTSpec(16, 1024, 24, 16),
    "vit_large_patch14_224": ViTSpec(14, 1024, 24, 16),
    "vit_huge_patch14_224": ViTSpec(14, 1280, 32, 16),
    "vit_huge_patch16_224": ViTSpec(16, 1280, 32, 16, timm="vit_huge_patch14_224"),
    "vit_giant_patch14_224": ViTSpec(14, 1408, 40, 16, mlp_ratio=48 / 11),
    "vit_gigantic_patch14_224": ViTSpec(14, 1664, 48, 16, mlp_ratio=64 / 13),
    **{
        f"vit_{size}_patch14_{kind}dinov2": ViTSpec(14, w, d, h, layer_scale=1e-5, registers=r)
        for size, (w, d, h) in _DINOV2.items()
        for kind, r in (("", 0), ("reg4_", 4))
    },
    "vit_giant_patch14_dinov2": _GIANT,
    "vit_giant_patch14_reg4_dinov2": replace(_GIANT, registers=4),
    # Web-SSL's ViT-3B (facebookresearch/webssl, vit_3b): DINOv2's block, wider and not as deep.
    "vit_3b_patch14_webssl": replace(_GIANT, width=3072, depth=26, heads=24, timm="vit_giant_patch14_dinov2"),
    # DINOv3's 7B (timm's vit_7b_patch16_dinov3) in width, depth, heads, MLP (8192) and registers. Not its weights:
    # positions are learned here and rotary there, where queries, keys and values have no bias.
    "vit_7b_patch16_reg4": replace(
        _GIANT, patch_size=16, width=4096, heads=32, mlp_ratio=4.0, registers=4, timm="vit_giant_patch14_reg4_dinov2"
    ),
    "vit_tiny_patch16_dinov3_qkvb": replace(_DINOV3, width=192, heads=3, qkv_bias=True),
    **{
        f"vit_{size}_patch16_dinov3{kind}": replace(spec, qkv_bias=bool(kind))
        for size, spec in _DINOV3_SIZES.items()
        for kind in ("", "_qkvb")
    },
    "vit_7b_patch16_dinov3": replace(_DINOV3, width=4096, depth=40, heads=32, swiglu=True),
}

BACKBONES: dict[str, BackboneSpec] = {**VITS}  # every backbone that dino_ds builds itself


def backbone_spec(name: str) -> BackboneSpec:
    """The spec of a name that a recipe may give: one of BACKBONES, any other model of timm's, or MODULE:CLASS. Raises
    ValueError with the nearest names for anything else."""
    if name in BACKBONES:
        return BACKBONES[name]
    from dino_ds.models.specs.foreign import foreign_spec

    return foreign_spec(name)
