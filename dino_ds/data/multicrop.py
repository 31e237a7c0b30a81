"""Multi-crop augmentation as in DINO and the masks of crops, with all randomness from one seed per image; and the crops
of evaluations. The augmentation is facebookresearch/dino's DataAugmentationDINO (`main_dino.py`). It calls Pillow's
operations directly, since torchvision's transforms would draw from torch's global generator. Masks are those of
facebookresearch/dinov2 `data/masking.py` (MaskingGenerator) and `data/collate.py`. There exactly half of a batch's
crops are masked, each with a ratio from its own bin of the range (DINOv3 takes the bin's upper edge). Here each
crop is masked with a probability and draws its ratio from the whole range, so that its mask follows from (seed, epoch,
index of the image, number of the crop) alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from dino_ds.basics.ranges import CROP, DECODE, loading_range
from dino_ds.basics.seeds import crop_seed
from dino_ds.config.crops import AUGMENTATIONS, LOCAL, Augmentation, CropGroup, Masks, crop_sizes
from dino_ds.config.recipe import Recipe
from dino_ds.data import decode, image_cache
from dino_ds.data.normalization import IMAGENET, Normalization, normalized_levels

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels
_ASPECT = (3 / 4, 4 / 3)
BICUBIC = Image.Resampling.BICUBIC
_LOG_ASPECT = math.log(1 / 0.3)
SLOTS = 4  # jitter operations of one crop, in an order drawn for this crop
FLIP, GRAY, SIGMA, SOLARIZE = range(4 * SLOTS, 4 * SLOTS + 4)
COLUMNS = 4 * SLOTS + 4  # numbers that describe the augmentation of a crop: see AugmentationParams
LUMA = (0.2989, 0.587, 0.114)
BLUR_REACH = 6  # pixels on either side that a blur reads: 3 standard deviations of the widest one


class MultiCrop:
    """Cuts the crops of all groups from an image, augments and normalizes them.

    Args:
        groups: crop groups.
        augment: probabilities and strengths, or the name of a preset.
        masks: options of the masked groups, by group name.
        normalization: mean and deviation of the channels.
        resolutions: the same crops in each of the sizes that optimizer steps draw from; empty: only those of `groups`.
    """

    def __init__(
        self,
        groups: Sequence[CropGroup],
        augment: str | Augmentation,
        masks: Mapping[str, MaskOptions] = MappingProxyType({}),
        normalization: Normalization = IMAGENET,
        resolutions: Sequence[MultiCrop] = (),
    ) -> None:
        self.groups = tuple(groups)
        self.augmentation = AUGMENTATIONS[augment] if isinstance(augment, str) else augment
        self.sizes = crop_sizes(groups)
        self.crops = [
            (group, (2 if group.name == LOCAL else min(number, 1)) if group.augmented else None)
            for group in groups
            for number in range(group.count)
        ]
        """Group of every crop, and the crop's index in the triples of an Augmentation (None = not augmented)."""
        self.masks, self.normalization = dict(masks), normalization
        self.resolutions = tuple(resolutions) or (self,)

    @staticmethod
    def of(recipe: Recipe) -> MultiCrop:
        """Build the crops of a recipe; `groups` are those of its largest resolution."""

        def of_groups(groups: Sequence[CropGroup], resolutions: Sequence[MultiCrop] = ()) -> MultiCrop:
            how = recipe.crops.augmentation, MaskOptions.of(recipe, groups), Normalization.of(recipe)
            return MultiCrop(groups, *how, resolutions)

        sized = [of_groups(recipe.groups_of(resolution)) for resolution in recipe.resolutions]
        return of_groups(recipe.groups, sized if len(sized) > 1 else ())

    def __call__(self, image: Image.Image, seed: int) -> list[Tensor]:
        """RGB image -> crops (3, size, size) float32, group after group; all randomness is from `seed`."""
        crops = []
        for sampled, size in zip(self.sample(image.width, image.height, seed), self.sizes, strict=True):
            crop = image.crop(sampled.box).resize((size, size), BICUBIC)
            if sampled.turns:
                crop = crop.transpose(getattr(Image.Transpose, f"ROTATE_{90 * sampled.turns}"))
            if sampled.flip:
                crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            for name, factor in sampled.jitter:
                crop = _JITTER[name](crop, factor)
            if sampled.gray:
                crop = crop.convert("L").convert("RGB")
            if sampled.blur_radius is not None:
                crop = crop.filter(ImageFilter.GaussianBlur(sampled.blur_radius))
            if sampled.solarize:
                crop = ImageOps.solarize(crop, 128)
            crops.append(to_tensor(crop, self.normalization))
        return crops

    def sample(self, width: int, height: int, seed: int) -> list[CropParameters]:
        """Draw the parameters of all crops of an image of `width` x `height` pixels."""
        rng, strength = random.Random(seed), self.augmentation
        # Turns have a random stream of their own (-2; masks have -1), so that other draws are the same without turns.
        turning = random.Random(crop_seed(seed, -2, 0)) if strength.vertical_flip or strength.rotation else None
        sampled: list[CropParameters] = []
        first: dict[str, int] = {}
        for group, kind in self.crops:
            first_of_group = first.setdefault(group.name, len(sampled))
            if group.like is not None:
                seen = sampled[first[group.like] + len(sampled) - first_of_group]
                sampled.append(CropParameters(seen.box, seen.flip, turns=seen.turns))
                continue
            crop = self._sample_crop(rng, width, height, group, kind)
            if turning:
                upside_down = turning.random() < strength.vertical_flip
                turns = turning.randint(1, 3) if turning.random() < strength.rotation else 0
                crop = replace(crop, flip=crop.flip != upside_down, turns=(turns + 2 * upside_down) % 4)
            sampled.append(crop)
        return sampled

    def _sample_crop(
        self, rng: random.Random, width: int, height: int, group: CropGroup, kind: int | None
    ) -> CropParameters:
        strength, jitter = self.augmentation, list[tuple[str, float]]()
        box, flip = sample_box(rng, width, height, group.scale), rng.random() < strength.flip
        if kind is None:
            return CropParameters(box, flip)
        if rng.random() < strength.jitter:
            names = list(_JITTER)
            rng.shuffle(names)
            for name in names:
                most = float(getattr(strength, name))
                factor = (0.0 if name == "hue" else 1.0) + rng.uniform(-most, most)
                jitter += [(name, factor)] if most else []
        return CropParameters(
            box,
            flip,
            tuple(jitter),
            gray=rng.random() < strength.gray,
            blur_radius=rng.uniform(0.1, 2.0) if rng.random() < strength.blur[kind] else None,
            solarize=rng.random() < strength.solarize[kind],
        )


