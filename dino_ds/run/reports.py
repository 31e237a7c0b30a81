"""Writes the metrics of a run every `log_every` steps, its progress, and the alarms that follow from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from dino_ds.basics.host_memory import host_memory_gib, resident_gib
from dino_ds.engine import distributed
from dino_ds.engine.device import memory_gib
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.health.collapse import CollapseAlarm, SpreadAlarm
from dino_ds.health.files import Event
from dino_ds.method.step import MicroStep
from dino_ds.run.bad_images import ImageReports
from dino_ds.run.metrics import Clock, Meter
from dino_ds.run.run import Run
from dino_ds.run.saver import Saver

_LONG_WAIT = 0.1
"""Share of the time spent waiting for data above which the step line states it."""


class Reports:
    """Collects and writes the reports of a run; `images` reports on its images. The loop updates `clock`.

    Every rank calls every method.
    """

    def __init__(self, run: Run, saver: Saver) -> None:
        self._run, self._saver, self._log = run, saver, run.log
        self.images = ImageReports(run, saver)
        self._shares = tuple(f"share/{source}" for source in run.options.part_ends)
        meters = ("loss", *run.step.objective.scalars, "constant_images", *self._shares)
        self._meter = Meter(meters, run.step.engine.device)
        self.clock = Clock(run.options.global_batch)
        self._began = 0.0, 0
        self._newest: MicroStep | None = None
        """Of steps without a line of metrics."""
        self._said_constant = self._said_wait = False
        warmup = run.step.schedules.warmup_steps
        objective = run.step.objective
        self._collapse: list[tuple[tuple[str, ...], CollapseAlarm | SpreadAlarm]] = [
            ((entropy.scalar, entropy.kl), CollapseAlarm(entropy.prototypes, warmup, entropy.rows))
            for entropy in objective.entropies
        ]
        self._collapse += [((name,), SpreadAlarm(name, warmup)) for name in objective.spreads]

    def begin(self) -> None:
        """Begin to measure speed: training starts or continues now."""
        self.clock.read()
        self._began = time.monotonic(), self._run.step.applied_steps

    def trained(self, micro: MicroStep, constant: Tensor, shares: list[Tensor]) -> None:
        """Add a micro-batch of an applied step; `constant` (b,) from `constant_images`, `shares` from `part_shares`."""
        self._newest = micro
        scalars = [micro.scalars[name] for name in self._run.step.objective.scalars]
        self._meter.add(micro.loss, *scalars, constant.float().mean(), *shares)

    def write(self, out: MicroStep) -> None:
        """Write a step's line of metrics, and the alarms that it raises."""
        means, speed, self._newest = self._meter.read(), self.clock.read(), None
        self.images.report_unreadable()
        predicted = self._run.options.predicted_gib
        record = {
            **self._describe_step(means, out.schedule),
            **speed,
            **_read_host(),
            **self._saver.metrics(),
            "memory_gib": memory_gib(),
            **({} if predicted is None else {"memory_predicted_gib": predicted}),
        }
        alarms = self._ask_alarms(record)
        self._log.write({**record, "collapsed": int(any(alarm.on for _, alarm in self._collapse))})
        self._show_progress(record)
        if means["constant_images"] and not self._said_constant:
            self._said_constant = True
            part = f"{means['constant_images']:.2%}"
            self._log.info(f"warning  {part} of the images are of one color (constant_images of metrics.jsonl)")
        self._log.info(*alarms)

    def finish(self) -> None:
        """Write the metrics of a run that ends between two lines, so that it ends at the step that is saved."""
        if self._newest is not None:
            self.write(self._newest)

    def _describe_step(self, means: dict[str, float], schedule: ScheduleValues) -> dict[str, Any]:
        """The metrics of training: progress, losses, schedules, gradient, skipped steps and bad images."""
        run, objective = self._run, self._run.step.objective
        return {
            "step": run.step.applied_steps,
            "images": run.step.applied_steps * run.options.global_batch,
            "epoch": run.state.position.epoch,
            "loss": means["loss"],
            **{name: means[name] for name in objective.scalars},
            **{entropy.kl: means[entropy.loss] - means[entropy.scalar] for entropy in objective.entropies},
            "lr": schedule.lr,
            "weight_decay": schedule.weight_decay,
            "teacher_momentum": schedule.teacher_momentum,
            **{f"{name}_momentum": momentum for name, momentum in schedule.momenta.items()},
            **{f"{name}_weight": schedule.weights[name] for name in run.step.schedules.moving_weights},
            "teacher_temp": schedule.teacher_temp,
            "grad_norm": run.step.engine.grad_norm,
            "loss_scale": run.step.engine.loss_scale,
            "skipped_steps": run.state.skipped_steps,
            "bad_images": len(run.state.bad_images),
            "constant_images": means["constant_images"],
            **{name: means[name] for name in self._shares},
        }

    def _ask_alarms(self, record: dict[str, Any]) -> list[str]:
        looks: list[tuple[tuple[str, ...], Callable[..., str]]] = [
            (names, alarm.look) for names, alarm in self._collapse
        ]
        lines = [look(record["step"], *(record[name] for name in names)) for names, look in looks]
        return [line for line in lines if line]

    def _show_progress(self, record: dict[str, Any]) -> None:
        run, rate = self._run, record["images_per_second"]
        waits = record["data_wait_fraction"]
        waiting = f", waits for data {100 * waits:.0f} % of the time" if waits > _LONG_WAIT else ""
        if waiting and not self._said_wait:
            self._said_wait = True
            waiting += " (dino-ds bench tune finds the loader processes that help)"
        losses = {name: record.get(f"{name}_loss") for name in run.step.objective.terms}
        terms = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items() if loss is not None)
        loss = f"loss {record['loss']:.3f}{f' ({terms})' if terms else ''}"
        short = f"{loss}, {rate:.0f} images/s{waiting}"
        seconds, steps = time.monotonic() - self._began[0], record["step"] - self._began[1]
        left = f"about {_duration((run.options.last_step - record['step']) * seconds / steps)} left"
        line = f"step {record['step']}/{run.options.last_step}  {short}, {left}"
        self._log.info(Event(line, "step", step=record["step"]))


def _read_host() -> dict[str, float]:
    """Memory of rank 0's machine in GiB: resident sets of this run's ranks and loader processes, and free memory."""
    by_rank = distributed.gather_objects(resident_gib())
    return {
        "host_memory_gib": sum(by_rank[: distributed.local_world_size()]),  # ranks are numbered machine by machine
        "host_free_gib": host_memory_gib()[1],
    }


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"
    return f"{seconds:.0f} s"
