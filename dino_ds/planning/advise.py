"""`dino-ds advise`: looks at a sample of the images, and says which settings to train with, why, and for how long."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dino_ds.config.flat import named_values
from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.data.sources import Source, build_source
from dino_ds.errors import ConfigError
from dino_ds.options.data import AdviseOptions
from dino_ds.planning.advice import RULE, Row, advise, expected_knn, fewer_gpus
from dino_ds.planning.advise_page import page
from dino_ds.planning.data_statistics import Facts, look_at, summarise
from dino_ds.planning.fit import FILLED
from dino_ds.planning.gpus import named_gpu, similar_gpu
from dino_ds.planning.measure.machine import find_gpus
from dino_ds.planning.measure.tables import print_result
from dino_ds.planning.recommend import recommend
from dino_ds.planning.rules import (
    FEW_IMAGES,
    LEAST_IMAGES,
    Data,
    Gpus,
    frozen_weights,
    recipe_for,
    released_weights,
    useful_gpus,
)
from dino_ds.planning.speed import Cluster

_TESTS = ("test", "val", "valid", "validation")
_LARGE_SIDE = 1024
"""Pixels of the shorter side from which decoding is worth saving."""
_MANY_TWINS = 0.05
"""Share of the images looked at that look like another one, from which a note is given."""
_BF16_SINCE = 8
"""Major compute capability from which on GPUs have bf16."""
_FAST = 0.99
"""EMA momentum that is advised if the teacher decides nothing."""


def run(options: AdviseOptions) -> None:
    """Print the advice. Raises ConfigError where there are too few images or nothing fits the GPU, DataError where
    none can be read."""
    cluster = _cluster(options)
    if options.source == "folder" and options.root is None:
        raise ConfigError("no images are given: dino-ds advise DIR (folder, list, shards, Parquet), or --source photos")
    source = build_source(options.source, options.root, "train", False)
    facts = look_at(source, options.sample, 0, options.workers, load_recipe(None, {}).data.max_pixels)
    found = summarise(facts, source)
    data = _decisive(source, facts)
    if data.images < LEAST_IMAGES:
        cure = f"released weights have 3 channels, these images {data.channels}: gather more images"
        if data.color:
            cure = f"take released features, dino-ds {_embed('vit_small_patch16_224.dino', options)}"
        raise ConfigError(
            f"{data.images} images are too few to learn from (LightlyTrain recommends several thousand): {cure}"
        )
    offered, cluster = cluster, cluster and _useful(data, cluster)
    gpus = _gpus(cluster)
    rows = advise(data, gpus)
    if offered and offered != cluster:
        rows.insert(0, fewer_gpus(data, gpus, offered.world_size))
    name = recipe_for(data, gpus)
    flags = _train_flags(options, name, rows)
    recipe = load_recipe(name, flags)
    result: dict[str, Any] = {
        "decisive": vars(data),
        "found": found,
        "gpu": None if cluster is None else cluster.gpu.name,
        "gpus": gpus.count,
        "gpus_offered": _gpus(offered).count,
        "advice": [vars(row) for row in rows],
        "prediction": None if cluster is None else _predict(with_known_network(recipe), data.images, cluster),
        "expected_knn": list(expected_knn(data, gpus)),
        "command": _command(name, flags, cluster.nodes if cluster else 1, gpus.count),
        "remedies": list(_remedies(recipe)),
        "notes": [
            *_notes(data, gpus, options, recipe.eval.root is not None, found["classes"] is not None),
            *_about_images(data, found, _images(options)),
        ],
    }
    print_result(page(result, options.root or options.source), result, options.json)


def _cluster(options: AdviseOptions) -> Cluster | None:
    """The GPUs that are named, else this machine's; None without any. Raises ConfigError."""
    if options.gpu is None and options.memory_gib is None:
        here = find_gpus()
        if not here:
            if options.gpus is not None or options.nodes > 1:
                named_gpu(None, None)
            return None
        card = similar_gpu(min(gpu.memory_gib for gpu in here), int(here[0].capability.split(".")[0]) >= _BF16_SINCE)
        return Cluster(card, options.gpus or len(here), options.nodes, card.network)
    card = named_gpu(options.gpu, options.memory_gib)
    return Cluster(card, options.gpus or 1, options.nodes, card.network)


