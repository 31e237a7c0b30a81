"""`dino-ds eval`: how good frozen features are, by the evaluations of the papers."""

from __future__ import annotations

import json as jsons
import time
from pathlib import Path
from typing import Any

import numpy as np

from dino_ds import distributed
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.data.multicrop import EvalCrop
from dino_ds.data.sources import Source, build_source
from dino_ds.durable import replace_file
from dino_ds.engine.device import device
from dino_ds.engine.process import init_distributed
from dino_ds.errors import ConfigError, DataError
from dino_ds.evals.features import extract_features, spread_indices
from dino_ds.evals.suite import EVALUATIONS, Labelled, Settings
from dino_ds.measure.host import describe_host, host_line
from dino_ds.names import did_you_mean
from dino_ds.weights.load import Backbone, load

RESULTS = "evaluations.json"
"""In a run folder: the newest result of each evaluation."""


def run(
    *,
    model: str | None,
    evals: str,
    source: str | None,
    root: str | None,
    test_root: str | None,
    size: int | None,
    k: str,
    temperature: float,
    images: int | None,
    workers: int | None,
    out: str | None,
    json: bool,
) -> None:
    """Features once, then every evaluation of `evals`; under a launcher every rank computes its share of the features.

    Raises ConfigError, DataError, CheckpointError.
    """
    if model is None:
        raise ConfigError("give a run folder, a file of weights, a Hugging Face folder or a timm name")
    names, settings = _chosen(evals), Settings(_numbers(k), temperature)
    init_distributed()
    began = time.monotonic()
    with distributed.together():
        backbone = load(model).to(device())
        train_set, test_set = _data(model, source, root, test_root)
        check_labels(train_set, test_set)
    size = size or backbone.image_size
    limit = images or max(len(train_set), len(test_set))
    train = _features(backbone, train_set, size, limit, workers)
    test = _features(backbone, test_set, size, limit, workers)
    results: dict[str, Any] = {}
    if distributed.rank() == 0:
        for name in names:
            results.update(EVALUATIONS[name](train, test, settings))
    distributed.barrier()
    if distributed.rank() == 0:
        seconds = time.monotonic() - began
        _write(results, model, out)
        _show(results, (train, test), backbone, seconds, json)


def check_labels(train: Source, test: Source) -> None:
    """Raises DataError where a labelled evaluation is not possible."""
    for which, images in (("training", train), ("test", test)):
        if images.labels is None or images.classes is None:
            raise DataError(f"the {which} images have no classes: sort them into class folders, or give labels")
    missing = sorted(set(test.classes or []) - set(train.classes or []))
    if missing:
        raise DataError(f"{len(missing)} classes of the test images are not in training: {', '.join(missing[:5])}")
    if train.classes != test.classes:
        raise DataError(
            f"the test images have {len(test.classes or [])} classes, the training images "
            f"{len(train.classes or [])}: they must be the same classes, or their numbers mean other things"
        )


def _chosen(evals: str) -> list[str]:
    names = [name.strip() for name in evals.split(",") if name.strip()]
    for name in names:
        if name not in EVALUATIONS:
            there = ", ".join(EVALUATIONS)
            raise ConfigError(f"--evals {name!r}: there is {there}.{did_you_mean(name, EVALUATIONS)}")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise ConfigError(f"--k {text!r}: wanted are numbers of neighbours such as 10,20,100,200")
    return numbers


def find_images(model: str, source: str | None, root: str | None) -> Source:
    """The images that are named, else the training images of the run `model`. Raises ConfigError, DataError."""
    if recipe := _recipe_of(model, source, root):
        source, root = recipe.data.source, recipe.data.root
    if source is None and root is None:
        raise ConfigError("name images: --root DIR (folder, list, shards, Parquet), or --source photos")
    return build_source(source or "folder", root, "train", False)


def _recipe_of(model: str, source: str | None, root: str | None) -> Recipe | None:
    """Of the run `model`, where no images are named."""
    config = Path(model) / "config.yaml"
    return load_recipe(str(config), {}) if source is None and root is None and config.is_file() else None


def _data(model: str, source: str | None, root: str | None, test_root: str | None) -> tuple[Source, Source]:
    """Training and test images: those that are named, else those of the run."""
    if recipe := _recipe_of(model, source, root):
        data = recipe.data
        test_root = test_root or (recipe.eval.root if data.own_files else data.root)
        source, root = data.source, data.root
    source = source or "folder"
    if (source == "folder" or ":" in source) and test_root is None:
        raise DataError("there are no test images: name labelled ones with --test_root DIR (and --root DIR to compare)")
    return build_source(source, root, "train", False), build_source(source, test_root or root, "test", False)


def _features(backbone: Backbone, images: Source, size: int, limit: int, workers: int | None) -> Labelled:
    """Of the labelled ones of at most `limit` images, spread evenly."""
    labels = np.asarray(images.labels)
    labelled = np.flatnonzero(labels >= 0)
    indices = [int(labelled[i]) for i in spread_indices(len(labelled), limit)]
    found = extract_features(backbone.features, images, indices, EvalCrop(size), device(), workers)
    assert found is not None  # nobody asks it to give up
    return Labelled(found[0].float(), found[1], len(images.classes or []))


def _write(results: dict[str, Any], model: str, out: str | None) -> None:
    """Into `out`, and for a run into its folder, where other results stay."""
    places = [Path(out).expanduser()] if out else []
    if (Path(model) / "config.yaml").is_file():
        places.append(Path(model) / RESULTS)
    for place in places:
        try:
            before = jsons.loads(place.read_text()) if place.is_file() else {}
            replace_file(place, jsons.dumps({**before, **results}, indent=1) + "\n")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{place} can't be written: {error}; mend it, or name another with --out") from None


def _show(
    results: dict[str, Any], sets: tuple[Labelled, Labelled], backbone: Backbone, seconds: float, json: bool
) -> None:
    images = [len(part.labels) for part in sets]
    if json:
        about = {"model": backbone.source, "train_images": images[0], "test_images": images[1]}
        print(jsons.dumps({**about, "seconds": round(seconds, 1), "host": describe_host(), "results": results}))
        return
    print(f"{backbone.source}: {images[0]} training and {images[1]} test images, {sets[0].classes} classes")
    for name, value in results.items():
        print(f"  {name:<24}{value:10.4g}")
    print(f"chance {100 / sets[0].classes:.1f} %; {seconds:.1f} s; {host_line(describe_host())}")
