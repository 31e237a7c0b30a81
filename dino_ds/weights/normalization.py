"""Mean, deviation and range of values of training images, as the files next to weights state them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dino_ds.basics.digits import range_text
from dino_ds.data.images import ValueRange
from dino_ds.data.normalization import USUAL_CHANNELS, Normalization
from dino_ds.errors import CheckpointError

_MOST = 1e3
"""Largest mean and deviation, where black is 0 and white 1; the least deviation is its inverse square."""
PROCESSOR = "preprocessor_config.json"
"""The file of a Hugging Face folder that says how images are prepared."""


def normalization_of(about: Mapping[str, Any], channels: int) -> Normalization:
    """Mean and deviation removed from training images of `channels` channels: those that a file states, else ImageNet's
    of gray and RGB images. Raises CheckpointError as `stated_normalization`, and where those of other channels are not
    stated."""
    stated = stated_normalization(about, channels)
    if stated is None and channels not in USUAL_CHANNELS:
        raise CheckpointError(
            f"no file says the mean and std of its images' {channels} channels: write both, {channels} numbers each, "
            f"black 0 and white 1, into the JSON beside the weights (FILE.pth.json, or FILE.json of FILE.safetensors)"
        )
    return stated or Normalization.usual(channels)


def stated_normalization(about: Mapping[str, Any], channels: int) -> Normalization | None:
    """Mean and deviation as the file next to the weights states them, None if it does not.

    A single number holds for all channels. Raises CheckpointError unless there is a number per channel, and for
    deviations that are not positive.
    """
    stated = about if "mean" in about or "std" in about else timm_statistics(about.get("pretrained_cfg"))
    if not stated:
        return None
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
    return Normalization(mean, std)


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


def notes_on_range(theirs: ValueRange | None, ours: ValueRange | None) -> list[str]:
    """A note where weights were trained on another range of values than this run's."""
    old, new = (f"values of {range_text(r)}" if r else "8-bit images" for r in (theirs, ours))
    return [] if theirs == ours else [f"it was trained on {old}, this run is on {new} (--data.value_range)"]


def processor_statistics(processor: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Mean and standard deviation of a Hugging Face image processor, {} if it has none, and notes on them.

    Raises CheckpointError for a processor that does not scale pixels to [0, 1] and then normalize them.
    """
    if not processor:
        return {}, []
    wanted = {"do_rescale": True, "do_normalize": True, "rescale_offset": False, "rescale_factor": 1 / 255}
    for key, value in wanted.items():
        setting = processor.get(key, value)
        if not isinstance(setting, bool | float) or abs(setting - value) > 1e-6:
            raise CheckpointError(f"{PROCESSOR}: {key} {str(setting)[:20]} is not known to dino_ds, only {value:.6g}")
    mean, std = (processor.get(key) for key in ("image_mean", "image_std"))
    if mean is None or std is None:
        return {}, [f"{PROCESSOR} has no image_mean or image_std: the usual ones are taken"]
    return {"mean": mean, "std": std}, []


def timm_side(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """The side of native images in timm's config.json, or None; not checked. arguments: the model's."""
    stated = config["pretrained_cfg"] if isinstance(config.get("pretrained_cfg"), dict) else config
    sizes = stated.get("input_size")
    return arguments.get("img_size", sizes[-1] if isinstance(sizes, list) and sizes else None)


def timm_statistics(config: Any) -> dict[str, Any]:
    """Mean and deviation in timm's pretrained_cfg, {} unless both have one number per channel."""
    if not isinstance(config, dict):
        return {}
    mean, std, size = (config.get(name) for name in ("mean", "std", "input_size"))
    if not (isinstance(mean, list) and isinstance(std, list) and isinstance(size, list) and size):
        return {}
    return {"mean": mean, "std": std} if len(mean) == len(std) == size[0] else {}
