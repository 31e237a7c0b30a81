"""`dino-ds advise`: looks at a sample of the images, and says which settings to train with, why, and what to type."""

from __future__ import annotations

import shlex
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dino_ds.config.fields import FEW_IMAGES, LEAST_IMAGES
from dino_ds.config.loading import load_recipe
from dino_ds.config.schema import named_values
from dino_ds.data.base import Source, UnreadableImage, prepare_images
from dino_ds.data.decode import open_image
from dino_ds.data.root import check_split, test_folder
from dino_ds.data.sources import build_source
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.commands import AdviseOptions
from dino_ds.options.definition import Result
from dino_ds.planning.advice import Row, advise, fewer_gpus
from dino_ds.planning.gpus import named_gpu
from dino_ds.planning.measure.machine import find_gpus
from dino_ds.planning.rules import (
    FROZEN,
    Data,
    Gpus,
    recipe_for,
    useful_gpus,
)

_LARGE_SIDE = 1024
"""Pixels of the shorter side above which smaller copies of the images are worth making: they decode faster."""
_SECONDS, _LEAST_SAMPLE = 3.0, 20
"""Seconds after which no more images are read, once there are _LEAST_SAMPLE."""
_WIDTH = 120


def run(options: AdviseOptions) -> Result:
    """Look at the images and advise. Raises ConfigError for too few images, DataError if none can be read."""
    name, offered = _offered_gpus(options)
    if options.source == "folder":
        if options.root is None:
            raise ConfigError("no images are given: dino-ds advise DIR (folder, list, ...), or --source photos")
        check_split(options.root)
    source = build_source(options.source, options.root, "train", False)
    images = _look_at(source, options.sample)
    data = Data(len(source), images["side"]["median"], images["channels"])
    if data.images < LEAST_IMAGES:
        cure = f"released weights have 3 channels, these images {data.channels}: gather more images"
        if data.color:
            cure = f"take released features, dino-ds {_embed(options)}"
        raise ConfigError(
            f"{data.images} images are too few to learn from (LightlyTrain recommends several thousand): {cure}"
        )
    count = useful_gpus(data, offered)
    nodes = max(1, count * options.nodes // offered.count) if offered.count else 1
    gpus = Gpus(count, offered.memory_gib)
    rows = advise(data, gpus)
    if count < offered.count:
        rows.insert(0, fewer_gpus(data, gpus, offered.count))
    recipe = recipe_for(data, gpus)
    flags = _train_flags(options, recipe, rows, images["classes"] or 0)
    has_tests = bool(flags.keys() & {"eval.root", "eval.val_share"})
    result: dict[str, Any] = {
        "decisive": vars(data),
        "found": images,
        "gpu": name,
        "gpus": count,
        "gpus_offered": offered.count,
        "advice": [vars(row) for row in rows],
        "command": _command(recipe, flags, nodes, count // nodes),
        "notes": [*_notes(data, gpus, options, has_tests), *_about_images(data, images, _images(options))],
    }
    return Result(result, _page(result, options.root or options.source))


def _offered_gpus(options: AdviseOptions) -> tuple[str | None, Gpus]:
    """Return name, number and memory of the GPUs in the options, else of this machine's. Raises ConfigError."""
    here = [] if options.gpu or options.memory_gib else find_gpus()
    if here:
        name, memory, count = here[0].name, min(gpu.memory_gib for gpu in here), options.gpus or len(here)
    elif options.gpu or options.memory_gib or options.gpus or options.nodes > 1:
        card = named_gpu(options.gpu, options.memory_gib)
        name, memory, count = card.name, card.memory_gib, options.gpus or 1
    else:
        return None, Gpus()
    return name, Gpus(count * options.nodes, memory)


def _look_at(source: Source, sample: int) -> dict[str, Any]:
    """Return facts about the source and at most `sample` random images. Raises DataError if none can be read."""
    print(
        f"looking at {min(sample, len(source)):,} of {len(source):,} images, 3 s at most", file=sys.stderr, flush=True
    )
    most, begin = load_recipe(None, {}).data.max_pixels, time.monotonic()
    sizes, channels, types = list[tuple[int, int]](), Counter[int](), set[str]()
    unreadable = looked_at = 0
    chosen = np.random.default_rng(0).permutation(len(source))[:sample].tolist()
    prepare_images(source, chosen[:_LEAST_SAMPLE])
    for index in chosen:
        looked_at += 1
        try:
            image = open_image(source, index, most)
            types.add(image.values().dtype.name)
        except UnreadableImage:
            unreadable += 1
        else:
            sizes.append((image.width, image.height))
            channels[image.channels] += 1
        if time.monotonic() - begin > _SECONDS and looked_at >= _LEAST_SAMPLE:
            break
    if not sizes:
        raise DataError(f"none of the {looked_at} images looked at can be read: dino-ds look-data says why")
    sides = np.array(sizes).min(1)
    return {
        "images": len(source),
        "looked_at": looked_at,
        "unreadable": unreadable,
        "classes": None if source.classes is None else len(source.classes),
        "channels": channels.most_common(1)[0][0],
        "types": sorted(types),
        "side": {"min": int(sides.min()), "median": int(np.median(sides)), "max": int(sides.max())},
    }


def _train_flags(options: AdviseOptions, recipe: str, rows: Sequence[Row], classes: int) -> dict[str, str]:
    """Return the options of `dino-ds train` that differ from the recipe. Of images with classes a tenth is held out
    for k-NN, unless a folder of test images is beside them."""
    flags = {"data.source": options.source}
    flags |= {"data.root": options.root} if options.root else {}
    tests = test_folder(Path(options.root)) if options.source == "folder" and options.root else None
    flags |= {"eval.root": str(tests)} if tests else {"eval.val_share": "0.1"} if classes > 1 else {}
    for row in rows:
        flags |= row.flags
    start = {key: text for key, text in flags.items() if key == "model.init_from"}
    unchanged, wanted = (dict(named_values(load_recipe(recipe, changes))) for changes in (start, flags))
    return {key: text for key, text in flags.items() if key in start or wanted[key] != unchanged[key]}


def _command(recipe: str, flags: Mapping[str, str], nodes: int, gpus: int) -> str:
    start = ["launch", "--hostfile", "HOSTS", "--"] if nodes > 1 else ["launch", "--ranks", str(gpus), "--"]
    start = start if max(nodes, gpus) > 1 else ["train"]
    words = [word for name, value in {"config": recipe, **flags}.items() for word in (f"--{name}", value)]
    return shlex.join(["dino-ds", *start, *words])


def _notes(data: Data, gpus: Gpus, options: AdviseOptions, has_tests: bool) -> Iterator[str]:
    if data.images < FEW_IMAGES:
        yield f"{data.images:,} images are few: LightlyTrain's FAQ recommends several thousand"
    if data.color and (not data.tiny or data.images < FEW_IMAGES):
        yield (
            f"first, without training (DINOv2's model card: good features out of the box)\n  dino-ds {_embed(options)}"
        )
    if not gpus.count:
        yield "no GPU here, none named: --gpu rtx4090-24g (see dino-ds plan) advises for that card"
    if not has_tests and options.source == "folder":
        yield "no class folders, so k-NN is not measured while it trains: name labeled images with --eval.root"
    yield "if it does not learn: docs/your-data.md"


def _images(options: AdviseOptions, section: str = "data.") -> str:
    """Name the images by options of commands that take a recipe's keys; with section "", of commands about models."""
    source = [] if options.source == "folder" else [f"--{section}source", options.source]
    return shlex.join([*source, *([] if options.root is None else [f"--{section}root", options.root])])


def _about_images(data: Data, images: Mapping[str, Any], named: str) -> Iterator[str]:
    """Yield notes about the images; named: the options that name them."""
    if images["unreadable"]:
        share = images["unreadable"] / images["looked_at"]
        yield f"{share:.1%} of the images can't be read: above 1 % the run stops (dino-ds look-data names them)"
    if images["types"] != ["uint8"] or not data.color:
        channels = "" if data.color else f" --model.in_chans {data.channels}"
        values = f"{data.channels} channel(s) of {', '.join(images['types'])}"
        yield f"{values}: data.value_range, mean and std are measured by\n  dino-ds look-data {named}{channels}"
    if data.side > _LARGE_SIDE:
        yield "large images are slow to decode: smaller ones are made once by\n  dino-ds shard --shrink 512"


def _embed(options: AdviseOptions) -> str:
    return f"embed {FROZEN} {_images(options, '')} --out features.parquet"


def _page(result: Mapping[str, Any], images_of: str) -> str:
    """Format the advice as text of 120 columns; images_of: folder or source of the images."""
    images = result["found"]
    classes = "no labels" if images["classes"] is None else f"{images['classes']:,} classes"
    side = images["side"]
    lines = [
        *_wrapped(f"images   {images['images']:,} in {images_of}; {classes}; looked at {images['looked_at']:,}", 9),
        f"size     shorter side {side['min']:,} to {side['max']:,} px, {side['median']:,} in the median; "
        f"{images['channels']} channel(s), {', '.join(images['types'])}",
        f"GPUs     {result['gpus_offered']} x {result['gpu']}" if result["gpu"] else "GPUs     none",
        "",
    ]
    for row in result["advice"]:
        cells = [[row["setting"]], textwrap.wrap(row["value"], 30), textwrap.wrap(row["why"], 70)]
        filled = [cell + [""] * (max(map(len, cells)) - len(cell)) for cell in cells]
        lines += [f"{a:<14} {b:<31} {c}".rstrip() for a, b, c in zip(*filled, strict=True)]
    notes = [line for note in result["notes"] for line in _wrapped(f"note: {note}")]
    return "\n".join([*lines, "", result["command"], "", *notes])


def _wrapped(text: str, indent: int = 2) -> list[str]:
    """Wrap a text at 120 columns; a line with a command is not broken."""
    wrapper = textwrap.TextWrapper(_WIDTH, subsequent_indent=" " * indent, break_long_words=False)
    wrapper.break_on_hyphens = False
    return [part for line in text.splitlines() for part in ([line] if "dino-ds" in line else wrapper.wrap(line))]
