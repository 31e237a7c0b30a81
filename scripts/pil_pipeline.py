"""DINO's own augmentation, for comparison: `DataAugmentationDINO` of facebookresearch/dino main_dino.py.

Written with torchvision's v1 transforms on Pillow images, as there; the recipe's sizes and strengths are filled in.
"""

from __future__ import annotations

import io
import random
from typing import Any

from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.normalization import MEAN, STD
from dino_ds.errors import ConfigError


class PilPipeline:
    """An image file's bytes -> its crops, normalized. Draws from the global random generators.

    Raises ConfigError for crops that are turned, which DINO's are not.
    """

    def __init__(self, multicrop: MultiCrop) -> None:
        if multicrop.augmentation.rotation or multicrop.augmentation.vertical_flip:
            raise ConfigError("DINO's pipeline has no crops.rotation or crops.vertical_flip: remove it")
        self._transforms = [
            self._build(multicrop, kind, group.size, group.scale) for group, kind in multicrop.crops if kind is not None
        ]

    def __call__(self, data: bytes) -> list[Tensor]:
        image = Image.open(io.BytesIO(data)).convert("RGB")
        return [transform(image) for transform in self._transforms]

    @staticmethod
    def _build(multicrop: MultiCrop, kind: int, size: int, scale: tuple[float, float]) -> Any:
        a = multicrop.augmentation
        jitter = transforms.ColorJitter(a.brightness, a.contrast, a.saturation, a.hue)
        return transforms.Compose(
            [
                transforms.RandomResizedCrop(size, scale=scale, interpolation=InterpolationMode.BICUBIC),
                transforms.RandomHorizontalFlip(a.flip),
                transforms.RandomApply([jitter], p=a.jitter),
                transforms.RandomGrayscale(a.gray),
                _Maybe(a.blur[kind], lambda image: image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))),
                _Maybe(a.solarize[kind], ImageOps.solarize),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )


class _Maybe:
    def __init__(self, probability: float, operation: Any) -> None:
        self._probability, self._operation = probability, operation

    def __call__(self, image: Image.Image) -> Image.Image:
        done: Image.Image = self._operation(image) if random.random() < self._probability else image
        return done
