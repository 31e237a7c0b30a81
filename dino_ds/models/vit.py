"""The Vision Transformer, with timm's parameter names, made for many crops at once.

Crops of several sizes go through one forward pass: their tokens are packed into one (tokens, width) matrix, so that
norms and linear layers run once, and only the attention runs per size. Exact, on any device.
Source: Dosovitskiy et al. 2021 (arXiv 2010.11929); initialisation and position embedding as facebookresearch/dino.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from dino_ds.backbones import BackboneOptions, ViTSpec
from dino_ds.models.base import CLS, Backbone, Crops, patches_of
from dino_ds.models.blocks import Block, PatchEmbed
from dino_ds.models.drop_path import Kept, drop_path_draws, drop_path_scales, kept_sequences
from dino_ds.models.packing import Packing
from dino_ds.models.positions import bicubic_matrix, resized
from dino_ds.models.weights import init_weights

_PLAIN = BackboneOptions()


class VisionTransformer(Backbone):
    """A ViT: `arch` the numbers; `image_size` pixels of the native (global) crop, a multiple of the patch size."""

    def __init__(self, arch: ViTSpec, image_size: int, options: BackboneOptions = _PLAIN) -> None:
        super().__init__(arch)
        self.arch, self.options = arch, options
        self.grid = image_size // arch.patch_size
        self._matrices: dict[tuple[int, str, torch.device], Tensor] = {}
        self.patch_embed = PatchEmbed(arch.in_chans, arch.patch_size, arch.width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, arch.width))
        self.reg_token = nn.Parameter(torch.zeros(1, arch.registers, arch.width)) if arch.registers else None
        positions = self.grid**2 + (0 if arch.registers else 1)
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, arch.width))
        attention, kernel = options.attention, options.attention_backend
        self.blocks = nn.ModuleList(Block(arch, attention, kernel) for _ in range(arch.depth))
        self.norm = nn.LayerNorm(arch.width, eps=arch.norm_eps)
        init_weights(self)

    def init_tokens(self) -> None:
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        if self.reg_token is not None:
            nn.init.normal_(self.reg_token, std=1e-6)

    def segments(self) -> Sequence[nn.Module]:
        return list(self.blocks)

    def forward(
        self,
        crops: Crops,
        drop_keys: Tensor | None = None,
        patches: Sequence[str] = (),
        masks: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        """As every `Backbone`. The crops of groups of one size, if adjacent, are one batch of the attention."""
        each = [crop for group in crops.values() for crop in group]
        draws = None
        if drop_keys is not None and self.options.drop_path > 0:
            draws = drop_path_draws(drop_keys, len(each), self.arch.depth)
        sizes = _adjacent_sizes(each)
        batches = [each[start:stop] for start, stop in sizes]
        cls_only = self.options.cls_only_last_block and not patches
        if self.options.packed:
            outputs = [self._features(batches, draws, cls_only, bool(patches))]
        else:
            images = each[0].shape[0]
            cut = [None if draws is None else draws[:, :, a * images : b * images] for a, b in sizes]
            outputs = [
                self._features([batch], own, cls_only, bool(patches)) for batch, own in zip(batches, cut, strict=True)
            ]
        found = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return self._by_name(found, crops, patches) if patches else {CLS: found}

    def _by_name(self, tokens: Tensor, crops: Crops, patches: Sequence[str]) -> dict[str, Tensor]:
        """All tokens of all crops (tokens, d) -> CLS features and the patch features of the groups `patches`."""
        found: dict[str, Tensor] = {}
        cls: list[Tensor] = []
        for name, group in crops.items():
            rows = sum(crop.shape[0] for crop in group)
            n = 1 + self.arch.registers + _patches(group[0], self.arch.patch_size)
            own, tokens = tokens[: rows * n].view(rows, n, -1), tokens[rows * n :]
            cls.append(own[:, 0])
            if name in patches:
                found[patches_of(name)] = own[:, 1 + self.arch.registers :]
        return {CLS: torch.cat(cls), **found}

    def tokens(self, images: Tensor) -> Tensor:
        """Images (b, c, h, w) -> all tokens after the final norm (b, 1 + registers + patches, d)."""
        x = self._features([[images]], None, cls_only=False, all_tokens=True)
        return x.view(images.shape[0], -1, self.arch.width)

    def last_tokens(self, images: Tensor, blocks: int) -> list[Tensor]:
        """Images (b, c, h, w) -> all tokens after each of the last `blocks` blocks and the final norm, each (b, n, d).

        As `get_intermediate_layers` of facebookresearch/dino.
        """
        x = self._embed(images)
        packing = Packing.of([(x.shape[0], x.shape[1])], x.device)
        flat, kept = x.flatten(0, 1), []
        for i, block in enumerate(self.blocks):
            flat = block(flat, packing, None, False)
            if i >= len(self.blocks) - blocks:
                kept.append(self.norm(flat).view_as(x))
        return kept

    @torch.no_grad()
    def last_attention(self, images: Tensor, cls_only: bool = False) -> Tensor:
        """Images (b, c, h, w) -> attention weights of the last block (b, heads, n, n), each row summing to 1.

        With `cls_only` the row of the CLS token alone, (b, heads, 1, n): n times less memory.
        """
        x = self._embed(images)
        packing = Packing.of([(x.shape[0], x.shape[1])], x.device)
        flat = x.flatten(0, 1)
        for block in self.blocks[:-1]:
            flat = block(flat, packing, None, False)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        (projected,) = last.attn.qkv(last.norm1(flat))
        q, k, _ = projected.view(*x.shape[:2], 3, self.arch.heads, -1).transpose(1, 3).unbind(2)
        q = q[:, :, :1] if cls_only else q
        return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(dim=-1)

    def _features(
        self, groups: list[list[Tensor]], draws: Tensor | None, cls_only: bool, all_tokens: bool = False
    ) -> Tensor:
        sequences = [self._embed(torch.cat(group)) for group in groups]
        packing = Packing.of([(s.shape[0], s.shape[1]) for s in sequences], sequences[0].device)
        x = torch.cat([s.flatten(0, 1) for s in sequences])
        drop = self._drop(draws, packing, x.dtype, cls_only)
        last = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            x = self.run_segment(i, block, x, packing, None if drop is None else drop[i], cls_only and i == last)
        if not cls_only and not all_tokens:
            x = x.index_select(0, packing.cls)
        return self.norm(x)

    def _drop(
        self, draws: Tensor | None, packing: Packing, dtype: torch.dtype, cls_only: bool
    ) -> list[Tensor] | list[list[Kept]] | None:
        """What each block drops: `draws` as of `drop_path_draws`; `cls_only` that the last one has only CLS rows."""
        if draws is None:
            return None
        if self.options.stochastic_depth == "batched":
            return kept_sequences(draws, self.options.drop_path, packing)
        scales = drop_path_scales(draws, self.options.drop_path).to(dtype).unsqueeze(-1)
        blocks = [*scales[:, :, packing.sequence_of_token()]]
        return [*blocks[:-1], scales[-1]] if cls_only else blocks

    def _embed(self, images: Tensor) -> Tensor:
        """Images (b, c, h, w) -> tokens with positions (b, n, d)."""
        patches = self.patch_embed(images)
        size = self.arch.patch_size
        positions = self._positions(images.shape[-2] // size, images.shape[-1] // size)
        cls = self.cls_token.expand(images.shape[0], -1, -1)
        if self.reg_token is None:
            return torch.cat((cls, patches), dim=1) + positions
        registers = self.reg_token.expand(images.shape[0], -1, -1)
        return torch.cat((cls, registers, patches + positions), dim=1)

    def _positions(self, height: int, width: int) -> Tensor:
        """The position embedding of a (height, width) grid of patches, (1, n, d); FP32 inside."""
        if (height, width) == (self.grid, self.grid):
            return self.pos_embed
        special = 0 if self.reg_token is not None else 1
        patches = resized(self.pos_embed[:, special:], self._matrix(height), self._matrix(width))
        return torch.cat((self.pos_embed[:, :special], patches.to(self.pos_embed.dtype)), dim=1)

    def _matrix(self, size: int) -> Tensor:
        """The bicubic matrix for `size` patches a side, made once."""
        key = (size, self.options.pos_embed_interpolation, self.pos_embed.device)
        if key not in self._matrices:
            self._matrices[key] = bicubic_matrix(self.grid, *key)
        return self._matrices[key]


def _adjacent_sizes(crops: Sequence[Tensor]) -> list[tuple[int, int]]:
    """[start, stop) of each run of crops of one size."""
    bounds = [i for i, crop in enumerate(crops) if i == 0 or crop.shape[-2:] != crops[i - 1].shape[-2:]]
    return list(zip(bounds, [*bounds[1:], len(crops)], strict=True))


def _patches(crop: Tensor, size: int) -> int:
    return (crop.shape[-2] // size) * (crop.shape[-1] // size)
