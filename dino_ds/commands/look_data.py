"""`dino-ds look-data`: shows what the network sees of some images, and statistics of the whole dataset."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from dino_ds.basics import files, seeds
from dino_ds.config.recipe import Recipe
from dino_ds.config.schema import show_value
from dino_ds.data import decode, feed, image_values, listing, mixture, normalization, sources
from dino_ds.data.batches import LoaderOptions, MultiCropDataset, augmented_crops, started, worker_options
from dino_ds.data.images import Source, UnreadableImage, ValueRange, prepare_images
from dino_ds.data.loader import ResumableSampler
from dino_ds.data.multicrop import MultiCrop
from dino_ds.errors import ConfigError, DataError
from dino_ds.options import commands, definition
from dino_ds.report.draw import INK

_NAMED, _ALIKE = 20, 3
"""Most classes that are named, also most reasons why files are unreadable; most files of a reason. --json has all."""
GLOBAL_COLOR, LOCAL_COLOR = "#e8590c", "#1c7ed6"
_LINE = 1.1  # height of a local crop, inches; an image and a global crop are two lines high
_MARGIN = 0.6  # inches above the first image and below the last
_ORIGINAL, _GLOBAL = 3, 2  # columns of the grid that an image and a global crop take; a local crop takes one


def run(options: commands.LookDataOptions, *, recipe: Recipe) -> definition.Result:
    """Draw the first `images` images that a run of this recipe trains on, with their crops in its first epoch, into
    `out` (.png), and return statistics of `sample` images drawn at random (0 = all).
    Raises ConfigError for impossible arguments, DataError without readable images."""
    png = _check(options.out)
    source = sources.training_images(recipe.data, recipe.eval.val_share)
    known = recipe.data.known_range
    # Given as its own earlier recipe, so that the mean is not measured here, but below, on more images.
    recipe, range_lines = normalization.with_image_settings(recipe, source, lambda: recipe)
    if recipe.data.known_range == known:
        range_lines = [f"data.value_range {show_value(recipe.data.value_range)}", *range_lines]
    data, channels = recipe.data, recipe.model.in_chans
    facts = look_at(source, options.sample, recipe)
    values = (fact.values for fact in facts if not fact.problem)
    measured = normalization.measure_channels(values, channels, data.known_range)
    statistics = {
        "source": data.source,
        "root": data.place if data.mixture else data.root,
        **summarize(facts, source),
        "value_range": range_lines,
        "channels": measured and {"mean": measured.mean, "std": measured.std},
        "sheet": str(png),
    }
    rows = list(islice(_sheet_rows(source, recipe), options.images))
    if not rows:
        raise DataError(f"no image has model.in_chans {channels} channels")
    title = f"{len(rows)} of {len(source):,} images and what the network sees of them: {_crops(recipe)}"
    sheet = draw_sheet(rows, title)
    with files.replacing(png) as path:
        sheet.savefig(path, format="png")
    return definition.Result(statistics, report(statistics), [f"note: {note}" for note in getattr(source, "notes", ())])


def _check(out: str | None) -> Path:
    default = files.free_stem(None, Path("look-data"), [".png"]) + ".png"
    path = Path(default if out is None else os.path.expanduser(out))
    files.check_absent(path)
    if path.suffix != ".png":
        raise ConfigError(f"--out {out} must end in .png")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: {path.parent} is not a writable folder")
    return path


def _crops(recipe: Recipe) -> str:
    crops = " + ".join(f"{group.count} x {group.size}" for group in recipe.groups)
    masks = "" if recipe.crops.mask == "none" else f", masks {recipe.crops.mask}"
    how = f"{crops} px (orange: global, blue: local crops), augmentation {recipe.crops.augment}{masks}"
    return "; ".join([how, *normalization.shown_channels(recipe.model.in_chans)])


def look_at(source: Source, count: int, recipe: Recipe) -> list[ImageFacts]:
    """Decode `count` images, drawn at random (0: all), and return their facts in the source's order."""
    count = min(count or len(source), len(source))
    chosen = np.sort(np.random.default_rng(recipe.seed).choice(len(source), count, replace=False)).tolist()
    dataset = FactsOf(source, recipe.data.max_pixels, recipe.model.in_chans, recipe.data.known_range)
    options, facts = worker_options(recipe.data.workers), list[ImageFacts]()
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=16, sampler=chosen, collate_fn=list, **options)
    with started(loader, source) as batches, tqdm(total=count, unit="image", desc="looking", disable=None) as bar:
        for batch in batches:
            facts += batch
            bar.update(len(batch))
    return facts


@dataclass(frozen=True)
class ImageFacts:
    """Facts of one image: upright size in pixels, and its values; or `problem`, why training skips the image."""

    index: int
    width: int = 0
    height: int = 0
    values: image_values.ImageValues = image_values.NO_VALUES
    problem: str = ""


