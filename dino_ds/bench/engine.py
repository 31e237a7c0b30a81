"""`dino-ds bench engine`: what DeepSpeed adds to the step, and the shares of loss and EMA in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dino_ds.bench.common import about, begin, heading
from dino_ds.bench.rungs import CLIPPING, build_rung, last_without_engine
from dino_ds.config.crops import student_sizes, teacher_sizes
from dino_ds.config.recipe import Recipe
from dino_ds.engine.device import device
from dino_ds.measure.host import copy_bytes_per_second
from dino_ds.measure.tables import markdown_table, print_result
from dino_ds.measure.timing import PartTimes, time_interleaved
from dino_ds.measure.trial import EPOCH_STEPS, build_trial, resolve
from dino_ds.objectives.dino import HEAD, DinoTerm
from dino_ds.options.bench import BenchEngineOptions
from dino_ds.ranges import PARTS, named_range
from dino_ds.training.build import build_schedules

STAGES = (0, 1, 3)
EMA_BYTES = 12
"""A parameter of one FP32 pass: teacher and student read, teacher written."""
PLAIN = "plain torch AdamW"


def run(options: BenchEngineOptions, *, recipe: Recipe) -> None:
    """The step at ZeRO 0, 1 and 3 against the same step with torch's AdamW alone, FP32, by turns in one process."""
    batch = begin(options.batch, options.threads, "bench engine")
    trials = {PLAIN: build_rung(last_without_engine(), recipe, batch)}
    for stage in STAGES:
        ds = {"gradient_clipping": CLIPPING, "zero_optimization": {"stage": stage}}
        resolved, config = resolve(recipe, ds, "bench engine", batch)
        name = f"ZeRO {stage}" if config.stage == stage else f"ZeRO {stage}, run as {config.stage}"
        trials[name] = build_trial(resolved, config)
    parts = {name: PartTimes(device()) for name in [*trials, "loss"]}
    runs: dict[str, Any] = {name: trial.run for name, trial in trials.items()} | {"loss": _LossAlone(recipe, batch)}
    timed = {name: parts[name].after(options.warmup, run) for name, run in runs.items()}
    timings = time_interleaved(timed, options.steps, options.warmup, device())
    plain = timings[PLAIN].seconds
    rows: list[dict[str, Any]] = []
    for name in trials:
        spent, timing = parts[name].read(), timings[name]
        rows.append(
            {
                "name": name,
                "step_seconds": timing.seconds,
                "spread": timing.spread,
                "overhead_percent": 100 * (timing.seconds / plain - 1),
                "ema_percent": 100 * spent["ema"] / options.steps / timing.seconds,
                "parts_seconds": {part: spent.get(part, 0.0) / options.steps for part in PARTS},
            }
        )
    loss_seconds = parts["loss"].read()["loss"] / options.steps
    parameters = sum(p.numel() for p in trials[PLAIN].step.teachers["ema"].network.parameters())
    floor = EMA_BYTES * parameters / copy_bytes_per_second(device())
    result = about(recipe, batch) | {
        "engines": rows,
        "loss_seconds": loss_seconds,
        "loss_percent": 100 * loss_seconds / timings["ZeRO 0"].seconds,
        "ema_over_byte_floor": rows[1]["parts_seconds"]["ema"] / floor,
        "clock": timings[PLAIN].clock,
    }
    print_result(_page(result), result, options.json)


class _LossAlone:
    """From logits to their gradient: in a step the second half of it is inside the backward pass."""

    def __init__(self, recipe: Recipe, batch: int) -> None:
        objective, k, crops = recipe.objective, recipe.head.prototypes, recipe.crops.groups
        self._term = DinoTerm(k, objective.student_temp, objective.center_momentum, device=device())
        self._schedule = build_schedules(recipe, EPOCH_STEPS).at(EPOCH_STEPS)
        self._student = self._cosines(len(student_sizes(crops)) * batch, k)
        self._teacher = self._cosines(len(teacher_sizes(crops)) * batch, k)

    @staticmethod
    def _cosines(rows: int, k: int) -> Tensor:
        return torch.rand(rows, k, device=device()) * 2 - 1

    def __call__(self) -> None:
        logits = self._student.clone().requires_grad_()  # the gradient is written over them
        with named_range("loss"):
            targets = self._term.targets({"ema": {HEAD: self._teacher}}, self._schedule)
            torch.autograd.grad(self._term.loss({HEAD: logits}, targets, self._schedule).loss, logits)
        self._term.center.drop()


def _page(result: dict[str, Any]) -> str:
    shown = [part for part in PARTS if part != "data"]
    header = ("step", "s", "spread", "overhead", *(f"{part}, ms" for part in shown))
    rows = [
        (
            row["name"],
            f"{row['step_seconds']:.4g}",
            f"{100 * row['spread']:.0f} %",
            f"{row['overhead_percent']:+.1f} %",
            *(f"{1000 * row['parts_seconds'][part]:.0f}" for part in shown),
        )
        for row in result["engines"]
    ]
    clock = "CPU time of one thread" if result["clock"] == "cpu" else "wall time"
    shares = ", ".join(f"{row['ema_percent']:.2f} % ({row['name']})" for row in result["engines"][1:])
    return "\n".join(
        [
            heading("bench engine", result),
            markdown_table(header, rows),
            "",
            f"{clock}, medians; parts are means over the same steps",
            f"loss, from logits to their gradient: {1000 * result['loss_seconds']:.1f} ms, "
            f"{result['loss_percent']:.2f} % of the step at ZeRO 0; EMA: {shares}, "
            f"{result['ema_over_byte_floor']:.2f} x the time of a copy of as many bytes",
        ]
    )
