"""What a run does beside training after some of its steps: the loop knows evaluations and pictures by this alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dino_ds.teachers.base import Teacher
from dino_ds.training.metrics import RunLog


@dataclass(frozen=True)
class Moment:
    """Where a run stands between two steps: `images` its teacher has seen so far.

    `stop_requested` is to be asked every few seconds by what takes long; it also tells the watchdog of progress.
    """

    teacher: Teacher
    device: torch.device
    step: int
    images: int
    run_dir: Path
    log: RunLog
    stop_requested: Callable[[], bool]


class AtStep(Protocol):
    """One thing to do after some of the steps, 0 and the last among them. Every rank calls every method."""

    def due(self, step: int, last: bool) -> bool:
        """Whether to run after `step`, 0 for the untrained network."""
        ...

    def run(self, moment: Moment) -> bool:
        """Do it and write down what it gives; False where a stop was requested before the end."""
        ...

    def short(self) -> str:
        """The newest result in a few words for the progress line, or ""."""
        return ""

    def summary(self) -> list[str]:
        """Lines for the end of the run."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` of an earlier start gave."""
