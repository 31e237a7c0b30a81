"""Photometric augmentation of whole batches on any device, every crop with its own parameters.

The loader sends crops as uint8 and a `Plan` of what is done to each. Every operation is that of torchvision's
functional on float tensors in [0, 1]; Pillow's, which `data.augment worker` applies, round to 8 bits after each. Which
crops an operation touches is known on the host, so nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.data.multicrop import ViewParameters, channel_statistics

_SLOTS = 4
"""Jitter operations of one crop, in its own order."""
_PIXEL, _GREY, _MEAN = range(3)
"""A blend is clamp(a * pixel + b * its grey + c * the crop's mean grey)."""
_LUMA = (0.2989, 0.587, 0.114)
_BLUR_REACH = 6
"""Pixels on either side that a blur looks at: 3 standard deviations of the widest one."""

_CACHED_PIXELS = 4 * 224**2
"""On a CPU crops are worked on in pieces of so many pixels: 2.4 MB in FP32."""


@dataclass(frozen=True)
class Plan:
    """What is done to n crops of one size: all row numbers in one tensor, all numbers in another.

    rows: int64, of the crops that are flipped, hue-shifted in slot 0, 1, 2, 3, made grey, blurred, solarized: one list
    after the other, as long as `counts` says. values: float32, the blends' coefficients (4 slots, 3, n); hue shifts in
    turns and blurs' standard deviations in pixels, in the order of their rows; the normalisation's scale and offset
    (2, c).
    """

    crops: int
    rows: Tensor
    values: Tensor
    counts: tuple[int, ...]

    @staticmethod
    def build(views: Sequence[ViewParameters], channels: int) -> Plan:
        """Saturation, hue and grey are left out where the channels are not RGB."""
        lists: list[list[int]] = [[] for _ in range(_SLOTS + 4)]
        flips, *hues, grays, blurs, solarized = lists
        blends = np.zeros((_SLOTS, 3, len(views)), dtype=np.float32)
        blends[:, _PIXEL] = 1
        turns: list[list[float]] = [[] for _ in range(_SLOTS)]
        for row, view in enumerate(views):
            for slot, (name, factor) in enumerate(view.jitter):
                if name in ("saturation", "hue") and channels != 3:
                    continue
                if name == "hue":
                    hues[slot].append(row)
                    turns[slot].append(factor)
                    continue
                blends[slot, _PIXEL, row] = factor
                if name != "brightness":
                    blends[slot, _GREY if name == "saturation" else _MEAN, row] = 1 - factor
            for happens, rows in (
                (view.flip, flips),
                (view.gray and channels == 3, grays),
                (view.blur_radius is not None, blurs),
                (view.solarize, solarized),
            ):
                if happens:
                    rows.append(row)
        sigmas = [views[row].blur_radius for row in blurs]
        mean, std = (np.asarray(values) for values in channel_statistics(channels))
        numbers = [blends.ravel(), *turns, sigmas, 1 / std, -mean / std]
        return Plan(
            len(views),
            torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.int64) for part in lists])),
            torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.float32) for part in numbers])),
            tuple(map(len, lists)),
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> Plan:
        """The same plan with both tensors moved."""
        return Plan(self.crops, move(self.rows), move(self.values), self.counts)

    def __reduce__(self) -> tuple[Any, ...]:
        # As plain bytes: between processes each tensor would take a file of shared memory.
        return _plan_of_arrays, (self.crops, self.rows.numpy(), self.values.numpy(), self.counts)


def _plan_of_arrays(crops: int, rows: np.ndarray, values: np.ndarray, counts: tuple[int, ...]) -> Plan:
    return Plan(crops, torch.from_numpy(rows), torch.from_numpy(values), counts)


