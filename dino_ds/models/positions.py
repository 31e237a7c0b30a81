"""Positions of patches: embeddings resized to other grids by bicubic interpolation, and axial rotary positions (RoPE).
Interpolation is a linear map, applied as matrix products: torch's `interpolate` sums its gradient in varying order on a
GPU. Half of a head's rotation pairs turn by the row of a patch, half by its column; in FP32, whatever the precision.
Source: Su et al. 2021 (arXiv 2104.09864); coordinates, periods and the change in training as DINOv3, arXiv
2508.10104."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.basics.seeds import mix, shift_right
from dino_ds.models.fused import fused
from dino_ds.models.packing import Groups, MadeOnce
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.specs.base import BackboneOptions


def resize_positions(patches: Tensor, height: int, width: int, interpolation: str) -> Tensor:
    """Resize the position embedding of a square grid of patches, (1, n, d), to a (height, width) grid, FP32."""
    side = math.isqrt(patches.shape[1])
    rows, columns = (bicubic_matrix(side, size, interpolation, patches.device) for size in (height, width))
    return resized(patches, rows, columns)


def resized(patches: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """patches (1, side * side, d), matrices (height, side) and (width, side) -> (1, height * width, d), FP32."""
    side, width = rows.shape[1], patches.shape[-1]
    with torch.autocast(patches.device.type, enabled=False):
        stretched = rows @ patches.float().reshape(side, side * width)
        return (columns @ stretched.view(-1, side, width)).view(1, -1, width)


def bicubic_matrix(side: int, size: int, interpolation: str, device: torch.device) -> Tensor:
    """The matrix (size, side) that does along one axis what torch's bicubic `interpolate` does. "dino": as
    facebookresearch/dino, and dinov2 without registers; "antialias": as dinov2 with registers, and timm."""
    points = torch.eye(side, device=device)[None, None]
    if interpolation == "dino":
        # The reference adds 0.1 against rounding down; this also shifts the samples, so released weights need it.
        matrix = F.interpolate(points, scale_factor=((size + 0.1) / side, 1.0), mode="bicubic")
    else:
        matrix = F.interpolate(points, size=(size, side), mode="bicubic", antialias=True)
    assert matrix.shape[-2:] == (size, side)
    return matrix[0, 0]


class RopeTables:
    """Makes the tables of a network: (2, patches, head width / 2), cosines and sines, for each block and grid. In
    training the coordinates of patches are stretched at random; see `stretches`."""

    def __init__(self, arch: ViTSpec, options: BackboneOptions) -> None:
        self._arch, self._rescale, self._made = arch, options.rope_rescale or 1.0, MadeOnce()

    def of(
        self, grids: Sequence[tuple[int, int]], device: torch.device, step_key: int | None = None
    ) -> list[Sequence[Tensor]]:
        """The tables of all blocks, for each grid (rows, columns). With a `step_key` the coordinates are
        stretched: separately for each block and each entry of `grids`, alike for all images."""
        blocks, sides = self._arch.depth, str(self._arch.rope)
        makers = [((device, *grid, "axes"), functools.partial(coordinates, *grid, sides, device)) for grid in grids]
        axes = [self._made.of(*maker).split(grid) for maker, grid in zip(makers, grids, strict=True)]
        turns = self._made.of((device,), lambda: frequencies(self._arch, device))
        if step_key is None or self._rescale == 1.0:
            return [
                [self._made.of((device, *grid), functools.partial(table, rows, columns, turns))] * blocks
                for grid, (rows, columns) in zip(grids, axes, strict=True)
            ]
        with torch.no_grad():
            factors = stretches(_draws(step_key, len(grids), blocks, device), self._rescale)
            pairs = zip(axes, factors, strict=True)
            return [table(rows * by, columns * by, turns).unbind() for (rows, columns), by in pairs]


def coordinates(height: int, width: int, sides: str, device: torch.device) -> Tensor:
    """The centers of a grid's rows, then of its columns, (height + width,), FP32; a normalized side is -1 to 1 long.
    `sides`: whether each axis is normalized by its own side ("separate"), or the larger or smaller ("max", "min")."""
    by = {"separate": (height, width), "max": (max(height, width),) * 2, "min": (min(height, width),) * 2}[sides]
    axes = [torch.arange(count, device=device, dtype=torch.float32) for count in (height, width)]
    return torch.cat([(axis + 0.5) / side * 2 - 1 for axis, side in zip(axes, by, strict=True)])


def stretches(draws: Tensor, rescale: float) -> Tensor:
    """draws (...) in [0, 1) -> factors (..., 1) for both coordinates, in [1 / rescale, rescale], log-uniform."""
    return (draws.mul(2).sub(1).float() * math.log(rescale)).exp().unsqueeze(-1)


def rotate(projected: Tensor, groups: Groups, tables: Sequence[Tensor], parts: tuple[int, int], heads: int) -> Tensor:
    """Rotate patches in `projected` (tokens, all * d), such as queries, keys and values side by side; parts: (rotated,
    all), of which the first `rotated` turn. groups: (sequences, tokens of each) per size; tables: one per size, or none
    to rotate nothing. A sequence ends with its patches; tokens before these, and sequences of one token, do not turn.
    Pair j is (j, j + c / 2) of a head of width c. `projected` may be overwritten: nothing else may read it."""
    if not tables:
        return projected
    if torch.compiler.is_compiling():
        return _rotated(projected, groups, tables, parts, heads)
    return _Rotate.apply(projected, groups, parts, heads, *tables)


class _Rotate(torch.autograd.Function):
    """A rotation in place, forward and backward: a linear layer's output and its gradient have no other reader."""

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, groups: Groups, parts: tuple[int, int], heads: int, *tables: Tensor
    ) -> Tensor:
        ctx.groups, ctx.parts, ctx.heads = groups, parts, heads
        ctx.save_for_backward(*tables)
        # Not marked as dirty: autograd forbids that for the views that ZeRO 3 makes of a module's outputs.
        for pairs, (cos, sin) in _patches(projected, groups, tables, parts, heads):
            _turn(pairs, cos, sin, 1.0)
        return projected

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        for pairs, (cos, sin) in _patches(grad, ctx.groups, ctx.saved_tensors, ctx.parts, ctx.heads):
            _turn(pairs, cos, sin, -1.0)
        return grad, None, None, None, *[None] * len(ctx.groups)


