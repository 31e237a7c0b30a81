"""The trials of `dino-ds bench tune`: each runs in processes of its own, and is kept in a file once it has ended."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import psutil
import torch
from tqdm import tqdm

from dino_ds.basics.files import replace_file
from dino_ds.basics.ranges import AUGMENTATION, listen
from dino_ds.config.ds_schema import DsConfig
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.data.batches import LoaderOptions, MultiCropDataset
from dino_ds.data.decode import open_image
from dino_ds.data.loader import to_device
from dino_ds.data.multicrop import MultiCrop, cut_crops, largest_shrink
from dino_ds.data.normalization import with_image_settings
from dino_ds.data.sources import training_images
from dino_ds.engine import distributed
from dino_ds.engine.process import device, resident_mib
from dino_ds.errors import ConfigError, DataError
from dino_ds.planning.bench.step import trace_steps
from dino_ds.planning.fit import with_batch
from dino_ds.planning.measure import (
    MEMORY_STEPS,
    ChildFailed,
    ChildLimits,
    ChildOutOfMemory,
    GpuPeak,
    PartTimes,
    build_trial,
    describe_host,
    real_feed,
    resolve,
    run_in_child,
    run_on_data,
    synchronize,
)

ONCE = ("optimizer", "center", "ema")
"""Parts of a step that run once, however many micro-batches it has."""
STAGES = ("read", "decode", "crop", "copy", "augmentation")
"""Stages of the loading of an image, in order; the last one runs on the training's device."""
_MOST_STEPS = 40
_TIMES_LONGER = 20
"""A trial is given up after so many times its measured seconds, beyond what its start takes."""
_SLOW = 0.6
"""Share of the highest rate below which a setting is not measured again."""
_START_SECONDS = 120.0
_LOADED = 16
"""Images whose loading is timed stage by stage."""


@dataclass(frozen=True)
class Setting:
    """A recipe and a ds JSON to measure: the one at `path` with `changes`. learned: how what is learned differs from
    the given recipe."""

    name: str
    recipe: Recipe
    ds: dict[str, Any]
    path: str
    config: DsConfig
    changes: Mapping[str, Any] = field(default_factory=dict)
    learned: str = "rounding only"

    @property
    def resolved(self) -> str:
        """Text that is equal for settings that are the same step."""
        options = {"dino_ds": self.config.performance, "blocks": self.config.checkpoint_blocks}
        return repr((self.recipe.crops, sorted((self.config.raw | options).items())))

    @property
    def measured_batch(self) -> int:
        """Images of a rank in a measured step: two micro-batches, since more would repeat the second one."""
        return self.config.micro_batch * min(self.config.accumulation, 2)


@dataclass
class Measurement:
    """The measured steps of a setting. rates: images/s of each; rounds: median of each round; parts: seconds of a
    whole step by part; peak_mib: peak memory of a rank; failed: why there are none."""

    rates: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    peak_mib: float = 0.0
    failed: str = ""

    @property
    def images_per_second(self) -> float:
        return median(self.rates)

    @property
    def spread(self) -> float:
        """The interquartile range of the steps or the range of the rounds, if larger, as a share of the median."""
        low, _, high = quantiles(self.rates, n=4)
        return max(high - low, max(self.rounds) - min(self.rounds)) / self.images_per_second


def beats(one: Measurement, other: Measurement) -> bool:
    """Whether `one` is faster than `other` by more than both spreads."""
    margin = max(one.spread, other.spread)
    return one.images_per_second > other.images_per_second * (1 + margin)


