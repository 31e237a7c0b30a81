"""`dino-ds bench step`: images/s, TFLOP/s, MFU, memory and the share of each part of the training step; and `dino-ds
bench ladder`, which adds one optimization at a time to the plain DINO step, and measures what each gains."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from dino_ds.basics.files import check_absent
from dino_ds.basics.formatting import markdown_table, short
from dino_ds.basics.own_code import allow_code
from dino_ds.basics.ranges import PARTS, listen
from dino_ds.config.ds_config import change_ds_config
from dino_ds.config.ds_schema import DsConfig, PerformanceOptions
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import estimate_memory
from dino_ds.costs.step_costs import model_flops
from dino_ds.engine import distributed
from dino_ds.engine.muon import on_amd, products_of_torch
from dino_ds.engine.process import DTYPES, device, memory_gib, release_memory
from dino_ds.errors import ConfigError
from dino_ds.method.build import fitting_levers
from dino_ds.method.dino import dino_loss, ibot_loss
from dino_ds.models.prototypes import Compared, Comparison, Logits, Prototypes
from dino_ds.options.commands import BenchLadderOptions, BenchStepOptions
from dino_ds.options.definition import Result
from dino_ds.planning import measure

_TRACE = "trace.json"


def run(options: BenchStepOptions, *, recipe: Recipe, ds: dict[str, Any], ds_path: str) -> Result:
    """Measure the step of `recipe` and `ds`, or with --compare key=a,b the steps of both values. Raises ConfigError."""
    settings = {"step": (recipe, ds)}
    if options.compare is not None:
        key, _, text = options.compare.partition("=")
        values = text.split(",")
        if len(values) != 2 or not all(values) or values[0] == values[1]:
            example = "write --compare ds.dino_ds.packed=false,true"
            raise ConfigError(f"--compare {options.compare!r} is not a key and two values: {example}")
        if key == "data.global_batch":
            raise ConfigError("--compare data.global_batch: the batch is given with --batch; run the bench twice")
        if key.startswith("ds."):
            settings = {f"{key}={v}": (recipe, change_ds_config(ds, ds_path, {key[3:]: v})) for v in values}
        else:
            allow_code(values)
            settings = {f"{key}={v}": (change_recipe(recipe, {key: v}), ds) for v in values}
    if options.profile and options.compare:
        raise ConfigError("--compare with --profile: trace one setting, named by its own option")
    if options.profile:
        check_absent(Path(options.profile, _TRACE), "name another folder with --profile")
    batch = measure.begin(options.batch, options.threads)
    resolved = {name: measure.resolve(*setting, ds_path, batch) for name, setting in settings.items()}
    if torch.cuda.is_available():  # one at a time: two may not fit
        summaries = [summary for name, pair in resolved.items() for summary in _measure({name: pair}, {}, options)]
    else:
        memory = dict[str, dict[str, float]]()
        for name, setting in settings.items() if distributed.world_size() == 1 else ():
            words: dict[str, Any] = {"recipe": setting[0].model_dump(mode="json"), "ds": setting[1], "ds_path": ds_path}
            child = measure.run_in_child(take_steps, options.threads, batch=batch, **words)
            memory[name] = {"peak_memory_mib": child.peak_mib, "imports_mib": child.imports_mib}
        summaries = _measure(resolved, memory, options)
    result = measure.about(recipe, batch) | {"settings": summaries}
    if options.compare:
        first, second = summaries
        result["ratio"] = second["images_per_second"] / first["images_per_second"]
    return Result(result, _page(result))


def take_steps(recipe: dict[str, Any], ds: dict[str, Any], ds_path: str, batch: int) -> None:
    trial = measure.build_trial(*measure.resolve(Recipe.model_validate(recipe), ds, ds_path, batch))
    for _ in range(measure.MEMORY_STEPS):
        trial.run()


def _measure(
    resolved: dict[str, tuple[Recipe, DsConfig]], memory: dict[str, dict[str, float]], options: BenchStepOptions
) -> list[dict[str, Any]]:
    """Time the settings, interleaved. memory: of the settings that were measured in processes of their own, in MiB."""
    peak, waits = measure.GpuPeak() if torch.cuda.is_available() else None, distributed.world_size() > 1
    parts = {name: measure.PartTimes(device(), waits) for name in resolved}
    steps = {name: measure.build_trial(*pair).run for name, pair in resolved.items()}
    timings = measure.time_interleaved(steps, options.steps, options.warmup, device(), waits, parts)
    traced = {name: trace_steps(steps[name], Path(options.profile)) if options.profile else {} for name in resolved}
    memory = memory if peak is None else {name: {"peak_memory_mib": peak.mib()} for name in resolved}
    steps.clear()
    release_memory()
    cuda, ranks, summaries = torch.cuda.is_available(), distributed.world_size(), []
    for name, (recipe, config) in resolved.items():
        timing, images, measured = timings[name], config.micro_batch * config.accumulation, memory.get(name, {})
        libraries = int(measured.get("imports_mib", 0.0) * measure.MIB)
        predicted = estimate_memory(recipe, config, ranks, cuda, libraries)
        flops, spent = sum(model_flops(recipe).values()), parts[name].read()
        tflops = flops * images / timing.seconds / 1e12
        rate = measure.matmul_tflops(device(), DTYPES[config.precision])
        shares = {part: spent.get(part, 0.0) / sum(timing.all_seconds) for part in PARTS}
        summary: dict[str, Any] = {"name": name, "precision": config.precision, "stage": config.stage}
        summary |= {"images_per_second": images * ranks / timing.seconds, "step_seconds": timing.seconds}
        summary |= {"spread": timing.spread, "clock": timing.clock, "gflop_per_image": flops / 1e9, "tflops": tflops}
        summary |= {"matmul_tflops": rate, "mfu": tflops / rate}
        summary |= {"parts": {**shares, "other": 1 - sum(shares.values())}, "peak_memory_mib": memory_gib() * 1024}
        summary |= {"predicted_memory_mib": predicted.gib * 1024}
        summaries.append(summary | measured | traced[name])
    return summaries


def trace_steps(step: Callable[[], object], folder: Path) -> dict[str, str]:
    """Trace a few steps and their parts with torch.profiler into `folder`; return the file and a table of operators."""
    on_gpu, rank = torch.cuda.is_available(), distributed.rank()
    path = folder / (f"trace_rank{rank}.json" if rank else _TRACE)
    with (
        profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler,
        listen(record_function),
        listen(torch.cuda.nvtx.range) if on_gpu else nullcontext(),
    ):
        for _ in range(3):
            step()
        measure.synchronize(device())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--profile {folder} can't be made: {error.strerror}") from None
    profiler.export_chrome_trace(str(path))
    by = f"self_{'cuda' if on_gpu else 'cpu'}_time_total"
    table = profiler.key_averages().table(sort_by=by, row_limit=15, max_name_column_width=40)
    return {"trace": str(path), "operators": table}


def _page(result: dict[str, Any]) -> str:
    settings = result["settings"]
    rows = {
        "images/s": [short(s["images_per_second"]) for s in settings],
        "step, s": [f"{s['step_seconds']:.4g}" for s in settings],
        "spread": [f"{100 * s['spread']:.0f} %" for s in settings],
        "TFLOP/s": [short(s["tflops"]) for s in settings],
        "matmul peak, TFLOP/s": [short(s["matmul_tflops"]) for s in settings],
        "MFU": [f"{100 * s['mfu']:.1f} %" for s in settings],
        "peak memory, MiB": [f"{s['peak_memory_mib']:.0f}" for s in settings],
        "predicted, MiB": [f"{s['predicted_memory_mib']:.0f}" for s in settings],
    }
    if "imports_mib" in settings[0]:
        rows["libraries' part, MiB"] = [f"{s['imports_mib']:.0f}" for s in settings]
    for part in (*PARTS, "other"):
        rows[f"part: {part}"] = [f"{100 * s['parts'][part]:.1f} %" for s in settings]
    table = [(name, *cells) for name, cells in rows.items()]
    lines = [measure.heading("bench step", result), markdown_table(["", *(s["name"] for s in settings)], table), ""]
    lines += [f"{measure.clock_name(settings[0]['clock'])}; median of the steps; FLOPs of the whole model"]
    if "trace" in settings[0]:
        lines += ["", settings[0]["operators"], f"{settings[0]['trace']}: open it in ui.perfetto.dev"]
    if "ratio" in result:
        lines.append(f"ratio of images/s, second to first: {result['ratio']:.3f}")
    return "\n".join(lines)


_PLAIN = PerformanceOptions(packed=False, cls_only_last_block=False, channels_last=False)
CLIPPING = 3.0


class LadderStep(NamedTuple):
    """How a training step of the ladder is built. exact: its result equals the plain step's up to rounding."""

    name: str
    exact: bool = True
    performance: PerformanceOptions = _PLAIN
    tiled_loss: bool = False
    onednn: bool = False
    precision: str = "fp32"
    batched_stochastic_depth: bool = False