def crops_per_plan(size: int, device: torch.device) -> int | None:
    """How many crops of `size` pixels go into one plan: all (None), but on a CPU as many as its cache holds."""
    return max(1, _CACHED_PIXELS // size**2) if device.type == "cpu" else None


def augment(crops: Tensor, plans: Sequence[Plan]) -> Tensor:
    """Crops (n, h, w, c) -> (n, c, h, w) float32, augmented and normalised, on the device of crops and plans.

    Crops are uint8, or float32 in [0, 1]. The plans follow each other: the first is for the first crops.
    """
    n, h, w, c = crops.shape
    out = torch.empty(n, c, h, w, device=crops.device)
    sizes = [plan.crops for plan in plans]
    for some, plan, part in zip(crops.split(sizes), plans, out.split(sizes), strict=True):
        _augment(some, plan, part)
    return out


def _augment(crops: Tensor, plan: Plan, x: Tensor) -> None:
    n, _, _, c = crops.shape
    flips, *hues, grays, blurs, solarized = plan.rows.split(plan.counts)
    sizes = [_SLOTS * 3 * n, *plan.counts[1 : 1 + _SLOTS], len(blurs), c, c]
    blends, *turns, sigmas, scale, offset = plan.values.split(sizes)
    if len(flips):
        crops = crops.index_copy(0, flips, crops[flips].flip(2))
    torch.mul(crops.permute(0, 3, 1, 2), 1 / 255 if crops.dtype == torch.uint8 else 1, out=x)
    for slot, coefficients in enumerate(blends.view(_SLOTS, 3, n, 1, 1, 1)):
        blend(x, *coefficients)
        _replace(x, hues[slot], shift_hue, turns[slot])
    _replace(x, grays, lambda some: grey(some).expand_as(some))
    _replace(x, blurs, gaussian_blur, sigmas)
    _replace(x, solarized, solarize)
    torch.addcmul(offset.view(c, 1, 1), x, scale.view(c, 1, 1), out=x)


def _replace(x: Tensor, rows: Tensor, operation: Callable[..., Tensor], *values: Tensor) -> None:
    if len(rows):
        x.index_copy_(0, rows, operation(x[rows], *values))


def grey(x: Tensor) -> Tensor:
    """(n, 3, h, w) -> (n, 1, h, w) luma; the mean of the channels where they are not RGB."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    r, g, b = x.unbind(1)
    return r.mul(_LUMA[0]).add_(g, alpha=_LUMA[1]).add_(b, alpha=_LUMA[2]).unsqueeze(1)


def blend(x: Tensor, pixel: Tensor, own_grey: Tensor, mean_grey: Tensor) -> Tensor:
    """Brightness, contrast or saturation of each crop, in place; coefficients (n, 1, 1, 1)."""
    shade = grey(x)
    mean = shade.mean((2, 3), keepdim=True)
    shade = shade.mul_(own_grey).add_(mean.mul_(mean_grey))
    return torch.addcmul(shade, x, pixel, out=x).clamp_(0, 1)


def shift_hue(x: Tensor, turns: Tensor) -> Tensor:
    """RGB (n, 3, h, w) -> the same value and chroma, the hue `turns` (n,) of the colour circle further."""
    r, g, b = x.unbind(1)
    high, low = torch.maximum(torch.maximum(r, g), b), torch.minimum(torch.minimum(r, g), b)
    chroma = high - low
    per_chroma = 1 / chroma.clamp_min(1e-6)  # below the steps of FP32; grey stays grey, since its chroma is 0
    hue = torch.where(
        high == r, (g - b) * per_chroma, torch.where(high == g, (b - r) * per_chroma + 2, (r - g) * per_chroma + 4)
    )
    hue.add_(6 * turns.view(-1, 1, 1))  # sixths of the circle
    hue.sub_(hue.div(6).floor_().mul_(6))
    # Each channel is a trapezoid of the hue.
    weights = ((hue - 3).abs_().sub_(1), 2 - (hue - 2).abs_(), 2 - (hue - 4).abs_())
    return torch.stack([torch.addcmul(low, chroma, weight.clamp_(0, 1)) for weight in weights], dim=1)


def gaussian_blur(x: Tensor, sigmas: Tensor) -> Tensor:
    """(n, c, h, w), each crop with its own standard deviation in pixels (n,); edges are mirrored."""
    n, c, h, w = x.shape
    for size, axis in ((w, 3), (h, 2)):
        reach = min(_BLUR_REACH, size - 1)
        offsets = torch.arange(-reach, reach + 1, device=x.device)
        kernels = torch.softmax(-0.5 * (offsets / sigmas[:, None]).square(), dim=1).repeat_interleave(c, 0)
        padding = [reach, reach, 0, 0] if axis == 3 else [0, 0, reach, reach]
        padded = F.pad(x, padding, mode="reflect")
        shape = (n * c, 1, 1, -1) if axis == 3 else (n * c, 1, -1, 1)
        x = F.conv2d(padded.view(1, n * c, *padded.shape[2:]), kernels.view(shape), groups=n * c).view(n, c, h, w)
    return x


def solarize(x: Tensor) -> Tensor:
    """Inverts what is brighter than 127.5 of 255: for 8-bit levels the threshold 128."""
    return torch.minimum(x, 1 - x)
