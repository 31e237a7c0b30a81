"""The crops that are cut from every image, and their augmentation, for data, model, costs and reports. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
EMA = "ema"  # the name of the teacher that follows the student and is the run's product
FROZEN = "frozen"  # the name of the teacher that is distilled
GLOBAL, LOCAL = "global", "local"  # the names of DINO's crop groups
Masks = Mapping[str, Mapping[str, "Tensor"]]
"""The patches of a micro-batch that the student does not see, for each masked group. "mask" (v * b, n) bool: crop-major
(the first crop of all images, then the second), patches row by row. "rows" (m,) int64: indices of the m hidden patches
in the flat mask, ascending. "weights" (m,) float32: 1 / hidden patches of that crop. m varies, and may be 0."""


@dataclass(frozen=True)
class CropGroup:
    name: str
    count: int  # crops of each image
    size: int  # pixels of a side
    scale: tuple[float, float]  # (smallest, largest) share of the image's area that a crop takes
    teachers: tuple[str, ...]  # names of the teachers that see them
    student: bool  # whether the student sees them
    masked: bool = False  # whether patches are masked for the student
    augmented: bool = True  # whether colors, blur and solarization change them; flips are random for every crop
    like: str | None = None  # name of an earlier group with as many crops, whose boxes and flips these share
    hides: bool = True  # whether masked patches are hidden; the student predicts them in both cases


def student_masks(groups: Iterable[CropGroup], masks: Masks) -> Masks:
    """The masks that the student's network gets: without "mask" for the groups that hide nothing."""
    seeing = {group.name for group in groups if not group.hides}
    return {
        name: {key: value for key, value in mask.items() if key != "mask"} if name in seeing else mask
        for name, mask in masks.items()
    }


def dino_groups(
    global_size: int,
    global_scale: tuple[float, float],
    local_size: int,
    local_scale: tuple[float, float],
    num_local: int,
    masked: bool = False,
) -> tuple[CropGroup, ...]:
    """DINO's crops: two large ones for teacher and student, with hidden patches if `masked`, and small ones."""
    both = CropGroup(GLOBAL, 2, global_size, global_scale, teachers=(EMA,), student=True, masked=masked)
    local = CropGroup(LOCAL, num_local, local_size, local_scale, teachers=(), student=True)
    return (both, local) if num_local else (both,)


@dataclass(frozen=True)
class Resolution:
    """Sizes of the crops of an optimizer step, in pixels, and the share of the steps with these sizes."""

    global_size: int
    local_size: int
    gram_size: int | None = None  # of Gram anchoring's own crops, None without them
    share: float = 1.0

    @staticmethod
    def parse(word: str) -> Resolution:
        """Read "512/112:0.3" or "512/112/768:0.3". Raises ValueError."""
        side = "([1-9][0-9]{0,4})"
        parts = re.fullmatch(rf"{side}/{side}(?:/{side})?:([0-9]*\.?[0-9]*)", word)
        if parts is None or not 0 < (share := float(f"0{parts[4]}")) < 1:
            form = "GLOBAL/LOCAL:SHARE or GLOBAL/LOCAL/GRAM:SHARE, such as 512/112:0.3 for 3 of 10 steps"
            raise ValueError(f"resolutions: {word!r} is not {form}")
        return Resolution(int(parts[1]), int(parts[2]), int(parts[3]) if parts[3] else None, share)

    def __str__(self) -> str:
        return f"{self.global_size}/{self.local_size}{f'/{self.gram_size}' if self.gram_size else ''}:{self.share:g}"


def parse_resolutions(words: Sequence[str]) -> tuple[Resolution, ...]:
    """The resolutions of `crops.resolutions`. Raises ValueError, also where their shares do not sum to 1."""
    resolutions = tuple(Resolution.parse(word) for word in words)
    if len(resolutions) == 1:
        instead = "set crops.global_size and crops.local_size instead"
        raise ValueError(f"resolutions {resolutions[0]}: there is one; {instead}")
    total = sum(step.share for step in resolutions)
    if resolutions and abs(total - 1) > 1e-6:  # shares that are written in decimals are rounded
        raise ValueError(f"resolutions: the shares sum to {total:g}, and must sum to 1")
    return resolutions