def all_steps() -> list[LadderStep]:
    """Return the steps, the plain one first; each adds an optimization to the step before it."""
    steps = [LadderStep("plain step")]

    def add(name: str, levers: dict[str, Any] | None = None, **changes: Any) -> None:
        changes["performance"] = dataclasses.replace(steps[-1].performance, **levers or {})
        steps.append(steps[-1]._replace(name=name, **changes))

    add("packed crops", {"packed": True})
    add("CLS-only last block", {"cls_only_last_block": True})
    add("channels-last images", {"channels_last": True})
    add("prototypes and loss in tiles", tiled_loss=True)
    add("oneDNN's products", onednn=True)
    add("bf16", exact=False, precision="bf16")
    add("torch.compile", {"compile": "default"})
    add("batched stochastic depth", {"compile": "off"}, batched_stochastic_depth=True)  # these two exclude each other
    return steps


def why_skipped(step: LadderStep, recipe: Recipe) -> str | None:
    cuda, is_vit = torch.cuda.is_available(), "packed" in recipe.model.spec().obeys
    of_vits, of_others = ("packed crops", "CLS-only last block", "batched stochastic depth"), ("channels-last images",)
    if step.name in (of_others if is_vit else of_vits):
        kind = "one of our ViTs, which have no such convolutions" if is_vit else "not one of our ViTs"
        return f"{recipe.model.backbone} is {kind}"
    if step.name == "oneDNN's products" and not (on_amd() and not cuda):
        return "they pay on AMD's CPUs with AVX-512 only"
    if step.name == "bf16" and not cuda and not torch.cpu.get_capabilities().get("avx512_bf16", False):
        return "this CPU has no bf16 units"
    if step.name == "torch.compile" and not (cuda and (shutil.which("cc") or shutil.which("gcc"))):
        return "there is no C compiler" if cuda else "it pays on a GPU only, which has kernels to fuse"
    if step.batched_stochastic_depth and recipe.model.drop_path == 0:
        return "model.drop_path is 0"
    return None


