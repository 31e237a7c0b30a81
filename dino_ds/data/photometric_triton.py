"""The augmentation of `photometric` as Triton kernels: four launches per crop size, whatever parameters were drawn.

Crops are read once for the mean gray that contrast needs, and once for the output; the blur's two passes touch blurred
crops only. `photometric` compares results with those of its own operations before it uses these kernels on a device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dino_ds.data.multicrop import BLUR_REACH, COLUMNS, FLIP, GRAY, LUMA, SIGMA, SLOTS, SOLARIZE

_COLUMNS, _SLOTS = tl.constexpr(COLUMNS), tl.constexpr(SLOTS)
_FLIP, _GRAY, _SIGMA, _SOLARIZE = (tl.constexpr(column) for column in (FLIP, GRAY, SIGMA, SOLARIZE))
_RED, _GREEN, _BLUE = (tl.constexpr(weight) for weight in LUMA)
_REACH = tl.constexpr(BLUR_REACH)
_BLOCK = 1024
"""Pixels of a crop that one Triton program processes."""


def augment(crops: Tensor, table: Tensor, scale: float, normalize: Tensor, out: Tensor) -> None:
    """Augment crops (n, h, w, c) times `scale` by `table` (n, COLUMNS), all on the device, into out (n, c, h, w).
    normalize (2, c): an offset and a factor for each channel; the last operation is value * factor + offset."""
    n, height, width, channels = crops.shape
    pixels = height * width
    chunks = triton.cdiv(pixels, _BLOCK)
    sums, between = torch.empty(n, chunks, device=crops.device), torch.empty_like(out)
    constants = {"CHANNELS": channels, "BLOCK": _BLOCK}
    launch(sum_gray, (n, chunks), crops, table, sums, pixels, chunks, scale, **constants)
    constants["CHUNKS"] = triton.next_power_of_2(chunks)
    launch(color, (n, chunks), crops, table, sums, out, height, width, chunks, scale, normalize, **constants)
    planes = (n, chunks, channels)
    launch(blur, planes, table, out, between, height, width, normalize, DOWN=False, BLOCK=_BLOCK)
    launch(blur, planes, table, between, out, height, width, normalize, DOWN=True, BLOCK=_BLOCK)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the current stream. Products and sums are rounded separately, as in torch's operators."""
    kernel[grid](*arguments, **constants, num_warps=4, enable_fp_fusion=False)


