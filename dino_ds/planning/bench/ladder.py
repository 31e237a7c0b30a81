"""`dino-ds bench ladder`: from the plain DINO step upwards, one optimization at a time: what each is worth here."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_ds.basics.digits import short
from dino_ds.basics.ranges import PARTS
from dino_ds.config.recipe import Recipe
from dino_ds.engine.device import device
from dino_ds.engine.products import products_of_torch
from dino_ds.options.bench import BenchLadderOptions
from dino_ds.planning.bench.common import MEMORY_STEPS, about, begin, clock_name, heading
from dino_ds.planning.bench.ladder_steps import SELECTIONS, LadderStep, build_ladder_step, why_skipped
from dino_ds.planning.measure.memory import ChildResult, GpuPeak, run_in_child
from dino_ds.planning.measure.tables import markdown_table, print_result
from dino_ds.planning.measure.timing import PartTimes, Timing, time_interleaved
from dino_ds.planning.measure.trial import Trial

FIRST = 3
"""Steps whose losses are compared: exact optimizations add in another order, and Adam makes the difference grow."""


@dataclass
class _Measured:
    """One ladder step. losses: of each training step; stage: ZeRO's, as the engine runs it, None without an engine."""

    step: LadderStep
    memory: ChildResult
    stage: int | None = None
    losses: list[float] = field(default_factory=list)
    parts: PartTimes = field(default_factory=lambda: PartTimes(device()))


def run(options: BenchLadderOptions, *, recipe: Recipe) -> None:
    """Measure every step of a selection that this host can run; --out DIR gets ladder.md, ladder.json, ladder.png."""
    batch = begin(options.batch, options.threads, "bench ladder")
    steps = SELECTIONS[options.only]()
    skipped = {step.name: why_skipped(step, recipe) for step in steps}
    measured, runs = {}, {}
    for step in steps:
        if skipped[step.name] is None:
            found, train = _prepare(step, recipe, batch, options)
            measured[step.name], runs[step.name] = found, found.parts.after(options.warmup, train)
    timings = time_interleaved(runs, options.steps, options.warmup, device())
    rows = _rows(steps, measured, timings, batch)
    for row in rows:
        row["skipped"] = skipped[row["name"]]
    first = next(iter(measured.values()))
    result = about(recipe, batch) | {"only": options.only, "ladder_steps": rows, **_together(rows)}
    result |= {"imports_mib": first.memory.imports_mib, "clock": timings[first.step.name].clock}
    page = _page(result)
    if options.out is not None:
        _write(Path(options.out), result, page)
    print_result(page, result, options.json)


def _prepare(
    step: LadderStep, recipe: Recipe, batch: int, options: BenchLadderOptions
) -> tuple[_Measured, Callable[[], None]]:
    """Build one step; its peak memory comes from this GPU's allocator or from a process of its own."""
    memory, peak = ChildResult(None, 0.0, 0.0), None
    if torch.cuda.is_available():
        peak = GpuPeak()
    else:
        given: dict[str, Any] = {"only": options.only, "name": step.name, "batch": batch}
        given["recipe"] = recipe.model_dump(mode="json")
        memory = run_in_child("dino_ds.planning.bench.ladder:take_ladder_step", options.threads, **given)
    trial = build_ladder_step(step, recipe, batch)
    found = _Measured(step, memory, trial.step.engine.config.stage if step.engine else None)

    def train() -> None:
        found.losses.append(float(_run(step, trial)))

    if peak:
        for _ in range(MEMORY_STEPS):
            train()
        found.memory = ChildResult(None, peak.mib(), 0.0)
    return found, train


def take_ladder_step(only: str, name: str, recipe: dict[str, Any], batch: int) -> None:
    """Run a few steps in the process whose memory is measured."""
    step = next(step for step in SELECTIONS[only]() if step.name == name)
    trial = build_ladder_step(step, Recipe.model_validate(recipe), batch)
    for _ in range(MEMORY_STEPS):
        _run(step, trial)


def _run(step: LadderStep, trial: Trial) -> Tensor:
    """One training step; without oneDNN's products where the ladder has not come to them yet."""
    with nullcontext() if step.onednn else products_of_torch():
        return trial.run()