def build_ladder_step(step: LadderStep, recipe: Recipe, batch: int) -> measure.Trial:
    if step.batched_stochastic_depth:
        recipe = change_recipe(recipe, {"model.stochastic_depth": "batched"})
    stage = 0 if step.precision == "fp32" else 1
    ds: dict[str, Any] = {"gradient_clipping": CLIPPING, "zero_optimization": {"stage": stage}}
    ds |= {"dino_ds": dataclasses.asdict(fitting_levers(recipe, step.performance))}
    ds |= {} if step.precision == "fp32" else {step.precision: {"enabled": True}}
    trial = measure.build_trial(*measure.resolve(recipe, ds, "bench ladder", batch))
    if not step.tiled_loss:  # the heads compute their losses by the plain formulas
        for head in trial.step.engine._engine.module.heads().values():
            head.prototypes.__class__ = PlainPrototypes
    return trial


class PlainPrototypes(Prototypes):
    """Computes all logits as one FP32 matrix, for `dino_loss` or `ibot_loss`; each pass normalizes the whole weight."""

    def forward(self, z: Tensor, comparison: Comparison | None = None) -> Logits | Compared:
        if comparison is None or not (comparison.exclude_own or comparison.weights is not None):
            return super().forward(z, comparison)
        weight = self.weight if self.free else F.normalize(self.weight, dim=-1)
        weight = weight if self.lengths is None else weight * self.lengths
        logits, how = F.linear(F.normalize(z, dim=-1), weight), comparison
        products = how.teacher.rows @ how.teacher.weight.t() * how.teacher.scale
        targets = F.softmax(products / how.temperature + how.shift, dim=-1).unflatten(0, (how.crops, -1))
        images = targets.shape[1]
        weights = targets.new_ones(images) if how.weights is None else how.weights
        if how.exclude_own:
            loss = dino_loss(logits.unflatten(0, (-1, images)), targets, how.student_temp, how.others)
        else:
            loss = ibot_loss(logits, targets[0], how.student_temp, weights, int(how.divisor or 1))
        entropies = torch.special.entr(targets).sum(dim=-1) * weights
        mean = entropies.sum() / (weights.sum() * how.crops).clamp_min(1e-9)
        return Compared(loss, mean, how.share(len(logits)))


