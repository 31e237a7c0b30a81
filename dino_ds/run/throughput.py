"""Monitors the throughput of this run: reports once that it has become slow for long, with the likely cause."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import psutil
import torch

from dino_ds.basics.digits import short
from dino_ds.basics.host_memory import own_processes
from dino_ds.engine.gpu_sensors import GpuReading

# Numbers of windows; a window is the time between two lines of metrics.
WARMUP = 2
ROLLING = LONG = 5
SLOW, RECOVERED = 0.8, 0.9
_IDLE = 0.2
"""A drop of the GPU's utilization by more than this fraction of the time points to something else."""


@dataclass(frozen=True)
class Host:
    """The host between two lines of metrics.

    others: cores that other processes use, other ranks among them; cores: number of the host's cores; memory: the
    fraction in use of the host's or the GPU's memory, whichever is fuller; load: processes that run or want to.
    """

    others: float
    cores: int
    memory: float
    load: float


@dataclass(frozen=True)
class _State:
    rate: float
    wait: float
    host: Host
    gpu: GpuReading | None


class ThroughputMonitor:
    """Gets each window by `update`. The baseline is the best mean of ROLLING windows, without the first WARMUP ones.

    A run is slow after LONG windows in a row under 80 % of the baseline, until the mean is back at 90 %.
    """

    def __init__(self, read_host: Callable[[], Host]) -> None:
        self._read_host = read_host
        self._warmup = WARMUP
        self._recent: deque[tuple[float, float]] = deque(maxlen=ROLLING)
        self._baseline: _State | None = None
        self._slow_windows = 0
        self._warned = False

    def update(
        self, images_per_second: float, data_wait_fraction: float, gpu: GpuReading | None = None
    ) -> tuple[dict[str, float], str | None]:
        """Take a window's values; the rolling ones for the metrics, and a line for the log or None."""
        if self._warmup:
            self._warmup -= 1
            return {}, None
        self._recent.append((images_per_second, data_wait_fraction))
        # Seconds per image add up, rates don't: windows have the same number of images.
        seconds = [1 / rate for rate, _ in self._recent]
        waited = [wait / rate for rate, wait in self._recent]
        now = _State(1 / fmean(seconds), sum(waited) / sum(seconds), self._read_host(), gpu)
        values = {"rolling_images_per_second": now.rate, "rolling_data_wait_fraction": now.wait}
        if len(self._recent) < ROLLING:
            return values, None
        if self._baseline is None or now.rate > self._baseline.rate:
            self._baseline = now
        values["throughput_of_best"] = now.rate / self._baseline.rate
        self._slow_windows = self._slow_windows + 1 if images_per_second < SLOW * self._baseline.rate else 0
        return values, self._judge(now, self._baseline)

    def _judge(self, now: _State, best: _State) -> str | None:
        part = now.rate / best.rate
        if self._warned and part >= RECOVERED:
            self._warned = False
            return f"throughput is back at {short(now.rate, 4)} img/s, {100 * part:.0f} % of this run's best"
        if self._warned or self._slow_windows < LONG:
            return None
        self._warned = True
        return (
            f"throughput has fallen to {short(now.rate, 4)} img/s, {100 * part:.0f} % of this run's best "
            f"{short(best.rate, 4)}. {_cause(now, best)}"
        )


def _cause(now: _State, best: _State) -> str:
    """The cause of at least half of the added time per image; if that is the step, a reading of GPU and host."""
    added = 1 / now.rate - 1 / best.rate
    if now.wait / now.rate - best.wait / best.rate > added / 2:
        return (
            f"Likely cause: the wait for data rose from {100 * best.wait:.0f} % to {100 * now.wait:.0f} % of the time: "
            "look at the disk or network that holds the images and at what else runs on the cores of the workers "
            "(data.workers)"
        )
    if now.host.memory > 0.95:
        return (
            f"Likely cause: memory is {100 * now.host.memory:.0f} % full, and freeing or swapping takes time: lower "
            "the micro-batch"
        )
    if now.gpu is not None and (cause := _cause_on_gpu(now.gpu, best.gpu or GpuReading())):
        return f"Likely cause: {cause}"
    host, before = now.host, best.host
    numbers = (
        f"they use {host.others:.1f} of {host.cores} cores, it was {before.others:.1f}; the load is {host.load:.1f}, "
        f"it was {before.load:.1f}"
    )
    # On cores that are all taken, others can't use more of them: then the load alone rises.
    if max(host.others - before.others, host.load - before.load) > 0.25 * host.cores:
        return f"Likely cause: other processes on this host: {numbers}"
    return (
        f"Each step takes longer, and other processes explain it badly ({numbers}): look at clock rate and temperature "
        "of the device, at other jobs on it and, with several ranks, at the slowest of them"
    )


def _cause_on_gpu(now: GpuReading, best: GpuReading) -> str:
    """The cause on this rank's GPU, or "" if its numbers name none."""
    if now.slowed_by and not best.slowed_by:
        known = ((now.celsius, "°C"), (now.watts, "W"))
        state = ", ".join(f"{value:.0f} {unit}" for value, unit in known if value is not None)
        look = "cooling" if now.slowed_by == "heat" else "power limit and power supply"
        return f"the GPU lowers its clock because of {now.slowed_by}{state and f' ({state})'}: look at its {look}"
    if now.others > best.others:
        return f"{now.others} other processes use this GPU, there were {best.others}: nvidia-smi lists them"
    if now.utilization is not None and now.utilization < (best.utilization or 0) - _IDLE:
        was, part = 100 * (best.utilization or 0), 100 * now.utilization
        return (
            f"the GPU is busy for {part:.0f} % of the time, it was {was:.0f} %: it waits for the host or for other "
            "ranks; look at the cores of this process, at the disk, and at the slowest rank"
        )
    return ""


class HostReader:
    """Each call describes the time since the last one; the load is the kernel's mean of about a minute."""

    def __init__(self) -> None:
        self._last = self._read()

    def __call__(self) -> Host:
        then, self._last = self._last, self._read()
        wall, busy, own = (b - a for a, b in zip(then, self._last, strict=True))
        cores = os.cpu_count() or 1
        # The kernel counts in ticks of 10 ms: of a moment the quotient may be anything.
        others = min(max(0.0, busy - own) / max(wall, 1e-3), float(cores))
        return Host(others, cores, _memory_in_use(), os.getloadavg()[0])

    def _read(self) -> tuple[float, float, float]:
        """Seconds on the clock, and of CPU time: of the whole host, and of this process with its loader processes."""
        host, own = psutil.cpu_times(), 0.0
        for process in own_processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                own += times.user + times.system
        return time.monotonic(), host.user + getattr(host, "nice", 0.0) + host.system, own


def _memory_in_use() -> float:
    used = psutil.virtual_memory().percent / 100
    if not torch.cuda.is_available():
        return used
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return max(used, 1 - (free + reserved) / total)