def _useful(data: Data, offered: Cluster) -> Cluster:
    """The part of the GPUs, of whole nodes where it is more than one, that these images keep busy."""
    count = useful_gpus(data, _gpus(offered))
    nodes = max(1, count // offered.gpus)
    return Cluster(offered.gpu, min(count, offered.gpus), nodes, offered.network)


def _gpus(cluster: Cluster | None) -> Gpus:
    return Gpus() if cluster is None else Gpus(cluster.world_size, cluster.gpu.memory_gib)


def _decisive(source: Source, facts: Sequence[Facts]) -> Data:
    good = [fact for fact in facts if fact.problem is None]
    channels = Counter(len(fact.mean) for fact in good)
    side = int(np.median([min(fact.width, fact.height) for fact in good]))
    return Data(len(source), side, channels.most_common(1)[0][0])


def _train_flags(options: AdviseOptions, recipe: str, rows: Sequence[Row]) -> dict[str, str]:
    """Options of `dino-ds train` that the recipe does not set so itself."""
    flags = {"data.source": options.source}
    flags |= {"data.root": options.root} if options.root else {}
    flags |= {"eval.root": tests} if (tests := _test_images(options)) else {}
    for row in rows:
        flags |= row.flags
    start = {key: text for key, text in flags.items() if key == "model.init_from"}
    own, wanted = (dict(named_values(load_recipe(recipe, given))) for given in (start, flags))
    return {key: text for key, text in flags.items() if key in start or wanted[key] != own[key]}


def with_known_network(recipe: Recipe) -> Recipe:
    """`recipe` with the network that its released weights are of: they need not be here for a prediction."""
    weights = recipe.model.init_from
    return recipe if weights is None else change_recipe(recipe, {"model.backbone": weights.partition(".")[0]})


def _test_images(options: AdviseOptions) -> str | None:
    """The folder of labelled test images next to a folder `train`, if there is one."""
    if options.source != "folder" or options.root is None or Path(options.root).name != "train":
        return None
    return next((str(one) for name in _TESTS if (one := Path(options.root).with_name(name)).is_dir()), None)


def _predict(recipe: Recipe, images: int, cluster: Cluster) -> dict[str, Any]:
    """The planner's prediction with the ds config that `train` would choose. Raises ConfigError."""
    best = recommend(recipe, cluster, FILLED * cluster.gpu.memory_gib)
    steps = recipe.length.in_steps(recipe.data.global_batch, images // recipe.data.global_batch)
    hours = steps * best.time.seconds / 3600
    return {
        "hours": hours,
        "images_per_second": best.time.images_per_second,
        "memory_gib": best.fit.memory.gib,
        "limit_gib": cluster.gpu.memory_gib,
        "ds_config": f"{best.shape}, {best.fit.config.precision}, micro-batch {best.fit.config.micro_batch}",
    }


def _command(recipe: str, flags: Mapping[str, str], nodes: int, gpus: int) -> str:
    start = ["launch", "--hostfile", "HOSTS", "--"] if nodes > 1 else ["launch", "--ranks", str(gpus), "--"]
    start = start if max(nodes, gpus) > 1 else ["train"]
    words = [word for name, value in {"config": recipe, **flags}.items() for word in (f"--{name}", value)]
    return shlex.join(["dino-ds", *start, *words])


def _remedies(recipe: Recipe) -> Iterator[str]:
    continued, outputs = recipe.model.init_from is not None, recipe.head.prototypes
    slower = "--optimizer.lr 2e-5 or --model.train lora (docs/continue.md)" if continued else "half the --optimizer.lr"
    faster = "--teacher.momentum 0.99 (dino#246), " if recipe.teacher.momentum > _FAST else ""
    if recipe.objective.dino_weight:
        yield (
            f"loss flat near ln {outputs} = {math.log(outputs):.2f}: the teacher is undecided. {faster}"
            "--objective.teacher_temp 0.02 --objective.warmup_teacher_temp 0.02 (dino#43), or milder crops "
            "(docs/your-data.md)"
        )
    yield (
        f"k-NN falls: with --eval.root the best teacher is kept (--weights best); try {slower}; more images, or the "
        f"released weights as they are: {RULE} (dinov2#204)"
    )
    yield "the loss alone says little: DINOv2's authors choose by k-NN (dinov2#143)"


def _notes(data: Data, gpus: Gpus, options: AdviseOptions, has_tests: bool, has_labels: bool) -> Iterator[str]:
    if data.images < FEW_IMAGES:
        yield f"{data.images:,} images are few: LightlyTrain's FAQ recommends several thousand"
    images = _images(options)
    if weights := frozen_weights(data, gpus):
        tests = shlex.quote(_test_images(options) or "TESTS")
        evaluate = f"eval {weights} {_images(options, '')} --test_root {tests}"
        yield (
            "first, without training (DINOv2's model card: good features out of the box)\n"
            f"  dino-ds {evaluate if has_labels else _embed(weights, options)}"
        )
    if released_weights(data, gpus):
        yield (
            "instead, for a small network: distil a large one, as LightlyTrain recommends (docs/distillation.md)\n"
            f"  dino-ds train --config distill_vits16 {images} --teacher.from WEIGHTS --teacher.distill features"
        )
    if not gpus.count:
        yield "no GPU here, none named: --gpu rtx4090-24g (see dino-ds plan) advises for that card"
    else:
        yield f"images must be read and cropped as fast as they are trained on\n  dino-ds bench workers {images}"
    if not has_tests and options.source == "folder":
        yield "no labelled test images: hold some back, and name them with --eval.root, to see k-NN while it trains"


def _images(options: AdviseOptions, section: str = "data.") -> str:
    """The images as options of commands that take a recipe's keys; without a `section`, of commands about models."""
    source = [] if options.source == "folder" else [f"--{section}source", options.source]
    return shlex.join([*source, *([] if options.root is None else [f"--{section}root", options.root])])


def _about_images(data: Data, found: dict[str, Any], images: str) -> Iterator[str]:
    """`images`: the options that name them."""
    channels = "" if data.color else f" --model.in_chans {data.channels}"
    if found["unreadable"]["count"]:
        share = found["unreadable"]["count"] / found["looked_at"]
        yield f"{share:.1%} of the images can't be read: above 1 % the run stops (dino-ds look-data names them)"
    if found["near_duplicates"]["surplus"] > _MANY_TWINS * found["looked_at"]:
        yield f"many images look the same: keep one of each; all are found by\n  dino-ds look-data {images} --sample 0"
    if found["values"].keys() != {"uint8"}:
        # Where the sample doesn't say which, `train` stops and names the flag.
        yield (
            f"values are {', '.join(found['values'])}: which range training takes, or which to give, shows\n"
            f"  dino-ds look-data {images}{channels}"
        )
    if channels:
        yield f"--data.mean and --data.std of these channels: measured by\n  dino-ds look-data {images}{channels}"
    if data.side > _LARGE_SIDE:
        yield "large images are slow to decode: dino-ds shard --shrink 512 makes smaller ones once"


def _embed(weights: str, options: AdviseOptions) -> str:
    return f"embed {weights} {_images(options, '')} --out features.parquet"