def run_ladder(options: BenchLadderOptions, *, recipe: Recipe) -> Result:
    batch = measure.begin(options.batch, options.threads, "bench ladder")
    reasons = {step.name: why_skipped(step, recipe) for step in all_steps()}
    steps = [step for step in all_steps() if reasons[step.name] is None]
    memory, runs = dict[str, measure.ChildResult](), dict[str, Callable[[], Tensor]]()
    words: dict[str, Any] = {"recipe": recipe.model_dump(mode="json"), "batch": batch}
    for step in steps:  # a GPU's allocator tells its peak; on a CPU, a process of its own is measured
        peak = measure.GpuPeak() if torch.cuda.is_available() else None
        if peak is None:
            memory[step.name] = measure.run_in_child(take_ladder_step, options.threads, name=step.name, **words)
        runs[step.name] = partial(_take, step, build_ladder_step(step, recipe, batch))
        if peak is not None:
            for _ in range(measure.MEMORY_STEPS):
                runs[step.name]()
            memory[step.name] = measure.ChildResult(None, peak.mib(), 0.0)
    timings = measure.time_interleaved(runs, options.steps, options.warmup, device())
    rows, first = list[dict[str, Any]](), steps[0].name
    for before, step in zip([steps[0], *steps], steps, strict=False):
        timing = timings[step.name]
        row = {"name": step.name, "exact": step.exact, "images_per_second": batch / timing.seconds}
        row |= {"step_seconds": timing.seconds, "speedup_step": timings[before.name].seconds / timing.seconds}
        row |= {"speedup_total": timings[first].seconds / timing.seconds, "peak_memory_mib": memory[step.name].peak_mib}
        rows.append(row | {"spread": timing.spread})
    exact = [row for row in rows if row["exact"]]
    result = measure.about(recipe, batch) | {"ladder_steps": rows}
    result |= {"skipped": {name: reason for name, reason in reasons.items() if reason}}
    result |= {"exact_total_speedup": exact[-1]["speedup_total"]}
    result |= {"exact_total_memory_ratio": exact[-1]["peak_memory_mib"] / exact[0]["peak_memory_mib"]}
    result |= {"imports_mib": memory[first].imports_mib, "clock": timings[first].clock}
    return Result(result, _ladder_page(result))


def take_ladder_step(name: str, recipe: dict[str, Any], batch: int) -> None:
    step = next(step for step in all_steps() if step.name == name)
    trial = build_ladder_step(step, Recipe.model_validate(recipe), batch)
    for _ in range(measure.MEMORY_STEPS):
        _take(step, trial)


def _take(step: LadderStep, trial: measure.Trial) -> Tensor:
    """One training step, with torch's own matrix products unless this ladder step has oneDNN's."""
    with nullcontext() if step.onednn else products_of_torch():
        return trial.run()


def _ladder_page(result: dict[str, Any]) -> str:
    rows = []
    for row in result["ladder_steps"]:
        times = f"{row['step_seconds']:.4g}", f"{100 * row['spread']:.0f} %"
        gains = f"{row['speedup_step']:.3f}", f"{row['speedup_total']:.3f}", f"{row['peak_memory_mib']:.0f}"
        kind = "exact" if row["exact"] else "not exact"
        rows.append((row["name"], kind, short(row["images_per_second"]), *times, *gains))
    libraries = f" (libraries take {result['imports_mib']:.0f} MiB of both)" if result["imports_mib"] else ""
    header = ("step", "result", "images/s", "s", "spread", "× before", "× first", "peak MiB")
    lines = [measure.heading("bench ladder", result), markdown_table(header, rows), ""]
    lines += [f"{name} skipped: {reason}" for name, reason in result["skipped"].items()]
    speed, memory = result["exact_total_speedup"], result["exact_total_memory_ratio"]
    last = f"{speed:.2f} x the images/s of the first and {memory:.2f} x its peak memory{libraries}"
    return "\n".join([*lines, f"{measure.clock_name(result['clock'])}, medians; exact steps: the last has {last}"])
