"""What a data set is made of: sizes, shapes, modes, formats, unreadable files, look-alikes and classes."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from dino_ds.data.decode import EncodedImage, open_image
from dino_ds.data.duplicates import MAX_DISTANCE, difference_hash, find_groups
from dino_ds.data.images import FORMATS, UnreadableImage
from dino_ds.data.sources import Source
from dino_ds.data.value_range import extremes
from dino_ds.data.workers import main_module_left_out, stop_workers, worker_options

SHORTER_SIDES = (0, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, math.inf)
"""Edges of the histogram, pixels."""
ASPECT_RATIOS = (0, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 0.95, 1.05, 4 / 3, 3 / 2, 2, 3, math.inf)
"""Edges of the histogram, width / height."""
_SHOWN_GROUPS, _SHOWN_MEMBERS = 50, 20
_BATCH = 16
_NO_FORMAT = "none"
"""Of images that do not come from files."""
_EXIF_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)


@dataclass(frozen=True)
class Facts:
    """One image: upright size in pixels, mode and format of its file, bytes of the file (None: there is no file).

    type, low, high: of the values as they are stored, and the extremes of those deeper than 8 bits. `problem` is why it
    can't be read; then the rest means nothing.
    """

    index: int
    width: int = 0
    height: int = 0
    mode: str = ""
    format: str = ""
    file_bytes: int | None = None
    hash: int = 0
    type: str = "uint8"
    low: float = 0
    high: float = 0
    problem: str | None = None


def look_at(
    source: Source, indices: Sequence[int], workers: int | None, max_pixels: int
) -> Generator[Facts, None, None]:
    """Facts in the order of `indices`, each image decoded once; `workers` as for `worker_options`."""
    loader: DataLoader[Facts] = DataLoader(
        _FactsOf(source, max_pixels), batch_size=_BATCH, sampler=indices, collate_fn=list, **worker_options(workers)
    )
    with main_module_left_out(unless_defines=source):
        batches = iter(loader)
    try:
        for batch in batches:
            yield from batch
    finally:
        stop_workers(batches)


class _FactsOf(Dataset[Facts]):
    def __init__(self, source: Source, max_pixels: int) -> None:
        self._source, self._max_pixels = source, max_pixels

    def __getitem__(self, index: int) -> Facts:
        read: Callable[[int], bytes] | None = getattr(self._source, "read", None)
        try:
            if read is None:
                return self._of_pixels(index)
            data = read(index)
            values = EncodedImage(data, self._source.name(index), self._max_pixels).values()
            found = _facts_of_values(values)
        except UnreadableImage as error:
            return Facts(index, problem=error.reason)
        with Image.open(io.BytesIO(data), formats=FORMATS) as header:
            turned = header.getexif().get(_EXIF_ORIENTATION) in _TURNED
            width, height = reversed(header.size) if turned else header.size
            return Facts(index, width, height, header.mode, header.format or _NO_FORMAT, len(data), **found)

    def _of_pixels(self, index: int) -> Facts:
        array = open_image(self._source, index, self._max_pixels).values()
        height, width, channels = array.shape
        mode = {1: "L", 3: "RGB"}.get(channels, f"{channels} channels")
        return Facts(index, width, height, mode, _NO_FORMAT, **_facts_of_values(array))


def _facts_of_values(values: np.ndarray) -> dict[str, Any]:
    """Hash, type and extremes. The hash of deeper values is of what they are between their own extremes."""
    about: dict[str, Any] = {}
    if values.dtype != np.uint8:
        low, high = extremes(values, "")
        about = {"type": values.dtype.name, "low": low, "high": high}
        values = ((values - np.float64(low)) * (255 / max(high - low, 1e-30))).astype(np.uint8)
    if values.ndim == 3 and values.shape[2] != 3:
        values = values.mean(2).astype(np.uint8)
    return {"hash": difference_hash(Image.fromarray(values)), **about}


def summarise(facts: Sequence[Facts], source: Source) -> dict[str, Any]:
    """What `dino-ds look-data --json` prints; sizes are of the readable images. At least one must be readable."""
    good = [fact for fact in facts if fact.problem is None]
    widths, heights = (np.array([getattr(fact, side) for fact in good]) for side in ("width", "height"))
    shorter = np.minimum(widths, heights)
    sizes = [fact.file_bytes for fact in good if fact.file_bytes is not None]
    return {
        "images": len(source),
        "looked_at": len(facts),
        "unreadable": _unreadable([fact for fact in facts if fact.problem is not None], source),
        "width": _spread(widths),
        "height": _spread(heights),
        "shorter_side": {**_spread(shorter), "histogram": _histogram(shorter, SHORTER_SIDES)},
        "aspect_ratio": {**_spread(widths / heights), "histogram": _histogram(widths / heights, ASPECT_RATIOS)},
        "formats": _counts(fact.format for fact in good),
        "modes": _counts(fact.mode for fact in good),
        "values": _values(good),
        "file_bytes": _spread(np.array(sizes)) if sizes else None,
        "classes": _classes(source),
        "near_duplicates": _near_duplicates(good, source),
    }


def _values(good: Sequence[Facts]) -> dict[str, Any]:
    """By type of the values stored: images, and the extremes of types deeper than uint8."""
    types = _counts(fact.type for fact in good)
    of = {name: [fact for fact in good if fact.type == name] for name in types}
    return {
        name: {"images": images}
        | ({} if name == "uint8" else {"min": min(f.low for f in of[name]), "max": max(f.high for f in of[name])})
        for name, images in types.items()
    }


def _unreadable(bad: Sequence[Facts], source: Source) -> dict[str, Any]:
    return {
        "count": len(bad),
        "reasons": _counts(fact.problem or "" for fact in bad),
        "files": [{"name": source.name(fact.index), "reason": fact.problem} for fact in bad],
    }


def _near_duplicates(good: Sequence[Facts], source: Source) -> dict[str, Any]:
    groups = find_groups(np.array([fact.hash for fact in good], dtype=np.uint64))
    return {
        "bits": MAX_DISTANCE,
        "groups": len(groups),
        "images": sum(map(len, groups)),
        "surplus": sum(len(group) - 1 for group in groups),
        "largest": [
            {"images": len(group), "names": [source.name(good[place].index) for place in group[:_SHOWN_MEMBERS]]}
            for group in groups[:_SHOWN_GROUPS]
        ],
    }


def _classes(source: Source) -> dict[str, Any] | None:
    """Of the whole data set: labels are at hand without reading an image."""
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
    return {
        "min": _number(values.min()),
        "median": _number(np.median(values)),
        "max": _number(values.max()),
    }


def _number(value: float) -> float:
    return int(value) if value == int(value) else round(float(value), 4)


def _histogram(values: np.ndarray, edges: Sequence[float]) -> list[dict[str, Any]]:
    """Bins [from, below), without empty ones at both ends; below None = no limit."""
    counts, _ = np.histogram(values, bins=[*edges[:-1], np.inf])
    filled = np.flatnonzero(counts)
    return [
        {
            "from": round(edges[i], 4),
            "below": None if math.isinf(edges[i + 1]) else round(edges[i + 1], 4),
            "images": int(counts[i]),
        }
        for i in range(filled[0], filled[-1] + 1)
    ]


def _counts(values: Iterator[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())
