"""The Vision Transformer, with timm's parameter names, made for many crops at once.

Crops of several sizes go through one forward pass: their tokens are packed into one (tokens, width) matrix, so that
norms and linear layers run once, and only the attention runs per size. Exact, on any device.
Source: Dosovitskiy et al. 2021 (arXiv 2010.11929); initialisation and position embedding as facebookresearch/dino.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from dino_ds.backbones import BackboneOptions, ViTSpec
from dino_ds.models.base import CLS, Backbone, Crops, patches_of
from dino_ds.models.blocks import Block, PatchEmbed
from dino_ds.models.drop_path import Kept, drop_path_draws, drop_path_scales, kept_sequences
from dino_ds.models.packing import Packing, Selection
from dino_ds.models.positions import bicubic_matrix, resized
from dino_ds.models.weights import init_weights

_PLAIN = BackboneOptions()


class VisionTransformer(Backbone):
    """A ViT: `arch` the numbers; `image_size` pixels of the native (global) crop, a multiple of the patch size."""

    training_only = ("mask_token",)

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
        self.mask_token = nn.Parameter(torch.zeros(1, arch.width)) if options.mask_token else None
        attention, kernel = options.attention, options.attention_backend
        self.blocks = nn.ModuleList(Block(arch, attention, kernel) for _ in range(arch.depth))
        self.norm = nn.LayerNorm(arch.width, eps=arch.norm_eps)
        init_weights(self)

    def init_tokens(self) -> None:
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        if self.reg_token is not None:
            nn.init.normal_(self.reg_token, std=1e-6)
        if self.mask_token is not None:
            nn.init.zeros_(self.mask_token)

    def segments(self) -> Sequence[nn.Module]:
        return list(self.blocks)

    def forward(
        self,
        crops: Crops,
        drop_keys: Tensor | None = None,
        patches: Sequence[str] = (),
        masks: Mapping[str, Tensor] = MappingProxyType({}),
        step_key: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """As every `Backbone`. The crops of groups of one size, if adjacent, are one batch of the attention."""
        runs = _adjacent_sizes(crops)
        batches = [self._batch(crops, names, patches, masks) for names in runs]
        draws = None
        if drop_keys is not None and self.options.drop_path > 0:
            draws = drop_path_draws(drop_keys, sum(len(group) for group in crops.values()), self.arch.depth)
        if self.options.packed:
            found = self._features(batches, draws)
        else:
            sizes = [len(batch.images) for batch in batches]
            cut = [None] * len(runs) if draws is None else draws.split(sizes, dim=-1)
            found = torch.cat([self._features([batch], own) for batch, own in zip(batches, cut, strict=True)])
        if not patches:
            return {CLS: found}
        kept = {name: batch.kept for names, batch in zip(runs, batches, strict=True) for name in names}
        return _by_name(found, crops, patches, kept)

    def _batch(self, crops: Crops, names: Sequence[str], patches: Sequence[str], masks: Mapping[str, Tensor]) -> _Batch:
        """The crops of the groups `names`, which have one size. Patches are computed for all of them or none."""
        images = torch.cat([crop for name in names for crop in crops[name]])
        grid = [side // self.arch.patch_size for side in images.shape[-2:]]
        kept = 1 + math.prod(grid) if any(name in patches for name in names) else 1
        if not any(name in masks for name in names):
            return _Batch(images, None, kept)
        rows = {name: sum(len(crop) for crop in crops[name]) for name in names}
        hidden = [
            masks[name] if name in masks else images.new_zeros(rows[name], math.prod(grid), dtype=torch.bool)
            for name in names
        ]
        return _Batch(images, torch.cat(hidden), kept)

    def tokens(self, images: Tensor) -> Tensor:
        """Images (b, c, h, w) -> all tokens after the final norm (b, 1 + registers + patches, d)."""
        return self.last_tokens(images, 1)[0]

    def last_tokens(self, images: Tensor, blocks: int) -> list[Tensor]:
        """Images (b, c, h, w) -> all tokens after each of the last `blocks` blocks and the final norm, each (b, n, d).

        As `get_intermediate_layers` of facebookresearch/dino.
        """
        x = self._embed(images)
        packing = Packing.of([(x.shape[0], x.shape[1])], x.device)
        flat, kept = x.flatten(0, 1), []
        for i, block in enumerate(self.blocks):
            flat = block(flat, packing)
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
            flat = block(flat, packing)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        (projected,) = last.attn.qkv(last.norm1(flat))
        q, k, _ = projected.view(*x.shape[:2], 3, self.arch.heads, -1).transpose(1, 3).unbind(2)
        q = q[:, :, :1] if cls_only else q
        return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(dim=-1)

    def _features(self, batches: Sequence[_Batch], draws: Tensor | None) -> Tensor:
        """Of each sequence the CLS token and the last tokens, `kept` of them, after the final norm: (rows, d)."""
        sequences = [self._embed(batch.images, batch.mask) for batch in batches]
        packing = Packing.of([(s.shape[0], s.shape[1]) for s in sequences], sequences[0].device)
        kept = [batch.kept for batch in batches]
        wanted = None if kept == [tokens for _, tokens in packing.groups] else packing.first_and_last(kept)
        selection = wanted if self.options.cls_only_last_block else None
        x = torch.cat([s.flatten(0, 1) for s in sequences])
        drop = self._drop(draws, packing, x.dtype, selection)
        last = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            own = None if drop is None else drop[i]
            x = self.run_segment(i, block, x, packing, own, selection if i == last else None)
        if wanted is not None and selection is None:
            x = x.index_select(0, wanted.rows)
        return self.norm(x)

    def _drop(
        self, draws: Tensor | None, packing: Packing, dtype: torch.dtype, selection: Selection | None
    ) -> list[Tensor] | list[list[Kept]] | None:
        """What each block drops: `draws` as of `drop_path_draws`; `selection` the rows that the last one gives."""
        if draws is None:
            return None
        last = self.options.drop_path
        rates = (last if self.options.drop_path_growth == "uniform" else 0.0, last)
        if self.options.stochastic_depth == "batched":
            return kept_sequences(draws, rates, packing, selection)
        scales = drop_path_scales(draws, rates).to(dtype).unsqueeze(-1)
        blocks = [*scales[:, :, packing.sequence_of_token()]]
        return blocks if selection is None else [*blocks[:-1], scales[-1][:, selection.packing.sequence_of_token()]]

    def _embed(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Images (b, c, h, w), hidden patches (b, n) bool or None -> tokens with positions (b, tokens, d)."""
        patches: Tensor = self.patch_embed(images)
        cls = self.cls_token.expand(images.shape[0], -1, -1)
        if mask is not None:
            assert self.mask_token is not None
            patches = torch.where(mask.unsqueeze(-1), self.mask_token.to(patches.dtype), patches)
        elif self.mask_token is not None:
            # Zero: ZeRO 3 would repeat an old gradient for a parameter that gets none.
            cls = cls + 0 * self.mask_token
        size = self.arch.patch_size
        positions = self._positions(images.shape[-2] // size, images.shape[-1] // size)
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


@dataclass(frozen=True)
class _Batch:
    """Crops of one size: images (b, c, h, w), hidden patches (b, n) bool or None, tokens to give of each."""

    images: Tensor
    mask: Tensor | None
    kept: int


def _adjacent_sizes(crops: Crops) -> list[list[str]]:
    """The names of groups whose crops have one size and lie side by side."""
    sizes = itertools.groupby(crops, key=lambda name: crops[name][0].shape[-2:])
    return [list(names) for _, names in sizes]


def _by_name(tokens: Tensor, crops: Crops, patches: Sequence[str], kept: Mapping[str, int]) -> dict[str, Tensor]:
    """The rows that `_features` gives, `kept` for each crop of a group -> features by name."""
    rows = [sum(len(crop) for crop in group) for group in crops.values()]
    parts = tokens.split([b * kept[name] for b, name in zip(rows, crops, strict=True)])
    found, cls = {}, []
    for name, b, own in zip(crops, rows, parts, strict=True):
        first, others = own.unflatten(0, (b, kept[name])).split([1, kept[name] - 1], dim=1)
        cls.append(first.squeeze(1))
        if name in patches:
            found[patches_of(name)] = others
    return {CLS: torch.cat(cls), **found}
