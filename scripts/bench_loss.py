"""What loss and EMA take, alone: `python -m scripts.bench_loss [--config vits16] [--batch 64]`.

The loss from logits to their gradient, whose second half is a part of a step's backward pass; the teacher's update
beside a copy of as many bytes, which is the least that it can take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import fire
import torch
from torch import Tensor

from dino_ds.bench.common import about, begin, clock_name, heading
from dino_ds.bench.ladder_steps import build_ladder_step, last_without_engine
from dino_ds.config.crops import student_sizes, teacher_sizes
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.engine.device import device
from dino_ds.measure.timing import time_interleaved
from dino_ds.measure.trial import EPOCH_STEPS
from dino_ds.objectives.dino import HEAD, DinoTerm
from dino_ds.training.build import build_schedules

EMA_BYTES = 12
"""A parameter in one FP32 pass: teacher and student are read, the teacher is written."""


def main(config: str = "vitti16", batch: int | None = None, steps: int = 7, threads: int = 1) -> None:
    """One process, FP32."""
    measure(load_recipe(config, {}), begin(batch, threads, "scripts.bench_loss"), steps)


def measure(recipe: Recipe, batch: int, steps: int) -> None:
    trial = build_ladder_step(dataclasses.replace(last_without_engine(), name="step"), recipe, batch)
    teacher = trial.step.teachers["ema"]
    weights = sum(p.numel() for p in teacher.network.parameters())
    source = torch.ones(EMA_BYTES * weights // 8, device=device())  # read and written once: 8 bytes a number
    target = torch.empty_like(source)
    runs: dict[str, Callable[[], object]] = {
        "step": trial.run,
        "loss": LossAlone(recipe, batch),
        "ema": lambda: teacher.update(trial.step.schedule),
        "copy": lambda: target.copy_(source),
    }
    timings = time_interleaved(runs, steps, 2, device())
    seconds = {name: timing.seconds for name, timing in timings.items()}
    print(heading("bench loss", about(recipe, batch)))
    for name in ("loss", "ema"):
        print(f"{name}: {1000 * seconds[name]:.1f} ms, {100 * seconds[name] / seconds['step']:.2f} % of the step")
    print(f"ema: {seconds['ema'] / seconds['copy']:.2f} x the time of a copy of as many bytes")
    print(f"{clock_name(timings['step'].clock)}, medians")


class LossAlone:
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
        targets = self._term.targets({"ema": {HEAD: self._teacher}}, self._schedule)
        torch.autograd.grad(self._term.loss({HEAD: logits}, targets, self._schedule).loss, logits)
        self._term.center.drop()


if __name__ == "__main__":
    fire.Fire(main)
