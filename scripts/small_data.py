"""What an objective learns from few images in a fixed time of the CPU, next to raw pixels and the untrained network.

`python -m scripts.small_data --data FOLDER|cifar10[:IMAGES] --objective RECIPE [--set key=value ...] [--seeds 3]
[--minutes 15] [--json]`. FOLDER holds train/ and test/ with class folders; torchvision's sets lie in --root.

The budget is CPU time, minutes of CORES cores, so that other load hardly counts. Schedules depend on the length, so it
is fixed before the run, from the rate of the first steps; it is in images, the same for all seeds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import torch

import dino_ds
from dino_ds.basics.formatting import markdown_table
from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.data.images import Source, evenly_spaced_indices
from dino_ds.data.normalization import Normalization
from dino_ds.data.sources import TORCHVISION_SETS, build_source
from dino_ds.errors import ConfigError, UserError
from dino_ds.evals.context import EvalContext, Settings
from dino_ds.evals.features import raw_pixels
from dino_ds.evals.suite import evaluate
from dino_ds.method.build import build_network, fitting_levers
from dino_ds.models.specs.backbones import FROM_SOURCE
from dino_ds.options.definition import Result
from dino_ds.planning.measure import describe_host, host_line
from dino_ds.weights.load import Backbone
from dino_ds.weights.start import as_source

CORES = 2
NEIGHBORS = 20
_RATE_STEPS = (10, 30)
"""Steps between which the rate is measured: the first ones allocate memory."""
_RESULTS = {"knn": f"knn_{NEIGHBORS}", "ridge": "ridge", "linear": "linear"}

Accuracies = dict[str, float]
"""Top-1 in percent by evaluation."""


class Part:
    """Images of one split, evenly spread over classes, as a class for `data.source`.

    `root` is SPLIT:IMAGES:SET:FOLDER, where IMAGES is 0 for all and SET is "folder" or one of torchvision's.
    """

    def __init__(self, root: str) -> None:
        split, count, name, folder = root.split(":", 3)
        place = f"{folder}/{split}" if name == "folder" else folder
        images = build_source(name, place, "train" if split == "train" else "test", download=False)
        if images.labels is None or images.classes is None:
            raise ConfigError(f"{place} has no class folders: accuracy needs labels")
        by_class = sorted(range(len(images)), key=images.labels.__getitem__)
        self._images = images
        self._rows = [by_class[i] for i in evenly_spaced_indices(len(images), int(count) or len(images))]
        self.labels = [images.labels[row] for row in self._rows]
        self.classes: list[str] | None = images.classes

    def __len__(self) -> int:
        return len(self._rows)

    def load(self, index: int) -> Any:
        return self._images.load(self._rows[index])

    def name(self, index: int) -> str:
        return self._images.name(self._rows[index])


def main(words: Sequence[str]) -> None:
    """Measure what the command line asks for. Raises UserError."""
    given = _parse(words)
    own, asked = _keys_of(given.data, given.root), dict(_pair(text) for text in given.set)
    if taken := sorted({"length", "seed", "log_every", *own} & asked.keys()):
        raise ConfigError(f"--set {taken[0]}: the bench sets it itself, by --data, --minutes and --seeds: leave it out")
    keys = own | asked
    recipe = _recipe(given.objective, keys)
    sources = Part(keys["data.root"]), Part(_test_root(keys["data.root"], given.test))
    images = images_within(given.minutes * CORES * 60, images_per_second(given.objective, keys), recipe)
    runs = []
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        runs.append(measure(given.objective, keys, images, seed, lambda model: accuracies(model, sources, given.evals)))
        print(f"seed {seed}: {_line(runs[-1])}", file=sys.stderr, flush=True)
    pixels = SimpleNamespace(
        features=raw_pixels, image_size=recipe.crops.global_size, normalization=Normalization.of(recipe)
    )
    result = {
        "data": given.data,
        "train_images": len(sources[0]),
        "test_images": len(sources[1]),
        "objective": given.objective,
        "set": given.set,
        "minutes": given.minutes,
        "images": images,
        "raw_pixels": accuracies(pixels, sources, given.evals),
        "runs": runs,
        "host": describe_host(),
    }
    Result(result, page(result)).show(given.json)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.small_data", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", required=True, help="FOLDER with train/ and test/, or cifar10; :N takes N images")
    parser.add_argument("--root", default="data", help="where torchvision's data sets lie")
    parser.add_argument("--test", default="test", help="folder of the test images within FOLDER")
    parser.add_argument("--objective", required=True, help="name or file of a recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the recipe")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=15, help=f"CPU time of training, of {CORES} cores")
    parser.add_argument("--evals", type=lambda text: text.split(","), default=list(_RESULTS), help=",".join(_RESULTS))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    if given.seeds < 1 or given.minutes <= 0 or set(given.evals) - set(_RESULTS):
        parser.error(f"--seeds 1 or more, --minutes above 0, --evals of {','.join(_RESULTS)}")
    return given


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: write KEY=VALUE, such as --set model.patch_size=4")
    return key, value


def _keys_of(data: str, root: str) -> dict[str, str]:
    """Keys of the recipe for training on `data`, without evaluations meanwhile."""
    name, _, count = data.partition(":")
    if count and not count.isdecimal():
        raise ConfigError(f"--data {data}: write FOLDER:IMAGES or cifar10:IMAGES, a whole number")
    chosen, folder = (name, root) if name in TORCHVISION_SETS else ("folder", name)
    place = f"train:{int(count or 0)}:{chosen}:{folder}"
    source = {"data.source": f"{Part.__module__}:Part".replace("__main__", "scripts.small_data"), "data.root": place}
    source |= {"data.workers": "0", "data.cache_gib": "0"}
    return source | {"eval.root": "none", "eval.every": "0 steps", "save_every": "1000000 steps"}


def _recipe(objective: str, keys: Mapping[str, str]) -> Recipe:
    """The recipe that `train` makes of these keys."""
    recipe = load_recipe(objective, keys)
    return as_source(recipe, None) if recipe.model.backbone == FROM_SOURCE else recipe


def _test_root(train: str, folder: str) -> str:
    _, _, rest = train.split(":", 2)
    return f"{folder}:0:{rest}"


def images_per_second(objective: str, keys: Mapping[str, str]) -> float:
    """Training's images per second of CPU time, by the first steps of a run."""
    first, last = _RATE_STEPS
    _, seconds = _train(objective, {**keys, "log_every": str(first)}, last)
    return int(_recipe(objective, keys).data.global_batch) / seconds


