"""Time of loss and EMA alone: `python -m scripts.bench_loss [--config vits16] [--batch 64]`.

The loss from bottleneck features to their gradient and that of the prototypes, with the products of both, which is
what the step does of it; the teacher's update beside a copy of as many bytes, which is the least that it can take.
"""

from __future__ import annotations

from collections.abc import Callable

import fire
import torch
from torch import Tensor

from dino_ds.config.crops import EMA, crop_sizes, teacher_sizes
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.engine.process import device
from dino_ds.method.build import build_objective, build_schedules
from dino_ds.method.dino import DINO
from dino_ds.models.prototypes import Prototypes
from dino_ds.planning.bench.step import all_steps, build_ladder_step
from dino_ds.planning.measure import EPOCH_STEPS, about, begin, clock_name, heading, time_interleaved

EMA_BYTES = 12
"""A parameter in one FP32 pass: teacher and student are read, the teacher is written."""


def main(config: str = "vitti16", batch: int | None = None, steps: int = 7, threads: int = 1) -> None:
    """One process, FP32."""
    measure(load_recipe(config, {}), begin(batch, threads, "scripts.bench_loss"), steps)


def measure(recipe: Recipe, batch: int, steps: int) -> None:
    exact = [step for step in all_steps() if step.exact]
    trial = build_ladder_step(exact[-1], recipe, batch)
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
    """DINO's term of a recipe on random features."""

    def __init__(self, recipe: Recipe, batch: int) -> None:
        head, crops = recipe.head, recipe.groups
        self._term = build_objective(recipe, device()).terms[DINO]
        self._schedule = build_schedules(recipe, EPOCH_STEPS).at(EPOCH_STEPS)
        self._prototypes, self._of_teacher = (
            Prototypes(head.bottleneck, head.prototypes, head.learned_lengths, head.free_prototypes).to(device())
            for _ in range(2)
        )
        self._student = torch.randn(
            len(crop_sizes(group for group in crops if group.student)) * batch, head.bottleneck, device=device()
        )
        self._teacher = torch.randn(len(teacher_sizes(crops)) * batch, head.bottleneck, device=device())

    def __call__(self) -> Tensor:
        """The loss; the gradients are dropped."""
        with torch.no_grad():
            outputs = {EMA: {DINO: self._of_teacher(self._teacher)}}
        (targets,) = self._term.targets([outputs], [{}], self._schedule)
        features = self._student.detach().requires_grad_()
        loss = self._term.loss({DINO: self._prototypes(features, targets)}, targets, self._schedule).loss
        torch.autograd.grad(loss, (features, *self._prototypes.parameters()))
        for statistic in self._term.statistics.values():
            statistic.drop()
        return loss.detach()


if __name__ == "__main__":
    fire.Fire(main)
