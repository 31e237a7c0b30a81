"""`dino-ds eval`: measures how good frozen features are, by the evaluations of the papers."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dino_ds.basics import files, formatting
from dino_ds.config.evaluation import BENCHMARKS, EVALUATIONS
from dino_ds.config.stages import find_model_folder
from dino_ds.data.images import Source
from dino_ds.data.sources import build_source, labeled_test, recipe_images, training_images
from dino_ds.engine import distributed, process
from dino_ds.errors import ConfigError
from dino_ds.evals.context import EvalContext, Settings
from dino_ds.evals.features import range_for, recipe_of
from dino_ds.evals.suite import describe_result, evaluate, note_on_shared, preflight_eval
from dino_ds.evals.tracking import RESULTS, as_json, name_images, write_results
from dino_ds.options.definition import EvalOptions, Result
from dino_ds.planning.measure import describe_host, host_line
from dino_ds.weights.load import load

_OF_IMAGES = tuple(name for name in EVALUATIONS if name not in BENCHMARKS)
_CONCERNS = {
    **dict.fromkeys(("source", "root", "test_root", "images"), _OF_IMAGES),
    **dict.fromkeys(("k", "temperature"), ("knn",)),
    "workers": (*_OF_IMAGES, "oxford", "paris"),
    "benchmark_root": BENCHMARKS,
}  # option -> the evaluations that it affects; options that are not listed affect all


def run(options: EvalOptions) -> Result:
    """Run every evaluation of `evals`, on all ranks; each result is written as soon as it is computed. If one fails,
    the Result has the results before it, and the error. Raises ConfigError, DataError, CheckpointError."""
    settings = _settings(options)
    process.init_distributed()
    with distributed.raise_on_all_ranks():
        _check_places(options)
    for name in set(options.evals) & set(BENCHMARKS):  # first, for an error that says what they need instead of --root
        preflight_eval(name, settings, lambda: (None, None))
    for name, concerned in _CONCERNS.items():
        if getattr(options, name) is not None and not set(concerned) & set(options.evals):
            problem = f"--{name} changes nothing of {', '.join(options.evals)}"
            raise ConfigError(f"{problem}: it is for {', '.join(concerned)}; add one to --evals, or leave --{name} out")
    began = time.monotonic()
    with distributed.raise_on_all_ranks():
        backbone = load(options.model, process.device())
    context = EvalContext(backbone, settings, process.device(), lambda: _data(options))
    of_images = [name for name in options.evals if name not in BENCHMARKS]
    for name in of_images:
        preflight_eval(name, settings, lambda: context.sources)
    if of_images:
        sources = [source for source in context.sources if source is not None]
        value_range, notes = range_for(backbone, sources)
        left_out = [note for source in sources for note in getattr(source, "notes", ())]
        context.note([*left_out, *notes, *note_on_shared(of_images, *context.sources, "--test_root")[1]])
        context.settings = replace(settings, value_range=value_range)
    root = options.test_root or options.root
    data = name_images(options.source or "folder", root) if options.source or root else None  # None: the run's
    results, failure = dict[str, Any](), None
    try:
        for name in tqdm(options.evals, "evaluations", leave=False, disable=distributed.hidden_bar()):
            start = time.monotonic()
            values = evaluate(name, context)
            results[name] = describe_result(name, context, values, time.monotonic() - start, backbone.about, data)
            with distributed.raise_on_all_ranks():
                if distributed.rank() == 0:
                    for path in _places(options.model, options.out):
                        try:
                            write_results(path, {name: results[name]})
                        except (OSError, ValueError) as error:
                            raise _not_written(path, error) from None
    except BaseException as error:  # the results before a failed evaluation are kept
        if not results:
            raise
        failure = error
    seconds, by_name = time.monotonic() - began, as_json(results)
    metrics = {metric: value for result in by_name.values() for metric, value in result["results"].items()}
    about = {"model": backbone.source, "seconds": round(seconds, 1), "host": describe_host()}
    page = _page(results, context, backbone.source, seconds)
    return Result({**about, "metrics": metrics, "results": by_name}, page, context.notes, error=failure)


def _settings(options: EvalOptions) -> Settings:
    """The settings that are given; others have the defaults of Settings."""
    names = ("size", "temperature", "images", "workers")
    values = {"ks": options.k, **{name: getattr(options, name) for name in names}}
    values["benchmark_root"] = Path(os.path.expanduser(options.benchmark_root)) if options.benchmark_root else None
    return Settings(**{name: value for name, value in values.items() if value is not None})


def _data(options: EvalOptions) -> tuple[Source, Source | None]:
    """Training and test images: the options', else the run's. A folder alone has no test images but held-out ones."""
    source, root, test_root = options.source, options.root, options.test_root
    if recipe := recipe_of(options.model, source, root):
        data, share = recipe.data, recipe.eval.val_share
        if share and data.own_files and not (test_root or recipe.eval.root):
            train = training_images(data, share)
            return train, labeled_test(train)
        test_root = test_root or (recipe.eval.root if data.own_files else data.root)
        source, root = data.source, data.root
    source = source or "folder"
    train = recipe_images(recipe.data) if recipe else build_source(source, root, "train", False)
    if (source == "folder" or ":" in source) and test_root is None:
        return train, None
    return train, build_source(source, test_root or root, "test", False)


def _check_places(options: EvalOptions) -> None:
    """Check, before hours of work, that results can be written and replace none in `out`. Raises ConfigError."""
    paths = _places(options.model, options.out)
    for path in paths:
        try:
            entries = files.read_object(path) if path.is_file() else {}
            is_named = options.out is not None and path is paths[0]
            if is_named and not entries.keys() <= EVALUATIONS.keys():
                raise ValueError("it holds something else than results of dino-ds eval")
            if is_named and (there := entries.keys() & set(options.evals)):
                raise ValueError(f"it holds results of {', '.join(sorted(there))} already")
        except (OSError, ValueError) as error:
            raise _not_written(path, error) from None
        if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise _not_written(path, "it is a folder" if path.is_dir() else f"{path.parent} is not a writable folder")


def _places(model: str, out: str | None) -> list[Path]:
    """Files for results: `out`, and in a run's folder that of the run or checkpoint; other results in them are kept."""
    places, home = [Path(os.path.expanduser(out))] if out else [], find_model_folder(model)
    result = Path(RESULTS)
    return [*places, home.place(result.stem, result.suffix)] if home.is_run else places


def _not_written(path: Path, reason: object) -> ConfigError:
    or_else = "evaluate its teacher.safetensors, with --out" if path.name == RESULTS else "name another with --out"
    return ConfigError(f"{path} can't be written: {reason}; fix it, or {or_else}")


def _page(results: dict[str, Any], context: EvalContext, model: str, seconds: float) -> str:
    train, test = context.image_counts
    sets = [f"{count} {which} images" for count, which in ((train, "training"), (test, "test")) if count]
    # Classes of the source, not of its features, which may not have been computed.
    chance = [f"chance {100 / len(context.labeled_sources[0].classes or ()):.1f} %"] if train else []
    lines = [f"{model}: {', '.join(sets + chance) or 'images of a protocol'}"]
    for name, result in results.items():
        lines.append(f"{name} ({result['seconds']:.1f} s)")
        lines += [f"  {key:<24}{formatting.short(value, 4):>10}" for key, value in result["results"].items()]
    return "\n".join([*lines, f"{seconds:.1f} s; {host_line(describe_host())}"])
