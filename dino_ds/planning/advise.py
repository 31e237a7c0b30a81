"""`dino-ds advise`: looks at a sample of the images, and says which settings to train with, why, and what to type. A
reason without a source says that it is a rule of thumb (docs/notes/advice.md)."""

from __future__ import annotations

import math
import shlex
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dino_ds.basics.formatting import range_text
from dino_ds.basics.machine import has_accelerator_files
from dino_ds.config.fields import LEAST_IMAGES, MOST_PASSES
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.config.schema import named_values
from dino_ds.config.sections import fitting_sizes
from dino_ds.data.decode import check_channels, open_image
from dino_ds.data.image_values import ImageValues, Sample
from dino_ds.data.images import Source, UnreadableImage, prepare_images
from dino_ds.data.root import check_split, test_folder
from dino_ds.data.scientific import note_stacks
from dino_ds.data.sources import build_source
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.commands import AdviseOptions
from dino_ds.options.definition import Result

_SECONDS, _LEAST_SAMPLE = 3.0, 20  # seconds after which no more images are read, once there are _LEAST_SAMPLE
_MANY_IMAGES = 1_000_000  # so many images are trained on from scratch: DINO's and DINOv2's authors had 1.28 million
_LEAST_BATCH = 32
_CPU_IMAGES, _TAUGHT_IMAGES, _TAUGHT_SIDE, _CONTINUED_IMAGES = 600_000, 50_000, 64, 16_000


def run(options: AdviseOptions) -> Result:
    """Look at the images and advise. Raises ConfigError for too few images, DataError if none can be read."""
    if options.source == "folder":
        if options.root is None:
            raise ConfigError("no images are given: dino-ds advise DIR (folder, list, ...), or --source photos")
        check_split(options.root)
    images = look_at(build_source(options.source, options.root, "train", False), options.sample)
    gpus = options.gpus or 0
    if options.gpus is None and has_accelerator_files():  # torch, which takes seconds to load, is only asked then
        from dino_ds.planning.measure import find_gpus

        gpus = len(find_gpus())
    facts = Situation(images["images"], images["side"]["median"], images["channels"], gpus)
    if facts.images < LEAST_IMAGES:
        cure = f"released weights have 3 channels, these images {facts.channels}: gather more images"
        if facts.has_color:
            cure = f"take released features, dino-ds {_embed(options)}"
        few = f"{facts.images} images are too few to learn from (LightlyTrain recommends several thousand)"
        raise ConfigError(f"{few}: {cure}")
    rows = advise(facts)
    flags = _train_flags(options, facts.recipe, rows, images)
    several = ["deepspeed", "--num_gpus", str(gpus), "--module", "dino_ds.train"]
    words = [word for name, value in {"config": facts.recipe, **flags}.items() for word in (f"--{name}", value)]
    result: dict[str, Any] = {"decisive": facts._asdict(), "found": images, "gpus": gpus}
    result["advice"] = [row._asdict() for row in rows]
    result["command"] = shlex.join([*(several if gpus > 1 else ("dino-ds", "train")), *words])
    result["notes"] = [*images.pop("notes"), *_notes(facts, images, options, flags)]
    result["ways"] = [
        {"way": name, "gave": gave, "minutes": minutes, "command": command or result["command"]}
        for name, gave, minutes, command in _ways(facts, options, flags)
        # `embed` by released weights refuses images whose values for black and white are not known.
        if not (images["unknown_range"] and command.startswith("dino-ds embed"))
    ]
    return Result(result, _page(result, options.root or options.source))


