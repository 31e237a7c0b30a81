"""`dino-ds bench ladder`: adds one optimization at a time to the plain DINO step, and measures what each gains."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.basics.formatting import markdown_table, short
from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.engine.muon import on_amd, products_of_torch
from dino_ds.engine.process import device
from dino_ds.method.build import fitting_levers
from dino_ds.method.dino import dino_loss, ibot_loss
from dino_ds.models.prototypes import Compared, Comparison, Logits, Prototypes
from dino_ds.options.commands import BenchLadderOptions
from dino_ds.options.definition import Result
from dino_ds.planning import measure

_PLAIN = PerformanceOptions(packed=False, cls_only_last_block=False, channels_last=False)
_OF_VITS = ("packed crops", "CLS-only last block", "batched stochastic depth")
_OF_OTHERS = ("channels-last images",)
CLIPPING = 3.0


@dataclass(frozen=True)
class LadderStep:
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
        steps.append(dataclasses.replace(steps[-1], name=name, **changes))

    add("packed crops", {"packed": True})
    add("CLS-only last block", {"cls_only_last_block": True})
    add("channels-last images", {"channels_last": True})
    add("prototypes and loss in tiles", tiled_loss=True)
    add("oneDNN's products", onednn=True)
    add("bf16", exact=False, precision="bf16")
    add("torch.compile", {"compile": "default"})
    add("batched stochastic depth", {"compile": "off"}, batched_stochastic_depth=True)  # these two exclude each other
    return steps


def last_exact() -> LadderStep:
    """Return the step with all exact optimizations."""
    return [step for step in all_steps() if step.exact][-1]


def why_skipped(step: LadderStep, recipe: Recipe) -> str | None:
    """Return why this step can't be measured here, or None if it can."""
    cuda, is_vit = torch.cuda.is_available(), "packed" in recipe.model.spec().obeys
    if step.name in (_OF_OTHERS if is_vit else _OF_VITS):
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
    """Build a trial of this step with `batch` images, in one process."""
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
    """Computes all logits as one matrix, in FP32, and `dino_loss` or `ibot_loss` of it; normalizes the whole weight in
    each pass."""

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


def run(options: BenchLadderOptions, *, recipe: Recipe) -> Result:
    """Measure every step that this host can run."""
    batch = measure.begin(options.batch, options.threads, "bench ladder")
    reasons = {step.name: why_skipped(step, recipe) for step in all_steps()}
    steps = [step for step in all_steps() if reasons[step.name] is None]
    memory, runs = dict[str, measure.ChildResult](), dict[str, Callable[[], Tensor]]()
    for step in steps:
        memory[step.name], runs[step.name] = _prepare(step, recipe, batch, options.threads)
    timings = measure.time_interleaved(runs, options.steps, options.warmup, device())
    rows = list(_rows(steps, memory, timings, batch))
    exact, first = [row for row in rows if row["exact"]], steps[0].name
    result = measure.about(recipe, batch) | {
        "ladder_steps": rows,
        "skipped": {name: reason for name, reason in reasons.items() if reason},
        "exact_total_speedup": exact[-1]["speedup_total"],
        "exact_total_memory_ratio": exact[-1]["peak_memory_mib"] / exact[0]["peak_memory_mib"],
        "imports_mib": memory[first].imports_mib,
        "clock": timings[first].clock,
    }
    return Result(result, _page(result))


def _prepare(
    step: LadderStep, recipe: Recipe, batch: int, threads: int
) -> tuple[measure.ChildResult, Callable[[], Tensor]]:
    """Build one ladder step; peak memory is read from the GPU's allocator, or on a CPU measured in a child process."""
    if torch.cuda.is_available():
        peak = measure.GpuPeak()
        trial = build_ladder_step(step, recipe, batch)
        for _ in range(measure.MEMORY_STEPS):
            _run(step, trial)
        memory = measure.ChildResult(None, peak.mib(), 0.0)
    else:
        arguments: dict[str, Any] = {"name": step.name, "recipe": recipe.model_dump(mode="json"), "batch": batch}
        memory = measure.run_in_child(take_ladder_step, threads, **arguments)
        trial = build_ladder_step(step, recipe, batch)
    return memory, lambda: _run(step, trial)


def take_ladder_step(name: str, recipe: dict[str, Any], batch: int) -> None:
    """Run a few steps in the process whose memory is measured."""
    step = next(step for step in all_steps() if step.name == name)
    trial = build_ladder_step(step, Recipe.model_validate(recipe), batch)
    for _ in range(measure.MEMORY_STEPS):
        _run(step, trial)


def _run(step: LadderStep, trial: measure.Trial) -> Tensor:
    """Run one training step; matrix products are torch's own unless this ladder step has oneDNN's."""
    with nullcontext() if step.onednn else products_of_torch():
        return trial.run()


def _rows(
    steps: list[LadderStep], memory: dict[str, measure.ChildResult], timings: dict[str, measure.Timing], batch: int
) -> Iterator[dict[str, Any]]:
    first = before = timings[steps[0].name].seconds
    for step in steps:
        timing = timings[step.name]
        yield {
            "name": step.name,
            "exact": step.exact,
            "images_per_second": batch / timing.seconds,
            "step_seconds": timing.seconds,
            "speedup_step": before / timing.seconds,
            "speedup_total": first / timing.seconds,
            "peak_memory_mib": memory[step.name].peak_mib,
            "spread": timing.spread,
        }
        before = timing.seconds


def _page(result: dict[str, Any]) -> str:
    rows = [
        (
            row["name"],
            "exact" if row["exact"] else "not exact",
            short(row["images_per_second"]),
            f"{row['step_seconds']:.4g}",
            f"{100 * row['spread']:.0f} %",
            f"{row['speedup_step']:.3f}",
            f"{row['speedup_total']:.3f}",
            f"{row['peak_memory_mib']:.0f}",
        )
        for row in result["ladder_steps"]
    ]
    libraries = f" (libraries take {result['imports_mib']:.0f} MiB of both)" if result["imports_mib"] else ""
    header = ("step", "result", "images/s", "s", "spread", "× before", "× first", "peak MiB")
    lines = [measure.heading("bench ladder", result), markdown_table(header, rows), ""]
    lines += [f"{name} skipped: {reason}" for name, reason in result["skipped"].items()]
    speed, memory = result["exact_total_speedup"], result["exact_total_memory_ratio"]
    lines.append(
        f"{measure.clock_name(result['clock'])}, medians; exact steps: the last has {speed:.2f} x the images/s of the "
        f"first and {memory:.2f} x its peak memory{libraries}"
    )
    return "\n".join(lines)
