"""Real images that need no download: 18 public-domain photographs, cut into patches.

The task is "which photograph is this patch from". The left 60 % of each photograph is for training and the right 30 %
for testing, so that no pixel is in both. Sources and licences of the photographs: photos/NOTICE.md.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib import resources

import numpy as np
from PIL import Image

PATCH_PIXELS = 40
_SIDES = (48, 72)
"""Smallest and largest side of a patch in a photograph of 256 pixels height."""
_PER_PHOTO = {"train": 160, "test": 52}
_PART = {"train": (0.0, 0.6), "test": (0.7, 1.0)}


class PhotoPatches:
    """Patches of 40 x 40 pixels, all in memory (uint8), sorted by photograph; positions and sizes never change."""

    def __init__(self, split: str) -> None:
        photos, count = list(_load_photos()), _PER_PHOTO[split]
        patches: list[np.ndarray] = []
        for name, photo in photos:
            rng = random.Random(f"{name}/{split}")
            patches += [_cut(photo, _PART[split], number, count, rng) for number in range(count)]
        self._patches, self._split, self._count = np.stack(patches), split, count
        self.labels: list[int] | None = [label for label in range(len(photos)) for _ in range(count)]
        self.classes: list[str] | None = [name for name, _ in photos]

    def __len__(self) -> int:
        return len(self._patches)

    def load(self, index: int) -> Image.Image:
        return Image.fromarray(self._patches[index])

    def name(self, index: int) -> str:
        assert self.classes is not None
        photo, number = divmod(range(len(self))[index], self._count)
        return f"photos/{self._split}/{self.classes[photo]}/{number}"


def _load_photos() -> Iterator[tuple[str, Image.Image]]:
    folder = resources.files("dino_ds.data").joinpath("photos")
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".jpg"):
            with file.open("rb") as stream, Image.open(stream) as photo:
                yield file.name[: -len(".jpg")], photo.convert("RGB")


def _cut(photo: Image.Image, part: tuple[float, float], number: int, count: int, rng: random.Random) -> np.ndarray:
    """Patch `number` of `count`: sizes evenly spread over the range, positions at random inside `part` of the width."""
    left, right = (round(edge * photo.width) for edge in part)
    side = round(_SIDES[0] + (_SIDES[1] - _SIDES[0]) * number / max(count - 1, 1))
    x, y = rng.randint(left, right - side), rng.randint(0, photo.height - side)
    patch = photo.crop((x, y, x + side, y + side))
    return np.asarray(patch.resize((PATCH_PIXELS, PATCH_PIXELS), Image.Resampling.BICUBIC))
