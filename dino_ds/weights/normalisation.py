"""What the files beside weights say of training images: what was removed of them, and what was black and white."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dino_ds.data.images import ValueRange
from dino_ds.data.normalisation import Normalisation
from dino_ds.errors import CheckpointError


def normalisation_of(about: Mapping[str, Any], channels: int) -> Normalisation:
    """What was removed of training images of so many channels; the usual where nothing says it.

    Raises CheckpointError for anything but a number a channel, and deviations of 0 and below.
    """
    stated = about if "mean" in about or "std" in about else timm_statistics(about.get("pretrained_cfg"))
    if not stated:
        return Normalisation.usual(channels)
    try:
        mean, std = (tuple(float(value) for value in stated[name]) for name in ("mean", "std"))
        if not len(mean) == len(std) == channels or not all(map(math.isfinite, mean + std)) or min(std) <= 0:
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"the JSON beside the weights has an unusable mean or std of {channels} channels: "
            f"{str(stated.get('mean'))[:80]} and {str(stated.get('std'))[:80]}"
        ) from None
    return Normalisation(mean, std)


def range_of(about: Mapping[str, Any]) -> ValueRange | None:
    """The range of values of training images deeper than 8 bits. Raises CheckpointError for anything but a range."""
    if "value_range" not in about:
        return None
    try:
        low, high = (float(value) for value in about["value_range"])
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"the JSON beside the weights has an unusable value_range: {str(about['value_range'])[:80]}"
        ) from None
    return low, high


def processor_statistics(processor: dict[str, Any]) -> dict[str, Any]:
    """Those of preprocessor_config.json in a Hugging Face folder, if it has both."""
    mean, std = processor.get("image_mean"), processor.get("image_std")
    return {"mean": mean, "std": std} if isinstance(mean, list) and isinstance(std, list) else {}


def timm_statistics(config: Any) -> dict[str, Any]:
    """Those of a timm folder's pretrained_cfg, if there are as many as the channels of its input."""
    if not isinstance(config, dict):
        return {}
    mean, std, size = (config.get(name) for name in ("mean", "std", "input_size"))
    if not (isinstance(mean, list) and isinstance(std, list) and isinstance(size, list) and size):
        return {}
    return {"mean": mean, "std": std} if len(mean) == len(std) == size[0] else {}
