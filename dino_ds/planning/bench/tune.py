"""Searches by measuring: the largest and the fastest micro-batch, loader processes, and what each lever brings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from dino_ds.basics.ranges import AUGMENTATION
from dino_ds.config.ds_config import CHECKOUT, change_ds_config, load_ds_config, resolve_ds_config
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import GIB, Memory, estimate_memory
from dino_ds.costs.step_costs import count_parameters
from dino_ds.engine.distributed import usable_cores
from dino_ds.engine.process import device, fp16_supported, memory_gib
from dino_ds.errors import ConfigError, NotEstimated, OutOfMemory
from dino_ds.planning.bench.trials import Measurement, Setting, Trials, beats, measure_loader, measure_stages
from dino_ds.planning.fit import micro_batches, with_batch, with_margins

ENOUGH_WAIT = 0.02
"""Share of a step that may pass waiting for images: more loader processes are not worth their memory then."""
_SHARES = {"micro-batches": 0.35, "loader": 0.2, "levers": 0.3, "comparison": 0.15}
_STEPS = 5
"""Steps that the shortest trial takes."""
_LEAST_SECONDS, _MOST_SECONDS = 0.5, 10.0


@dataclass
class Findings:
    """What a search has found so far.

    Attributes:
        predicted_gib: memory of a rank by micro-batch; None for a backbone without an estimate.
        limited_by: why no larger micro-batch was tried.
        sizes: what was measured by micro-batch.
        loaders: figures by number of loader processes; stages: milliseconds of an image by stage.
        settings, levers: what was compared, and its measurements; skipped: why others were not.
        pair: the setting as it was given, and the best one, measured together at the end.
    """

    predicted_gib: dict[int, float | None] = field(default_factory=dict)
    limited_by: str = ""
    sizes: dict[int, Measurement] = field(default_factory=dict)
    loaders: dict[int, dict[str, float]] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)
    levers: dict[str, Measurement] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    workers: int | None = None
    best: Setting | None = None
    pair: dict[str, Measurement] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        return max((size for size, result in self.sizes.items() if not result.failed), default=0)


class Search:
    """Tunes the step of a recipe and a ds JSON on `ranks` processes of this machine; fills `findings` part by part."""

    def __init__(self, recipe: Recipe, ds: dict[str, Any], path: str, trials: Trials) -> None:
        self._recipe, self._ds, self._path, self._trials = recipe, ds, path, trials
        self.findings = Findings()
        self._libraries = round(memory_gib() * GIB)

    def run(self) -> None:
        """Raises OutOfMemory if no micro-batch fits or runs, ConfigError for batch sizes that contradict each other."""
        shipped = self._setting("as given", self._recipe, self._ds, self._path)
        fastest = self._find_micro_batch()
        if self._recipe.data.root or self._recipe.data.mixture or self._recipe.data.source != "folder":
            self._find_workers(fastest)
        self._compare_levers(fastest)
        best, findings = fastest.name, self.findings
        for name, result in findings.levers.items():
            alike = findings.settings[name].learned == fastest.learned
            if not result.failed and alike and beats(result, findings.levers[best]):
                best = name
        findings.best = replace(findings.settings[best], name="tuned")
        findings.pair = self._trials.compare([shipped, findings.best], self._each("comparison", 2), rounds=3)

    def _each(self, part: str, settings: int, rounds: int = 2) -> float:
        """Seconds of each trial of a part, beyond its start, which takes about as long again."""
        seconds = _SHARES[part] * self._trials.seconds / max(1, settings * rounds) / 2
        return max(_LEAST_SECONDS, min(_MOST_SECONDS, seconds))

    def _setting(self, name: str, recipe: Recipe, ds: dict[str, Any], path: str, micro: int | None = None) -> Setting:
        """Raises ConfigError for a ds JSON that can't be used here."""
        batch, ranks = recipe.data.global_batch, self._trials.ranks
        ds = ds if micro is None else with_batch(ds, micro, batch // (micro * ranks))
        config = resolve_ds_config(dict(ds), path, batch, ranks, fp16_supported(), count_parameters(recipe))
        return Setting(name, recipe, ds, path, config)

    def _predict(self, setting: Setting) -> Memory | None:
        """Predict a rank's memory as it will be measured; None for a backbone without an estimate."""
        on_gpu, ranks = device().type != "cpu", self._trials.ranks
        try:
            libraries = 0 if on_gpu else self._libraries
            memory = estimate_memory(setting.recipe, setting.config, ranks, on_gpu, libraries, exact=False)
        except NotEstimated:
            return None
        return with_margins(memory, ranks) if on_gpu else memory

    def _find_micro_batch(self) -> Setting:
        """Measure micro-batches from the smallest on, as far as memory and time allow; of those that are equally fast,
        the smallest is taken."""
        findings, settings, sizes = self.findings, dict[str, Setting](), list(self._sizes())
        each, most = self._each("micro-batches", len(sizes)), _SHARES["micro-batches"] * self._trials.seconds / 2
        for size in sizes:
            setting = self._setting(f"micro-batch {size}", self._recipe, self._ds, self._path, size)
            memory = self._predict(setting)
            findings.predicted_gib[size] = None if memory is None else memory.gib
            if memory is not None and memory.gib > self._trials.limit_gib:
                findings.limited_by = f"{size} images need {memory.gib:.2f} GiB by prediction"
                break
            if findings.largest:
                rate = findings.sizes[findings.largest].images_per_second
                if (seconds := _STEPS * setting.measured_batch * self._trials.ranks / rate) > most:
                    findings.limited_by = f"trying {size} images would take {seconds:.0f} s: --minutes allows more"
                    break
            findings.sizes |= {size: self._trials.compare([setting], each, 1)[setting.name]}
            settings[setting.name] = setting
            if findings.sizes[size].failed:
                findings.limited_by = f"{size} images: {findings.sizes[size].failed}"
                break
        if not findings.largest:
            raise OutOfMemory(f"no micro-batch runs. {_largest_part(memory) if memory else ''}{findings.limited_by}")
        runs = [setting for setting in settings.values() if not findings.sizes[setting.config.micro_batch].failed]
        results = self._trials.compare(runs, each)
        findings.sizes |= {setting.config.micro_batch: results[setting.name] for setting in runs}
        top = max(results.values(), key=lambda result: result.images_per_second)
        return next(setting for setting in runs if not beats(top, results[setting.name]))

    def _sizes(self) -> Iterator[int]:
        """Yield the micro-batches to try, smallest first, each at least half as large again as the one before."""
        batch, ranks, before = self._recipe.data.global_batch, self._trials.ranks, 0
        for size in reversed(micro_batches(batch, ranks)):
            if size >= 1.5 * before or size == batch // ranks:
                yield size
                before = size

    def _find_workers(self, fastest: Setting) -> None:
        """Measure the loader alone and the wait in the step, from no loader process to one a core; the fewest with
        hardly a wait are taken, or else those of the fastest step."""
        cores, findings, trials = max(1, len(usable_cores()) // self._trials.ranks), self.findings, self._trials
        counts = sorted({0, cores, *(2**n for n in range(cores.bit_length()) if 2**n < cores)})
        each, micro = self._each("loader", 2 * len(counts) + 1, 1), fastest.config.micro_batch
        for workers in counts:
            made = replace(fastest, recipe=change_recipe(fastest.recipe, {"data.workers": str(workers)}))
            alone = trials.run(measure_loader, each, recipe=made.recipe.model_dump(mode="json"), batch=micro)
            step = trials.step(made, each, real_images=True)
            if "failed" in alone or "failed" in step:
                findings.skipped[f"{workers} loader processes"] = alone.get("failed") or step["failed"]
                continue
            parts, seconds = step["parts"], fmean(step["seconds"])
            augmented = 0.0 if device().type == "cuda" else parts.get(AUGMENTATION, 0.0)  # on a CPU within "data"
            findings.loaders[workers] = {
                "images_per_second": alone["images_per_second"] * trials.ranks,
                "wait": max(0.0, parts.get("data", 0.0) - augmented) / seconds,
                "step_images_per_second": made.measured_batch * trials.ranks / seconds,
            }
        alone = change_recipe(fastest.recipe, {"data.workers": "0"}).model_dump(mode="json")
        findings.stages = trials.run(measure_stages, each, recipe=alone, batch=micro).get("milliseconds", {})
        if findings.loaders:
            enough = [n for n, loader in findings.loaders.items() if loader["wait"] <= ENOUGH_WAIT]
            quickest = max(findings.loaders, key=lambda n: findings.loaders[n]["step_images_per_second"])
            findings.workers = min(enough, default=quickest)

    def _compare_levers(self, fastest: Setting) -> None:
        """Compare the shipped ds configs and other levers, each changed alone, at the fastest micro-batch."""
        findings, limit = self.findings, self._trials.limit_gib
        findings.settings, resolved = {fastest.name: fastest}, {fastest.resolved: fastest.name}
        for name, recipe, path, changes in self._levers(fastest.recipe):
            learned = "rounding only" if recipe is fastest.recipe else "a loss of fewer crops"
            try:
                ds = load_ds_config(path, changes) if path != self._path else change_ds_config(self._ds, path, changes)
                setting = self._setting(name, recipe, ds, path, fastest.config.micro_batch)
            except ConfigError as error:
                findings.skipped[name] = str(error)
                continue
            memory = self._predict(setting)
            if memory is not None and memory.gib > limit:
                findings.skipped[name] = f"needs {memory.gib:.2f} GiB by prediction, and a rank may take {limit:.2f}"
            elif (same := resolved.setdefault(setting.resolved, name)) != name:
                findings.skipped[name] = f"here the same as {same}"
            else:
                findings.settings[name] = replace(setting, changes=changes, learned=learned)
        findings.levers = self._trials.compare(
            [*findings.settings.values()], self._each("levers", len(findings.settings))
        )
        findings.skipped |= {name: result.failed for name, result in findings.levers.items() if result.failed}

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


def _largest_part(memory: Memory) -> str:
    name, size = max(memory.parts.items(), key=lambda part: part[1])
    return f"The smallest one needs most of its memory for {name} ({size / GIB:.2f} of {memory.gib:.2f} GiB). "
