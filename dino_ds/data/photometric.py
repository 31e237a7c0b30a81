"""Photometric augmentation of whole batches on any device, each crop with its own parameters. The loader sends crops
with their AugmentationParams. The operations are torchvision's functional ones on float tensors in [0, 1]; Pillow's,
used by `data.augment worker`, round to 8 bits after each operation. The host knows which crops an operation changes, so
nothing waits for the device. On CUDA the kernels of `photometric_triton` do the same in four launches per crop size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.basics.ranges import TAKEN
from dino_ds.data import multicrop
from dino_ds.data.multicrop import FLIP, GRAY, LUMA, SIGMA, SLOTS, SOLARIZE, AugmentationParams, CropParameters

_OPTIONAL_COLUMNS = [FLIP, *range(3, 4 * SLOTS, 4), GRAY, SIGMA, SOLARIZE]
"""Columns that are 0 for a crop without the operation; hue has one in each jitter slot."""
_CACHED_PIXELS = 4 * 224**2  # pixels that are augmented at once on a CPU: 2.4 MB in FP32

Kernels = Callable[[Tensor, Tensor, float, Tensor, Tensor], None]


def crops_per_params(size: int, device: torch.device) -> int | None:
    """Most crops of `size` pixels that are augmented at once: as many as fit a CPU's cache; None = all, on a GPU."""
    return max(1, _CACHED_PIXELS // size**2) if device.type == "cpu" else None


def augment(crops: Tensor, params: Sequence[AugmentationParams], normalize: Tensor) -> Tensor:
    """Crops (n, h, w, c) -> (n, c, h, w) float32, augmented and normalized, on the device of crops and params. Crops
    are uint8, or float32 in [0, 1]; `params` are in their order. `normalize` (2, c): final offset and factor of each
    channel."""
    n, h, w, c = crops.shape
    out = torch.empty(n, c, h, w, device=crops.device)
    sizes = [len(piece.table) for piece in params]
    for some, piece, part in zip(crops.split(sizes), params, out.split(sizes), strict=True):
        if crops.is_cuda and "augmentation" in TAKEN:
            from dino_ds.data import photometric_triton

            photometric_triton.augment(some, piece.on_device, _scale(some), normalize, part)
        else:
            _augment(some, piece, normalize, part)
    return out


def kernel_difference(kernels: Kernels, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    """Largest difference between results of the kernels and of `_augment` on a CPU; waits for the device."""
    first = (("brightness", 0.7), ("contrast", 1.3), ("saturation", 0.8), ("hue", -0.08))
    second = (("hue", 0.1), ("saturation", 1.2), ("contrast", 0.6), ("brightness", 1.4))
    box = (0, 0, 1, 1)
    sampled = [
        CropParameters(box, True, first, False, 2.0, False),
        CropParameters(box, False, second, False, 0.5, True),
        CropParameters(box, True, second, True, None, True),
        CropParameters(box, False, (), False, None, False),
    ]
    h, w, c = shape
    levels = torch.rand(len(sampled), h, w, c, generator=torch.Generator().manual_seed(0))
    crops = levels if dtype.is_floating_point else (255 * levels).to(dtype)
    params, expected = AugmentationParams.build(sampled, c), torch.empty(len(sampled), c, h, w)
    normalize = torch.stack([torch.linspace(-2, 0, c), torch.linspace(2, 5, c)])
    _augment(crops, params, normalize, expected)
    result = torch.empty_like(expected, device=device)
    kernels(crops.to(device), params.table.to(device), _scale(crops), normalize.to(device), result)
    return (expected - result.cpu()).abs().max().item()


def _scale(crops: Tensor) -> float:
    return 1 / 255 if crops.dtype == torch.uint8 else 1.0


def _augment(crops: Tensor, params: AugmentationParams, normalize: Tensor, x: Tensor) -> None:
    (n, _, _, c), table, on_device = crops.shape, params.table.numpy(), params.on_device
    which, crop = np.nonzero(table.T[_OPTIONAL_COLUMNS])
    counts = np.bincount(which, minlength=len(_OPTIONAL_COLUMNS)).tolist()
    split = torch.from_numpy(crop).to(x.device, non_blocking=True).split(counts)
    rows = {column: some for column, some, count in zip(_OPTIONAL_COLUMNS, split, counts, strict=True) if count}

    def replace(column: int, operation: Callable[..., Tensor], *values: Tensor) -> None:
        if column in rows:
            some = rows[column]
            x.index_copy_(0, some, operation(x[some], *(value[some] for value in values)))

    if FLIP in rows:
        crops = crops.index_copy(0, rows[FLIP], crops[rows[FLIP]].flip(2))
    torch.mul(crops.permute(0, 3, 1, 2), _scale(crops), out=x)
    weights = on_device[:, : 4 * SLOTS].T.contiguous().view(SLOTS, 4, n, 1, 1, 1)
    for slot, (pixel, own_gray, mean_gray, turns) in enumerate(weights):
        shade = gray(x)
        mean = shade.mean((2, 3), keepdim=True)
        shade.mul_(own_gray).add_(mean.mul_(mean_gray))
        torch.addcmul(shade, x, pixel, out=x).clamp_(0, 1)
        replace(4 * slot + 3, shift_hue, turns)
    replace(GRAY, lambda some: gray(some).expand_as(some))
    replace(SIGMA, gaussian_blur, on_device[:, SIGMA])
    # Values brighter than 127.5 / 255 are inverted, which for 8-bit levels is the threshold 128.
    replace(SOLARIZE, lambda some: torch.minimum(some, 1 - some))
    offset, factor = normalize.view(2, c, 1, 1)
    torch.addcmul(offset, x, factor, out=x)


def gray(x: Tensor) -> Tensor:
    """RGB (n, 3, h, w) -> luma (n, 1, h, w); for other channels their mean."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    r, g, b = x.unbind(1)
    return r.mul(LUMA[0]).add_(g, alpha=LUMA[1]).add_(b, alpha=LUMA[2]).unsqueeze(1)


def shift_hue(x: Tensor, turns: Tensor) -> Tensor:
    """Shift the hue of RGB (n, 3, h, w) by `turns` (n,) of the color circle; value and chroma stay the same."""
    r, g, b = x.unbind(1)
    high, low = torch.maximum(torch.maximum(r, g), b), torch.minimum(torch.minimum(r, g), b)
    chroma = high - low
    per_chroma = 1 / chroma.clamp_min(1e-6)  # no division by 0; gray stays gray, since its chroma is 0
    hue = torch.where(
        high == r, (g - b) * per_chroma, torch.where(high == g, (b - r) * per_chroma + 2, (r - g) * per_chroma + 4)
    )
    hue.add_(6 * turns.view(-1, 1, 1))  # sixths of the circle
    hue.sub_(hue.div(6).floor_().mul_(6))
    # Each channel is a trapezoid of the hue.
    weights = ((hue - 3).abs_().sub_(1), 2 - (hue - 2).abs_(), 2 - (hue - 4).abs_())
    return torch.stack([torch.addcmul(low, chroma, weight.clamp_(0, 1)) for weight in weights], dim=1)


def gaussian_blur(x: Tensor, sigmas: Tensor) -> Tensor:
    """Blur crops (n, c, h, w), each with its own standard deviation in pixels (n,); edges are mirrored."""
    n, c, h, w = x.shape
    for size, axis in ((w, 3), (h, 2)):
        reach = min(multicrop.BLUR_REACH, size - 1)
        offsets = torch.arange(-reach, reach + 1, device=x.device)
        kernels = torch.softmax(-0.5 * (offsets / sigmas[:, None]).square(), dim=1).repeat_interleave(c, 0)
        padding = [reach, reach, 0, 0] if axis == 3 else [0, 0, reach, reach]
        padded = F.pad(x, padding, mode="reflect")
        shape = (n * c, 1, 1, -1) if axis == 3 else (n * c, 1, -1, 1)
        x = F.conv2d(padded.view(1, n * c, *padded.shape[2:]), kernels.view(shape), groups=n * c).view(n, c, h, w)
    return x
