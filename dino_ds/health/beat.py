"""One page of shared memory, through which a rank tells its monitor process where it is without a system call."""

from __future__ import annotations

import ctypes
import mmap
import os

from dino_ds.basics.ranges import PARTS

PHASES = ("start", "data", "step", "save", "evaluate", "end")
ENDS = ("", "done", "stopped", "error")
STOP_REASONS = ("", "the stop file", "the end of the launcher", "the loss of the run folder")
"""Why a monitor process asks its rank to stop."""


class Beat(ctypes.Structure):
    """One rank's progress, in words of 8 bytes, each written and read atomically.

    moves: how often the phase, the step or its part has changed; ranks do the same things in the same order, so the
    rank with the fewest moves is behind. step: optimizer steps done. warm: the first step, with its longer time limit,
    is done. listed: the monitor may write this rank's heartbeat into the run folder. left: the rank no longer needs its
    monitor.
    """

    moves: int
    ticks: int
    step: int
    warm: int
    listed: int
    left: int
    _phase: int
    _part: int
    _stop_reason: int
    _end: int
    _words = ("moves", "ticks", "step", "warm", "listed", "left", "_phase", "_part", "_stop_reason", "_end")
    _fields_ = [(name, ctypes.c_uint64) for name in _words]
    descriptor: int

    @classmethod
    def shared(cls, descriptor: int | None = None) -> Beat:
        """A new page that other processes can open, or the existing page of a file descriptor."""
        number = os.memfd_create("dino_ds_beat") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(number, mmap.PAGESIZE)
        beat = cls.from_buffer(mmap.mmap(number, mmap.PAGESIZE))
        beat.descriptor = number
        return beat

    def enter(self, phase: str, step: int) -> None:
        """Note that the rank is now in `phase`, with `step` optimizer steps done."""
        self._phase, self.step, self._part = PHASES.index(phase), step, 0
        self.moves += 1

    def enter_part(self, name: str) -> None:
        """Note that the rank is now in part `name` of a step (dino_ds.basics.ranges)."""
        if not self._phase:
            self.tick()  # start-up rehearses a step, perhaps on one rank for all
            return
        self._part = PARTS.index(name) + 1 if name in PARTS else 0
        self.moves += 1

    def tick(self) -> None:
        """Note progress inside a phase; ranks may have different numbers of ticks."""
        self.ticks += 1

    def end(self, how: str) -> None:
        """Note that the rank is about to end, as one of ENDS; only the first call counts."""
        self._end = self._end or ENDS.index(how)

    def request_stop(self, reason: str) -> None:
        """Ask the rank to stop at its next step, for one of STOP_REASONS; called by the monitor."""
        self._stop_reason = STOP_REASONS.index(reason)

    @property
    def stop_reason(self) -> str:
        return STOP_REASONS[self._stop_reason]

    @property
    def phase(self) -> str:
        return PHASES[self._phase]

    @property
    def where(self) -> str:
        """The part of the step that the rank is in, or its phase outside of a step."""
        return PARTS[self._part - 1] if self._part else self.phase

    @property
    def ended(self) -> str:
        return ENDS[self._end]