def _patches(
    x: Tensor, groups: Groups, tables: Sequence[Tensor], parts: tuple[int, int], heads: int
) -> list[tuple[Tensor, Tensor]]:
    """Views of the rotated rows, by size (sequences, patches, rotated parts, heads, 2, c / 2), and their tables."""
    views = []
    cut = x.split([sequences * tokens for sequences, tokens in groups])
    for rows, (sequences, tokens), own_table in zip(cut, groups, tables, strict=True):
        patches = own_table.shape[1]
        if tokens > patches:  # otherwise the CLS token alone
            pairs = rows.view(sequences, tokens, parts[1], heads, 2, -1)[:, tokens - patches :, : parts[0]]
            views.append((pairs, own_table.view(2, patches, 1, 1, -1)))
    return views


def _turn(pairs: Tensor, cos: Tensor, sin: Tensor, direction: float) -> None:
    """Rotate pairs (sequences, patches, parts, heads, 2, c / 2) in place; cos and sin (patches, 1, 1, c / 2)."""
    first, second = pairs.unbind(-2)
    turned = pairs * cos.unsqueeze(-2)  # FP32
    turned.select(-2, 0).addcmul_(second, sin, value=-direction)
    turned.select(-2, 1).addcmul_(first, sin, value=direction)
    pairs.copy_(turned)


