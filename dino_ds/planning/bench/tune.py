"""Searches by measuring: the largest and the fastest micro-batch, loader processes, and what each lever brings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dino_ds.config.ds_config import CHECKOUT, load_ds_config, resolve_ds_config
from dino_ds.config.ds_schema import check_offload
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import GIB, estimate_memory
from dino_ds.costs.step_costs import count_parameters
from dino_ds.engine.distributed import usable_cores
from dino_ds.engine.process import device, fp16_supported, memory_gib
from dino_ds.errors import ConfigError, NotEstimated, OutOfMemory
from dino_ds.planning.bench.trials import SLOW, Measurement, Setting, Trials
from dino_ds.planning.fit import micro_batches, with_batch, with_margins

ENOUGH_WAIT = 0.02
"""Share of a step that may pass waiting for images: more loader processes are not worth their memory then."""
_PROBE, _STEPS, _LONGEST = 8, 5, 0.15
"""Images of the first micro-batch, whose speed tells how long others take; steps that the shortest trial takes, and the
share of the time that they may take."""
_SHARES = {"micro-batches": 0.3, "levers": 0.65, "loader processes": 0.8}
"""Shares of the time after which no trial of a part begins; the rest is for the comparison at the end."""


class Search:
    """Tunes the step of a recipe and a ds JSON on this machine, part by part.

    Args:
        path, changes: the ds JSON, and the keys that the user changes in it; they are changed in all others too.

    Attributes:
        sizes, levers, loaders: what was measured of each micro-batch, lever and number of loader processes.
        limited_by: why no larger micro-batch was tried; skipped: why other settings were not measured.
        pair: the setting as it was given and the one that was found, measured together at the end.
        best: the second of the pair if it is faster, else the first.
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
        for share, find in zip(_SHARES.values(), finds, strict=False):
            self._trials.until(share)
            best = find(best or given)
        self._trials.until(math.inf)  # all before is for this comparison
        tuned = replace(best or given, name="tuned")
        self.pair = self._trials.compare([given, tuned], rounds=3, real_images=self.has_images)
        shipped, found = self.pair["as given"], self.pair["tuned"]
        self.best = given if shipped.rounds and not (found.rounds and found.beats(shipped)) else tuned

    def _compare(self, settings: Sequence[Setting], rounds: int = 2, **kwargs: Any) -> dict[str, Measurement]:
        """Measure settings, and keep why some were not."""
        results = self._trials.compare(settings, rounds, **kwargs)
        self.skipped |= {name: result.failed for name, result in results.items() if result.failed}
        return results

    def _setting(
        self, name: str, recipe: Recipe, path: str, changes: Mapping[str, Any] | None = None, micro: int | None = None
    ) -> Setting:
        """Raises ConfigError for a ds JSON that can't be used here."""
        batch, ranks, on_gpu = recipe.data.global_batch, self._trials.ranks, device().type == "cuda"
        changes = {**self._changes, **(changes or {})}
        ds = load_ds_config(path, changes)
        ds = ds if micro is None else with_batch(ds, micro, batch // (micro * ranks))
        config = resolve_ds_config(dict(ds), path, batch, ranks, fp16_supported(), count_parameters(recipe))
        check_offload(config, recipe.optimizer.kind)
        try:
            memory = estimate_memory(recipe, config, ranks, on_gpu, self._libraries, exact=False)
        except NotEstimated:
            return Setting(name, recipe, path, changes, ds, config, None)
        return Setting(name, recipe, path, changes, ds, config, with_margins(memory, ranks) if on_gpu else memory)

    def _too_large(self, setting: Setting, rate: float = math.inf) -> str:
        """Why a setting can't be tried: it needs more memory by prediction, most of it for its largest part, or more
        time at `rate` images/s. "" if it can."""
        memory, limit = setting.memory, self._trials.limit_gib
        if memory is not None and memory.gib > limit:
            part, size = max(memory.parts.items(), key=lambda part: part[1])
            return f"needs {memory.gib:.2f} of {limit:.2f} GiB by prediction, most of it for {part} ({size / GIB:.2f})"
        seconds = _STEPS * setting.measured_batch * self._trials.ranks / rate
        if seconds > _LONGEST * self._trials.seconds:
            return f"trying it would take {seconds:.0f} s: --minutes allows more"
        return ""

    def _find_micro_batch(self, given: Setting) -> Setting:
        """Measure micro-batches from the largest that fits by prediction down to those that are much slower; of those
        that are equally fast, the smallest is taken."""
        sizes, halved = micro_batches(self._recipe.data.global_batch, self._trials.ranks), list[int]()
        for size in sizes:
            if not halved or size <= halved[-1] // 2:
                halved.append(size)
        made = [self._setting(f"micro-batch {n}", self._recipe, self._path, micro=n) for n in halved]
        probe = min(made, key=lambda setting: abs(setting.config.micro_batch - _PROBE))
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
        """Compare the shipped ds configs and other levers, each changed alone, at the fastest micro-batch; return the
        fastest that learns the same."""
        own = Path(self._path).stem
        fastest = replace(fastest, name=f"{own}, as given")
        settings = {fastest.resolved: fastest}
        for name, recipe, path, changes in self._levers(fastest.recipe):
            try:
                setting = self._setting(name, recipe, path, changes, fastest.config.micro_batch)
            except ConfigError as error:
                self.skipped[name] = str(error)
                continue
            if recipe is not fastest.recipe:
                setting = replace(setting, learned="a loss of fewer crops")
            if reason := self._too_large(setting):
                self.skipped[name] = reason
            elif (same := settings.setdefault(setting.resolved, setting)) is not setting and name != own:
                self.skipped[name] = f"here the same as {same.name}"
        self.levers = self._compare([*settings.values()])
        best = self.levers[fastest.name]
        for result in self.levers.values():
            if result.rounds and not result.setting.learned and result.beats(best):
                best = result
        return best.setting

    def _levers(self, recipe: Recipe) -> Iterator[tuple[str, Recipe, str, dict[str, str]]]:
        """Yield each lever's name, recipe, and ds JSON: its path and the keys that change in it."""
        for path in sorted((CHECKOUT / "ds_configs").glob("*.json")):
            yield path.stem, recipe, f"ds_configs/{path.name}", {}
        yield "recomputation", recipe, self._path, {"activation_checkpointing.number_checkpoints": "auto"}
        yield "torch.compile", recipe, self._path, {"dino_ds.compile": "default"}
        if "channels_last" in recipe.model.spec().obeys:
            yield "channels last", recipe, self._path, {"dino_ds.channels_last": "true"}
        if recipe.crops.num_local > 1:
            few = change_recipe(recipe, {"crops.num_local": str(recipe.crops.num_local // 2)})
            yield f"{few.crops.num_local} local crops", few, self._path, {}

    def _find_workers(self, best: Setting) -> Setting:
        """Measure `best` on real images, from no loader process to one a core. Of the settings that are as fast as the
        fastest, return the one with the fewest processes that waits less than ENOUGH_WAIT, or else with the fewest."""
        cores = max(1, len(usable_cores()) // self._trials.ranks)
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