def images_within(seconds: float, rate: float, recipe: Recipe) -> int:
    """Images that training sees within `seconds`, in whole steps. Raises ConfigError where these are fewer than two."""
    steps = int(seconds * rate) // recipe.data.global_batch
    if steps < 2:
        raise ConfigError(f"{seconds:g} CPU seconds are too short at {rate:.3g} images a second: raise --minutes")
    return steps * recipe.data.global_batch


def measure(objective: str, keys: Mapping[str, str], images: int, seed: int, judge: Any) -> dict[str, Any]:
    """Train once: what `judge` says of the untrained network and the teacher, and the CPU minutes of training."""
    steps = images // _recipe(objective, keys).data.global_batch
    often = {"log_every": str(min(50, steps // 2))}  # CPU time is read where a line is logged
    keys = {**keys, **often, "seed": str(seed), "length": f"{images} images"}
    before = judge(untrained(_recipe(objective, keys)))
    (model, collapsed), step_seconds = _train(objective, keys)
    return {
        "seed": seed,
        "cpu_minutes": step_seconds * steps / 60,
        "collapsed": collapsed,
        "untrained": before,
        "teacher": judge(model),
    }


def _train(objective: str, keys: Mapping[str, str], steps: int | None = None) -> tuple[tuple[Backbone, bool], float]:
    """The teacher of a run, or of its first `steps` steps, with whether it has collapsed; CPU seconds of a step."""
    seen: list[tuple[int, float]] = []

    def note(step: int, line: dict[str, Any]) -> None:
        seen.append((step, time.process_time()))

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        options: dict[str, Any] = dict(keys)
        run = dino_ds.train(objective, run_dir=f"{folder}/run", max_steps=steps, callbacks=[note], **options)
        collapsed = bool(run.metrics[-1].get("collapsed"))
        model = run.load()
    (first, began), (last, ended) = seen[0], seen[-1]
    return (model, collapsed), (ended - began) / (last - first)


def untrained(recipe: Recipe) -> Backbone:
    """The network that a run of this recipe begins with."""
    network = build_network(recipe, fitting_levers(recipe, PerformanceOptions()))
    model = Backbone(network.backbone, recipe.crops.global_size, "untrained", {})
    model.normalization = Normalization.of(recipe)
    return model


def accuracies(model: Any, sources: tuple[Source, Source], names: Sequence[str]) -> Accuracies:
    """What frozen features of the training images say of the test images."""
    settings = Settings(ks=(NEIGHBORS,), workers=0)
    context = EvalContext(model, settings, torch.device("cpu"), lambda: sources, progress=False)
    return {name: evaluate(name, context)[_RESULTS[name]] for name in names}


def page(result: Mapping[str, Any]) -> str:
    """A table of accuracies, mean and standard deviation over seeds."""
    runs, names = result["runs"], list(result["raw_pixels"])
    rows = [("raw pixels", *(f"{result['raw_pixels'][name]:.1f}" for name in names))]
    for who in ("untrained", "teacher"):
        rows.append((who, *(_mean_text([run[who][name] for run in runs]) for name in names)))
    collapsed = sum(run["collapsed"] for run in runs)
    cpu = mean(run["cpu_minutes"] for run in runs)
    return "\n".join(
        [
            f"{result['objective']} {' '.join(result['set'])} on {result['data']}: "
            f"{result['train_images']} training and {result['test_images']} test images",
            host_line(result["host"]),
            "",
            markdown_table(("top-1, %", *(_RESULTS[name] for name in names)), rows),
            "",
            f"{result['images']} images in {cpu:.1f} CPU minutes, {len(runs)} seed(s), {collapsed} collapsed",
        ]
    )


def _mean_text(values: Sequence[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def _line(run: Mapping[str, Any]) -> str:
    found = ", ".join(f"{name} {run['untrained'][name]:.1f} -> {run['teacher'][name]:.1f}" for name in run["teacher"])
    return f"{found}, {run['cpu_minutes']:.2f} CPU minutes{', collapsed' if run['collapsed'] else ''}"


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
