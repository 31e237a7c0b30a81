"""Mean, deviation and range of values of training images, as the files next to weights state them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dino_ds.data.images import ValueRange
from dino_ds.data.normalisation import Normalisation
from dino_ds.errors import CheckpointError

_MOST = 1e3
"""Largest mean and deviation, where black is 0 and white 1; the least deviation is its inverse square."""
PROCESSOR = "preprocessor_config.json"
"""The file of a Hugging Face folder that says how images are prepared."""


def normalisation_of(about: Mapping[str, Any], channels: int) -> Normalisation:
    """Mean and deviation removed from training images of `channels` channels, or the usual ones if no file says.

    One number stands for all channels. Raises CheckpointError for anything but a number a channel, and deviations of 0
    and below.
    """
    stated = about if "mean" in about or "std" in about else timm_statistics(about.get("pretrained_cfg"))
    if not stated:
        return Normalisation.usual(channels)
    try:
        both = [stated[name] for name in ("mean", "std")]
        each = ([value] * channels if isinstance(value, int | float) else value for value in both)
        mean, std = (tuple(float(value) for value in values) for values in each)
        if not len(mean) == len(std) == channels or not all(abs(value) <= _MOST for value in mean):
            raise ValueError
        if not all(1 / _MOST**2 <= value <= _MOST for value in std):
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
        if not (-1e18 <= low < high <= 1e18 and high - low >= 1e-18):  # as data.value_range
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"the JSON beside the weights has an unusable value_range: {str(about['value_range'])[:80]}"
        ) from None
    return low, high


def processor_statistics(processor: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Mean and standard deviation of a Hugging Face image processor, {} for none, and notes on them.

    They are those of pixels in [0, 1], whatever its own range: it scales pixels of 0 to 255 by rescale_factor, or not
    at all, and normalises, or not at all. Raises CheckpointError for settings that can't be used.
    """
    if not processor:
        return {}, []
    rescales, normalises = (_flag(processor, key) for key in ("do_rescale", "do_normalize"))
    if processor.get("rescale_offset"):
        raise CheckpointError(f"{PROCESSOR}: rescale_offset is not known to dino_ds")
    white = 255 * _number(processor.get("rescale_factor", 1 / 255)) if rescales else 255.0
    mean, std = (processor.get(key) for key in ("image_mean", "image_std")) if normalises else (0.0, 1.0)
    if mean is None or std is None:
        return {}, [f"{PROCESSOR} has no image_mean or image_std: the usual ones are taken"]
    if abs(white - 1) < 1e-6:
        return {"mean": mean, "std": std}, []
    return {key: _divided(value, white) for key, value in (("mean", mean), ("std", std))}, []


def _flag(processor: Mapping[str, Any], key: str) -> bool:
    value = processor.get(key, True)
    if value not in (True, False, None):
        raise CheckpointError(f"{PROCESSOR}: {key} {str(value)[:20]!r} is not true or false")
    return value is not False


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"{PROCESSOR}: rescale_factor {str(value)[:20]!r} is not a number above 0")
    return float(value)


def _divided(values: Any, by: float) -> Any:
    """A number or a list of numbers, divided; anything else is left to `normalisation_of`, which refuses it."""
    if isinstance(values, list):
        return [_divided(value, by) for value in values]
    return values / by if isinstance(values, int | float) else values


def timm_side(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Side of native images that timm's config.json states, or None; unchecked. arguments: those of the model."""
    stated = config["pretrained_cfg"] if isinstance(config.get("pretrained_cfg"), dict) else config
    sizes = stated.get("input_size")
    return arguments.get("img_size", sizes[-1] if isinstance(sizes, list) and sizes else None)


def timm_statistics(config: Any) -> dict[str, Any]:
    """Mean and deviation in timm's pretrained_cfg, {} unless there are as many as its channels."""
    if not isinstance(config, dict):
        return {}
    mean, std, size = (config.get(name) for name in ("mean", "std", "input_size"))
    if not (isinstance(mean, list) and isinstance(std, list) and isinstance(size, list) and size):
        return {}
    return {"mean": mean, "std": std} if len(mean) == len(std) == size[0] else {}
