"""`dino-ds bench ladder`: from the plain DINO step upwards, one lever at a time: what each is worth on this host."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dino_ds.bench.common import MEMORY_STEPS, about, begin, heading
from dino_ds.bench.rungs import Rung, all_rungs, build_rung, why_skipped
from dino_ds.config.recipe import Recipe
from dino_ds.engine.device import device
from dino_ds.measure.memory import ChildResult, GpuPeak, run_in_child
from dino_ds.measure.tables import markdown_table, print_result, short
from dino_ds.measure.timing import Timing, time_interleaved
from dino_ds.measure.trial import Trial
from dino_ds.options.bench import BenchLadderOptions

FIRST = 3
"""Steps whose losses are compared: exact rungs add in another order, and Adam makes the difference grow."""


def run(options: BenchLadderOptions, *, recipe: Recipe) -> None:
    """Measure every rung that this host can stand on; --out DIR gets ladder.md, ladder.json and ladder.png."""
    batch = begin(options.batch, options.threads, "bench ladder")
    rungs = all_rungs()
    skipped = {rung.name: why_skipped(rung, recipe) for rung in rungs}
    measured = [rung for rung in rungs if skipped[rung.name] is None]
    memory = {} if torch.cuda.is_available() else {r.name: _memory(r, recipe, batch, options.threads) for r in measured}
    losses: dict[str, list[float]] = {rung.name: [] for rung in measured}
    runs = _build(measured, recipe, batch, losses, memory)
    timings = time_interleaved(runs, options.steps, options.warmup, device())
    result = about(recipe, batch) | _result(rungs, skipped, timings, memory, losses, batch)
    page = _page(result)
    if options.out is not None:
        _write(Path(options.out), result, page)
    print_result(page, result, options.json)


def take_rung(name: str, recipe: dict[str, Any], batch: int) -> None:
    """What the process does whose memory is measured."""
    rung = next(rung for rung in all_rungs() if rung.name == name)
    trial = build_rung(rung, Recipe.model_validate(recipe), batch)
    for _ in range(MEMORY_STEPS):
        trial.run()


def _memory(rung: Rung, recipe: Recipe, batch: int, threads: int) -> ChildResult:
    return run_in_child(
        "dino_ds.bench.ladder:take_rung", threads, name=rung.name, recipe=recipe.model_dump(mode="json"), batch=batch
    )


def _build(
    rungs: list[Rung], recipe: Recipe, batch: int, losses: dict[str, list[float]], memory: dict[str, ChildResult]
) -> dict[str, Callable[[], None]]:
    """The step of each rung; `losses` gets those of each of its steps, and `memory` its peak on a GPU."""
    runs: dict[str, Callable[[], None]] = {}
    for rung in rungs:
        peak = None if rung.name in memory else GpuPeak()
        runs[rung.name] = _noting(build_rung(rung, recipe, batch), losses[rung.name])
        if peak:
            for _ in range(MEMORY_STEPS):
                runs[rung.name]()
            memory[rung.name] = ChildResult(None, peak.mib(), 0.0)
    return runs


def _noting(trial: Trial, losses: list[float]) -> Callable[[], None]:
    return lambda: losses.append(float(trial.run()))


def _loss_difference(losses: list[float], plain: list[float]) -> float:
    """The largest relative one of the first steps."""
    pairs = zip(losses[:FIRST], plain[:FIRST], strict=True)
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def _result(
    rungs: list[Rung],
    skipped: dict[str, str | None],
    timings: dict[str, Timing],
    memory: dict[str, ChildResult],
    losses: dict[str, list[float]],
    batch: int,
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    first = before = timings[rungs[0].name].seconds
    plain = losses[rungs[0].name]
    for rung in rungs:
        row: dict[str, Any] = {"name": rung.name, "exact": rung.exact, "skipped": skipped[rung.name]}
        row |= dict.fromkeys(("images_per_second", "speedup_step", "speedup_total", "peak_memory_mib", "spread"))
        if rung.name in timings:
            seconds = timings[rung.name].seconds
            row |= {
                "images_per_second": batch / seconds,
                "speedup_step": before / seconds,
                "speedup_total": first / seconds,
                "peak_memory_mib": memory[rung.name].peak_mib,
                "spread": timings[rung.name].spread,
                "best_images_per_second": batch / min(timings[rung.name].all_seconds),
                "first_losses": losses[rung.name][:FIRST],
                "loss_difference": _loss_difference(losses[rung.name], plain),
            }
            before = seconds
        rows.append(row)
    last = [row for row in rows if row["exact"]][-1]
    return {
        "rungs": rows,
        "exact_total_speedup": last["speedup_total"],
        "exact_total_speedup_of_best": last["best_images_per_second"] / rows[0]["best_images_per_second"],
        "exact_total_memory_ratio": last["peak_memory_mib"] / rows[0]["peak_memory_mib"],
        "exact_loss_difference": max(row["loss_difference"] for row in rows if row["exact"]),
        "imports_mib": memory[rungs[0].name].imports_mib,
        "clock": timings[rungs[0].name].clock,
    }


def _page(result: dict[str, Any]) -> str:
    rows = []
    for row in result["rungs"]:
        kind = "exact" if row["exact"] else "not exact"
        if row["skipped"]:
            rows.append((row["name"], kind, "skipped", "", "", "", ""))
        else:
            rates = (f"{short(row['images_per_second'])}", f"{100 * row['spread']:.0f} %")
            gains = (f"{row['speedup_step']:.3f}", f"{row['speedup_total']:.3f}", f"{row['peak_memory_mib']:.0f}")
            rows.append((row["name"], kind, *rates, *gains))
    header = ("rung", "result", "images/s", "spread", "× before", "× plain", "peak MiB")
    lines = [heading("bench ladder", result), markdown_table(header, rows), ""]
    lines += [f"{row['name']} skipped: {row['skipped']}" for row in result["rungs"] if row["skipped"]]
    clock = "CPU time of one thread" if result["clock"] == "cpu" else "wall time"
    lines.append(f"{clock}, medians; each rung has the levers of those above it")
    libraries = f" (of them libraries {result['imports_mib']:.0f})" if result["imports_mib"] else ""
    lines.append(
        f"exact levers together: {result['exact_total_speedup']:.2f} x the plain step's images/s, "
        f"{result['exact_total_memory_ratio']:.2f} x its peak memory of "
        f"{result['rungs'][0]['peak_memory_mib']:.0f} MiB{libraries}; "
        f"their first {FIRST} losses differ by at most {result['exact_loss_difference']:.0e} of their size"
    )
    return "\n".join(lines)


def _write(folder: Path, result: dict[str, Any], page: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ladder.md").write_text(page + "\n")
    (folder / "ladder.json").write_text(json_module.dumps(result, indent=1) + "\n")
    _draw(result).savefig(folder / "ladder.png", dpi=110)


def _draw(result: dict[str, Any]) -> Any:
    """A matplotlib Figure: a bar of images/s and one of peak memory for each rung that was measured."""
    from matplotlib.figure import Figure

    rows = [row for row in result["rungs"] if not row["skipped"]][::-1]
    names = [row["name"] for row in rows]
    colours = ["#3b6ea5" if row["exact"] else "#c98a3a" for row in rows]
    figure = Figure(figsize=(11, 0.45 * len(rows) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    bars = left.barh(names, [row["images_per_second"] for row in rows], color=colours)
    left.bar_label(
        bars, [f"{short(row['images_per_second'])}  ({row['speedup_total']:.2f}×)" for row in rows], padding=3
    )
    left.set_xlabel("images/s (× the plain step)")
    memory = right.barh(names, [row["peak_memory_mib"] for row in rows], color=colours)
    right.bar_label(memory, fmt="%.0f", padding=3)
    right.set_xlabel("peak memory, MiB")
    for axes in (left, right):
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    host = result["host"]
    figure.suptitle(f"{result['backbone']}, batch {result['batch']}, {host['gpu'] or host['cpu']}; orange: not exact")
    return figure