def look_at(source: Source, sample: int) -> dict[str, Any]:
    """Facts about the source and `sample` random images, read as in a run. Raises DataError if none can be read."""
    some = f"{min(sample, len(source)):,} of {len(source):,}"
    print(f"looking at {some} images, 3 s at most", file=sys.stderr, flush=True)
    most, began = Recipe().data.max_pixels, time.monotonic()
    seen, sides, unreadable = Sample(), list[int](), list[str]()
    chosen = np.random.default_rng(0).permutation(len(source))[:sample].tolist()
    prepare_images(source, chosen[:_LEAST_SAMPLE])
    counts = Counter[int]()
    for index in chosen[:_LEAST_SAMPLE]:
        with suppress(UnreadableImage):
            counts[open_image(source, index, most, channels=None).channels] += 1  # gray ones have 3, as in a run
    channels = max(counts, key=lambda number: counts[number], default=3)
    for looked_at, index in enumerate(chosen, 1):
        try:
            image = open_image(source, index, most, channels=channels)
            check_channels(image, channels, source.name(index))
            seen.values.append(ImageValues.of(image.values(), source.name(index)))
        except UnreadableImage as error:
            unreadable.append(str(error))
        else:
            sides.append(min(image.width, image.height))
            seen.stacks += [source.name(index)] if getattr(image, "pages", 1) == channels == 3 else []
        if time.monotonic() - began > _SECONDS and looked_at >= _LEAST_SAMPLE:
            break
    if not sides:
        raise DataError(f"none of the {len(unreadable)} images looked at can be read, such as {unreadable[0]}")
    facts: dict[str, Any] = {"images": len(source), "looked_at": len(sides) + len(unreadable)}
    facts["unreadable"] = {"count": len(unreadable), "first": next(iter(unreadable), None)}
    facts |= {"classes": None if source.classes is None else len(source.classes), "channels": channels}
    facts["gray"] = all(len(image.mean) == 1 for image in seen.values)
    facts["types"] = sorted({image.type for image in seen.values})
    facts["unknown_range"] = seen.measured if seen.deep and seen.chosen is None else None
    facts["notes"] = [*getattr(source, "notes", ()), *note_stacks(seen.stacks)]
    return facts | {"side": {"min": min(sides), "median": int(np.median(sides)), "max": max(sides)}}


def _train_flags(options: AdviseOptions, recipe: str, rows: Sequence[Row], images: Mapping[str, Any]) -> dict[str, str]:
    """The options of `train` that differ from the recipe. A tenth of images with classes is held out, unless test
    images are beside them. If more images are unreadable than a run allows, twice their share is allowed."""
    flags = {"data.source": options.source}
    flags |= {"data.root": options.root} if options.root else {}
    tests = test_folder(Path(options.root)) if options.source == "folder" and options.root else None
    flags |= {"eval.root": str(tests)} if tests else {"eval.val_share": "0.1"} if (images["classes"] or 0) > 1 else {}
    if (share := images["unreadable"]["count"] / images["looked_at"]) > Recipe().data.max_bad_fraction:
        flags["data.max_bad_fraction"] = f"{min(1.0, math.ceil(200 * share) / 100):g}"
    if images["unknown_range"]:
        flags["data.value_range"] = range_text(images["unknown_range"])
    for row in rows:
        flags |= row.flags
    start = {key: text for key, text in flags.items() if key == "model.init_from"}
    unchanged, wanted = (dict(named_values(load_recipe(recipe, changes))) for changes in (start, flags))
    return {key: text for key, text in flags.items() if key in start or wanted[key] != unchanged[key]}


def _notes(
    facts: Situation, images: Mapping[str, Any], options: AdviseOptions, flags: Mapping[str, str]
) -> Iterator[str]:
    if facts.has_color and not facts.is_tiny and not images["unknown_range"]:
        why = "DINOv2's model card: good features out of the box"
        yield f"first, without training ({why})\n  dino-ds {_embed(options)}"
    if not facts.gpus:
        yield "no GPU here: --gpus 1 advises for a machine with one"
    about = ("data.source", "data.root", "data.value_range", "crops.", "model.")
    shown = {"config": facts.recipe, **{key: text for key, text in flags.items() if key.startswith(about)}}
    look = shlex.join(["dino-ds", "look-data", *(word for name in shown for word in (f"--{name}", shown[name]))])
    if count := images["unreadable"]["count"]:
        share, first = count / images["looked_at"], images["unreadable"]["first"]
        allowed = flags.get("data.max_bad_fraction")
        effect = f"more than a run allows: the commands allow {float(allowed):.0%}" if allowed else "and are skipped"
        unreadable = f"{share:.1%} of the images can't be read as {_channels(images)}, such as {first}"
        yield f"{unreadable}, {effect}; all of them: {look}"
    if images["unknown_range"]:
        has = "the lowest and highest of images looked at, and skips images beyond: widen --data.value_range"
        values = f"{' and '.join(images['types'])} values"
        yield f"which {values} are black and white is not known: the command has {has} where there are"
    if images["types"] != ["uint8"] or not facts.has_color:
        finds = f"the run finds their {'mean' if images['unknown_range'] else 'range and mean'}"
        yield f"{_channels(images)} of {', '.join(images['types'])}: {finds}, as this does\n  {look}"
        yield "augmentation as of photographs; microscopes', satellites' and X-rays': docs/augmentation.md"
    yield "if it does not learn: docs/your-data.md"