def _rows(
    steps: list[LadderStep], measured: dict[str, _Measured], timings: dict[str, Timing], batch: int
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    first = before = timings[steps[0].name].seconds
    plain = measured[steps[0].name].losses
    for step in steps:
        row: dict[str, Any] = {"name": step.name, "exact": step.exact}
        row |= dict.fromkeys(("images_per_second", "speedup_step", "speedup_total", "peak_memory_mib", "spread"))
        if found := measured.get(step.name):
            timing = timings[step.name]
            parts = found.parts.read()
            row |= {
                "stage": found.stage,
                "images_per_second": batch / timing.seconds,
                "step_seconds": timing.seconds,
                "speedup_step": before / timing.seconds,
                "speedup_total": first / timing.seconds,
                "peak_memory_mib": found.memory.peak_mib,
                "spread": timing.spread,
                "parts_seconds": {part: parts.get(part, 0.0) / len(timing.all_seconds) for part in PARTS},
                "best_images_per_second": batch / min(timing.all_seconds),
                "first_losses": found.losses[:FIRST],
                "loss_difference": _loss_difference(found.losses, plain),
            }
            before = timing.seconds
        rows.append(row)
    return rows


def _loss_difference(losses: list[float], plain: list[float]) -> float:
    """The largest relative difference of the first losses."""
    pairs = zip(losses[:FIRST], plain[:FIRST], strict=True)
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def _together(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Compare the last exact step with the first."""
    exact = [row for row in rows if row["exact"] and not row["skipped"]]
    first, last = exact[0], exact[-1]
    return {
        "exact_total_speedup": last["speedup_total"],
        "exact_total_speedup_of_best": last["best_images_per_second"] / first["best_images_per_second"],
        "exact_total_memory_ratio": last["peak_memory_mib"] / first["peak_memory_mib"],
        "exact_loss_difference": max(row["loss_difference"] for row in exact),
    }


def _page(result: dict[str, Any]) -> str:
    shown = [part for part in PARTS if part != "data"]
    rows, parts = [], []
    for row in result["ladder_steps"]:
        if row["skipped"]:
            continue
        stage = row["stage"]
        run_as = f", run as {stage}" if row["name"].startswith("ZeRO") and not row["name"].endswith(str(stage)) else ""
        rows.append(
            (
                row["name"] + run_as,
                "exact" if row["exact"] else "not exact",
                short(row["images_per_second"]),
                f"{row['step_seconds']:.4g}",
                f"{100 * row['spread']:.0f} %",
                f"{row['speedup_step']:.3f}",
                f"{row['speedup_total']:.3f}",
                f"{row['peak_memory_mib']:.0f}",
            )
        )
        parts.append((row["name"], *(f"{1000 * row['parts_seconds'][part]:.0f}" for part in shown)))
    first = result["ladder_steps"][0]
    libraries = f" (libraries take {result['imports_mib']:.0f} of them)" if result["imports_mib"] else ""
    header = ("step", "result", "images/s", "s", "spread", "× before", "× first", "peak MiB")
    lines = [heading("bench ladder", result), markdown_table(header, rows), ""]
    lines += [f"{row['name']} skipped: {row['skipped']}" for row in result["ladder_steps"] if row["skipped"]]
    lines += ["", markdown_table(("ms of each part", *shown), parts), ""]
    lines.append(
        f"{clock_name(result['clock'])}, medians; exact steps: the last has {result['exact_total_speedup']:.2f} x the "
        f"images/s of the first and {result['exact_total_memory_ratio']:.2f} x its peak memory of "
        f"{first['peak_memory_mib']:.0f} MiB{libraries}; their first {FIRST} losses differ by at most "
        f"{result['exact_loss_difference']:.0e} of their size"
    )
    return "\n".join(lines)


def _write(folder: Path, result: dict[str, Any], page: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ladder.md").write_text(page + "\n")
    (folder / "ladder.json").write_text(json.dumps(result, indent=1) + "\n")
    _draw(result).savefig(folder / "ladder.png", dpi=110)


def _draw(result: dict[str, Any]) -> Any:
    """A matplotlib Figure: a bar of images/s and one of peak memory for each step that was measured."""
    from matplotlib.figure import Figure

    rows = [row for row in result["ladder_steps"] if not row["skipped"]][::-1]
    names = [row["name"] for row in rows]
    colors = ["#3b6ea5" if row["exact"] else "#c98a3a" for row in rows]
    figure = Figure(figsize=(11, 0.45 * len(rows) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    bars = left.barh(names, [row["images_per_second"] for row in rows], color=colors)
    texts = [f"{short(row['images_per_second'])}  ({row['speedup_total']:.2f}×)" for row in rows]
    left.bar_label(bars, texts, padding=3)
    left.set_xlabel("images/s (× the first step)")
    memory = right.barh(names, [row["peak_memory_mib"] for row in rows], color=colors)
    right.bar_label(memory, fmt="%.0f", padding=3)
    right.set_xlabel("peak memory, MiB")
    for axes in (left, right):
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    host = result["host"]
    figure.suptitle(f"{result['backbone']}, batch {result['batch']}, {host['gpu'] or host['cpu']}; orange: not exact")
    return figure
