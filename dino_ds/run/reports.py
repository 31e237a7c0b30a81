"""Writes a run's report every `log_every` steps: metrics, progress, alarms, unreadable and single-color images."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from dino_ds.basics.host_memory import host_memory_gib, resident_gib
from dino_ds.data.base import allowed_bad_images
from dino_ds.engine import distributed
from dino_ds.engine.device import memory_gib
from dino_ds.engine.gpu_sensors import GpuReading, open_sensors
from dino_ds.errors import DataError
from dino_ds.health.collapse import CollapseAlarm
from dino_ds.method.step import MicroStep
from dino_ds.run.metrics import Clock, Meter
from dino_ds.run.run import Run
from dino_ds.run.saver import Saver
from dino_ds.run.throughput import HostReader, ThroughputMonitor

_NO_CONTRAST = 1e-3
"""The largest range of a channel that counts as a single color, in deviations; a level of 8 bits is 17 times that."""
_GRID = 32
_MOST_NAMES = 20


class Reports:
    """Collects and writes the reports of a run. Every rank calls every method; the loop feeds `clock`."""

    def __init__(self, run: Run, saver: Saver) -> None:
        self._run, self._saver, self._log = run, saver, run.log
        self._meter = Meter(("loss", *run.step.objective.scalars, "constant_images"), run.step.engine.device)
        self.clock = Clock(run.options.global_batch)
        self._throughput = ThroughputMonitor(HostReader())
        self._sensors = open_sensors(run.step.engine.device) if distributed.rank() == 0 else None
        self._last_gpu: tuple[GpuReading | None, int] = (None, 0)
        warmup = run.step.schedules.warmup_steps
        self._collapse = [
            (entropy, CollapseAlarm(entropy.prototypes, warmup, entropy.rows, run.options.balanced))
            for entropy in run.step.objective.entropies
        ]
        self._constant = ConstantImages()
        self._constant_names: set[str] = set()
        self._bad_images: set[str] = set()
        self._notes: list[str] = []

    def loaded(self, unreadable: list[str], notes: list[str]) -> None:
        """Collect the unreadable images of a micro-batch of this rank, and the notes of its loader."""
        self._bad_images.update(unreadable)
        self._notes += notes

    def trained(self, micro: MicroStep, names: list[str], constant: Tensor) -> None:
        """Add a micro-batch of an applied step; `constant` (b,) comes from `constant_images`."""
        scalars = [micro.scalars[name] for name in self._run.step.objective.scalars]
        self._meter.add(micro.loss, *scalars, constant.float().mean())
        self._constant.add(constant, names)

    def write(self, out: MicroStep) -> None:
        """Write the line of metrics of a step, and the alarms that follow from it."""
        run, schedule, predicted = self._run, out.schedule, self._run.options.predicted_gib
        if self._sensors is not None:
            self._sensors.start()  # while this thread waits for the device
        means, speed = self._meter.read(), self.clock.read()
        gpu, hardware = self._read_gpu()
        rolling, warning = self._throughput.look(**speed, gpu=gpu)
        self.collect_bad_images()
        self._name_constant_images(means["constant_images"])
        objective = run.step.objective
        kls = {entropy.kl: means[entropy.loss] - means[entropy.scalar] for entropy in objective.entropies}
        record = {
            "step": run.step.applied_steps,
            "images": run.step.applied_steps * run.options.global_batch,
            "epoch": run.state.position.epoch,
            "loss": means["loss"],
            **{name: means[name] for name in objective.scalars},
            **kls,
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
            **speed,
            **rolling,
            **hardware,
            **_read_host(),
            **self._saver.metrics(),
            "memory_gib": memory_gib(),
            **({} if predicted is None else {"memory_predicted_gib": predicted}),
        }
        # Constant images are reported once, whatever the number of terms.
        constant = [means["constant_images"], *[0.0] * len(self._collapse)]
        alarms = [
            alarm.look(run.step.applied_steps, means[entropy.scalar], kls[entropy.kl], part)
            for (entropy, alarm), part in zip(self._collapse, constant, strict=False)
        ]
        self._log.write({**record, "collapsed": int(any(alarm.on for _, alarm in self._collapse))})
        self._show_progress(record)
        for line in (f"speed    after step {record['step']}: {warning}" if warning else "", *alarms):
            if line:
                self._log.info(line)

    def _read_gpu(self) -> tuple[GpuReading | None, dict[str, float]]:
        """The reading of rank 0's GPU, or None, and its metrics; energy counts evaluations and saves too."""
        gpu = self._sensors.finish() if self._sensors is not None else None
        if gpu is None:
            return None, {}
        before, step = self._last_gpu
        steps = self._run.step.applied_steps - step
        self._last_gpu = gpu, self._run.step.applied_steps
        images = steps * self._run.options.global_batch // distributed.world_size()
        return gpu, gpu.metrics(before, images)

    def collect_bad_images(self) -> None:
        """Gather the unreadable images of all ranks; name and count each once. Raises DataError for too many."""
        run, mine = self._run, sorted(self._bad_images - self._run.state.bad_images)
        found = distributed.gather_objects((mine, self._notes))
        self._notes = []
        for rank, (_, notes) in enumerate(found):
            for note in notes:
                self._log.info(f"note     rank {rank}: {note}")
        for name in sorted({name for names, _ in found for name in names}):
            run.state.bad_images.add(name)
            self._log.info(f"unreadable image skipped: {name}")
        self._bad_images.clear()
        drawn, fraction = run.images_drawn, run.options.max_bad_fraction
        limit = allowed_bad_images(fraction, drawn, run.options.images)
        if len(run.state.bad_images) > limit:
            self._log.info(*self._saver.saving.finish())
            raise DataError(
                f"{len(run.state.bad_images)} of {drawn} images are unreadable, data.max_bad_fraction {fraction:g} "
                f"allows {limit}; their names are in {run.path / 'log.txt'}: fix or remove them, or raise the fraction"
            )

    def _name_constant_images(self, fraction: float) -> None:
        """Name new single-color images, up to a limit. `fraction` of all ranks' images since the last line are such."""
        if not fraction:
            self._constant.forget()
            return
        found = {name for names in distributed.gather_objects(self._constant.take_names()) for name in names}
        new = sorted(found - self._constant_names)
        room = max(0, _MOST_NAMES - len(self._constant_names))
        self._constant_names.update(new)
        for name in new[:room]:
            self._log.info(f"warning  image of one colour: {name}")
        if new[room:] and room:
            self._log.info("warning  and more images of one colour: metrics.jsonl has their part as constant_images")

    def _show_progress(self, record: dict[str, Any]) -> None:
        run, rate = self._run, record["images_per_second"]
        short = f"loss {record['loss']:.3f}"
        for entropy in run.step.objective.entropies:
            own = "" if entropy.loss == "loss" else f", {entropy.loss} {record[entropy.loss]:.3f}"
            short += f"{own} = entropy {record[entropy.scalar]:.3f} + KL {record[entropy.kl]:.3f}"
        speed = f"{rate:.0f} img/s, data wait {100 * record['data_wait_fraction']:.0f} %"
        knn = f", {newest}" if run.evaluations and (newest := run.evaluations.short()) else ""
        self._log.progress(record["step"], f"{short}, {speed}{knn}")
        if not self._log.shows_bar:
            left = (run.options.last_step - record["step"]) * run.options.global_batch / rate
            self._log.info(
                f"step {record['step']}/{run.options.last_step}  {short}, {speed}, {_duration(left)} left{knn}"
            )