def _embed(options: AdviseOptions, weights: str = "vit_small_patch14_dinov2.lvd142m", size: int = 224) -> str:
    """The words of `embed`, by default for released weights that are worth a look before any training."""
    return f"embed {weights} --size {size} {_images(options, '')} --out features.parquet"


def _images(options: AdviseOptions, section: str) -> str:
    """Options that name the images: --data.source and --data.root for section "data.", --source and --root for ""."""
    source = [] if options.source == "folder" else [f"--{section}source", options.source]
    return shlex.join([*source, *([] if options.root is None else [f"--{section}root", options.root])])


def _channels(images: Mapping[str, Any]) -> str:
    return "gray" if images["gray"] else f"{images['channels']} channels"


def _page(result: Mapping[str, Any], images_of: str) -> str:
    images, side = result["found"], result["found"]["side"]
    classes = "no labels" if images["classes"] is None else f"{images['classes']:,} classes"
    lines = [f"images   {images['images']:,} in {images_of}; {classes}; looked at {images['looked_at']:,}"]
    sizes = f"{side['min']:,} to {side['max']:,} px, {side['median']:,} in the median"
    lines += [f"size     shorter side {sizes}; {_channels(images)}, {', '.join(images['types'])}"]
    lines += [f"GPUs     {result['gpus'] or 'none'}", ""]
    for row in result["advice"]:
        start = f"{row['setting']:<14} {row['value']:<31} "
        lines += textwrap.wrap(f"{start}{row['why']}", 120, subsequent_indent=" " * 47, break_on_hyphens=False)
    lines += ["", result["command"], ""]
    for way in result["ways"]:
        start = f"{way['way']:<14} about {max(1, way['minutes']):,.0f} min of a core"
        lines += textwrap.wrap(f"{start:<46} {way['gave']}", 120, subsequent_indent=" " * 47)
        lines += [f"  {way['command']}" if way["command"] != result["command"] else "  the command above"]
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"])])


