"""Decides how often to save, by the cost of a save and the cost of a failure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

HOURS_BETWEEN_FAILURES = 24.0  # of the whole job: an assumption
FIRST_SAVE_AFTER = 5
"""Steps of this process before its first save, by which the cost is known and a broken disk is noticed early."""
_SHORTEST, _LONGEST = 30.0, 3600.0  # seconds

Times = tuple[float, float]
"""Two times of one rank in seconds: how long training stood still for a save, and an optimizer step."""


def young_interval(stall_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of training between two saves at which least is lost, to first order (J. W. Young, 1974).

    stall_seconds: how long training stands still for a save. mtbf_seconds: mean time between failures of the whole job.
    """
    return math.sqrt(2 * stall_seconds * mtbf_seconds)


class SaveClock:
    """Knows after which optimizer steps a checkpoint is written; every rank has one, and they agree.

    every: steps, 0 for never, or None for as often as pays, known once the first save after step `start` was measured.
    """

    def __init__(self, every: int | None, start: int, epoch_steps: int, hours_between_failures: float) -> None:
        self._every, self._start, self._epoch_steps = every, start, epoch_steps
        self._mtbf_seconds = hours_between_failures * 3600
        self._began = self._step_seconds = 0.0

    def due(self, done: int) -> bool:
        """Whether to save after step `done`; asked once after every step."""
        if self._every is not None:
            return self._every > 0 and done % self._every == 0
        steps = done - self._start
        if steps == 1:  # the first step warms up
            self._began = time.monotonic()
        if steps == FIRST_SAVE_AFTER:
            self._step_seconds = (time.monotonic() - self._began) / (FIRST_SAVE_AFTER - 1)
        # Again after 50, 500, ... steps where a save has failed and nothing is known yet.
        return steps in [FIRST_SAVE_AFTER * 10**power for power in range(10)]

    def settle(self, stall_seconds: float, gather: Callable[[Times], list[Times]]) -> str | None:
        """Fix the interval, if it is not known, after a save that stopped training for `stall_seconds` on this rank.

        The slowest rank's times decide. gather: turns a value of this rank into the values of all ranks, which must all
        call this after the same step. Returns a line for the log, or None if the interval was known.
        """
        if self._every is not None or not self._step_seconds:
            return None
        stalls, steps = zip(*gather((stall_seconds, self._step_seconds)), strict=True)
        stall, step_seconds = max(stalls), max(max(steps), 1e-6)
        best = young_interval(stall, self._mtbf_seconds)
        seconds = max(_SHORTEST, min(best, self._epoch_steps * step_seconds, _LONGEST))
        self._every = max(1, round(seconds / step_seconds))
        return (
            f"every {self._every} steps = {self._every * step_seconds:.0f} s: a save stops training for {stall:.2f} s, "
            f"a failure is expected every {self._mtbf_seconds / 3600:g} h: best {best:.0f} s, kept within "
            f"{_SHORTEST:.0f} s and the shorter of an epoch and {_LONGEST / 3600:.0f} h"
        )
