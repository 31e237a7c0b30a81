"""Who may ask a run to stop at its next step: signals, and the death of the launcher."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil

from dino_ds.step import DinoStep


class StopRequests:
    """SIGINT and SIGTERM ask for a stop; a second SIGINT ends at once.

    SIGTERM to the `deepspeed` command reaches no rank: it ends, and its children go on without it. So a rank
    whose launcher has lost its own parent asks for a stop too.
    """

    def __init__(self, step: DinoStep) -> None:
        self.name = ""
        self._step = step
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)
        self._launcher = _node_launcher()
        self._launcher_parent = self._launcher.ppid() if self._launcher else 0

    def _ask(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and self.name == "SIGINT":
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        self._step.votes.cast("stop")

    def look(self) -> None:
        """Once per step: is the launcher still there?"""
        if self._launcher is None or self._step.votes.cast_by_me("stop"):
            return
        try:
            orphaned = self._launcher.ppid() != self._launcher_parent
        except psutil.Error:
            orphaned = True
        if orphaned:
            self.name = "the end of the launcher"
            self._step.votes.cast("stop")


def _node_launcher() -> psutil.Process | None:
    """DeepSpeed's launcher on this node, where a `deepspeed` command has started it."""
    try:
        parent = psutil.Process(os.getppid())
        runner = parent.parent()
        started = runner is not None and any("deepspeed" in word for word in runner.cmdline())
        return parent if started and "deepspeed.launcher.launch" in parent.cmdline() else None
    except psutil.Error:
        return None
