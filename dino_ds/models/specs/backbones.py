"""The backbones we build, by timm's names: plain numbers, no torch, so that help and the planner stay light."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol


class BackboneSpec(Protocol):
    """What the program knows of a backbone without building it: a frozen dataclass of plain numbers.

    `builder` is "module:class" of its `dino_ds.models.base.Backbone`; stride: pixels from one patch feature to the
    next; side_multiple: the sides of crops must be multiples of it; width: of a feature; depth: segments that are
    compiled and recomputed one by one; in_chans: channels of the images.
    """

    builder: ClassVar[str]

    def __hash__(self) -> int: ...

    @property
    def stride(self) -> int: ...

    @property
    def side_multiple(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def depth(self) -> int: ...

    @property
    def in_chans(self) -> int: ...

    def timm_model(self, name: str) -> tuple[str, dict[str, Any]] | None:
        """The name and the arguments by which timm.create_model builds this backbone, called `name` here; None if timm
        does not know it."""


@dataclass(frozen=True)
class BackboneOptions:
    """What a recipe and a ds config ask of a backbone; `attention` to `cls_only_last_block` change speed, not results.

    Most are as in the recipe's section "model" and the ds JSON's "dino_ds". `mask_token`: it has one, in the place of
    hidden patches; `packed` False runs one pass a size; `cls_only_last_block` False computes the last block for all
    tokens; `channels_last` None: on a GPU, where tensor cores want them so; a CPU is no faster with it.
    """

    drop_path: float = 0.0
    drop_path_growth: str = "linear"
    stochastic_depth: str = "per_image"
    pos_embed_interpolation: str = "dino"
    attention: str = "sdpa"
    attention_backend: str = "auto"
    packed: bool = True
    cls_only_last_block: bool = True
    mask_token: bool = False
    sync_batch_norm: bool = True
    rope_shift: float | None = None
    rope_jitter: float | None = None
    rope_rescale: float | None = None
    channels_last: bool | None = None


@dataclass(frozen=True)
class ViTSpec:
    """A ViT as timm's `VisionTransformer` describes it; its stride is the patch size.

    `mlp_ratio` is timm's: SwiGLU's packed first layer has `int(width * mlp_ratio)` outputs, gate and value together.
    `layer_scale` is the initial value of LayerScale, None for none. `rope`: rotary positions (DINOv3) in the place of
    learned ones, with coordinates normalised by each side ("separate") or the larger or smaller one ("max", "min"), and
    periods from 1 to `rope_base`, or those given. `qkv_bias`, with RoPE: of queries and values; keys have none.
    `rms_norm` in the place of LayerNorm; `cls_norm`: the CLS token has another final norm than the patches;
    `local_cls_norm`: that of local crops has one more, in training. With `registers` tokens (after the CLS token) the
    position embedding covers the patches only: timm's `no_embed_class`, as in its DINOv2 models. `timm`: the name of
    the model that timm makes it of with these numbers, for one that timm has no name for. `norm_eps`: LayerNorm's;
    other projects' weights may have been trained with another.
    """

    builder: ClassVar[str] = "dino_ds.models.vit:VisionTransformer"
    hides_patches: ClassVar[bool] = True
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
    def stride(self) -> int:
        return self.patch_size

    @property
    def side_multiple(self) -> int:
        return self.patch_size

    def timm_model(self, name: str) -> tuple[str, dict[str, Any]] | None:
        arguments: dict[str, Any] = {
            "patch_size": self.patch_size,
            "embed_dim": self.width,
            "depth": self.depth,
            "num_heads": self.heads,
            "in_chans": self.in_chans,
        }
        if self.rope is not None:
            return self._timm_eva(name, arguments)
        if self.timm is not None:
            name, arguments = self.timm, arguments | {"mlp_ratio": self.mlp_ratio}
        as_named = VITS.get(name)
        if as_named is None or as_named.layer_scale != self.layer_scale:
            arguments["init_values"] = self.layer_scale
        if as_named is None or as_named.registers != self.registers:
            arguments |= {"reg_tokens": self.registers, "no_embed_class": self.registers > 0}
        return name, arguments

    def _timm_eva(self, name: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """By one of timm's functions for DINOv3, which make its `Eva` with LayerNorm's epsilon and RoPE as there."""
        like = VITS.get(name, _DINOV3)
        name, like = (name, like) if like.rope is not None and name in VITS else ("vit_small_patch16_dinov3", _DINOV3)
        fixed = ("rope", "rms_norm", "cls_norm", "norm_eps", "rope_min_period", "rope_max_period")
        if any(getattr(self, key) != getattr(like, key) for key in fixed):
            return None
        own, as_named = self._eva_arguments(), like._eva_arguments()
        changed = {key: value for key, value in own.items() if value != as_named[key]}
        if self.swiglu and (not like.swiglu or int(self.width * self.mlp_ratio) // 2 % 64):
            changed["swiglu_align_to"] = 1  # no rounding; with 0 gate and value would be of one layer
        return name, arguments | changed | {"global_pool": "token"}

    def _eva_arguments(self) -> dict[str, Any]:
        return {
            "mlp_ratio": self.mlp_ratio / 2 if self.swiglu else self.mlp_ratio,
            "swiglu_mlp": self.swiglu,
            "num_reg_tokens": self.registers,
            "init_values": self.layer_scale,
            "qkv_bias": self.qkv_bias,
            "rope_temperature": self.rope_base,
        }


FROM_SOURCE = "from_source"
"""Instead of a name: the architecture of the weights that a run starts from; the command line resolves it first."""

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
_DINOV2 = {
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
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
    # positions are learned here and rotary there, and its queries, keys and values have no bias.
    "vit_7b_patch16_reg4": replace(
        _GIANT,
        patch_size=16,
        width=4096,
        heads=32,
        mlp_ratio=4.0,
        registers=4,
        timm="vit_giant_patch14_reg4_dinov2",
    ),
    "vit_tiny_patch16_dinov3_qkvb": replace(_DINOV3, width=192, heads=3, qkv_bias=True),
    **{
        f"vit_{size}_patch16_dinov3{kind}": replace(spec, qkv_bias=bool(kind))
        for size, spec in _DINOV3_SIZES.items()
        for kind in ("", "_qkvb")
    },
    "vit_7b_patch16_dinov3": replace(_DINOV3, width=4096, depth=40, heads=32, swiglu=True),
}

BACKBONES: dict[str, BackboneSpec] = {**VITS}
"""Every backbone that dino_ds builds itself."""


def backbone_spec(name: str) -> BackboneSpec:
    """The spec of a name that a recipe may give: one of BACKBONES, any other model of timm's, or MODULE:CLASS.

    Raises ValueError with the nearest names for anything else.
    """
    if name in BACKBONES:
        return BACKBONES[name]
    from dino_ds.models.specs.foreign_backbones import foreign_spec

    return foreign_spec(name)


def backbone_name(spec: BackboneSpec) -> str:
    """For people: of a network that dino_ds does not build itself the name that a recipe gives it."""
    return str(getattr(spec, "name", type(spec).__name__))