class Situation(NamedTuple):
    """The facts that decide the advice.

    images: number of images.
    side: median of the images' shorter sides, in pixels.
    channels: 1 and 3 are treated alike, since gray is read as RGB.
    gpus: number of GPUs; 0 for a CPU.
    """

    images: int
    side: int
    channels: int = 3
    gpus: int = 0

    @property
    def is_tiny(self) -> bool:
        return self.side < 96  # below it, weights and crops for 224 pixels make no sense

    @property
    def has_color(self) -> bool:
        return self.channels in (1, 3)

    @property
    def weights(self) -> str | None:
        """timm's name of the weights to continue from; None: train from scratch."""
        if self.is_tiny or not self.gpus or not self.has_color or self.images >= _MANY_IMAGES:
            return None
        return f"vit_{'base' if self.gpus >= 4 and self.images >= 100_000 else 'small'}_patch16_224.dino"

    @property
    def teacher(self) -> str | None:
        """timm's name of the weights that teach a small network; None: no network is taught."""
        return "tf_efficientnet_lite0.in1k" if not self.gpus and self.has_color and self.side >= 32 else None

    @property
    def recipe(self) -> str:
        """Name of the shipped recipe, which the other settings change."""
        if self.is_tiny or not self.gpus:
            return "small"
        if self.weights:
            return "continue"
        if self.images < 100_000:
            return "small_vits16"
        return "vits16" if self.images < _MANY_IMAGES or self.gpus < 4 else "vitb16"

    @property
    def batch(self) -> int:
        """Images of a step on GPUs, a multiple of their number: at least 8 steps an epoch, but 32 images or more."""
        wanted = 1024 if self.gpus >= 16 else 512 if self.images >= _MANY_IMAGES else 256
        wanted = min(wanted, max(_LEAST_BATCH, 2 ** int(math.log2(self.images / 8))))
        return max(1, wanted // self.gpus) * self.gpus

    @property
    def patch(self) -> int:
        """Side of the patches of a network for small images, or for a CPU."""
        if self.gpus:
            return 4 if self.side < 64 else 8
        return 4 if self.side < 16 else 8 if self.is_tiny else 16


class Row(NamedTuple):
    """One piece of advice: a readable `value`, the reason with a source, and the `flags` of `train` that follow."""

    setting: str
    value: str
    why: str
    flags: Mapping[str, str] = {}


def advise(facts: Situation) -> list[Row]:
    """Advise on each setting, in the order of decisions. `facts` has at least LEAST_IMAGES images."""
    rows = [_start(facts), _backbone(facts), _objective(facts), _crops(facts)]
    if not facts.gpus:
        images = min(_TAUGHT_IMAGES if facts.teacher else _CPU_IMAGES, MOST_PASSES * facts.images)
        value, first = f"{images:,} images", f'a first look: --length "{images // 10} images"'
        why = f"as measured (docs/continue.md), at most {MOST_PASSES:,} times each image; {first}"
        if not facts.teacher:
            value += f", {images * _cpu_seconds(facts, rows[-1].flags) / 3600:.1f} h of a core"
            within = "the time within a factor of 2 (docs/notes/advice.md)"
            why = f"recipe small's, at most {MOST_PASSES:,} times each image; {within}; {first}"
        return [*rows, Row("length", value, why, {"length": f"{images} images"})]
    if not facts.weights:
        return [*rows, *_from_scratch(facts)]
    # The schedule is that of recipe continue, whose warm-up and evaluations are shares of the length.
    length, batch = min(100_000, 500 * facts.images), max(1, 64 // facts.gpus) * facts.gpus
    why = "the longest run of the study (docs/notes/continue.md), each image 500 times at most: rule of thumb"
    rows.append(Row("length", f"{length:,} images", why, {"length": f"{length} images"}))
    why = "the study's: the number of steps counts most in so short a run (docs/small-data.md)"
    return [*rows, Row("batch", str(batch), why, {"data.global_batch": str(batch)})]


def _ways(facts: Situation, options: AdviseOptions, flags: Mapping[str, str]) -> Iterator[tuple[str, str, float, str]]:
    """Yield the ways to get features on a CPU, none if no network can teach: name, result in docs/continue.md, minutes
    of a core (as measured on one machine), and command, "" for the advised one."""
    if facts.teacher is None:
        return
    of_all = ("eval.", "data.max_bad_fraction", "data.value_range")
    shared = "".join(f" --{key} {shlex.quote(text)}" for key, text in flags.items() if key.startswith(of_all))
    images, size = _images(options, "data.") + shared, max(_TAUGHT_SIDE, min(224, facts.side // 32 * 32))
    gave = "k-NN 79.2 % of hand signs at 64 pixels, 83.3 at 96; 70.9 of Tiny-ImageNet at 64"
    seconds = 1.1e-6 * size**2
    yield "as they are", gave, facts.images * seconds / 60, f"dino-ds {_embed(options, facts.teacher, size)}"
    gave = "a small ViT's k-NN of hand signs 28.5 to 33.6 %, ridge of CIFAR-10 38.2 to 41.9; this network kept its own"
    crops = f"--crops.global_size {_TAUGHT_SIDE} --crops.local_size {_TAUGHT_SIDE // 2}"
    command = f"dino-ds train --config continue --model.init_from {facts.teacher} {crops}"
    command += f" --length '{_CONTINUED_IMAGES} images' {images}"
    yield "continue", gave, _CONTINUED_IMAGES * 0.125 / 60, command
    yield "teach", "k-NN 50.1 % of Tiny-ImageNet, by an eighth of the teacher's weights", _TAUGHT_IMAGES * 0.02 / 60, ""
    gave = "k-NN 36.7 % of Tiny-ImageNet after 50,000 images, 42.2 after 100,000"
    yield "from scratch", gave, _CPU_IMAGES * 0.003 / 60, f"dino-ds train --config small {images}"


def _cpu_seconds(facts: Situation, flags: Mapping[str, str]) -> float:
    """Estimate the seconds of a CPU core that recipe small takes for an image with the crops of `flags`. With its own,
    600,000 images took 23 minutes: the network's 90 % grow with the patches, the loader's 10 % with the pixels."""
    known, sizes = load_recipe("small", {}), load_recipe("small", {**flags, "model.patch_size": str(facts.patch)})

    def work(recipe: Recipe) -> tuple[int, int]:
        crops, patch = recipe.crops, recipe.model.patch_size or facts.patch
        seen, local = 2 * crops.global_size**2, crops.num_local * crops.local_size**2
        return (4 * seen + 3 * local) // patch**2, seen + local  # student: 3 with backward; teacher: 1, of global crops

    patches, pixels = (new / old for new, old in zip(work(sizes), work(known), strict=True))
    return 23 * 60 / 600_000 * (0.9 * patches + 0.1 * pixels)


def _start(facts: Situation) -> Row:
    if facts.weights:
        why = "below 1 million images (rule of thumb): a user's k-NN was 83.6 % frozen, 85.1 from scratch, 86.9 "
        why, flags = f"{why}continued (dinov3#23)", {"model.init_from": facts.weights}
        return Row("start", f"continue from {facts.weights}", why, flags)
    if facts.teacher:
        why = "k-NN 50.1 after 50,000 images, from scratch 36.7 (docs/continue.md); features as they are: below"
        flags = {"teacher.source": facts.teacher, "teacher.distill": "features"}
        return Row("start", f"taught by {facts.teacher}", why, flags)
    flags = {} if facts.has_color else {"model.in_chans": str(facts.channels)}
    why = "DINO and DINOv2 had 1.28 million images (arXiv 2104.14294, 2304.07193)"
    if flags:
        why = f"released weights have 3 channels, these images {facts.channels}: adapting them is untried"
    elif facts.is_tiny:
        why = f"released weights know 224 pixels, these images have {facts.side}"
    elif not facts.gpus:
        why = "without a GPU only a small network is feasible (docs/quickstart.md)"
    return Row("start", "from scratch", why, flags)


def _backbone(facts: Situation) -> Row:
    if facts.recipe != "small":
        of_weights = "4 GPUs and 100,000 images for ViT-B, else ViT-S: rule of thumb"
        why = of_weights if facts.weights else "S below 1 million images or 4 GPUs, else B: rule of thumb"
        large = facts.recipe == "vitb16" or (facts.weights or "").startswith("vit_base")
        return Row("backbone", "ViT-B/16" if large else "ViT-S/16", why)
    flags = {"model.patch_size": str(facts.patch)}
    if not facts.gpus:
        why = "recipe small, measured on a CPU (docs/small-data.md)"
        return Row("backbone", f"2 blocks, 128 wide, patch {facts.patch}", why, flags)
    flags |= {"model.width": "192", "model.depth": "12", "model.heads": "3"}
    return Row("backbone", f"ViT-Ti/{facts.patch}", "patches of 4 below 64 px, of 8 below 96: rule of thumb", flags)


def _objective(facts: Situation) -> Row:
    if facts.teacher:
        why = "1 - cosine to them through a linear layer (arXiv 2312.06709), measured on a CPU (docs/continue.md)"
        flags = {"objective.coding_rate_weight": "0", "objective.dino_weight": "1"}
        return Row("objective", "the teacher's features", why, flags)
    if facts.recipe.startswith("small"):
        why = "k-NN above DINO's on three sets of small images, measured on a CPU (docs/small-data.md)"
        return Row("objective", "coding rate (SimDINO)", why)
    if facts.weights:
        why = "no head has to be learned first: DINO's new ones cost 70 points (dinov2#204); measured on small networks"
        return Row("objective", "coding rate, start preserved", f"{why} (docs/continue.md)")
    why = "batches below 2048: DINOv2's authors cannot advise them (dinov2#298)"
    return Row("objective", "DINO", why)


def _crops(facts: Situation) -> Row:
    known = load_recipe(facts.recipe, {"model.init_from": facts.weights} if facts.weights else {}).crops
    local = 0 if facts.teacher else 6 if facts.gpus and facts.recipe == "small" else known.num_local
    why = "by the images' size, with few patches: rule of thumb; colors of recipe small, no blur (docs/small-data.md)"
    sizes = fitting_sizes(facts.side, facts.patch, 64 if facts.is_tiny else 96)
    if facts.recipe != "small":
        sizes = fitting_sizes(facts.side, 16, 224)
        why = f"DINO's 224 and 96 (main_dino.py), or not larger than the images' {facts.side} px: rule of thumb"
    if facts.teacher and sizes[0] < _TAUGHT_SIDE:
        sizes = _TAUGHT_SIDE, sizes[1]
        why = f"the teacher sees little in fewer pixels than {_TAUGHT_SIDE} (docs/continue.md)"
    wanted = {"global_size": sizes[0], "local_size": sizes[1] if local else known.local_size, "num_local": local}
    flags = {f"crops.{key}": str(value) for key, value in wanted.items() if value != getattr(known, key)}
    return Row("crops", f"2 x {sizes[0]}" + (f" + {local} x {sizes[1]}" if local else "") + " px", why, flags)


def _from_scratch(facts: Situation) -> Iterator[Row]:
    batch = facts.batch
    if facts.images < 1_280_000:  # 20 million images are shown in all; from ImageNet's number on, 128 million
        passes = round(min(max(20e6 / facts.images, 100), MOST_PASSES))
    else:
        passes = round(min(max(128e6 / facts.images, 5), 100))
    steps = max(1, facts.images // batch * passes)
    why = "LightlyTrain: 200-2000 epochs below 100,000 images, 100-500 to 1 million, 5-100 above 10 million"
    yield Row("length", f"{passes} epochs = {steps:,} steps", why, {"length": f"{passes} epochs"})
    why = "DINO's k-NN at 128, 256, 512, 1024: 57.9, 59.1, 59.6, 59.9 % (arXiv 2104.14294, table 9)"
    if facts.images < 16 * batch:
        why = f"at least 8 steps an epoch and {_LEAST_BATCH} images a step: rule of thumb. {why}"
    yield Row("batch", str(batch), why, {"data.global_batch": str(batch)})
    rate, warmup = 7.5e-4 if facts.recipe == "vitb16" else 5e-4, max(1, min(10, passes // 10))
    why = "linear in the batch; warm-up 10 epochs, a tenth of the run at most (main_dino.py, LightlyTrain)"
    flags = {"optimizer.lr": f"{rate:g}", "optimizer.warmup": f"{warmup} epochs"}
    if facts.recipe == "small":
        flags["optimizer.lr_scaling"] = "linear"  # the recipe scales its own rate by the batch's root
    scaled = f": {rate * batch / 256:.2g} for {batch}" if batch != 256 else ""
    yield Row("learning rate", f"{rate:g} for 256 images{scaled}, warm-up {warmup} epochs", why, flags)
    if facts.recipe == "small":
        ema = f"{round(0.9 ** math.sqrt(batch / 64), 3):g}"  # measured with batches of 16 and 256
        why = "recipe small's 0.9 at 64 images, by the root of the batch: low ones learn faster (docs/small-data.md)"
        yield Row("EMA momentum", f"{ema} to 1", why, {"teacher.momentum": ema})
    elif facts.recipe != "small_vits16":  # its objective has no prototypes, and its momentum is for few images
        ema = f"{round(max(0.99, min(1 - 0.004 * batch / 512, 1 - 100 / steps)), 4):g}"
        why = "DINO: 0.996 at 512, 0.9995 at 256 (main_dino.py); LightlyTrain: 0.99 up to 20,000 images; here as many "
        why += "images as DINO's 0.996 averages, at most a hundredth of the run, but 0.99 or more: rule of thumb"
        yield Row("EMA momentum", f"{ema} to 1", why, {"teacher.momentum": ema})
        outputs = min(2 ** int(math.log2(facts.images / 16)), 65536)
        why = "at least 16 images for each, and 1,024: rule of thumb; LightlyTrain has 1,024 (20,000 images) to 65,536"
        yield Row("prototypes", f"{outputs:,}", why, {"head.prototypes": str(outputs)})
