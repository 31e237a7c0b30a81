"""The Vision Transformer for exporters: plain attention without packing, for images of any size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_ds.models.blocks import Block
from dino_ds.models.rope import frequencies, table
from dino_ds.models.vit import VisionTransformer


class PlainViT(nn.Module):
    """Images (b, c, h, w) -> CLS features (b, d), with the weights of `vit`; h and w multiples of the patch size.

    Gives the same features as `vit.features`, without packing. The position embedding is resized by two matrix products
    whose entries are computed from the image's size, so that a traced or exported program works at any size.
    """

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Tensor) -> Tensor:
        vit = self.vit
        turns: Tensor | None = None
        size = vit.arch.patch_size
        patches = vit.patch_embed(images)
        height, width = images.shape[-2] // size, images.shape[-1] // size
        cls = vit.cls_token.expand(images.shape[0], -1, -1)
        if vit.pos_embed is None:
            turns = _rope_table(vit, height, width)
        else:
            patches = patches + _resized(vit, height, width)
            if vit.reg_token is None:
                cls = cls + vit.pos_embed[:, :1]
        if vit.reg_token is not None:
            cls = torch.cat((cls, vit.reg_token.expand(images.shape[0], -1, -1)), dim=1)
        x = torch.cat((cls, patches), dim=1)
        for block in vit.blocks:
            x = _run(block, x, turns)
        norm = vit.norm if vit.cls_norm is None else vit.cls_norm
        features: Tensor = norm(x[:, 0])
        return features


def _run(block: nn.Module, x: Tensor, turns: Tensor | None) -> Tensor:
    """Tokens (b, n, d), which end with the patches, and RoPE's table (2, patches, c / 2) or None -> (b, n, d)."""
    assert isinstance(block, Block)
    attention, heads = block.attn, block.attn.heads
    qkv = F.linear(block.norm1(x), attention.qkv.weight, attention.qkv_bias())
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
    if turns is not None:
        q, k = (_rotated(t, turns) for t in (q, k))
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = block.add1(x, attention.proj(mixed))
    return block.add2(x, block.mlp(block.norm2(x)))


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Queries or keys (b, heads, n, c) with their patches rotated."""
    cos, sin = turns.unbind()
    special = x.shape[2] - turns.shape[1]
    first, second = x[:, :, special:].chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((x[:, :, :special], turned), dim=2)


def _rope_table(vit: VisionTransformer, height: int, width: int) -> Tensor:
    """Cosines and sines (2, height * width, c / 2), computed from the grid's size."""
    arch, device = vit.arch, vit.cls_token.device
    ones = torch.ones(1, device=device)
    rows, columns = ones * height, ones * width
    if arch.rope == "separate":
        by = (rows, columns)
    else:
        by = ((torch.maximum if arch.rope == "max" else torch.minimum)(rows, columns),) * 2
    axes = [
        (torch.arange(count, device=device, dtype=torch.float32) + 0.5) * (2 / side) - 1
        for count, side in zip((height, width), by, strict=True)
    ]
    return table(axes[0], axes[1], frequencies(arch, device))


def _resized(vit: VisionTransformer, height: int, width: int) -> Tensor:
    """The patches' position embedding for a (height, width) grid, (1, height * width, d)."""
    special = 0 if vit.reg_token is not None else 1
    assert vit.pos_embed is not None
    patches = vit.pos_embed[:, special:]
    grid = patches.unflatten(1, (vit.grid, vit.grid))[0]
    ones = torch.ones(1, device=patches.device)
    native = (ones * height == vit.grid) & (ones * width == vit.grid)
    rows, columns = (
        torch.where(native, _identity(size, patches.device, vit.grid), _bicubic(size, vit, patches.device))
        for size in (height, width)
    )
    resized = torch.einsum("yh,xw,hwd->yxd", rows, columns, grid.float())
    return resized.flatten(0, 1).unsqueeze(0).to(patches.dtype)


def _identity(size: int, device: torch.device, grid: int) -> Tensor:
    return (torch.arange(size, device=device)[:, None] == torch.arange(grid, device=device)[None]).float()


def _bicubic(size: int, vit: VisionTransformer, device: torch.device) -> Tensor:
    """The matrix (size, grid) that resizes one axis as torch's bicubic `interpolate` does.

    "dino": by the scale factor (size + 0.1) / grid, a = -0.75, edges repeated. "antialias": by size, a = -0.5, the
    kernel widened where it shrinks, weights normalized over the pixels inside.
    """
    grid = vit.grid
    there = torch.arange(grid, device=device, dtype=torch.float32)
    wanted = torch.arange(size, device=device, dtype=torch.float32)
    if vit.options.pos_embed_interpolation == "dino":
        centers = (wanted + 0.5) * (grid / (size + 0.1)) - 0.5
        # Weights of pixels beyond an edge are added to the edge's.
        padded = torch.arange(-3, grid + 3, device=device, dtype=torch.float32)
        weights = _kernel(padded[None] - centers[:, None], -0.75)
        return weights @ (padded.clamp(0, grid - 1)[:, None] == there[None]).float()
    step = grid / size
    wide = torch.clamp(torch.ones_like(wanted[:1]) * step, min=1.0)
    centers = (wanted + 0.5) * step - 0.5
    weights = _kernel((there[None] - centers[:, None]) / wide, -0.5)
    return weights / weights.sum(dim=1, keepdim=True)


def _kernel(distance: Tensor, a: float) -> Tensor:
    """The kernel of Keys' cubic convolution."""
    x = distance.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