@dataclass(frozen=True)
class CropParameters:
    """Random changes of a crop, in the order of application, except `turns`."""

    box: Box
    flip: bool
    jitter: tuple[tuple[str, float], ...] = ()  # (operation, factor) in the order of application; empty = none
    gray: bool = False
    blur_radius: float | None = None
    solarize: bool = False
    turns: int = 0
    """Turns by 90 degrees, counter-clockwise, after resizing; two turns and a flip mirror a crop top to bottom."""


@dataclass(frozen=True)
class AugmentationParams:
    """Augmentation of n crops of one size: a row of COLUMNS float32 numbers for each. Each jitter slot has four:
    the weights of the pixel, its gray and the crop's mean gray in a sum that is clamped, and the hue shift in turns of
    the color circle. The last four are: whether the crop is flipped, whether it is made gray, the blur's standard
    deviation in pixels (0 = none), and whether the crop is solarized."""

    table: Tensor  # the rows, on the host
    on_device: Tensor  # a copy of the rows on the device of the crops

    @staticmethod
    def build(crops: Sequence[CropParameters], channels: int) -> AugmentationParams:
        """Build the table of sampled crops; without saturation, hue and gray for channels other than RGB."""
        table = torch.from_numpy(np.array([_row(crop, channels == 3) for crop in crops], dtype=np.float32))
        return AugmentationParams(table, table)

    def moved(self, move: Callable[[Tensor], Tensor]) -> AugmentationParams:
        return AugmentationParams(self.table, move(self.on_device))

    def __reduce__(self) -> tuple[Any, ...]:
        # As plain bytes: a tensor would be sent through a file of shared memory.
        return _from_array, (self.table.numpy(),)