class FactsOf(Dataset[ImageFacts]):
    """The facts of each image of a source, as a run with `channels` and `value_range` reads it."""

    def __init__(self, source: Source, max_pixels: int, channels: int, value_range: ValueRange | None = None) -> None:
        self._source, self._max_pixels, self._channels, self._range = source, max_pixels, channels, value_range

    def __getitems__(self, indices: list[int]) -> list[ImageFacts]:
        prepare_images(self._source, indices)
        return [self[index] for index in indices]

    def __getitem__(self, index: int) -> ImageFacts:
        try:
            image = decode.open_image(self._source, index, self._max_pixels, channels=self._channels)
            values = image_values.ImageValues.of(image.values())
        except UnreadableImage as error:
            return ImageFacts(index, problem=error.reason)
        problem = values.why_skipped(self._range)
        channels = 3 if len(values.mean) == 1 != self._channels else len(values.mean)
        if channels != self._channels and hasattr(self._source, "read"):
            problem = f"{channels} channels, {self._channels} are wanted"
        return ImageFacts(index, image.width, image.height, values, problem)


def summarize(facts: Sequence[ImageFacts], source: Source) -> dict[str, Any]:
    """Statistics for `--json` of look-data; sizes are of readable images. Raises DataError if none is readable."""
    good, bad = [fact for fact in facts if not fact.problem], [fact for fact in facts if fact.problem]
    if not good:
        first = f"{source.name(bad[0].index)} ({bad[0].problem})"
        raise DataError(f"none of the {len(bad)} images looked at can be read; the first is {first}: name others")
    files_of_bad = [{"name": source.name(fact.index), "reason": fact.problem} for fact in bad]
    classes: dict[str, Any] | None = None  # of the whole dataset: labels are known without reading an image
    if source.labels is not None and source.classes is not None:
        labels = np.asarray(source.labels)
        counts = np.bincount(labels[labels >= 0], minlength=len(source.classes))
        of_each = dict(zip(source.classes, counts.tolist(), strict=False))
        classes = {"count": len(source.classes), "unlabelled": int((labels < 0).sum())}
        classes |= {"images": _spread(counts), "counts": of_each}
    by_type: dict[str, Any] = {}  # images by type of their stored values, and the extremes of types deeper than uint8
    for name, images in Counter(fact.values.type for fact in good).items():
        by_type[name] = {"images": images}
        if name != "uint8":
            some = [fact.values for fact in good if fact.values.type == name]
            by_type[name] |= {"min": min(values.low for values in some), "max": max(values.high for values in some)}
    sides = {side: _spread(np.array([getattr(fact, side) for fact in good])) for side in ("width", "height")}
    unreadable = {"count": len(bad), "files": files_of_bad}
    whole = {"images": len(source), "looked_at": len(facts), "unreadable": unreadable}
    return {**whole, **sides, "values": by_type, "classes": classes}


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
    if (classes := statistics["classes"]) is None:
        yield "classes", "none: images have no labels"
    else:
        unlabeled = f"; {classes['unlabelled']:,} images without a label" if classes["unlabelled"] else ""
        yield "classes", f"{classes['count']:,}; images in a class: {_range_text(classes['images'])}{unlabeled}"
        counts = sorted(classes["counts"].items(), key=lambda item: -item[1])
        more = ", ..." if len(counts) > _NAMED else ""
        yield "", ", ".join(f"{name} {count:,}" for name, count in counts[:_NAMED]) + more
    bad = statistics["unreadable"]
    yield "unreadable", f"{bad['count']:,} ({bad['count'] / statistics['looked_at']:.2%})"
    alike: dict[str, list[str]] = {}
    for file in bad["files"]:
        alike.setdefault(file["reason"], []).append(file["name"])
    for reason, names in islice(alike.items(), _NAMED):
        more = f" and {len(names) - _ALIKE:,} more" if len(names) > _ALIKE else ""
        yield "", f"{', '.join(names[:_ALIKE])}{more} ({reason})"
    if len(alike) > _NAMED or any(len(names) > _ALIKE for names in alike.values()):
        more = f"{len(alike) - _NAMED:,} more reasons; " if len(alike) > _NAMED else ""
        yield "", f"{more}--json names all files"
    yield "size", ", ".join(f"{side} {_range_text(statistics[side])}" for side in ("width", "height")) + " px"
    deep = {name: facts for name, facts in statistics["values"].items() if "min" in facts}
    for name, facts in deep.items():
        yield "values", f"{name} in {facts['images']:,}: {facts['min']:.10g} to {facts['max']:.10g}"
    for words in statistics["value_range"] if deep else ():
        yield "", words
    if measured := statistics["channels"]:
        flags = (f"--data.{name} {','.join(f'{value:g}' for value in measured[name])}" for name in ("mean", "std"))
        yield "channels", " ".join(flags)
    yield "sheet", statistics["sheet"]


def _range_text(values: dict[str, float]) -> str:
    low, middle, high = (f"{values[name]:,.0f}" for name in ("min", "median", "max"))
    return low if low == high else f"{low} to {high} (median {middle})"


