"""A run's next start: the command, how long to wait before it, and when there is to be none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from dino_ds.ports import find_free_port, port_is_free

RESUME = ("--resume", "auto")
DEADLY = 3
"""So many deaths in a row at one step: it is the step's doing."""
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 300.0
_FIRST_WAIT_STORAGE = 30.0
STORAGE = 5
FINAL = (0, 2, 3, 4, 7, 75)
"""Codes that a start would only repeat, or that want none: done, usage, checkpoint, numbers, memory, stopped."""


def resumed(argv: Sequence[str]) -> list[str]:
    """The same command with `--resume auto`, and a free master port where its own is taken."""
    words = list(argv)
    script = script_index(words)
    given = iter(range(script + 1, len(words)))
    kept = words[: script + 1]
    for i in given:
        if words[i] == RESUME[0]:
            if i + 1 < len(words) and not words[i + 1].startswith("-"):
                next(given)
        elif not words[i].startswith(f"{RESUME[0]}="):
            kept.append(words[i])
    return with_free_port([*kept, *RESUME])


def script_index(words: Sequence[str]) -> int:
    """Where the launcher's own words end: the place of train.py, or of `train` of `dino-ds train`."""
    return next((i for i, word in enumerate(words) if Path(word).name in ("train.py", "train")), 0)


def with_free_port(words: list[str]) -> list[str]:
    """Another --master_port if the one given is taken; where other machines must know it, it stays."""
    end = script_index(words)
    elsewhere = ("--hostfile", "-H", "--nnodes", "--rdzv_endpoint", "--rdzv-endpoint")
    if any(word.partition("=")[0] in elsewhere for word in words[:end]):
        return words
    changed = list(words)
    for i, word in enumerate(words[:end]):
        name, equals, port = word.partition("=")
        if name not in ("--master_port", "--master-port"):
            continue
        place = i if equals else i + 1
        port = port if equals else words[place]
        if port.isdigit() and not port_is_free(int(port)):
            changed[place] = f"{name}={find_free_port()}" if equals else str(find_free_port())
    return changed


class BackOff:
    """Seconds to wait before a start: doubling from 1 s (30 s for a full disk) to 5 min, less up to a half by chance.

    It begins again where the run has saved a later step since the last time: machines must not be hammered, and a run
    that gets on must not wait.
    """

    def __init__(self, checkpoint: int | None) -> None:
        self._checkpoint, self._in_vain = checkpoint, 0

    def wait(self, code: int, checkpoint: int | None) -> float:
        if (checkpoint or 0) > (self._checkpoint or 0):
            self._in_vain = 0
        self._checkpoint = checkpoint
        first = _FIRST_WAIT_STORAGE if code == STORAGE else _FIRST_WAIT
        longest = min(_LONGEST_WAIT, first * 2**self._in_vain)
        self._in_vain += 1
        return longest * random.uniform(0.5, 1.0)


class Deaths:
    """At which steps a run has died lately."""

    def __init__(self) -> None:
        self._steps: list[int | None] = []

    def add(self, step: int | None) -> bool:
        """Whether this is the third in a row at one step; None: not while working on a step."""
        self._steps.append(step)
        last = self._steps[-DEADLY:]
        return step is not None and last == [step] * DEADLY
