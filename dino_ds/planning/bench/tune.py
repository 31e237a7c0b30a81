"""Searches by measuring: the largest and the fastest micro-batch, loader processes, and what each lever brings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dino_ds.config.ds_config import CHECKOUT, load_ds_config, resolve_ds_config
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import GIB, estimate_memory
from dino_ds.costs.step_costs import count_parameters
from dino_ds.engine.distributed import usable_cores
from dino_ds.engine.process import device, fp16_supported, memory_gib
from dino_ds.errors import ConfigError, NotEstimated, OutOfMemory
from dino_ds.planning.bench.trials import Measurement, Setting, Trials
from dino_ds.planning.fit import micro_batches, with_batch, with_margins

ENOUGH_WAIT = 0.02
"""Share of a step that may pass waiting for images: more loader processes are not worth their memory then."""
_STEPS, _LONGEST = 5, 0.15
"""Steps that the shortest trial takes, and the share of the time that they may take."""


class Search:
    """Tunes the step of a recipe and a ds JSON on this machine, part by part.

    Args:
        path, changes: the ds JSON, and the keys that the user changes in it; they are changed in all others too.

    Attributes:
        sizes, levers, loaders: what was measured of each micro-batch, lever and number of loader processes.
        limited_by: why no larger micro-batch was tried; skipped: why other settings were not.
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
        given = self._setting("as given", self._recipe, self._path)
        best = self._find_lever(self._find_micro_batch())
        best = self._find_workers(best) if self.has_images else best
        best, self._trials.end = replace(best, name="tuned"), math.inf  # all before is for this comparison
        self.pair = self._trials.compare([given, best], rounds=3, real_images=self.has_images)
        shipped, tuned = self.pair["as given"], self.pair["tuned"]
        self.best = given if shipped.rates and not (tuned.rates and tuned.beats(shipped)) else best

    def _setting(
        self, name: str, recipe: Recipe, path: str, changes: Mapping[str, Any] | None = None, micro: int | None = None
    ) -> Setting:
        """Raises ConfigError for a ds JSON that can't be used here."""
        batch, ranks, on_gpu = recipe.data.global_batch, self._trials.ranks, device().type == "cuda"
        changes = {**self._changes, **(changes or {})}
        ds = load_ds_config(path, changes)
        ds = ds if micro is None else with_batch(ds, micro, batch // (micro * ranks))
        config = resolve_ds_config(dict(ds), path, batch, ranks, fp16_supported(), count_parameters(recipe))
        try:
            memory = estimate_memory(recipe, config, ranks, on_gpu, self._libraries, exact=False)
        except NotEstimated:
            return Setting(name, recipe, path, changes, ds, config, None)
        return Setting(name, recipe, path, changes, ds, config, with_margins(memory, ranks) if on_gpu else memory)

    def _too_large(self, setting: Setting) -> str:
        """Why a setting can't fit by prediction, with its largest part; "" if it may."""
        memory, limit = setting.memory, self._trials.limit_gib
        if memory is None or memory.gib <= limit:
            return ""
        part, size = max(memory.parts.items(), key=lambda part: part[1])
        return f"needs {memory.gib:.2f} of {limit:.2f} GiB by prediction, most of it for {part} ({size / GIB:.2f})"

    def _find_micro_batch(self) -> Setting:
        """Measure micro-batches from the smallest on, as far as memory and time allow; of those that are equally fast,
        the smallest is taken."""
        runs, rate = list[Setting](), math.inf
        for size in self._sizes():
            setting = self._setting(f"micro-batch {size}", self._recipe, self._path, micro=size)
            seconds = _STEPS * setting.measured_batch * self._trials.ranks / rate
            self.limited_by = self._too_large(setting)
            if seconds > _LONGEST * self._trials.seconds:
                self.limited_by = f"trying it would take {seconds:.0f} s: --minutes allows more"
            if not self.limited_by:
                self.sizes |= self._trials.compare([setting], 1)
                self.limited_by = self.sizes[setting.name].failed
            if self.limited_by:
                self.limited_by = f"{setting.name}: {self.limited_by}"
                break
            runs, rate = [*runs, setting], self.sizes[setting.name].images_per_second
        if not runs:
            raise OutOfMemory(f"no micro-batch runs. {self.limited_by}")
        self.sizes |= (results := self._trials.compare(runs))
        top = max(results.values(), key=lambda result: result.images_per_second)
        return next(setting for setting in runs if not top.beats(results[setting.name]))

    def _sizes(self) -> Iterator[int]:
        """Yield the micro-batches to try, smallest first, each at least twice the one before."""
        sizes, before = micro_batches(self._recipe.data.global_batch, self._trials.ranks), 0
        for size in reversed(sizes):
            if size >= 2 * before or size == sizes[0]:
                yield size
                before = size

    def _find_lever(self, fastest: Setting) -> Setting:
        """Compare the shipped ds configs and other levers, each changed alone, at the fastest micro-batch; return the
        fastest that learns the same."""
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
            elif (same := settings.setdefault(setting.resolved, setting)) is not setting:
                self.skipped[name] = f"here the same as {same.name}"
        self.levers = self._trials.compare([*settings.values()])
        self.skipped |= {name: result.failed for name, result in self.levers.items() if result.failed}
        best = self.levers[fastest.name]
        for result in self.levers.values():
            if result.rates and not result.setting.learned and result.beats(best):
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
        """Measure `best` on real images, from no loader process to one a core; return it with the fewest that leave
        hardly a wait, or else those of the fastest step."""
        cores = max(1, len(usable_cores()) // self._trials.ranks)
        counts = sorted({0, cores, *(2**n for n in range(cores.bit_length()) if 2**n < cores)})
        recipes = {str(n): change_recipe(best.recipe, {"data.workers": str(n)}) for n in counts}
        made = [replace(best, name=f"{name} loader processes", recipe=recipe) for name, recipe in recipes.items()]
        self.loaders = self._trials.compare(made, 1, real_images=True)
        ran = [result for result in self.loaders.values() if result.rates]
        enough = [result for result in ran if (result.wait or 0.0) <= ENOUGH_WAIT]
        fastest = sorted(ran, key=lambda result: -result.images_per_second)
        return next((result.setting for result in [*enough, *fastest]), best)
