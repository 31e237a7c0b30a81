"""The Vision Transformer, with timm's parameter names, made for many crops at once; positions are learned or rotary.
Crops of several sizes go through one forward pass: their tokens are packed into one (tokens, width) matrix, so that
norms and linear layers run once, and only the attention runs per size. Exact, on any device. Source: Dosovitskiy et al.
2021 (arXiv 2010.11929); initialization and position embedding as facebookresearch/dino."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from dino_ds.config.crops import LOCAL
from dino_ds.models.base import CLS, NOTHING, Backbone, Crops, init_weights, patches_of
from dino_ds.models.blocks import Block, PatchProjection, RotaryBlock, fuses_sums, norm_layer, run_fused
from dino_ds.models.drop_path import Kept, drop_path_draws, drop_path_scales, kept_sequences
from dino_ds.models.packing import MadeOnce, Packing, Selection
from dino_ds.models.positions import RopeTables, bicubic_matrix, resized
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.specs.base import BackboneOptions

_PLAIN = BackboneOptions()


class VisionTransformer(Backbone):
    """A ViT with the numbers of `arch`; `image_size`: side of the native (global) crop, a multiple of patch_size."""

    training_only = ("mask_token", "local_cls_norm.weight", "local_cls_norm.bias")

    def __init__(self, arch: ViTSpec, image_size: int, options: BackboneOptions = _PLAIN) -> None:
        super().__init__(arch)
        self.arch, self.options, self.grid, self._made = arch, options, image_size // arch.patch_size, MadeOnce()
        projection = PatchProjection(arch.in_chans, arch.width, arch.patch_size, arch.patch_size)
        self.patch_embed = nn.Sequential(OrderedDict(proj=projection))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, arch.width))
        self.reg_token = nn.Parameter(torch.zeros(1, arch.registers, arch.width)) if arch.registers else None
        positions = self.grid**2 + (0 if arch.registers else 1)
        self.rope = None if arch.rope is None else RopeTables(arch, options)
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, arch.width)) if self.rope is None else None
        self.mask_token = nn.Parameter(torch.zeros(1, arch.width)) if options.mask_token else None
        block = Block if self.rope is None else RotaryBlock
        self.blocks = nn.ModuleList(block(arch, options.attention) for _ in range(arch.depth))
        self.norm = norm_layer(arch)
        self.cls_norm = norm_layer(arch) if arch.cls_norm else None
        self.local_cls_norm = norm_layer(arch) if arch.local_cls_norm else None
        init_weights(self)

    def init_tokens(self) -> None:
        rotary = self.pos_embed is None
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        (nn.init.normal_ if rotary else nn.init.trunc_normal_)(self.cls_token, std=0.02)
        if self.reg_token is not None:
            nn.init.normal_(self.reg_token, std=0.02 if rotary else 1e-6)
        if self.mask_token is not None:
            nn.init.zeros_(self.mask_token)

    def segments(self) -> Sequence[nn.Module]:
        return list(self.blocks)

    def forward(
        self,
        crops: Crops,
        drop_keys: Tensor | None = None,
        patches: Sequence[str] = (),
        masks: Mapping[str, Tensor] = NOTHING,
        step_key: int | None = None,
    ) -> dict[str, Tensor]:
        """See `Backbone.forward`. Adjacent crop groups of the same size are one batch of the attention."""
        runs = [list(names) for _, names in itertools.groupby(crops, key=lambda name: crops[name][0].shape[-2:])]
        batches = [self._batch(crops, names, patches, masks) for names in runs]
        if self.rope is not None:
            grids = [self._grid(batch.images) for batch in batches]
            tables = self.rope.of(grids, batches[0].images.device, step_key)
            batches = [replace(batch, tables=rope) for batch, rope in zip(batches, tables, strict=True)]
        draws = None
        if drop_keys is not None and self.options.drop_path > 0:
            draws = drop_path_draws(drop_keys, sum(len(group) for group in crops.values()), self.arch.depth)
        if self.options.packed:
            tokens = self._features(batches, draws)
        else:
            sizes = [len(batch.images) for batch in batches]
            cut = [None] * len(runs) if draws is None else draws.split(sizes, dim=-1)
            tokens = torch.cat([self._features([batch], part) for batch, part in zip(batches, cut, strict=True)])
        if not patches:
            return {CLS: tokens}
        kept = {name: batch.kept for names, batch in zip(runs, batches, strict=True) for name in names}
        rows = [sum(len(crop) for crop in group) for group in crops.values()]
        parts = tokens.split([b * kept[name] for b, name in zip(rows, crops, strict=True)])
        features, cls = {}, []
        for name, b, part in zip(crops, rows, parts, strict=True):
            first, others = part.unflatten(0, (b, kept[name])).split([1, kept[name] - 1], dim=1)
            cls.append(first.squeeze(1))
            if name in patches:
                features[patches_of(name)] = others
        return {CLS: torch.cat(cls), **features}

    def _batch(self, crops: Crops, names: Sequence[str], patches: Sequence[str], masks: Mapping[str, Tensor]) -> _Batch:
        """Batch the crops of the groups `names`, all of one size. Patches are computed for all of them or none."""
        images = torch.cat([crop for name in names for crop in crops[name]])
        patch_count = math.prod(self._grid(images))
        sequences = {name: sum(len(crop) for crop in crops[name]) for name in names}
        kept = 1 + patch_count if any(name in patches for name in names) else 1
        if not any(name in masks for name in names):
            return _Batch(images, None, kept, sequences)
        hidden = [
            masks[name] if name in masks else images.new_zeros(count, patch_count, dtype=torch.bool)
            for name, count in sequences.items()
        ]
        return _Batch(images, torch.cat(hidden), kept, sequences)

    def _grid(self, images: Tensor) -> tuple[int, int]:
        return images.shape[-2] // self.arch.patch_size, images.shape[-1] // self.arch.patch_size

    def tokens(self, images: Tensor) -> Tensor:
        """Images (b, c, h, w) -> all tokens after the final norm (b, 1 + registers + patches, d)."""
        return self.last_tokens(images, 1)[0]

    def last_tokens(self, images: Tensor, blocks: int) -> list[Tensor]:
        """Images (b, c, h, w) -> all tokens after each of the last `blocks` blocks and the final norm, each (b, n, d):
        `get_intermediate_layers` of facebookresearch/dino."""
        x, packing, tables = self._start(images)
        flat, kept = x.flatten(0, 1), []
        for i, block in enumerate(self.blocks):
            flat = block(flat, packing, tables=tables)
            if i >= len(self.blocks) - blocks:
                kept.append(self._normed(flat.view_as(x)))
        return kept

    @torch.no_grad()
    def last_attention(self, images: Tensor, cls_only: bool = False) -> Tensor:
        """Images (b, c, h, w) -> attention weights of the last block (b, heads, n, n), each row summing to 1; with
        `cls_only` the row of the CLS token alone, (b, heads, 1, n): n times less memory."""
        x, packing, tables = self._start(images)
        flat = x.flatten(0, 1)
        for block in self.blocks[:-1]:
            flat = block(flat, packing, tables=tables)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        return last.attn.weights(last.norm1(flat), packing, tables, cls_only)

    def _start(self, images: Tensor) -> tuple[Tensor, Packing, Sequence[Tensor]]:
        """Inputs of the blocks for images of one size: tokens (b, n, d), their packing and the table of RoPE."""
        x = self._embed(images)
        packing = Packing.of([(x.shape[0], x.shape[1])], x.device)
        if self.rope is None:
            return x, packing, ()
        ((table, *_),) = self.rope.of([self._grid(images)], x.device)
        return x, packing, (table,)

    def _normed(self, tokens: Tensor) -> Tensor:
        """Apply the final norm to all tokens of images (b, n, d); registers get that of the CLS token."""
        if self.cls_norm is None:
            return self.norm(tokens)
        first, patches = tokens.tensor_split([1 + self.arch.registers], dim=1)
        return torch.cat((self.cls_norm(first), self.norm(patches)), dim=1)

    def _features(self, batches: Sequence[_Batch], draws: Tensor | None) -> Tensor:
        """Compute CLS token and last tokens of each sequence, `kept` in total, after the final norm: (rows, d)."""
        sequences, images = [self._embed(batch.images, batch.mask) for batch in batches], batches[0].images
        groups, kept = tuple((s.shape[0], s.shape[1]) for s in sequences), tuple(batch.kept for batch in batches)

        def pack() -> tuple[Packing, Selection | None]:
            packing = Packing.of(groups, images.device)
            return packing, None if kept == tuple(n for _, n in groups) else packing.first_and_last(kept)

        packing, wanted = self._made.of((groups, kept, images.device), pack)
        selection = wanted if self.options.cls_only_last_block else None
        x = torch.cat([s.flatten(0, 1) for s in sequences])
        drop = self._drop(draws, packing, x.dtype, selection)
        tables = [[batch.tables[i] for batch in batches if batch.tables] for i in range(len(self.blocks))]
        blocks, last = cast("list[Block]", [*self.blocks]), len(self.blocks) - 1
        if not self.is_compiled and drop is None and fuses_sums(blocks[0].norm1, x):
            x = run_fused(blocks, x, packing, selection, tables)
        else:
            for i, block in enumerate(blocks):
                dropped = None if drop is None else drop[i]
                x = self.run_segment(i, block, x, packing, dropped, selection if i == last else None, tables[i])
        if wanted is not None and selection is None:
            x = x.index_select(0, wanted.rows)
        normed: Tensor = self.norm(x)  # of all rows, so that its gradient exists in every pass: ZeRO 3 needs it
        of_local, at = self.local_cls_norm if torch.is_grad_enabled() else None, 0
        cls = (packing if wanted is None else wanted.packing).cls
        for name, count in (item for batch in batches for item in batch.sequences.items()):
            norm = of_local if of_local is not None and name == LOCAL else self.cls_norm
            if norm is not None:
                rows = cls[at : at + count]
                normed = normed.index_copy(0, rows.long(), norm(x.index_select(0, rows)))
            at += count
        return normed

    def _drop(
        self, draws: Tensor | None, packing: Packing, dtype: torch.dtype, selection: Selection | None
    ) -> list[Tensor] | list[list[Kept]] | None:
        if draws is None:
            return None
        rate = self.options.drop_path
        rates = (rate if self.options.drop_path_growth == "uniform" else 0.0, rate)
        if self.options.stochastic_depth == "batched":
            return kept_sequences(draws, rates, packing, selection, self._made)
        scales = drop_path_scales(draws, rates).to(dtype).unsqueeze(-1)
        sequences, last = (
            self._made.of(("sequences", rows.groups, draws.device), rows.sequence_of_token)
            for rows in (packing, packing if selection is None else selection.packing)
        )
        blocks = [*scales[:, :, sequences]]
        return blocks if selection is None else [*blocks[:-1], scales[-1][:, last]]

    def _embed(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Images (b, c, h, w), hidden patches (b, n) bool or None -> tokens with positions (b, tokens, d)."""
        patches: Tensor = self.patch_embed(images)
        cls = self.cls_token.expand(images.shape[0], -1, -1)
        if mask is not None:
            assert self.mask_token is not None
            patches = torch.where(mask.unsqueeze(-1), self.mask_token.to(patches.dtype), patches)
        elif self.mask_token is not None:
            cls = cls + 0 * self.mask_token  # zero: ZeRO 3 would repeat an old gradient for a parameter that gets none
        positions = None if self.pos_embed is None else self._positions(*self._grid(images))
        if self.reg_token is not None:
            registers = self.reg_token.expand(images.shape[0], -1, -1)
            return torch.cat((cls, registers, patches if positions is None else patches + positions), dim=1)
        tokens = torch.cat((cls, patches), dim=1)
        return tokens if positions is None else tokens + positions

    def _positions(self, height: int, width: int) -> Tensor:
        assert self.pos_embed is not None
        if (height, width) == (self.grid, self.grid):
            return self.pos_embed
        special = 0 if self.reg_token is not None else 1
        patches = resized(self.pos_embed[:, special:], self._matrix(height), self._matrix(width))
        return torch.cat((self.pos_embed[:, :special], patches.to(self.pos_embed.dtype)), dim=1)

    def _matrix(self, size: int) -> Tensor:
        key = (size, self.options.pos_embed_interpolation, self.cls_token.device)
        return self._made.of(key, lambda: bicubic_matrix(self.grid, *key))


@dataclass(frozen=True)
class _Batch:
    """Crops of one size: images (b, c, h, w), mask of hidden patches (b, n) bool or None. kept: tokens of an image
    whose features are returned; sequences: number of crops by group; tables: RoPE's, one for each block."""

    images: Tensor
    mask: Tensor | None
    kept: int
    sequences: Mapping[str, int]
    tables: Sequence[Tensor] = ()
