"""Finds by measuring the largest and the fastest micro-batch, the number of loader processes, and what each lever (a ds
config or an option that may speed up a step) gains. Trials run in processes of their own; a file keeps the results."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import psutil
import torch
from tqdm import tqdm

from dino_ds.basics.files import replace_file
from dino_ds.basics.ranges import AUGMENTATION, COPY, listen
from dino_ds.config.ds_config import CHECKOUT, load_ds_config, resolve_ds_config
from dino_ds.config.ds_schema import DsConfig, check_offload
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import GIB, Memory, estimate_memory
from dino_ds.costs.step_costs import count_parameters
from dino_ds.data.feed import Position
from dino_ds.data.normalization import with_image_settings
from dino_ds.data.sources import training_images
from dino_ds.engine import distributed
from dino_ds.engine.process import device, fp16_supported, memory_gib, resident_mib
from dino_ds.errors import ConfigError, NotEstimated, OutOfMemory
from dino_ds.method.build import build_prefetcher
from dino_ds.options.commands import BenchTuneOptions
from dino_ds.planning import measure
from dino_ds.planning.bench.step import trace_steps
from dino_ds.planning.fit import micro_batches, with_batch, with_margins

ENOUGH_WAIT = 0.02  # share of a step that may pass waiting for images: more loader processes aren't worth it


class Search:
    """Tunes the step of a recipe and a ds JSON on this machine, part by part.

    Args:
        path: the ds JSON.
        changes: keys that the user changes in it, and that are changed in the other ds JSONs that are tried too.

    Attributes:
        sizes, levers, loaders: what was measured of each micro-batch, lever and number of loader processes.
        limited_by: why no larger micro-batch was tried; skipped: why other settings were not measured.
        pair: the setting as it was given and the one that was found, measured together at the end.
        best: the second of the pair if it is faster or the first did not run, else the first.
    """

    def __init__(self, recipe: Recipe, path: str, changes: Mapping[str, Any], trials: Trials) -> None:
        self._recipe, self._path, self._changes, self._trials = recipe, path, changes, trials
        self._libraries = round(memory_gib() * GIB)
        self.has_images = bool(recipe.data.root or recipe.data.mixture or recipe.data.source != "folder")
        self.sizes, self.levers, self.loaders, self.pair = (dict[str, Measurement]() for _ in range(4))
        self.limited_by, self.skipped = "", dict[str, str]()
        self.best: Setting | None = None

    def run(self) -> None:
        """Raises OutOfMemory if no micro-batch fits or runs, ConfigError for batch sizes that contradict each other."""
        given, best = self._setting("as given", self._recipe, self._path), None
        finds = [self._find_micro_batch, self._find_lever, *([self._find_workers] if self.has_images else [])]
        # Shares of the time after which no trial of a part begins; the rest is for the comparison at the end.
        for share, find in zip((0.3, 0.65, 0.8), finds, strict=False):
            self._trials.until(share)
            best = find(best or given)
        self._trials.until(math.inf)  # the comparison runs even if the time is up
        tuned = replace(best or given, name="tuned")
        self.pair = self._trials.compare([given, tuned], rounds=3, real_images=self.has_images)
        shipped, found = self.pair["as given"], self.pair["tuned"]
        self.best = given if shipped.rounds and not (found.rounds and found.beats(shipped)) else tuned

    def _compare(self, settings: Sequence[Setting], rounds: int = 2, **kwargs: Any) -> dict[str, Measurement]:
        results = self._trials.compare(settings, rounds, **kwargs)
        self.skipped |= {name: result.failed for name, result in results.items() if result.failed}
        return results

    def _setting(
        self, name: str, recipe: Recipe, path: str, changes: Mapping[str, Any] | None = None, micro: int | None = None
    ) -> Setting:
        batch, ranks, on_gpu = recipe.data.global_batch, self._trials.ranks, device().type == "cuda"
        changes = {**self._changes, **(changes or {})}
        ds = load_ds_config(path, changes)
        ds = ds if micro is None else with_batch(ds, micro, batch // (micro * ranks))
        config = resolve_ds_config(dict(ds), path, batch, ranks, fp16_supported(), count_parameters(recipe))
        check_offload(config, recipe.optimizer.kind)
        memory = None
        with suppress(NotEstimated):
            memory = estimate_memory(recipe, config, ranks, on_gpu, self._libraries, exact=False)
            memory = with_margins(memory, ranks) if on_gpu else memory
        return Setting(name, recipe, path, changes, ds, config, memory)

    def _too_large(self, setting: Setting, rate: float = math.inf) -> str:
        """Why a setting can't be tried, by its predicted memory or its time at `rate` images/s; "" if it can."""
        memory, limit = setting.memory, self._trials.limit_gib
        if memory is not None and memory.gib > limit:
            part, size = max(memory.parts.items(), key=lambda part: part[1])
            return f"needs {memory.gib:.2f} of {limit:.2f} GiB by prediction, most of it for {part} ({size / GIB:.2f})"
        seconds = 5 * setting.measured_batch * self._trials.ranks / rate  # of the fewest steps of a trial
        if seconds > 0.15 * self._trials.seconds:
            return f"trying it would take {seconds:.0f} s: --minutes allows more"
        return ""

    def _find_micro_batch(self, given: Setting) -> Setting:
        """The smallest of the fastest micro-batches, tried from the largest that fits to one that is much slower."""
        sizes, halved = micro_batches(self._recipe.data.global_batch, self._trials.ranks), list[int]()
        for size in sizes:
            if not halved or size <= halved[-1] // 2:
                halved.append(size)
        made = [self._setting(f"micro-batch {n}", self._recipe, self._path, micro=n) for n in halved]
        probe = min(made, key=lambda setting: abs(setting.config.micro_batch - 8))  # it tells how long others take
        rate, self.limited_by = self._try(probe, math.inf)
        runs, top = list[Setting](), 0.0
        for setting in made if rate else made[made.index(probe) + 1 :]:
            speed, reason = self._try(setting, rate or math.inf)
            if reason and not runs:
                self.limited_by = reason
            if speed:
                runs, top = [*runs, setting], max(top, speed)
            if speed < SLOW * top:
                break
        if not runs:
            raise OutOfMemory(f"no micro-batch runs. {self.limited_by}")
        self.sizes |= (results := self._trials.compare(runs))
        fastest = max(results.values(), key=lambda result: result.images_per_second)
        return next(setting for setting in reversed(runs) if not fastest.beats(results[setting.name]))

    def _try(self, setting: Setting, rate: float) -> tuple[float, str]:
        """Return the images/s of a first trial, and ""; or 0.0, and why nothing was measured."""
        reason = self._too_large(setting, rate)
        if not reason:
            self.sizes |= (results := self._trials.compare([setting], 1))
            reason = results[setting.name].failed
        return (0.0, f"{setting.name}: {reason}") if reason else (results[setting.name].images_per_second, "")

    def _find_lever(self, fastest: Setting) -> Setting:
        """Change each lever alone at the fastest micro-batch; return the fastest setting that learns the same."""
        ds_name = Path(self._path).stem
        fastest = replace(fastest, name=f"{ds_name}, as given")
        settings = {fastest.resolved: fastest}
        recipe, own_path = fastest.recipe, self._path
        shipped = sorted(CHECKOUT.glob("ds_configs/*.json"))
        levers = [(file.stem, recipe, f"ds_configs/{file.name}", dict[str, str]()) for file in shipped]
        levers.append(("recomputation", recipe, own_path, {"activation_checkpointing.number_checkpoints": "auto"}))
        levers.append(("torch.compile", recipe, own_path, {"dino_ds.compile": "default"}))
        if "channels_last" in recipe.model.spec().obeys:
            levers.append(("channels last", recipe, own_path, {"dino_ds.channels_last": "true"}))
        if recipe.crops.num_local > 1:
            few = change_recipe(recipe, {"crops.num_local": str(recipe.crops.num_local // 2)})
            levers.append((f"{few.crops.num_local} local crops", few, own_path, {}))
        for name, recipe, path, changes in levers:
            try:
                setting = self._setting(name, recipe, path, changes, fastest.config.micro_batch)
            except ConfigError as error:
                self.skipped[name] = str(error)
                continue
            if recipe is not fastest.recipe:
                setting = replace(setting, learned="a loss of fewer crops")
            if reason := self._too_large(setting):
                self.skipped[name] = reason
            elif (same := settings.setdefault(setting.resolved, setting)) is not setting and name != ds_name:
                self.skipped[name] = f"here the same as {same.name}"
        self.levers = self._compare([*settings.values()])
        best = self.levers[fastest.name]
        for result in self.levers.values():
            if result.rounds and not result.setting.learned and result.beats(best):
                best = result
        return best.setting

    def _find_workers(self, best: Setting) -> Setting:
        """Measure `best` on real images, from no loader process to one a core. Of the settings that are as fast as the
        fastest, return the one with the fewest processes that waits less than ENOUGH_WAIT, or else with the fewest."""
        cores = max(1, len(distributed.usable_cores()) // self._trials.ranks)
        counts = sorted({0, cores, *(2**n for n in range(cores.bit_length()) if 2**n < cores)})
        recipes = {n: change_recipe(best.recipe, {"data.workers": str(n)}) for n in counts}
        made = [replace(best, name=f"loader processes: {n}", recipe=recipe) for n, recipe in recipes.items()]
        self.loaders = self._compare(made, real_images=True)
        ran = [result for result in self.loaders.values() if result.rounds]
        if not ran:
            return best
        top = max(ran, key=lambda result: result.images_per_second)
        fast = [result for result in ran if not top.beats(result)]
        return next((result for result in fast if (result.wait or 0.0) <= ENOUGH_WAIT), fast[0]).setting


_ONCE = ("optimizer", "center", "ema")  # parts of a step that run once, however many micro-batches it has
SLOW = 0.75  # share of the highest rate below which a setting is not measured again


@dataclass(frozen=True)
class Setting:
    """A recipe, and the ds JSON at `path` with `changes`. memory: predicted; learned: what it learns instead, or ""."""

    name: str
    recipe: Recipe
    path: str
    changes: Mapping[str, Any]
    ds: dict[str, Any]
    config: DsConfig
    memory: Memory | None
    learned: str = ""

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
    """The measured steps of a setting. rounds: images/s of each step, by trial; loader: images/s of a rank's loader
    alone; stages: ms of an image's loading, by stage; parts: seconds of a step by part; failed: why none ran."""

    setting: Setting
    rounds: list[list[float]] = field(default_factory=list)
    loader: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    peak_gib: float = 0.0
    failed: str = ""

    @property
    def images_per_second(self) -> float:
        """The median of all steps; 0 if nothing was measured."""
        return median(chain(*self.rounds)) if self.rounds else 0.0

    @property
    def spread(self) -> float:
        """The median's uncertainty, as a share: the larger of the trials' range and the steps' IQR / sqrt(number)."""
        rates, medians = [*chain(*self.rounds)], [*map(median, self.rounds)]
        low, _, high = quantiles(rates, n=4)
        return max(max(medians) - min(medians), (high - low) / math.sqrt(len(rates))) / self.images_per_second

    @property
    def wait(self) -> float | None:
        """The share of the step that passes waiting for images; None if none were loaded."""
        images = self.setting.recipe.data.global_batch
        return None if self.loader is None else self.parts["data"] * self.images_per_second / images

    def beats(self, other: Measurement) -> bool:
        return self.images_per_second > other.images_per_second * (1 + max(self.spread, other.spread))

    def is_worse(self, other: Measurement) -> bool:
        """Whether nothing was measured, or `other` is faster and takes less memory."""
        return not self.rounds or bool(other.rounds and other.beats(self) and other.peak_gib < self.peak_gib)

    def add(self, trial: dict[str, Any], ranks: int) -> None:
        """Add a trial; a later round that fails, such as for lack of time, takes nothing away."""
        if "failed" in trial:
            self.failed = "" if self.rounds else trial["failed"]
            return
        config = self.setting.config
        repeated = config.accumulation * config.micro_batch / self.setting.measured_batch
        once = sum(trial["parts"].get(part, 0.0) for part in _ONCE) / fmean(trial["seconds"])
        scale = once + (1 - once) * repeated  # a whole step's time, as a multiple of the measured one's
        images = config.micro_batch * config.accumulation * ranks
        self.rounds.append([images / (seconds * scale) for seconds in trial["seconds"]])
        self.parts = {part: s * (1.0 if part in _ONCE else repeated) for part, s in trial["parts"].items()}
        self.loader, self.stages = trial.get("loader"), trial.get("stages", {})
        self.peak_gib = max(self.peak_gib, trial["peak_mib"] / 1024)

    def facts(self) -> dict[str, Any]:
        memory, figures = self.setting.memory, ("images_per_second", "spread", "peak_gib", "loader", "wait")
        facts = {name: getattr(self, name) for name in figures} if self.rounds else {}
        predicted = None if memory is None else memory.gib
        return facts | {"predicted_gib": predicted, "parts": self.parts, "stages": self.stages, "failed": self.failed}


class Trials:
    """Runs trials, each once: `ended` has their results, with --resume those of an earlier call on this machine too.
    limit_gib: memory that a rank may take. Raises ConfigError for a file that can't be resumed."""

    def __init__(self, options: BenchTuneOptions, ranks: int, limit_gib: float) -> None:
        self._path, self.ranks, self.limit_gib = Path(options.out).with_suffix(".json"), ranks, limit_gib
        self._threads = options.threads or max(1, len(distributed.usable_cores()) // ranks)
        self._place = [self._threads, ranks, *(measure.describe_host()[name] for name in ("host", "gpu", "versions"))]
        self.ended: dict[str, dict[str, Any]] = {}
        try:
            for key, trial in json.loads(self._path.read_text("utf-8"))["trials"].items() if options.resume else ():
                if trial.get("peak_mib", math.inf) <= 1024 * limit_gib:  # not those that failed or took more
                    self.ended[key] = trial
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{self._path} has no trials of dino-ds bench tune ({type(error).__name__})"
            raise ConfigError(f"--resume: {reason}: leave --resume out") from None
        self._busy, self._began, self.seconds = _busy_seconds(), time.monotonic(), 60 * options.minutes
        self.until(1.0)

    def until(self, share: float) -> None:
        """Begin no trial after this share of the time."""
        self._end = self._began + share * self.seconds

    def write(self, **result: Any) -> None:
        replace_file(self._path, json.dumps({"trials": self.ended, **result}, indent=1))

    @property
    def others_cores(self) -> float:
        """Cores that programs other than this one and its trials have kept busy, on average since the beginning."""
        return max(0.0, (_busy_seconds() - self._busy) / max(time.monotonic() - self._began, 1e-9))

    def step(self, setting: Setting, number: int = 0, **kwargs: Any) -> dict[str, Any]:
        """Return what the trial `number` of a setting's step measured, or {"failed": why}."""
        ds = with_batch(setting.ds, setting.config.micro_batch, "auto")
        words: dict[str, Any] = {"recipe": setting.recipe.model_dump(mode="json"), "ds": ds}
        words |= {"ds_path": setting.path, "batch": setting.measured_batch}
        call = json.dumps([words, number, kwargs, self._place], sort_keys=True)
        key = hashlib.sha256(call.encode()).hexdigest()
        if key not in self.ended:
            if time.monotonic() > self._end:
                return {"failed": "no time was left: --minutes gives more, --resume goes on"}
            seconds = min(10.0, max(0.5, self.seconds / 120))  # of measuring, after a start of up to 120 s
            limits = measure.ChildLimits(self.ranks, self.limit_gib, 120.0 + 20 * seconds)
            try:
                options: dict[str, Any] = {"setting": words, "seconds": seconds, **kwargs}
                child = measure.run_in_child(measure_step, self._threads, limits, **options)
                self.ended[key] = {"peak_mib": child.peak_mib, **child.value}
            except measure.ChildFailed as error:
                self.ended[key] = {"failed": str(error)}
            self.write()
        return self.ended[key]

    def compare(self, settings: Sequence[Setting], rounds: int = 2, **kwargs: Any) -> dict[str, Measurement]:
        """Measure settings in rounds, every second one in reverse order, so that a disturbance meets all alike."""
        results = {setting.name: Measurement(setting) for setting in settings}
        for number in range(rounds):
            top = max(result.images_per_second for result in results.values())
            for setting in tqdm(settings[:: -1 if number % 2 else 1], desc="trials", leave=False, disable=None):
                result = results[setting.name]
                if not number or result.images_per_second > SLOW * top:
                    result.add(self.step(setting, number, **kwargs), self.ranks)
        return results


def _busy_seconds() -> float:
    """CPU seconds that this machine has spent on other programs than this one and its ended children."""
    times, ours = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    busy = sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return float(busy - ours.user - ours.system - ours.children_user - ours.children_system)


def measure_step(
    setting: dict[str, Any], seconds: float, real_images: bool = False, profile: str | None = None
) -> dict[str, Any]:
    """Measure a trial's steps for `seconds`; before, with `real_images`, the loader alone. profile: trace folder."""
    peak = measure.GpuPeak() if torch.cuda.is_available() else None
    recipe, config = measure.resolve(Recipe.model_validate(setting.pop("recipe")), **setting)
    trial, parts = measure.build_trial(recipe, config), measure.PartTimes(device(), waits=True)
    result = dict[str, Any]()
    step: Callable[[], object] = trial.run
    with ExitStack() as feeds:
        if real_images:
            source = training_images(recipe.data, recipe.eval.val_share)
            of_images, _ = with_image_settings(recipe, source)
            made = build_prefetcher(of_images, source, config.micro_batch, device(), Position())
            feed = feeds.enter_context(closing(made))
            step = partial(measure.run_on_data, trial, feed)
            next(feed)  # the loader's processes have started; now a rank's loader alone
            loading, loaded, began = measure.PartTimes(device(), waits=True), 0, time.perf_counter()
            with listen(loading):
                while (elapsed := time.perf_counter() - began) < seconds or not loaded:
                    next(feed)
                    measure.synchronize(device())
                    loaded += config.micro_batch
            result["loader"] = loaded / elapsed
            result["stages"] = {name: 1000 * spent / loaded for name, spent in loading.read().items()}
        for _ in range(measure.MEMORY_STEPS):
            began = time.perf_counter()
            step()
            measure.synchronize(device())
        wanted = distributed.gather_objects(round(seconds / (time.perf_counter() - began)))[0]
        result["seconds"] = []
        for _ in range(max(2, min(40, wanted))):
            began = time.perf_counter()
            with listen(parts):
                step()
            measure.synchronize(device())
            result["seconds"].append(time.perf_counter() - began)
        result |= trace_steps(step, Path(profile)) if profile else {}
    spent = {name: total / len(result["seconds"]) for name, total in parts.read().items()}
    if peak is None and real_images:  # on a CPU, copy and augmentation are done within the wait
        spent["data"] = max(0.0, spent["data"] - spent.get(COPY, 0.0) - spent.get(AUGMENTATION, 0.0))
    return result | {"parts": spent, "peak_mib": peak.mib() if peak else resident_mib(peak=True)}
