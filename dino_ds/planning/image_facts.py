"""Facts about a sample of images, read as a run would read them: size, channels, types, what is unreadable."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from dino_ds.config.loading import load_recipe
from dino_ds.data.decode import check_channels, open_image
from dino_ds.data.image_values import ImageValues, Sample
from dino_ds.data.images import Source, UnreadableImage, prepare_images
from dino_ds.data.scientific import note_stacks
from dino_ds.errors import DataError

_SECONDS, _LEAST_SAMPLE = 3.0, 20
"""Seconds after which no more images are read, once there are _LEAST_SAMPLE."""


def look_at(source: Source, sample: int) -> dict[str, Any]:
    """Return facts about the source and at most `sample` random images. Raises DataError if none can be read."""
    print(
        f"looking at {min(sample, len(source)):,} of {len(source):,} images, 3 s at most", file=sys.stderr, flush=True
    )
    most, begin = load_recipe(None, {}).data.max_pixels, time.monotonic()
    sides, stacks, values = list[int](), list[str](), list[ImageValues]()
    unreadable, looked_at = list[str](), 0
    chosen = np.random.default_rng(0).permutation(len(source))[:sample].tolist()
    prepare_images(source, chosen[:_LEAST_SAMPLE])
    channels = _most_channels(source, chosen[:_LEAST_SAMPLE], most)
    for index in chosen:
        looked_at += 1
        try:
            image = open_image(source, index, most, channels=channels)
            check_channels(image, channels, source.name(index))
            values.append(ImageValues.of(image.values(), source.name(index)))
        except UnreadableImage as error:
            unreadable.append(str(error))
        else:
            sides.append(min(image.width, image.height))
            stacks += [source.name(index)] if getattr(image, "pages", 1) == channels == 3 else []
        if time.monotonic() - begin > _SECONDS and looked_at >= _LEAST_SAMPLE:
            break
    if not sides:
        raise DataError(f"none of the {looked_at} images looked at can be read, such as {unreadable[0]}")
    seen = Sample(images=len(sides), values=values)
    return {
        "images": len(source),
        "looked_at": looked_at,
        "unreadable": {"count": len(unreadable), "first": next(iter(unreadable), None)},
        "classes": None if source.classes is None else len(source.classes),
        "channels": channels,
        "gray": all(len(image.mean) == 1 for image in values),
        "types": sorted({image.type for image in values}),
        "unknown_range": seen.measured if seen.deep and seen.chosen is None else None,
        "notes": [*getattr(source, "notes", ()), *note_stacks(stacks)],
        "side": {"min": min(sides), "median": int(np.median(sides)), "max": max(sides)},
    }


def _most_channels(source: Source, indices: Sequence[int], max_pixels: int) -> int:
    """The number of channels that most of these images have; gray ones have 3, as a run reads them."""
    counts = Counter[int]()
    for index in indices:
        with suppress(UnreadableImage):
            counts[open_image(source, index, max_pixels, channels=None).channels] += 1
    return counts.most_common(1)[0][0] if counts else 3