def _row(crop: CropParameters, rgb: bool) -> list[float]:
    row = [1.0, 0.0, 0.0, 0.0] * SLOTS + [0.0] * 4
    for slot, (name, factor) in enumerate(crop.jitter):
        if name == "brightness":
            row[4 * slot] = factor
        elif name == "contrast":
            row[4 * slot], row[4 * slot + 2] = factor, 1 - factor
        elif rgb and name == "saturation":
            row[4 * slot], row[4 * slot + 1] = factor, 1 - factor
        elif rgb:
            row[4 * slot + 3] = factor
    row[FLIP:] = crop.flip, crop.gray and rgb, crop.blur_radius or 0.0, crop.solarize
    return row


def _from_array(table: np.ndarray) -> AugmentationParams:
    return AugmentationParams(torch.from_numpy(table), torch.from_numpy(table))


def sample_box(rng: random.Random, width: int, height: int, scale: tuple[float, float]) -> Box:
    """Draw torchvision's RandomResizedCrop: area uniform, aspect ratio log-uniform, ten tries, then the center."""
    for _ in range(10):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(_ASPECT[0]), math.log(_ASPECT[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top, left = rng.randint(0, height - h), rng.randint(0, width - w)
            return left, top, left + w, top + h
    w, h = width, height
    if width / height < _ASPECT[0]:
        h = min(round(width / _ASPECT[0]), height)
    elif width / height > _ASPECT[1]:
        w = min(round(height * _ASPECT[1]), width)
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def cut_crops(
    image: decode.EncodedImage | decode.DecodedImage | image_cache.CachedImage,
    sampled: Sequence[CropParameters],
    sizes: Sequence[int],
    outputs: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Crops (size, size, c) of an image: cut, resized and turned; in `outputs`, tensors of that shape, if given."""
    boxes, crops = [crop.box for crop in sampled], list[Tensor]()
    with loading_range(DECODE):
        array = image.decode(largest_shrink(boxes, sizes))
    if array.shape[:2] != (image.height, image.width):
        across, down = array.shape[1] / image.width, array.shape[0] / image.height
        boxes = [shrunk_box(box, across, down) for box in boxes]
    with loading_range(CROP):
        for i, (parameters, box, size) in enumerate(zip(sampled, boxes, sizes, strict=True)):
            crop = resize_crop(array, box, size, None if outputs is None else outputs[i])
            crops.append(crop.copy_(torch.rot90(crop, parameters.turns)) if parameters.turns else crop)
    return crops


def resize_crop(image: np.ndarray, box: Box, size: int, output: Tensor | None = None) -> Tensor:
    """The `box` (left, top, right, bottom) of an image (h, w, c) as (size, size, c), bicubic, antialiased; in `output`,
    a tensor of that shape, if given. uint8 stays uint8, float32 stays in [0, 1]. The filter is Pillow's; uint8 differs
    by a level or two of rounding. Pixels stay interleaved, so that torch copies them neither before nor after."""
    left, top, right, bottom = box
    # A batch of one image with all its strides: otherwise torch would not see that pixels are interleaved.
    pixels = torch.from_numpy(np.ascontiguousarray(image[top:bottom, left:right])[None])
    crop = torch.empty(size, size, image.shape[2], dtype=pixels.dtype) if output is None else output
    if pixels.shape[1:3] == (size, size):
        return crop.copy_(pixels[0])
    out = crop[None].permute(0, 3, 1, 2)
    torch._C._nn._upsample_bicubic2d_aa(pixels.permute(0, 3, 1, 2), (size, size), False, None, out=out)  # type: ignore[call-arg]
    if crop.is_floating_point():
        crop.clamp_(0, 1)  # bicubic overshoots at edges; uint8 saturates
    return crop


def largest_shrink(boxes: Sequence[Box], sizes: Sequence[int]) -> int:
    """Largest factor (1, 2, 4 or 8) by which the image may be decoded smaller without enlarging a crop."""
    spare = min(
        min(right - left, bottom - top) / size for (left, top, right, bottom), size in zip(boxes, sizes, strict=True)
    )
    return next((shrink for shrink in (8, 4, 2) if shrink <= spare), 1)


def shrunk_box(box: Box, across: float, down: float) -> Box:
    """`box` in an image whose width is `across` and whose height is `down` times as large; at least one pixel."""
    left, top = round(box[0] * across), round(box[1] * down)
    return left, top, max(round(box[2] * across), left + 1), max(round(box[3] * down), top + 1)


def _shift_hue(image: Image.Image, turns: float) -> Image.Image:
    """Shift Pillow's 8-bit hue by `turns` of the color circle, -0.5 to 0.5."""
    hue, saturation, value = image.convert("HSV").split()
    shift = int(turns * 255)  # truncates toward zero, as torchvision does
    rotated = hue.point([(level + shift) % 256 for level in range(256)])
    return Image.merge("HSV", (rotated, saturation, value)).convert("RGB")


_JITTER: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "saturation": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "hue": _shift_hue,
}


def to_tensor(image: Image.Image, normalization: Normalization) -> Tensor:
    """RGB image -> (3, h, w) float32, normalized."""
    pixels, levels = np.asarray(image), normalized_levels(normalization)
    out = np.empty((3, *pixels.shape[:2]), dtype=np.float32)
    for channel in range(3):
        np.take(levels[channel], pixels[:, :, channel], out=out[channel], mode="clip")
    return torch.from_numpy(out)


class EvalCrop:
    """The k-NN preprocessing of DINO: shorter side to size * 256 / 224 (bicubic), center crop, normalize. If an image's
    shorter side has at most `size` pixels, it is resized to `size` and not cut. Of an odd border, the smaller half is
    cut at the left and the top, as in transformers; torchvision rounds half to even, so that of borders of 3, 7, ...
    pixels it cuts the larger half there."""

    def __init__(self, size: int, normalization: Normalization) -> None:
        self.size, self.channels, self._normalization = size, len(normalization.mean), normalization

    def __call__(self, image: Image.Image | np.ndarray) -> Tensor:
        """RGB image, or (h, w, c) of uint8 or of float32 in [0, 1] -> (c, size, size) float32."""
        if isinstance(image, Image.Image):
            return to_tensor(self._cut(image), self._normalization)
        cut = [np.asarray(self._cut(Image.fromarray(plane))) for plane in np.moveaxis(image, -1, 0)]
        planes = torch.from_numpy(np.stack(cut))
        return self._normalization(planes.clamp(0, 1) if planes.is_floating_point() else planes / 255)

    def box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the kept part of an image, in its pixels."""
        (wide, high), (left, top) = self._resized(width, height)
        across, down = width / wide, height / high
        return left * across, top * down, (left + self.size) * across, (top + self.size) * down

    def _resized(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(width, height) of the resized image before the cut, and the upper left corner of the cut."""
        short, long = sorted((width, height))
        target = self.size if short <= self.size else int(self.size * 256 / 224)
        other = int(target * long / short)
        wide, high = (target, other) if width <= height else (other, target)
        return (wide, high), ((wide - self.size) // 2, (high - self.size) // 2)

    def _cut(self, image: Image.Image) -> Image.Image:
        size, (x, y) = self._resized(*image.size)
        if max(size) > 16 * self.size:  # cut first, to save memory
            left, top, right, bottom = self.box(*image.size)
            box = (left, top, min(right, image.width), min(bottom, image.height))
            return image.resize((self.size, self.size), BICUBIC, box=box)
        return image.resize(size, BICUBIC).crop((x, y, x + self.size, y + self.size))


@dataclass(frozen=True)
class MaskOptions:
    """The masks of a crop group. A crop is masked with probability `share`; int(patches * ratio) of its patches are to
    be hidden, the ratio drawn uniformly from the range `ratio`. Law "dinov2" hides blocks, perhaps of fewer patches;
    "dinov3" adds the missing ones at random. grid: (rows, columns) of a crop's patches."""

    law: Literal["dinov2", "dinov3"]
    share: float
    ratio: tuple[float, float]
    grid: tuple[int, int]

    @staticmethod
    def of(recipe: Recipe, groups: Sequence[CropGroup] | None = None) -> dict[str, MaskOptions]:
        """Options of a recipe's masked groups, by name. groups: crop groups of one of its resolutions, by default of
        the largest. Raises ConfigError for an unknown backbone."""
        crops = recipe.crops
        if crops.mask == "none":
            return {}
        stride = recipe.model.spec().stride
        how = crops.mask, crops.mask_share, crops.mask_ratio
        sides = {group.name: group.size // stride for group in groups or recipe.groups if group.masked}
        return {name: MaskOptions(*how, (side, side)) for name, side in sides.items()}


def draw_masks(groups: Sequence[CropGroup], masks: Mapping[str, MaskOptions], seeds: Sequence[int]) -> Masks:
    """Masks of a micro-batch, on the host. masks: options of masked groups by name; seeds: one for each image."""
    drawn, first = {}, 0
    for group in groups:
        if options := masks.get(group.name):
            numbers = range(first, first + group.count)  # of the group's crops among all crops of an image
            flat = [draw_mask(options, crop_seed(seed, -1, number)) for number in numbers for seed in seeds]
            drawn[group.name] = with_rows(torch.from_numpy(np.stack(flat)))
        first += group.count
    return drawn


def draw_mask(options: MaskOptions, seed: int) -> np.ndarray:
    """Draw the hidden patches of a crop: (rows * columns,) bool, row by row. The seed alone decides."""
    rng = random.Random(seed)
    mask = np.zeros(options.grid, dtype=bool)
    flat = mask.reshape(-1)
    if rng.random() >= options.share:
        return flat
    missing = int(mask.size * rng.uniform(*options.ratio))
    # The reference's largest block is half of the crop by `0.5 * side // patch * side // patch`, which halves the
    # number of rows and rounds down: 18 x 37 patches of 37 x 37. Kept, so that masks follow its law on odd grids too.
    largest = options.grid[0] // 2 * options.grid[1]
    while missing and (added := add_block(mask, min(missing, largest), rng)):
        missing -= added
    if missing and options.law == "dinov3":
        flat[rng.sample(np.flatnonzero(~flat).tolist(), missing)] = True
    return flat


def add_block(mask: np.ndarray, most: float, rng: random.Random) -> int:
    """Hide one more block of `mask` (rows, columns), at most `most` new patches, and return their number; 0: no block.
    The block's area is drawn uniformly between 4 and `most`, its height / width log-uniformly between .3 and 1 / .3.
    The block is smaller than the crop in both directions, and may overlap others if it hides at least one new patch."""
    rows, columns = mask.shape
    for _ in range(10):
        area = rng.uniform(4, most)
        aspect = math.exp(rng.uniform(-_LOG_ASPECT, _LOG_ASPECT))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if height < rows and width < columns:
            top, left = rng.randint(0, rows - height), rng.randint(0, columns - width)
            block = mask[top : top + height, left : left + width]
            added = height * width - int(np.count_nonzero(block))
            if 0 < added <= most:
                block[:] = True
                return added
    return 0


def with_rows(mask: Tensor) -> dict[str, Tensor]:
    """Masks (v * b, n) bool of v * b crops, on the host, as an entry of `Masks`."""
    rows = mask.flatten().nonzero().squeeze(1)
    return {"mask": mask, "rows": rows, "weights": 1 / mask.sum(1)[rows // mask.shape[1]].float()}


def synthetic_masks(recipe: Recipe, images: int, device: torch.device) -> Masks:
    """A recipe's masks for synthetic crops; always the same."""
    options = MaskOptions.of(recipe)
    drawn = draw_masks(recipe.groups, options, range(images))
    return {name: {key: tensor.to(device) for key, tensor in mask.items()} for name, mask in drawn.items()}