def _read_host() -> dict[str, float]:
    """Memory of rank 0's machine in GiB: resident sets of this run's ranks and loader processes, and what is free."""
    by_rank = distributed.gather_objects(resident_gib())
    return {
        "host_memory_gib": sum(by_rank[: distributed.local_world_size()]),  # ranks are numbered machine by machine
        "host_free_gib": host_memory_gib()[1],
    }


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def constant_images(crops: list[Tensor]) -> Tensor:
    """Which images have a single color in each of their crops (b, c, h, w): (b,) bool, on the device.

    Only a grid of about 32 x 32 pixels is looked at.
    """
    flat = []
    for crop in crops:
        step = max(1, crop.shape[-1] // _GRID)
        seen = crop[:, :, ::step, ::step]
        flat.append((seen.amax((2, 3)) - seen.amin((2, 3))).amax(1) < _NO_CONTRAST)
    return torch.stack(flat).all(0)


class ConstantImages:
    """Collects this rank's single-color images; only `take_names` reads the device."""

    def __init__(self) -> None:
        self._seen: deque[tuple[Tensor, list[str]]] = deque(maxlen=1000)

    def add(self, constant: Tensor, names: list[str]) -> None:
        self._seen.append((constant, names))

    def take_names(self) -> list[str]:
        """The names since the last call, each once."""
        found = {
            name: None
            for constant, names in self._seen
            for name, bad in zip(names, constant.tolist(), strict=True)
            if bad
        }
        self._seen.clear()
        return list(found)

    def forget(self) -> None:
        self._seen.clear()