@triton.jit
def sum_gray(crops, table, sums, pixels, chunks, scale, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum the gray values of each chunk as they are before contrast; 0 for crops without contrast."""
    crop, chunk = tl.program_id(0), tl.program_id(1)
    row = table + crop * _COLUMNS
    contrast, total = 0.0, 0.0
    for slot in tl.static_range(_SLOTS):
        contrast += tl.abs(tl.load(row + 4 * slot + 2))
    if contrast != 0:
        position = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = position < pixels
        source = crops + (crop.to(tl.int64) * pixels + position) * CHANNELS
        if CHANNELS == 3:
            r, g, b = _load_rgb(source, inside, scale)
            r, g, b = _jitter_rgb(r, g, b, row, 0.0, True)
            gray = _gray(r, g, b)
        else:
            gray = tl.full((BLOCK,), 0.0, tl.float32)
            for channel in range(CHANNELS):
                x = tl.load(source + channel, mask=inside, other=0).to(tl.float32) * scale
                gray += _jitter_plane(x, row, 0.0, True)
            gray = gray / CHANNELS
        total = tl.sum(tl.where(inside, gray, 0.0), 0)
    tl.store(sums + crop * chunks + chunk, total)


@triton.jit
def color(  # type: ignore[no-untyped-def]
    crops, table, sums, out, height, width, chunks, scale, normalize,
    CHANNELS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply everything but the blur; crops that will be blurred are not yet solarized and normalized."""
    crop, chunk = tl.program_id(0), tl.program_id(1)
    row, pixels = table + crop * _COLUMNS, height * width
    parts = tl.arange(0, CHUNKS)
    mean = tl.sum(tl.load(sums + crop * chunks + parts, mask=parts < chunks, other=0.0), 0) / pixels
    position = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = position < pixels
    x = position % width
    from_x = tl.where(tl.load(row + _FLIP) != 0, width - 1 - x, x)
    first = crop.to(tl.int64) * pixels * CHANNELS
    source = crops + first + (position - x + from_x) * CHANNELS
    target = out + first + position
    if CHANNELS == 3:
        r, g, b = _load_rgb(source, inside, scale)
        r, g, b = _jitter_rgb(r, g, b, row, mean, False)
        if tl.load(row + _GRAY) != 0:
            gray = _gray(r, g, b)
            r, g, b = gray, gray, gray
        if tl.load(row + _SIGMA) == 0:
            r, g, b = (
                _finish(r, row, normalize, 0, 3),
                _finish(g, row, normalize, 1, 3),
                _finish(b, row, normalize, 2, 3),
            )
        tl.store(target, r, mask=inside)
        tl.store(target + pixels, g, mask=inside)
        tl.store(target + 2 * pixels, b, mask=inside)
    else:
        for channel in range(CHANNELS):
            value = tl.load(source + channel, mask=inside, other=0).to(tl.float32) * scale
            value = _jitter_plane(value, row, mean, False)
            if tl.load(row + _SIGMA) == 0:
                value = _finish(value, row, normalize, channel, CHANNELS)
            tl.store(target + channel * pixels, value, mask=inside)


@triton.jit
def blur(  # type: ignore[no-untyped-def]
    table, source, target, height, width, normalize, DOWN: tl.constexpr, BLOCK: tl.constexpr
):
    """Blur crops with a sigma in one pass, across or down; the pass down also solarizes and normalizes them."""
    crop, chunk, channel = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, pixels = table + crop * _COLUMNS, height * width
    sigma = tl.load(row + _SIGMA)
    if sigma != 0:
        position = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = position < pixels
        first = (crop.to(tl.int64) * tl.num_programs(2) + channel) * pixels
        x = position % width
        if DOWN:
            at, size, stride = position // width, height, width
        else:
            at, size, stride = x, width, 1
        value, weights = tl.full((BLOCK,), 0.0, tl.float32), 0.0
        for step in tl.static_range(2 * _REACH + 1):
            offset = step - _REACH
            reaches = (offset < size) & (-offset < size)
            ratio = offset / sigma
            weight = tl.where(reaches, tl.exp(-0.5 * ratio * ratio), 0.0)
            other = tl.abs(at + offset)
            other = tl.where(reaches, tl.where(other < size, other, 2 * (size - 1) - other), at)
            there = source + first + position + (other - at) * stride
            value += weight * tl.load(there, mask=inside, other=0.0)
            weights += weight
        value = value / weights
        if DOWN:
            value = _finish(value, row, normalize, channel, tl.num_programs(2))
        tl.store(target + first + position, value, mask=inside)


@triton.jit
def _load_rgb(source, inside, scale):  # type: ignore[no-untyped-def]
    r = tl.load(source, mask=inside, other=0).to(tl.float32) * scale
    g = tl.load(source + 1, mask=inside, other=0).to(tl.float32) * scale
    b = tl.load(source + 2, mask=inside, other=0).to(tl.float32) * scale
    return r, g, b


@triton.jit
def _jitter_rgb(r, g, b, row, mean, BEFORE_CONTRAST: tl.constexpr):  # type: ignore[no-untyped-def]
    goes_on = 1.0
    for slot in tl.static_range(_SLOTS):
        pixel, own_gray = tl.load(row + 4 * slot), tl.load(row + 4 * slot + 1)
        towards_mean, turns = tl.load(row + 4 * slot + 2), tl.load(row + 4 * slot + 3)
        if BEFORE_CONTRAST:
            goes_on = tl.where(towards_mean == 0, goes_on, 0.0)
            pixel = tl.where(goes_on != 0, pixel, 1.0)
            own_gray, towards_mean, turns = own_gray * goes_on, 0.0, turns * goes_on
        shade = _gray(r, g, b) * own_gray + mean * towards_mean
        r, g, b = _clamp(shade + r * pixel), _clamp(shade + g * pixel), _clamp(shade + b * pixel)
        if turns != 0:
            r, g, b = _shift_hue(r, g, b, turns)
    return r, g, b


@triton.jit
def _jitter_plane(x, row, mean, BEFORE_CONTRAST: tl.constexpr):  # type: ignore[no-untyped-def]
    goes_on = 1.0
    for slot in tl.static_range(_SLOTS):
        pixel, towards_mean = tl.load(row + 4 * slot), tl.load(row + 4 * slot + 2)
        if BEFORE_CONTRAST:
            goes_on = tl.where(towards_mean == 0, goes_on, 0.0)
            pixel, towards_mean = tl.where(goes_on != 0, pixel, 1.0), 0.0
        x = _clamp(mean * towards_mean + x * pixel)
    return x


@triton.jit
def _shift_hue(r, g, b, turns):  # type: ignore[no-untyped-def]
    high, low = tl.maximum(tl.maximum(r, g), b), tl.minimum(tl.minimum(r, g), b)
    chroma = high - low
    per_chroma = 1 / tl.maximum(chroma, 1e-6)
    of_others = tl.where(high == g, (b - r) * per_chroma + 2, (r - g) * per_chroma + 4)
    hue = tl.where(high == r, (g - b) * per_chroma, of_others) + 6 * turns
    hue = hue - tl.floor(hue / 6) * 6
    red = low + chroma * _clamp(tl.abs(hue - 3) - 1)
    green = low + chroma * _clamp(2 - tl.abs(hue - 2))
    blue = low + chroma * _clamp(2 - tl.abs(hue - 4))
    return red, green, blue


@triton.jit
def _finish(x, row, normalize, channel, channels):  # type: ignore[no-untyped-def]
    x = tl.where(tl.load(row + _SOLARIZE) != 0, tl.minimum(x, 1 - x), x)
    return x * tl.load(normalize + channels + channel) + tl.load(normalize + channel)


@triton.jit
def _gray(r, g, b):  # type: ignore[no-untyped-def]
    return r * _RED + g * _GREEN + b * _BLUE


@triton.jit
def _clamp(x):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(x, 0.0), 1.0)