def _sheet_rows(source: Source, recipe: Recipe) -> Iterator[SheetRow]:
    """Yield the readable images in the order of a run's first epoch, with their crops in that epoch."""
    data, channels = recipe.data, recipe.model.in_chans
    multicrop, options = MultiCrop.of(recipe), LoaderOptions.of(recipe, global_batch=1)
    dataset = MultiCropDataset(source, multicrop, options)
    order = ResumableSampler(len(source), options, feed.Position(), mixture.draws_in(source))
    for keys in islice(order, len(source)):
        [(epoch, index)] = keys
        try:
            array = decode.open_image(source, index % len(source), data.max_pixels, data.known_range, channels).decode()
        except UnreadableImage:
            continue
        if array.shape[2] != channels:
            continue
        batch = dataset.__getitems__(keys)
        if isinstance(batch, DataError):
            raise batch
        whole = torch.from_numpy(array).permute(2, 0, 1)
        original = _picture(whole, whole)
        sampled = multicrop.sample(original.width, original.height, seeds.crop_seed(recipe.seed, epoch, index))
        shown = normalization.with_hidden_patches(augmented_crops(batch), batch.masks, images=1)
        crops = [_picture(multicrop.normalization.undone(crop[0]), whole) for crop in shown]
        boxes = [crop.box for crop in sampled]
        yield SheetRow(listing.printable(batch.names[0]), original, boxes, crops, multicrop.groups[0].count)


def _picture(pixels: torch.Tensor, like: torch.Tensor) -> Image.Image:
    """Pixels (c, h, w), uint8 or in [0, 1], as RGB; other channels are stretched like those of the whole image."""
    levels = (normalization.visible(pixels, like) * 255).round().to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy())


@dataclass(frozen=True)
class SheetRow:
    """One image and its crops as RGB pictures, `num_global` of them drawn large; boxes: left, top, right, bottom."""

    name: str
    original: Image.Image
    boxes: list[tuple[int, int, int, int]]
    crops: list[Image.Image]
    num_global: int

    def color(self, crop: int) -> str:
        return GLOBAL_COLOR if crop < self.num_global else LOCAL_COLOR


def draw_sheet(rows: Sequence[SheetRow], title: str) -> Figure:
    """Draw one row per image, all crops of a kind in one size."""
    large = rows[0].num_global
    small = (len(rows[0].crops) - large + 1) // 2
    columns = _ORIGINAL + _GLOBAL * large + small
    height = 2 * _LINE * len(rows) + 2 * _MARGIN
    figure = Figure(figsize=(_LINE * columns, height), dpi=100)
    edges = {"top": 1 - _MARGIN / height, "bottom": _MARGIN / height, "left": 0.01, "right": 0.99}
    grid = figure.add_gridspec(2 * len(rows), columns, **edges, hspace=0.16, wspace=0.04)
    for number, row in enumerate(rows):
        two_lines = slice(2 * number, 2 * number + 2)
        axes = _show(figure.add_subplot(grid[two_lines, :_ORIGINAL]), row.original)
        name = row.name if len(row.name) <= 90 else f"…{row.name[-90:]}"  # the end of a path tells more
        size = f"  {row.original.width} x {row.original.height}"
        axes.set_title(name + size, fontsize=7, color=INK, loc="left", pad=2, parse_math=False)
        for crop, (left, top, right, bottom) in reversed([*enumerate(row.boxes)]):
            width = 2 if crop < row.num_global else 1
            # The edges of a picture's first pixel are at -0.5 and 0.5.
            corner, color = (left - 0.5, top - 0.5), row.color(crop)
            axes.add_patch(Rectangle(corner, right - left, bottom - top, fill=False, lw=width, ec=color))
            _tag(axes, left, top, crop, row)
        for crop, picture in enumerate(row.crops):
            left = _ORIGINAL + _GLOBAL * min(crop, large)
            cell = grid[two_lines, left : left + _GLOBAL]
            if crop >= large:
                line, column = divmod(crop - large, small)
                cell = grid[2 * number + line, left + column]
            _tag(_show(figure.add_subplot(cell), picture), 0, 0, crop, row)
    figure.set_facecolor("none")
    lines = textwrap.fill(title, int(13 * figure.get_figwidth()))
    figure.text(0.01, 1 - 0.1 / height, lines, fontsize=9, color=INK, va="top", parse_math=False)
    return figure


def _tag(axes: Axes, left: float, top: float, crop: int, row: SheetRow) -> None:
    style = {"facecolor": row.color(crop), "linewidth": 0, "pad": 1.5}
    axes.text(left - 0.5, top - 0.5, str(crop + 1), color="white", fontsize=6, ha="left", va="top", bbox=style)


def _show(axes: Axes, picture: Image.Image) -> Axes:
    """Show a picture; a small one is enlarged without smoothing, so that its pixels stay visible."""
    axes.imshow(picture, interpolation="nearest" if max(picture.size) < 100 * _LINE else "antialiased")
    axes.set_axis_off()
    axes.set_anchor("NW")
    return axes