@fused(kernels=1, pieces=2)
def write_rotated(out: Tensor, pieces: list[Tensor], table: Tensor, rotated: int, back: bool) -> None:
    """Stack `pieces`, each (sequences, heads, tokens, c), in `out` (sequences, tokens, pieces, heads, 2, c / 2). The
    patches of the first `rotated` pieces are turned by `table` as `rotate` does; with `back` by the opposite angles."""
    tokens, patches = pieces[0].shape[2], table.shape[1]
    whole = [piece.transpose(1, 2).unflatten(-1, (2, -1)) for piece in pieces]
    if tokens > patches:
        cos, sin = F.pad(table, (0, 0, tokens - patches, 0)).view(2, tokens, 1, 1, -1)
        is_patch = (torch.arange(tokens, device=table.device) >= tokens - patches).view(-1, 1, 1, 1)
        sign = (1 - 2 * torch.arange(2, device=table.device).view(2, 1)) * (1 if back else -1)
        for i, part in enumerate(whole[:rotated]):
            turned = part * cos + part.flip(-2) * (sin * sign)
            whole[i] = torch.where(is_patch, turned.to(part.dtype), part)
    out.copy_(torch.stack(whole, dim=2))


def _rotated(projected: Tensor, groups: Groups, tables: Sequence[Tensor], parts: tuple[int, int], heads: int) -> Tensor:
    """`rotate` with plain operators, which torch.compile fuses into one kernel."""
    out = []
    cut = projected.split([sequences * tokens for sequences, tokens in groups])
    for rows, (sequences, tokens), own_table in zip(cut, groups, tables, strict=True):
        patches = own_table.shape[1]
        if tokens <= patches:
            out.append(rows)
            continue
        whole = rows.view(sequences, tokens, parts[1], heads, 2, -1)
        before, patch_rows = whole.split([tokens - patches, patches], dim=1)
        cos, sin = own_table.view(2, patches, 1, 1, -1)
        first, second = patch_rows[:, :, : parts[0]].float().unbind(-2)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2).to(projected.dtype)
        patch_rows = torch.cat((turned, patch_rows[:, :, parts[0] :]), dim=2)
        out.append(torch.cat((before, patch_rows), dim=1).view(sequences * tokens, -1))
    return torch.cat(out)


def _draws(step_key: int, sizes: int, blocks: int, device: torch.device) -> Tensor:
    """(sizes, blocks) FP64 in [0, 1): a hash of (key, size, block)."""
    hashed = mix(torch.arange(4, 5 * sizes * blocks, 5, device=device) + step_key)
    return (shift_right(hashed, 11).to(torch.float64) * 2.0**-53).view(sizes, blocks)


def frequencies(arch: ViTSpec, device: torch.device) -> Tensor:
    """2 pi / period of the rotation pairs of one axis, (head width / 4,) FP32, with periods in a geometric sequence."""
    count = arch.width // arch.heads // 4
    least, most = arch.rope_min_period, arch.rope_max_period
    if least is None or most is None:
        least, factor = 1.0, arch.rope_base ** (1 / count)
    else:
        factor = (most / least) ** (1 / max(count - 1, 1))
    powers = torch.arange(count, device=device, dtype=torch.float64) * -math.log(factor)
    return (powers.exp() * (2 * math.pi / least)).float()


def table(rows: Tensor, columns: Tensor, turns: Tensor) -> Tensor:
    """Coordinates (..., height), (..., width), `frequencies` -> (..., 2, height * width, c / 2): cosines, sines."""
    vertical, horizontal = (axis.unsqueeze(-1) * turns for axis in (rows, columns))
    grid = (*rows.shape, columns.shape[-1], len(turns))
    parts = (vertical.unsqueeze(-2).expand(grid), horizontal.unsqueeze(-3).expand(grid))
    angles = torch.cat(parts, dim=-1).flatten(-3, -2)
    return torch.stack((angles.cos(), angles.sin()), dim=-3)
