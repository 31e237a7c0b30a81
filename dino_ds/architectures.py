"""The backbones we build, by timm's names: plain numbers, no torch, so that help and the planner stay light."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """A ViT as timm's `VisionTransformer` describes it.

    `mlp_ratio` is timm's: SwiGLU's packed first layer has `int(width * mlp_ratio)` outputs, gate and value together.
    `layer_scale` is the initial value of LayerScale, None for none. With `registers` tokens (after the CLS token) the
    position embedding covers the patches only: timm's `no_embed_class`, as in its DINOv2 models.
    """

    patch_size: int
    width: int
    depth: int
    heads: int
    mlp_ratio: float = 4.0
    swiglu: bool = False
    layer_scale: float | None = None
    registers: int = 0
    in_chans: int = 3

    def timm_arguments(self, image_size: int) -> dict[str, int | float]:
        """What `timm.create_model` wants beside the name of a backbone of this kind of block."""
        arguments: dict[str, int | float] = {
            "img_size": image_size,
            "patch_size": self.patch_size,
            "embed_dim": self.width,
            "depth": self.depth,
            "num_heads": self.heads,
            "in_chans": self.in_chans,
        }
        return arguments if self.mlp_ratio == 4 else arguments | {"mlp_ratio": self.mlp_ratio}


_S16 = Architecture(16, 384, 12, 6)
_DINOV2 = {
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
}

ARCHITECTURES: dict[str, Architecture] = {
    "vit_tiny_patch16_224": Architecture(16, 192, 12, 3),
    "vit_small_patch16_224": _S16,
    "vit_small_patch8_224": Architecture(8, 384, 12, 6),
    "vit_base_patch16_224": Architecture(16, 768, 12, 12),
    "vit_base_patch8_224": Architecture(8, 768, 12, 12),
    "vit_large_patch16_224": Architecture(16, 1024, 24, 16),
    "vit_large_patch14_224": Architecture(14, 1024, 24, 16),
    "vit_huge_patch14_224": Architecture(14, 1280, 32, 16),
    "vit_giant_patch14_224": Architecture(14, 1408, 40, 16, mlp_ratio=48 / 11),
    **{
        f"vit_{size}_patch14_{kind}dinov2": Architecture(14, w, d, h, layer_scale=1e-5, registers=r)
        for size, (w, d, h) in _DINOV2.items()
        for kind, r in (("", 0), ("reg4_", 4))
    },
    # timm: mlp_ratio = 2.66667 * 2, SwiGLUPacked
    "vit_giant_patch14_dinov2": Architecture(14, 1536, 40, 24, mlp_ratio=2.66667 * 2, swiglu=True, layer_scale=1e-5),
    "vit_giant_patch14_reg4_dinov2": Architecture(
        14, 1536, 40, 24, mlp_ratio=2.66667 * 2, swiglu=True, layer_scale=1e-5, registers=4
    ),
}
