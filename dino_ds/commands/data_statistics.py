"""Statistics of a dataset: sizes, modes, formats, unreadable files and classes, as numbers and as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from dino_ds.data.base import Source, UnreadableImage, prepare_images
from dino_ds.data.decode import open_image
from dino_ds.data.images import ValueRange, extremes
from dino_ds.data.normalization import Normalization
from dino_ds.data.workers import started, worker_options
from dino_ds.errors import DataError

_BATCH = 16
_ROWS = 256
"""At least this many rows of a large image are averaged."""
_FAR = 0.5
_NAMED = 20
"""Most unreadable files that are named; --json names all."""
_NO_FORMAT = "none"
"""Format of images that do not come from files."""


@dataclass(frozen=True)
class ImageFacts:
    """Facts of one image: upright size in pixels, mode and format of its file.

    `type`: dtype of the stored values; `low`, `high`: their extremes if deeper than 8 bits; `mean`, `square`: means of
    each channel's values and of their squares. `problem`: why the image can't be read; the other fields then
    mean nothing.
    """

    index: int
    width: int = 0
    height: int = 0
    mode: str = ""
    format: str = ""
    type: str = "uint8"
    low: float = 0
    high: float = 0
    mean: tuple[float, ...] = ()
    square: tuple[float, ...] = ()
    problem: str | None = None


def look_at(
    source: Source, count: int, seed: int, workers: int | None, max_pixels: int, channels: int = 3
) -> list[ImageFacts]:
    """Decode `count` images, drawn at random (0: all), and return their facts in the source's order; `workers` as for
    `worker_options`, `channels` as for `open_image`."""
    count = min(count or len(source), len(source))
    chosen = np.sort(np.random.default_rng(seed).choice(len(source), count, replace=False)).tolist()
    dataset, options = _FactsOf(source, max_pixels, channels), worker_options(workers)
    loader: DataLoader[ImageFacts] = DataLoader(dataset, batch_size=_BATCH, sampler=chosen, collate_fn=list, **options)
    facts: list[ImageFacts] = []
    with started(loader, source) as batches, tqdm(total=count, unit="image", desc="looking", disable=None) as bar:
        for batch in batches:
            facts += batch
            bar.update(len(batch))
    return facts


class _FactsOf(Dataset[ImageFacts]):
    def __init__(self, source: Source, max_pixels: int, channels: int) -> None:
        self._source, self._max_pixels, self._channels = source, max_pixels, channels

    def __getitems__(self, indices: list[int]) -> list[ImageFacts]:
        prepare_images(self._source, indices)
        return [self[index] for index in indices]

    def __getitem__(self, index: int) -> ImageFacts:
        try:
            image = open_image(self._source, index, self._max_pixels, channels=self._channels)
            facts = _facts_of_values(image.values())
        except UnreadableImage as error:
            return ImageFacts(index, problem=error.reason)
        mode = {1: "L", 3: "RGB"}.get(image.channels, f"{image.channels} channels")
        mode, form = getattr(image, "mode", mode), getattr(image, "format", "") or _NO_FORMAT
        return ImageFacts(index, image.width, image.height, mode, form, **facts)


def _facts_of_values(values: np.ndarray) -> dict[str, Any]:
    """The moments of the values, and the type and extremes of values deeper than 8 bits."""
    about: dict[str, Any] = _moments(values)
    if values.dtype != np.uint8:
        low, high = extremes(values, "")
        about |= {"type": values.dtype.name, "low": low, "high": high}
    return about


def _moments(values: np.ndarray) -> dict[str, tuple[float, ...]]:
    """Means of (h, w) or (h, w, c) values and of their squares, by channel; of large images only of some rows."""
    some = values[:: max(1, len(values) // _ROWS)]
    planes = some.reshape(-1, some.shape[2] if some.ndim == 3 else 1).astype(np.float64)
    return {"mean": tuple(planes.mean(0).tolist()), "square": tuple(np.square(planes).mean(0).tolist())}


def measure_channels(
    facts: Sequence[ImageFacts], channels: int, value_range: ValueRange | None
) -> Normalization | None:
    """Mean and standard deviation as a recipe takes them, to 4 digits; all readable images have the same weight.

    Gray images count in all `channels`; images with another number of channels are left out. None if none is left.
    """
    moments = []
    for fact in facts:
        if fact.problem is not None or len(fact.mean) not in (1, channels):
            continue
        black, white = (0.0, 255.0) if fact.type == "uint8" else value_range or (fact.low, fact.high)
        mean, square = (np.broadcast_to(np.array(values), channels) for values in (fact.mean, fact.square))
        scale = max(white - black, 1e-30)
        moments.append(((mean - black) / scale, (square - 2 * black * mean + black**2) / scale**2))
    return Normalization.measured(moments) if moments else None


def advise_normalization(measured: Normalization, used: Normalization, is_given: bool) -> str:
    """Advice whether a run should use the `measured` statistics instead of those `used` so far.

    Far, by a rule of thumb: a mean half a standard deviation away, or a standard deviation 1.5 times as large or small.
    """
    if len(measured.mean) != 3 and not is_given:
        return f"give these: the default is the average of ImageNet's, {used.mean[0]:.3g} and {used.std[0]:.3g}"
    mean, std = np.array(used.mean), np.array(used.std)
    far_mean = (np.abs(np.array(measured.mean) - mean) / std).max() > _FAR
    far = far_mean or np.abs(np.log(np.array(measured.std) / std)).max() > math.log(1 + _FAR)
    which = "those of the recipe" if is_given else "the default"
    return f"give these: they are far from {which} ({used})" if far else f"near {which}, which will do"


def summarize(facts: Sequence[ImageFacts], source: Source) -> dict[str, Any]:
    """Statistics for `dino-ds look-data --json`; sizes are of readable images. Raises DataError if none is readable."""
    good, bad = ([fact for fact in facts if (fact.problem is None) == readable] for readable in (True, False))
    if not good:
        first = f"{source.name(bad[0].index)} ({bad[0].problem})"
        raise DataError(f"none of the {len(bad)} images looked at can be read; the first is {first}: name others")
    widths, heights = (np.array([getattr(fact, side) for fact in good]) for side in ("width", "height"))
    return {
        "images": len(source),
        "looked_at": len(facts),
        "unreadable": {
            "count": len(bad),
            "files": [{"name": source.name(fact.index), "reason": fact.problem} for fact in bad],
        },
        "width": _spread(widths),
        "height": _spread(heights),
        "formats": _counts(fact.format for fact in good),
        "modes": _counts(fact.mode for fact in good),
        "values": _values(good),
        "classes": _classes(source),
    }


def _values(good: Sequence[ImageFacts]) -> dict[str, Any]:
    """The number of images by type of their stored values, and the extremes of types deeper than uint8."""
    by_type: dict[str, Any] = {name: {"images": images} for name, images in _counts(fact.type for fact in good).items()}
    for name in by_type.keys() - {"uint8"}:
        some = [fact for fact in good if fact.type == name]
        by_type[name] |= {"min": min(fact.low for fact in some), "max": max(fact.high for fact in some)}
    return by_type


def _classes(source: Source) -> dict[str, Any] | None:
    """Classes of the whole dataset: labels are known without reading an image."""
    if source.labels is None or source.classes is None:
        return None
    labels = np.asarray(source.labels)
    counts = np.bincount(labels[labels >= 0], minlength=len(source.classes))
    return {
        "count": len(source.classes),
        "unlabelled": int((labels < 0).sum()),
        "images": _spread(counts),
        "counts": dict(zip(source.classes, counts.tolist(), strict=False)),
    }


def _spread(values: np.ndarray) -> dict[str, float]:
    return {"min": _number(values.min()), "median": _number(np.median(values)), "max": _number(values.max())}


def _number(value: float) -> float:
    return int(value) if value == int(value) else round(float(value), 4)


def _counts(values: Iterator[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())


def report(statistics: dict[str, Any]) -> str:
    """Text for a terminal from the result of `summarize` with source, root, channels, value_range, misfits, sheet."""
    return "\n".join(f"{head:<14}{text}".rstrip() for head, text in _lines(statistics))


def _channel_flags(channels: dict[str, Any]) -> str:
    """Mean and standard deviation as a run takes them."""
    return " ".join(f"--data.{name} {','.join(f'{value:g}' for value in channels[name])}" for name in ("mean", "std"))


def _lines(statistics: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of the text as (heading or "", text)."""
    yield "images", f"{statistics['images']:,} in {statistics['root'] or statistics['source']}"
    if statistics["looked_at"] < statistics["images"]:
        yield "looked at", f"{statistics['looked_at']:,} of them, drawn at random (--sample 0: all)"
    yield from _class_lines(statistics["classes"])
    yield from _unreadable_lines(statistics)
    yield "size", ", ".join(f"{side} {_range_text(statistics[side])}" for side in ("width", "height")) + " px"
    yield "formats", _shares(statistics["formats"])
    yield "modes", _shares(statistics["modes"])
    yield from _value_lines(statistics)
    if statistics["channels"]:
        yield "channels", _channel_flags(statistics["channels"])
        yield "", statistics["channels"]["advice"]
    yield "sheet", statistics["sheet"]
    if statistics["shown"]:
        yield "", f"shown: {statistics['shown']}"


