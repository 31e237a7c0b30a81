"""What a rank tells its watcher: a page of memory that both see. Writing to it is no system call."""

from __future__ import annotations

import mmap
import os

from dino_ds.ranges import PARTS

PHASES = ("start", "data", "step", "save", "evaluate", "end")
ENDS = ("", "done", "stopped", "error")
STOP_REASONS = ("", "the stop file", "the end of the launcher", "the loss of the run folder")
"""Why a watcher wants its rank to stop."""

_BYTES = 4096
_TEXT = 128
"""Where the message begins; before it are words of 8 bytes, which are written and read whole."""
_MOVES, _PHASE, _STEP, _PART, _LISTED, _WISH, _END, _CODE, _LENGTH, _FIRST, _LEFT, _BREATHS = range(12)


class Beat:
    """One rank's progress: phase, part of the step, optimizer steps so far, and how often any of them has changed.

    `moves` counts the changes: ranks do the same things in the same order, so the rank with the fewest is behind.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """A new page, or the one behind a file descriptor that another process has made."""
        self.descriptor = os.memfd_create("dino_ds_beat") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, _BYTES)
        self._map = mmap.mmap(self.descriptor, _BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._part_numbers = {name: i + 1 for i, name in enumerate(PARTS)}
        self._phase_numbers = {name: i for i, name in enumerate(PHASES)}

    def enter(self, phase: str, step: int) -> None:
        """The rank is now in `phase`, with `step` optimizer steps done."""
        words = self._words
        words[_PHASE], words[_STEP], words[_PART] = self._phase_numbers[phase], step, 0
        words[_MOVES] += 1

    def part(self, name: str) -> None:
        """The rank has come to the part `name` of a step (dino_ds.ranges)."""
        words = self._words
        words[_PART] = self._part_numbers.get(name, 0)
        words[_MOVES] += 1

    def tick(self) -> None:
        """The rank makes progress inside a phase, in as many pieces as its share of the work has."""
        self._words[_BREATHS] += 1

    def first_step_done(self) -> None:
        """From now on the limits of a process that has warmed up apply."""
        self._words[_FIRST] = 1

    def list_in_folder(self) -> None:
        """From now on the watcher may write this rank's heartbeat into the run folder."""
        self._words[_LISTED] = 1

    def unlist(self) -> None:
        """From now on it may not: this start was refused, and the run in the folder is another start's."""
        self._words[_LISTED] = 0

    def leave(self) -> None:
        """The rank has no more need of its watcher."""
        self._words[_LEFT] = 1

    def end(self, how: str, code: int, message: str) -> None:
        """The rank is about to end, as one of ENDS; the first word counts."""
        if self.ended:
            return
        text = message.encode()[: _BYTES - _TEXT]
        self._map[_TEXT : _TEXT + len(text)] = text
        self._words[_LENGTH], self._words[_CODE] = len(text), code
        self._words[_END] = ENDS.index(how)

    def request_stop(self, why: str) -> None:
        """The watcher wants the rank to stop at its next step."""
        self._words[_WISH] = STOP_REASONS.index(why)

    @property
    def stop_reason(self) -> str:
        return STOP_REASONS[self._words[_WISH]]

    @property
    def moves(self) -> int:
        return self._words[_MOVES]

    @property
    def breaths(self) -> int:
        return self._words[_BREATHS]

    @property
    def phase(self) -> str:
        return PHASES[self._words[_PHASE]]

    @property
    def where(self) -> str:
        """The phase, or the part of the step."""
        part = self._words[_PART]
        return PARTS[part - 1] if part else self.phase

    @property
    def step(self) -> int:
        return self._words[_STEP]

    @property
    def warm(self) -> bool:
        return bool(self._words[_FIRST])

    @property
    def left(self) -> bool:
        return bool(self._words[_LEFT])

    @property
    def listed(self) -> bool:
        return bool(self._words[_LISTED])

    @property
    def ended(self) -> str:
        return ENDS[self._words[_END]]

    @property
    def last_word(self) -> tuple[int, str]:
        """Exit code and message of the end."""
        length = self._words[_LENGTH]
        return self._words[_CODE], bytes(self._map[_TEXT : _TEXT + length]).decode(errors="replace")

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.descriptor)
