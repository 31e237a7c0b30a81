"""`dino-ds eval`: how good frozen features are, by the evaluations of the papers."""

from __future__ import annotations

import json as jsons
import os
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dino_ds import distributed
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.data.sources import Source, build_source
from dino_ds.engine.device import device
from dino_ds.engine.process import init_distributed
from dino_ds.errors import ConfigError
from dino_ds.evals.results import RESULTS, as_json, describe_result, read_results, write_results
from dino_ds.evals.subject import Settings, Subject
from dino_ds.evals.suite import EVALUATIONS, evaluate
from dino_ds.measure.host import describe_host, host_line
from dino_ds.names import did_you_mean
from dino_ds.weights.load import Backbone, load


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
    epochs: int,
    batch: int,
    workers: int | None,
    out: str | None,
    json: bool,
) -> None:
    """Every evaluation of `evals`, by all ranks of the launcher; each result is written as soon as it is there.

    Raises ConfigError, DataError, CheckpointError.
    """
    if model is None:
        raise ConfigError("give a run folder, a file of weights, a Hugging Face folder or a timm name")
    names = _chosen(evals)
    settings = Settings(
        ks=_numbers(k),
        temperature=temperature,
        size=size,
        images=images,
        epochs=epochs,
        batch=batch,
        workers=workers,
        root=Path(root).expanduser() if root else None,
    )
    init_distributed()
    with distributed.together():
        _check_places(model, out)
    began = time.monotonic()
    with distributed.together():
        backbone = load(model).to(device())
    subject = Subject(backbone, settings, device(), lambda: _data(model, source, root, test_root))
    results: dict[str, Any] = {}
    try:
        for name in tqdm(names, "evaluations", leave=False, disable=None if distributed.rank() == 0 else True):
            start = time.monotonic()
            values = evaluate(name, subject)
            results[name] = describe_result(
                values,
                time.monotonic() - start,
                backbone.about.get("step"),
                backbone.about.get("images"),
                *subject.image_counts,
            )
            with distributed.together():
                if distributed.rank() == 0:
                    _write({name: results[name]}, model, out)
    finally:  # an evaluation that fails takes nothing from those before it
        if distributed.rank() == 0 and results:
            for note in subject.notes:
                print(note, file=sys.stderr)
            _show(results, subject, backbone, time.monotonic() - began, json)


def _chosen(evals: str) -> list[str]:
    names = [name.strip() for name in evals.split(",") if name.strip()]
    for name in names:
        if name not in EVALUATIONS:
            there = ", ".join(EVALUATIONS)
            raise ConfigError(f"--evals {name!r}: there is {there}.{did_you_mean(name, EVALUATIONS)}")
    if not names:
        raise ConfigError(f"--evals names no evaluation: there is {', '.join(EVALUATIONS)}")
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


def _data(model: str, source: str | None, root: str | None, test_root: str | None) -> tuple[Source, Source | None]:
    """Training and test images: those that are named, else those of the run. A folder alone has no test images."""
    if recipe := _recipe_of(model, source, root):
        data = recipe.data
        test_root = test_root or (recipe.eval.root if data.own_files else data.root)
        source, root = data.source, data.root
    source = source or "folder"
    train = build_source(source, root, "train", False)
    if (source == "folder" or ":" in source) and test_root is None:
        return train, None
    return train, build_source(source, test_root or root, "test", False)


def _write(results: dict[str, Any], model: str, out: str | None) -> None:
    for place in _places(model, out):
        try:
            write_results(place, results)
        except (OSError, ValueError) as error:
            raise _not_written(place, error) from None


def _check_places(model: str, out: str | None) -> None:
    """An evaluation may take hours: what is wrong with its file is said before. Raises ConfigError."""
    for place in _places(model, out):
        try:
            read_results(place)
        except (OSError, ValueError) as error:
            raise _not_written(place, error) from None
        if place.is_dir() or not os.access(place.parent, os.W_OK | os.X_OK):
            raise _not_written(
                place, "it is a folder" if place.is_dir() else f"{place.parent} is no folder to write to"
            )


def _places(model: str, out: str | None) -> list[Path]:
    """`out`, and of a run the file in its folder; other results in them stay."""
    places = [Path(out).expanduser()] if out else []
    return [*places, Path(model) / RESULTS] if (Path(model) / "config.yaml").is_file() else places


def _not_written(place: Path, reason: object) -> ConfigError:
    return ConfigError(f"{place} can't be written: {reason}; mend it, or name another with --out")


def _show(results: dict[str, Any], subject: Subject, backbone: Backbone, seconds: float, json: bool) -> None:
    if json:
        about = {"model": backbone.source, "seconds": round(seconds, 1), "host": describe_host()}
        print(jsons.dumps({**about, "results": as_json(results)}))
        return
    train, test = subject.image_counts
    sets = [f"{count} {which} images" for count, which in ((train, "training"), (test, "test")) if count]
    # Of the source, not of its features: rank 0 alone is here, and those may not have been wanted.
    chance = [f"chance {100 / len(subject.train_source.classes or ()):.1f} %"] if train else []
    print(f"{backbone.source}: {', '.join(sets + chance) or 'images of a protocol'}")
    for name, result in results.items():
        print(f"{name} ({result['seconds']:.1f} s)")
        for key, value in result["results"].items():
            print(f"  {key:<24}{value:10.4g}")
    print(f"{seconds:.1f} s; {host_line(describe_host())}")