def _class_lines(classes: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if classes is None:
        yield "classes", "none: images have no labels"
        return
    counts = sorted(classes["counts"].items(), key=lambda item: -item[1])
    unlabeled = f"; {classes['unlabelled']:,} images without a label" if classes["unlabelled"] else ""
    yield "classes", f"{classes['count']:,}; images in a class: {_range_text(classes['images'])}{unlabeled}"
    if classes["images"]["min"] == classes["images"]["max"]:
        return
    if len(counts) <= 2 * _NAMED:
        yield "", ", ".join(f"{name} {count:,}" for name, count in counts)
    else:
        yield "", "largest " + ", ".join(f"{name} {count:,}" for name, count in counts[:5])
        yield "", "smallest " + ", ".join(f"{name} {count:,}" for name, count in counts[-5:])


def _value_lines(statistics: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield lines on the images' values: on those deeper than 8 bits, and on misfits."""
    deep = {name: each for name, each in statistics["values"].items() if "min" in each}
    for number, (name, each) in enumerate(deep.items()):
        span = f"{each['min']:.10g} to {each['max']:.10g}"
        yield "" if number else "values", f"{name} in {each['images']:,}: {span}"
    if deep:
        yield "", statistics["value_range"]
    for number, words in enumerate(statistics["misfits"]):
        yield "" if deep or number else "values", words


def _unreadable_lines(statistics: dict[str, Any]) -> Iterator[tuple[str, str]]:
    bad = statistics["unreadable"]
    share = f" ({bad['count'] / statistics['looked_at']:.2%})" if bad["count"] else ""
    yield "unreadable", f"{bad['count']:,}{share}"
    for file in bad["files"][:_NAMED]:
        yield "", f"{file['name']} ({file['reason']})"
    if bad["count"] > _NAMED:
        yield "", f"and {bad['count'] - _NAMED:,} more (--json names all)"


def _range_text(values: dict[str, float]) -> str:
    low, middle, high = (f"{values[name]:,.0f}" for name in ("min", "median", "max"))
    return low if low == high else f"{low} to {high} (median {middle})"


def _shares(counts: dict[str, int]) -> str:
    total = sum(counts.values())
    return ", ".join(f"{name} {count:,} ({count / total:.1%})" for name, count in counts.items())
