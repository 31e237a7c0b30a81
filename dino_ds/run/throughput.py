"""Monitors the throughput of this run: reports once, with the likely cause, if it stays slow."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from dino_ds.basics.digits import short

# Numbers of windows, each the time between two lines of metrics; then shares of the baseline.
WARMUP = 2
ROLLING = LONG = 5
SLOW, RECOVERED = 0.8, 0.9


@dataclass(frozen=True)
class _State:
    """Means over the last ROLLING windows, and readings after them. load: the host's load average of one minute."""

    rate: float
    wait: float
    load: float


class ThroughputMonitor:
    """Compares windows of steps with a baseline: the best mean of ROLLING windows so far, without the first WARMUP.

    A run is slow after LONG windows in a row under 80 % of the baseline, until the mean is back at 90 %.
    """

    def __init__(self, read_load: Callable[[], float] = lambda: os.getloadavg()[0]) -> None:
        self._read_load = read_load
        self._warmup = WARMUP
        self._recent: deque[tuple[float, float]] = deque(maxlen=ROLLING)
        self._baseline: _State | None = None
        self._slow_windows = 0
        self._warned = False

    def update(self, images_per_second: float, data_wait_fraction: float) -> tuple[dict[str, float], str | None]:
        """Add a window; returns rolling means for the metrics, and a line for the log or None."""
        if self._warmup:
            self._warmup -= 1
            return {}, None
        self._recent.append((images_per_second, data_wait_fraction))
        # Seconds per image add up, rates don't: windows have the same number of images.
        seconds = [1 / rate for rate, _ in self._recent]
        waited = [wait / rate for rate, wait in self._recent]
        now = _State(1 / fmean(seconds), sum(waited) / sum(seconds), self._read_load())
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
    """The likely cause: waiting for data, if it is over half of the added time per image, else the host's load."""
    added = 1 / now.rate - 1 / best.rate
    if now.wait / now.rate - best.wait / best.rate > added / 2:
        return (
            f"Likely cause: the wait for data rose from {100 * best.wait:.0f} % to {100 * now.wait:.0f} % of the time: "
            "look at the disk or network that holds the images and at what else runs on the cores of the workers "
            "(data.workers)"
        )
    return (
        f"Each step takes longer; the load of this host is {now.load:.1f} on {os.cpu_count()} cores, it was "
        f"{best.load:.1f}: look at other processes, at clock rate and temperature of the device and, with several "
        "ranks, at the slowest of them"
    )
