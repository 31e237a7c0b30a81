"""Times several functions interleaved in one process, so that a disturbance slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from tqdm import tqdm

from dino_ds.basics.ranges import listen


@dataclass(frozen=True)
class Timing:
    """Seconds of each run, by the `clock` that `clock_of` chose."""

    all_seconds: tuple[float, ...]
    clock: str

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.all_seconds)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median."""
        return (max(self.all_seconds) - min(self.all_seconds)) / self.seconds


def clock_of(device: torch.device, waits: bool = False) -> str:
    """Choose the clock: "cpu", this process's CPU time, which other programs' load doesn't lengthen, for work with
    one thread on the CPU that `waits` for no other process; else "wall"."""
    return "cpu" if device.type == "cpu" and torch.get_num_threads() == 1 and not waits else "wall"


def now_by(clock: str) -> Callable[[], float]:
    return time.process_time if clock == "cpu" else time.perf_counter


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_interleaved(
    runs: Mapping[str, Callable[[], object]], repeats: int, warmup: int, device: torch.device, waits: bool = False
) -> dict[str, Timing]:
    """Time each of `runs` `repeats` times after `warmup` calls, interleaved, every second round in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    clock = clock_of(device, waits)
    now = now_by(clock)
    for i in tqdm(range(warmup + repeats), desc="rounds", leave=False, disable=None):
        for name in list(runs)[:: -1 if i % 2 else 1]:
            synchronize(device)
            begin = now()
            runs[name]()
            synchronize(device)
            if i >= warmup:
                seconds[name].append(now() - begin)
    return {name: Timing(tuple(times), clock) for name, times in seconds.items()}


class PartTimes:
    """Sums the seconds of each named range of `dino_ds.basics.ranges`; on a GPU by events, without waiting."""

    def __init__(self, device: torch.device, waits: bool = False) -> None:
        self._device, self._now = device, now_by(clock_of(device, waits))
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        start = self._now()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    def after(self, warmup: int, run: Callable[[], object]) -> Callable[[], None]:
        """Wrap `run` so that its parts are timed after the first `warmup` calls."""
        left = warmup

        def timed() -> None:
            nonlocal left
            if left:
                left -= 1
                run()
            else:
                with listen(self):
                    run()

        return timed

    def read(self) -> dict[str, float]:
        """Return the seconds of each part so far; waits for the device."""
        synchronize(self._device)
        for name, begin, end in self._events:
            self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000
        self._events.clear()
        return dict(self._seconds)
