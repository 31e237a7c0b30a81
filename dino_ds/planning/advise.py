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

from dino_ds.config.fields import LEAST_IMAGES
from dino_ds.config.loading import load_recipe
from dino_ds.config.schema import named_values
from dino_ds.data.decode import open_image
from dino_ds.data.images import Source, UnreadableImage, prepare_images
from dino_ds.data.root import check_split, test_folder
from dino_ds.data.scientific import note_stacks
from dino_ds.data.sources import build_source
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.commands import AdviseOptions
from dino_ds.options.definition import Result
from dino_ds.planning.advice import Row, Situation, Way, advise, ways
from dino_ds.planning.measure import find_gpus

FROZEN = "vit_small_patch14_dinov2.lvd142m --size 224"
"""Arguments of `embed` for released weights whose features are worth a look before any training."""
_SECONDS, _LEAST_SAMPLE = 3.0, 20
"""Seconds after which no more images are read, once there are _LEAST_SAMPLE."""
_WIDTH = 120


def run(options: AdviseOptions) -> Result:
    """Look at the images and advise. Raises ConfigError for too few images, DataError if none can be read."""
    if options.source == "folder":
        if options.root is None:
            raise ConfigError("no images are given: dino-ds advise DIR (folder, list, ...), or --source photos")
        check_split(options.root)
    images = _look_at(build_source(options.source, options.root, "train", False), options.sample)
    gpus = len(find_gpus()) if options.gpus is None else options.gpus
    facts = Situation(images["images"], images["side"]["median"], images["channels"], gpus)
    if facts.images < LEAST_IMAGES:
        cure = f"released weights have 3 channels, these images {facts.channels}: gather more images"
        if facts.has_color:
            cure = f"take released features, dino-ds {_embed(options)}"
        raise ConfigError(
            f"{facts.images} images are too few to learn from (LightlyTrain recommends several thousand): {cure}"
        )
    rows = advise(facts)
    flags = _train_flags(options, facts.recipe, rows, images["classes"] or 0)
    several = ["deepspeed", "--num_gpus", str(gpus), "--module", "dino_ds.train"]
    words = [word for name, value in {"config": facts.recipe, **flags}.items() for word in (f"--{name}", value)]
    result: dict[str, Any] = {
        "decisive": vars(facts),
        "found": images,
        "gpus": gpus,
        "advice": [vars(row) for row in rows],
        "command": shlex.join([*(several if gpus > 1 else ("dino-ds", "train")), *words]),
        "notes": [*images.pop("notes"), *_notes(facts, images, options)],
    }
    result["ways"] = [_way(way, result["command"], options) for way in ways(facts)]
    return Result(result, _page(result, options.root or options.source))


def _look_at(source: Source, sample: int) -> dict[str, Any]:
    """Return facts about the source and at most `sample` random images. Raises DataError if none can be read."""
    print(
        f"looking at {min(sample, len(source)):,} of {len(source):,} images, 3 s at most", file=sys.stderr, flush=True
    )
    most, begin = load_recipe(None, {}).data.max_pixels, time.monotonic()
    sides, channels, types, stacks = list[int](), Counter[int](), set[str](), list[str]()
    unreadable, looked_at = list[str](), 0
    chosen = np.random.default_rng(0).permutation(len(source))[:sample].tolist()
    prepare_images(source, chosen[:_LEAST_SAMPLE])
    for index in chosen:
        looked_at += 1
        try:
            image = open_image(source, index, most)
            types.add(image.values().dtype.name)
        except UnreadableImage as error:
            unreadable.append(str(error))
        else:
            sides.append(min(image.width, image.height))
            channels[image.channels] += 1
            stacks += [source.name(index)] if getattr(image, "pages", 1) == 3 else []
        if time.monotonic() - begin > _SECONDS and looked_at >= _LEAST_SAMPLE:
            break
    if not sides:
        raise DataError(f"none of the {looked_at} images looked at can be read, such as {unreadable[0]}")
    return {
        "images": len(source),
        "looked_at": looked_at,
        "unreadable": len(unreadable),
        "classes": None if source.classes is None else len(source.classes),
        "channels": channels.most_common(1)[0][0],
        "types": sorted(types),
        "notes": [*getattr(source, "notes", ()), *note_stacks(stacks)],
        "side": {"min": min(sides), "median": int(np.median(sides)), "max": max(sides)},
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


def _way(way: Way, advised: str, options: AdviseOptions) -> dict[str, Any]:
    """A way with its whole command, and the minutes that it takes a core."""
    section, end = ("", " --out features.parquet") if way.words[:1] == ("embed",) else ("data.", "")
    command = f"dino-ds {shlex.join(way.words)} {_images(options, section)}{end}" if way.words else advised
    return {"way": way.name, "gave": way.gave, "minutes": way.images * way.seconds / 60, "command": command}


def _notes(facts: Situation, images: Mapping[str, Any], options: AdviseOptions) -> Iterator[str]:
    if facts.has_color and not facts.is_tiny:
        yield (
            f"first, without training (DINOv2's model card: good features out of the box)\n  dino-ds {_embed(options)}"
        )
    if not facts.gpus:
        yield "no GPU here: --gpus 1 advises for a machine with one"
    channels = "" if facts.has_color else f" --model.in_chans {facts.channels}"
    look = "dino-ds look-data " + _images(options, "data.") + channels
    if images["unreadable"]:
        share = images["unreadable"] / images["looked_at"]
        yield f"{share:.1%} of the images can't be read: above 1 % the run stops; which ones: {look}"
    if images["types"] != ["uint8"] or not facts.has_color:
        values = f"{facts.channels} channel(s) of {', '.join(images['types'])}"
        yield f"{values}: the run finds their range and mean, which this shows\n  {look}"
    yield "if it does not learn: docs/your-data.md"


def _embed(options: AdviseOptions) -> str:
    return f"embed {FROZEN} {_images(options, '')} --out features.parquet"


def _images(options: AdviseOptions, section: str) -> str:
    """Name the images by options of commands that take a recipe's keys; with section "", of commands about models."""
    source = [] if options.source == "folder" else [f"--{section}source", options.source]
    return shlex.join([*source, *([] if options.root is None else [f"--{section}root", options.root])])


def _page(result: Mapping[str, Any], images_of: str) -> str:
    """Format the advice as text of 120 columns; images_of: folder or source of the images."""
    images, side = result["found"], result["found"]["side"]
    classes = "no labels" if images["classes"] is None else f"{images['classes']:,} classes"
    lines = [
        f"images   {images['images']:,} in {images_of}; {classes}; looked at {images['looked_at']:,}",
        f"size     shorter side {side['min']:,} to {side['max']:,} px, {side['median']:,} in the median; "
        f"{images['channels']} channel(s), {', '.join(images['types'])}",
        f"GPUs     {result['gpus'] or 'none'}",
        "",
    ]
    for row in result["advice"]:
        start = f"{row['setting']:<14} {row['value']:<31} "
        lines += textwrap.wrap(f"{start}{row['why']}", _WIDTH, subsequent_indent=" " * 47, break_on_hyphens=False)
    lines += ["", result["command"], ""]
    for way in result["ways"]:
        start = f"{way['way']:<14} about {max(1, way['minutes']):,.0f} min of a core"
        lines += textwrap.wrap(f"{start:<46} {way['gave']}", _WIDTH, subsequent_indent=" " * 47)
        lines += [f"  {way['command']}" if way["command"] != result["command"] else "  the command above"]
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"])])