class Trials:
    """Runs trials one after the other until the time is up. What a file of an earlier call holds is not run again.

    limit_gib: memory that a rank may take. Raises ConfigError for a file that another machine or version wrote.
    """

    def __init__(self, path: Path, minutes: float, threads: int, ranks: int, limit_gib: float, resume: bool) -> None:
        self._path, self._threads, self.ranks, self.limit_gib = path, threads, ranks, limit_gib
        self.seconds = 60 * minutes
        self._end = time.monotonic() + self.seconds
        host = describe_host()
        same = {"host": host["host"], "gpu": host["gpu"], "versions": host["versions"], "limit_gib": limit_gib}
        self.kept: dict[str, Any] = {"made": same, "trials": {}}
        if resume:
            self._read(same)
        self._busy, self._began = _busy_seconds(), time.monotonic()

    def _read(self, same: dict[str, Any]) -> None:
        try:
            self.kept = json.loads(self._path.read_text(encoding="utf-8"))["kept"]
            differs = [name for name in same if name != "limit_gib" and self.kept["made"][name] != same[name]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--resume: {self._path} has no trials of dino-ds bench tune ({type(error).__name__})"
            ) from None
        if differs:
            raise ConfigError(f"--resume: the trials of {self._path} had another {differs[0]}: leave --resume out")

    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    @property
    def others_cores(self) -> float:
        """Cores that programs other than this one and its trials have kept busy, on average since the beginning."""
        elapsed = time.monotonic() - self._began
        return max(0.0, (_busy_seconds() - self._busy) / max(elapsed, 1e-9))

    def run(self, function: Callable[..., dict[str, Any]], seconds: float, **kwargs: Any) -> dict[str, Any]:
        """Return what `function` measured in about `seconds`, or {"failed": why}."""
        words = json.dumps([function.__name__, kwargs, self._threads, self.ranks], sort_keys=True)
        key = hashlib.sha256(words.encode()).hexdigest()
        if key not in self.kept["trials"]:
            if self.seconds_left() <= 0:
                return {"failed": "no time was left: --minutes gives more, --resume goes on"}
            self.kept["trials"][key] = self._measure(function, seconds, kwargs)
            replace_file(self._path, json.dumps({"kept": self.kept}))
        result: dict[str, Any] = self.kept["trials"][key]
        return result

    def _measure(
        self, function: Callable[..., dict[str, Any]], seconds: float, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        limits = ChildLimits(self.ranks, self.limit_gib, _START_SECONDS + _TIMES_LONGER * seconds)
        try:
            child = run_in_child(function, self._threads, limits, **kwargs, seconds=seconds)
        except ChildFailed as error:
            return {"failed": str(error), "out_of_memory": isinstance(error, ChildOutOfMemory)}
        return {"peak_mib": child.peak_mib, **child.value}

    def step(self, setting: Setting, seconds: float, number: int = 0, **kwargs: Any) -> dict[str, Any]:
        """Run the trial `number` of a setting's step."""
        ds = with_batch(setting.ds, setting.config.micro_batch, "auto")
        recipe = setting.recipe.model_dump(mode="json")
        words = {"recipe": recipe, "ds": ds, "ds_path": setting.path, "batch": setting.measured_batch}
        return self.run(measure_step, seconds, setting=words, number=number, **kwargs)

    def compare(self, settings: list[Setting], seconds: float, rounds: int = 2) -> dict[str, Measurement]:
        """Measure settings in rounds, every second one in reverse order, so that a disturbance meets all alike."""
        results = {setting.name: Measurement() for setting in settings}
        for number in range(rounds):
            top = max((result.images_per_second for result in results.values() if result.rates), default=0.0)
            for setting in tqdm(settings[:: -1 if number % 2 else 1], desc="trials", leave=False, disable=None):
                result = results[setting.name]
                if not number or (result.rates and result.images_per_second > _SLOW * top):
                    self._add(result, self.step(setting, seconds, number), setting)
        return results

    def _add(self, result: Measurement, trial: dict[str, Any], setting: Setting) -> None:
        """Add a trial to a setting's result; a later round for which no time is left takes nothing away."""
        if "failed" in trial:
            result.failed = "" if result.rates else trial["failed"]
            return
        whole, measured = setting.config.accumulation, setting.measured_batch // setting.config.micro_batch
        repeated, mean = whole / measured, fmean(trial["seconds"])
        once = sum(trial["parts"].get(part, 0.0) for part in ONCE) / mean
        scale = once + (1 - once) * repeated  # a whole step's time, as a multiple of the measured one's
        images = setting.config.micro_batch * whole * self.ranks
        rates = [images / (seconds * scale) for seconds in trial["seconds"]]
        result.rates += rates
        result.rounds.append(median(rates))
        result.peak_mib = max(result.peak_mib, trial["peak_mib"])
        result.parts = {part: s * (1.0 if part in ONCE else repeated) for part, s in trial["parts"].items()}


def _busy_seconds() -> float:
    """CPU seconds that this machine has spent on other programs than this one and its ended children."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    busy = sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return float(busy - own.user - own.system - own.children_user - own.children_system)


def measure_step(
    setting: dict[str, Any], seconds: float, number: int, real_images: bool = False, profile: str | None = None
) -> dict[str, Any]:
    """Measure steps for about `seconds`, in a trial's process. number: of the round; profile: folder for a trace."""
    peak = GpuPeak() if torch.cuda.is_available() else None
    recipe, config = resolve(Recipe.model_validate(setting.pop("recipe")), **setting)
    trial, parts = build_trial(recipe, config), PartTimes(device(), waits=True)
    with ExitStack() as feeds:
        step: Callable[[], object] = trial.run
        if real_images:
            feed = feeds.enter_context(closing(real_feed(recipe, config.micro_batch)))
            step = partial(run_on_data, trial, feed, recipe.seed)
        for _ in range(MEMORY_STEPS):
            began = time.perf_counter()
            step()
            synchronize(device())
        wanted = round(seconds / (time.perf_counter() - began))
        steps, times = max(2, min(_MOST_STEPS, distributed.gather_objects(wanted)[0])), []
        for _ in range(steps):
            began = time.perf_counter()
            with listen(parts):
                step()
            synchronize(device())
            times.append(time.perf_counter() - began)
        traced = trace_steps(step, Path(profile)) if profile else {}
    spent = {name: total / steps for name, total in parts.read().items()}
    return {"seconds": times, "parts": spent, "peak_mib": peak.mib() if peak else resident_mib(peak=True), **traced}


def measure_loader(recipe: dict[str, Any], batch: int, seconds: float) -> dict[str, Any]:
    """Measure the images/s of a rank's loader alone, in a trial's process."""
    loaded = 0
    with closing(real_feed(_with_batch(recipe, batch), batch)) as feed:
        next(feed)  # the loader's processes have started
        began = time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds or not loaded:
            next(feed)
            synchronize(device())
            loaded += batch
    return {"images_per_second": loaded / elapsed}


def measure_stages(recipe: dict[str, Any], batch: int, seconds: float) -> dict[str, Any]:
    """Measure the milliseconds of one process for each stage of an image's loading, in a trial's process: the medians
    of some images, after one round that isn't counted."""
    made = _with_batch(recipe, batch)
    source = training_images(made.data, made.eval.val_share)
    made, _ = with_image_settings(made, source)
    options, multicrop = LoaderOptions.of(made, micro_batch=batch), MultiCrop.of(made)
    spent: dict[str, list[float]] = {stage: [] for stage in STAGES}
    read = getattr(source, "read", source.load)
    for index in [*range(min(2, len(source))), *range(min(_LOADED, len(source)))]:
        times = [time.perf_counter()]
        read(index)
        times.append(time.perf_counter())
        image = open_image(source, index, options.max_pixels, options.value_range, options.channels)
        sampled = multicrop.sample(image.width, image.height, index)
        image.decode(largest_shrink([crop.box for crop in sampled], multicrop.sizes))
        times.append(time.perf_counter())
        cut_crops(image, sampled, multicrop.sizes)
        times.append(time.perf_counter())
        for stage, before, after in zip(STAGES, times, times[1:], strict=False):
            spent[stage].append(after - before)
    batches = MultiCropDataset(source, multicrop, options)
    for _ in range(3):
        loaded = batches.__getitems__([(0, index) for index in range(batch)])
        if isinstance(loaded, DataError):
            raise loaded
        parts, began = PartTimes(device(), waits=True), time.perf_counter()
        with listen(parts):
            to_device(loaded, device())
        synchronize(device())
        augmented = parts.read().get(AUGMENTATION, 0.0)
        spent["augmentation"].append(augmented / batch)
        spent["copy"].append((time.perf_counter() - began - augmented) / batch)
    each = {stage: median(seconds) for stage, seconds in spent.items()}
    each["decode"] = max(0.0, each["decode"] - each["read"])  # opening an image reads it
    each["crop"] = max(0.0, each["crop"] - each["decode"])  # and cutting decodes it
    return {"milliseconds": {stage: 1000 * seconds for stage, seconds in each.items()}}


def _with_batch(recipe: dict[str, Any], batch: int) -> Recipe:
    images = {"data.global_batch": str(batch * distributed.world_size())}
    return change_recipe(Recipe.model_validate(recipe), images)
