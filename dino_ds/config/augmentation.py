"""The chances and strengths by which crops are augmented: those of each preset, and a recipe's in their place.

No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

JITTERED = ("brightness", "contrast", "saturation", "hue")
_MOST = (1.0, 1.0, 1.0, 0.5)
"""Largest strengths of `JITTERED`: beyond, brightness is negative, and the hue turns by more than half a circle."""


@dataclass(frozen=True)
class Augmentation:
    """Chances and strengths; triples are (first global crop, second global crop, local crops).

    brightness, contrast and saturation are multiplied by 1 ± strength, the hue is turned by ± strength of the color
    circle, all four with the chance `jitter`. rotation: the chance of a turn by 90, 180 or 270 degrees.
    """

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
        """This augmentation with one factor on its four strengths, or with four others. Raises ValueError."""
        text = ",".join(f"{value:g}" for value in numbers)
        if len(numbers) not in (1, len(JITTERED)):
            raise ValueError(
                f"jitter {text} has {len(numbers)} numbers: give one factor on the strengths of crops.augment (0 = "
                f"none) or the strengths of {', '.join(JITTERED)}, such as 0.4,0.4,0.2,0.1"
            )
        factors = [numbers[0] * getattr(self, name) for name in JITTERED]
        strengths = dict(zip(JITTERED, factors if len(numbers) == 1 else numbers, strict=True))
        for (name, strength), most in zip(strengths.items(), _MOST, strict=True):
            if not 0 <= strength <= most:
                raise ValueError(f"jitter {text} makes the strength of {name} {strength:g}: it must be 0 to {most:g}")
        return replace(self, **strengths)


def chances_by_kind(name: str, numbers: Sequence[float]) -> tuple[float, float, float]:
    """The three chances of an Augmentation, from one for every crop or from three. Raises ValueError."""
    text = ",".join(f"{value:g}" for value in numbers)
    if len(numbers) not in (1, 3):
        raise ValueError(
            f"{name} {text} has {len(numbers)} numbers: give one chance for every crop, or three, of the first global "
            "crop, the second and the local ones"
        )
    if not all(0 <= value <= 1 for value in numbers):
        raise ValueError(f"{name} {text} is not a chance: it must be 0 to 1")
    first, second, local = numbers if len(numbers) == 3 else (*numbers, *numbers, *numbers)
    return first, second, local


AUGMENTATIONS = {
    "dino": Augmentation(blur=(1.0, 0.1, 0.5)),
    # DINOv2's GaussianBlur inverts its probability: written 1, .1, .5, executed 0, .9, .5.
    "dinov2_as_trained": Augmentation(blur=(0.0, 0.9, 0.5)),
    # A radius of 2 pixels erases what a 32-pixel image shows.
    "low_res": Augmentation(blur=(0.0, 0.0, 0.0), saturation=0.4),
}
