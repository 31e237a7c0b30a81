"""Statistics of a dataset: sizes, unreadable files, classes and values, as numbers and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from dino_ds.config.recipe import Recipe
from dino_ds.data.base import Source, UnreadableImage, prepare_images
from dino_ds.data.decode import open_image
from dino_ds.data.find_range import NO_VALUES, ImageValues
from dino_ds.data.images import ValueRange
from dino_ds.data.workers import started, worker_options
from dino_ds.errors import DataError

_BATCH = 16
_NAMED = 20
"""Most unreadable files and classes that are named; --json names all."""


@dataclass(frozen=True)
class ImageFacts:
    """Facts of one image: upright size in pixels, and its values.

    `problem`: why training skips the image; the other fields may then mean nothing.
    """

    index: int
    width: int = 0
    height: int = 0
    values: ImageValues = NO_VALUES
    problem: str = ""


def look_at(source: Source, count: int, recipe: Recipe) -> list[ImageFacts]:
    """Decode `count` images, drawn at random (0: all), and return their facts in the source's order."""
    count = min(count or len(source), len(source))
    chosen = np.sort(np.random.default_rng(recipe.seed).choice(len(source), count, replace=False)).tolist()
    dataset = FactsOf(source, recipe.data.max_pixels, recipe.model.in_chans, recipe.data.known_range)
    loader: DataLoader[ImageFacts] = DataLoader(
        dataset, batch_size=_BATCH, sampler=chosen, collate_fn=list, **worker_options(recipe.data.workers)
    )
    facts: list[ImageFacts] = []
    with started(loader, source) as batches, tqdm(total=count, unit="image", desc="looking", disable=None) as bar:
        for batch in batches:
            facts += batch
            bar.update(len(batch))
    return facts


class FactsOf(Dataset[ImageFacts]):
    """The facts of each image of a source, as a run with `channels` and `value_range` reads it."""

    def __init__(self, source: Source, max_pixels: int, channels: int, value_range: ValueRange | None = None) -> None:
        self._source, self._max_pixels, self._channels, self._range = source, max_pixels, channels, value_range

    def __getitems__(self, indices: list[int]) -> list[ImageFacts]:
        prepare_images(self._source, indices)
        return [self[index] for index in indices]

    def __getitem__(self, index: int) -> ImageFacts:
        try:
            image = open_image(self._source, index, self._max_pixels, channels=self._channels)
            values = ImageValues.of(image.values())
        except UnreadableImage as error:
            return ImageFacts(index, problem=error.reason)
        problem = values.why_skipped(self._range)
        channels = 3 if len(values.mean) == 1 != self._channels else len(values.mean)
        if channels != self._channels and hasattr(self._source, "read"):
            problem = f"{channels} channels, {self._channels} are wanted"
        return ImageFacts(index, image.width, image.height, values, problem)


def summarize(facts: Sequence[ImageFacts], source: Source) -> dict[str, Any]:
    """Statistics for `dino-ds look-data --json`; sizes are of readable images. Raises DataError if none is readable."""
    good, bad = [fact for fact in facts if not fact.problem], [fact for fact in facts if fact.problem]
    if not good:
        first = f"{source.name(bad[0].index)} ({bad[0].problem})"
        raise DataError(f"none of the {len(bad)} images looked at can be read; the first is {first}: name others")
    return {
        "images": len(source),
        "looked_at": len(facts),
        "unreadable": {
            "count": len(bad),
            "files": [{"name": source.name(fact.index), "reason": fact.problem} for fact in bad],
        },
        "width": _spread(np.array([fact.width for fact in good])),
        "height": _spread(np.array([fact.height for fact in good])),
        "values": _values(good),
        "classes": _classes(source),
    }


def _values(good: Sequence[ImageFacts]) -> dict[str, Any]:
    """The number of images by type of their stored values, and the extremes of types deeper than uint8."""
    by_type: dict[str, Any] = {
        name: {"images": images} for name, images in Counter(f.values.type for f in good).items()
    }
    for name in by_type.keys() - {"uint8"}:
        some = [fact.values for fact in good if fact.values.type == name]
        by_type[name] |= {"min": min(values.low for values in some), "max": max(values.high for values in some)}
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
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}


def report(statistics: dict[str, Any]) -> str:
    """Text for a terminal from the result of `summarize` with source, root, channels, value_range and sheet."""
    return "\n".join(f"{head:<14}{text}".rstrip() for head, text in _lines(statistics))


def _lines(statistics: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of the text as (heading or "", text)."""
    yield "images", f"{statistics['images']:,} in {statistics['root'] or statistics['source']}"
    if statistics["looked_at"] < statistics["images"]:
        yield "looked at", f"{statistics['looked_at']:,} of them, drawn at random (--sample 0: all)"
    yield from _class_lines(statistics["classes"])
    bad = statistics["unreadable"]
    yield "unreadable", f"{bad['count']:,} ({bad['count'] / statistics['looked_at']:.2%})"
    for file in bad["files"][:_NAMED]:
        yield "", f"{file['name']} ({file['reason']})"
    if bad["count"] > _NAMED:
        yield "", f"and {bad['count'] - _NAMED:,} more (--json names all)"
    yield "size", ", ".join(f"{side} {_range_text(statistics[side])}" for side in ("width", "height")) + " px"
    deep = {name: each for name, each in statistics["values"].items() if "min" in each}
    for name, each in deep.items():
        yield "values", f"{name} in {each['images']:,}: {each['min']:.10g} to {each['max']:.10g}"
    for words in statistics["value_range"] if deep else ():
        yield "", words
    if measured := statistics["channels"]:
        flags = (f"--data.{name} {','.join(f'{value:g}' for value in measured[name])}" for name in ("mean", "std"))
        yield "channels", " ".join(flags)
    yield "sheet", statistics["sheet"]


def _class_lines(classes: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if classes is None:
        yield "classes", "none: images have no labels"
        return
    unlabeled = f"; {classes['unlabelled']:,} images without a label" if classes["unlabelled"] else ""
    yield "classes", f"{classes['count']:,}; images in a class: {_range_text(classes['images'])}{unlabeled}"
    counts = sorted(classes["counts"].items(), key=lambda item: -item[1])
    more = ", ..." if len(counts) > _NAMED else ""
    yield "", ", ".join(f"{name} {count:,}" for name, count in counts[:_NAMED]) + more


def _range_text(values: dict[str, float]) -> str:
    low, middle, high = (f"{values[name]:,.0f}" for name in ("min", "median", "max"))
    return low if low == high else f"{low} to {high} (median {middle})"