def crop_sizes(groups: Iterable[CropGroup]) -> list[int]:
    """The size of every crop of an image, in the order of the groups."""
    return [group.size for group in groups for _ in range(group.count)]


def teacher_sizes(groups: Iterable[CropGroup], teacher: str = EMA) -> list[int]:
    return crop_sizes(group for group in groups if teacher in group.teachers)


def describe_crops(groups: Iterable[CropGroup]) -> str:
    """The groups in words, such as "2x224 + 8x96"."""
    return " + ".join(f"{group.count}x{group.size}" for group in groups)


def all_crops(crops: Mapping[str, Sequence[_T]]) -> list[_T]:
    return [crop for group in crops.values() for crop in group]


JITTERED = ("brightness", "contrast", "saturation", "hue")


@dataclass(frozen=True)
class Augmentation:
    """Chances and strengths; triples are (first global crop, second global crop, local crops). brightness, contrast and
    saturation are multiplied by 1 ± strength, the hue is turned by ± strength of the color circle, all four with the
    chance `jitter`. rotation: the chance of a turn by 90, 180 or 270 degrees."""

    blur: tuple[float, float, float]
    solarize: tuple[float, float, float] = (0.0, 0.2, 0.0)
    flip: float = 0.5
    jitter: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    gray: float = 0.2
    vertical_flip: float = 0.0
    rotation: float = 0.0

    def with_jitter(self, numbers: Sequence[float]) -> Augmentation:
        """This augmentation with its four jitter strengths times one number, or replaced by four. Raises ValueError."""
        text = ",".join(f"{value:g}" for value in numbers)
        if len(numbers) not in (1, len(JITTERED)):
            how = "give one factor on the strengths of crops.augment (0 = none) or the strengths of"
            names = f"{', '.join(JITTERED)}, such as 0.4,0.4,0.2,0.1"
            raise ValueError(f"jitter {text} has {len(numbers)} numbers: {how} {names}")
        factors = [numbers[0] * getattr(self, name) for name in JITTERED]
        strengths = dict(zip(JITTERED, factors if len(numbers) == 1 else numbers, strict=True))
        for name, strength in strengths.items():
            # Larger ones turn the hue by over half a circle, or make brightness negative.
            most = 0.5 if name == "hue" else 1.0
            if not 0 <= strength <= most:
                raise ValueError(f"jitter {text} makes the strength of {name} {strength:g}: it must be 0 to {most:g}")
        return replace(self, **strengths)


def chances_by_kind(name: str, numbers: Sequence[float]) -> tuple[float, float, float]:
    """The three chances of an Augmentation, from one number for all crops or from three. Raises ValueError."""
    text = ",".join(f"{value:g}" for value in numbers)
    if len(numbers) not in (1, 3):
        how = "give one chance for every crop, or three, of the first global crop, the second and the local ones"
        raise ValueError(f"{name} {text} has {len(numbers)} numbers: {how}")
    if not all(0 <= value <= 1 for value in numbers):
        raise ValueError(f"{name} {text} is not a chance: it must be 0 to 1")
    return numbers[0], numbers[len(numbers) // 2], numbers[-1]


AUGMENTATIONS = {
    "dino": Augmentation(blur=(1.0, 0.1, 0.5)),
    # DINOv2's GaussianBlur inverts its probability: written 1, .1, .5, executed 0, .9, .5.
    "dinov2_as_trained": Augmentation(blur=(0.0, 0.9, 0.5)),
    # A radius of 2 pixels erases what a 32-pixel image shows.
    "low_res": Augmentation(blur=(0.0, 0.0, 0.0), saturation=0.4),
}
