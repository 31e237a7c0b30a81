"""A checkpoint is complete or absent, whenever the process dies. Death of one of several ranks: tests/faults."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.small_run import SmallRun, is_that_of
from tests.fork_server import fork_server

STEPS, SAVE_EVERY = 6, 2
_CALLS = ("replace", "rename", "unlink", "rmdir", "mkdir")
_CALL_WEIGHT = 2000
"""What a call other than a write weighs, in bytes, when the point of death is drawn."""


class Death:
    """Counts what this process does to the disk, and kills it when `budget` is spent, in the middle of a write too."""

    def __init__(self, budget: float) -> None:
        self.budget, self.spent, write = budget, 0.0, os.write

        def counted_write(descriptor: int, data: Any) -> int:
            write(descriptor, data[: int(min(len(data), self.budget - self.spent))])
            self.spend(len(data))
            return len(data)

        os.write = counted_write
        for name in _CALLS:
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.spend(_CALL_WEIGHT / 2)
            result = call(*args, **kwargs)
            self.spend(_CALL_WEIGHT / 2)
            return result

        return counted

    def spend(self, weight: float) -> None:
        self.spent += weight
        if self.spent > self.budget:
            os.kill(os.getpid(), signal.SIGKILL)


def _train(folder: Path, start: int, budget: float, seed: int) -> None:
    """Go on from step `start`; each complete checkpoint is said in `complete`, and what was spent in `spent`."""
    rng, said, death = random.Random(seed), (folder / "complete").open("a"), Death(budget)
    run = SmallRun(folder, keep=2, keep_every=6, background=rng.random() < 0.7)
    if start:
        run.train(start)
        run.checkpoints.tidy(start)
    for _ in range(STEPS):
        if run.train().step % SAVE_EVERY == 0:
            run.save(wait=rng.random() < 0.3)
        time.sleep(0.001)
        said.writelines(f"{line}\n" for line in run.said)
        said.flush()
        run.said.clear()
    run.save(wait=True)
    (folder / "spent").write_text(str(death.spent))


def _live(folder: Path, start: int = 0, budget: float = float("inf"), seed: int = 1) -> int:
    """The exit code of a process that calls `_train`."""
    folder.mkdir(exist_ok=True)
    process = fork_server().fork(_train, folder, start, budget, seed)
    while process not in (ended := fork_server().ended()):
        time.sleep(0.01)
    return ended[process][0]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.full)])
def test_no_death_tears_a_checkpoint(tmp_path, kills):
    """SIGKILL at random points of writing: nothing that was said to be complete is lost, what is found is whole, and
    the run goes on."""
    assert _live(tmp_path / "whole") == 0
    rng, spent = random.Random(11), float((tmp_path / "whole/spent").read_text())
    for number in range(kills):
        folder, seed = tmp_path / str(number), rng.randrange(2**30)
        assert _live(folder, 0, rng.uniform(0, spent), seed) in (-signal.SIGKILL, 0)
        lines = [line.split() for line in (folder / "complete").read_text().splitlines()]
        said = max((int(words[2][:-1]) for words in lines if words[0] == "save"), default=0)
        choice = SmallRun(folder).choose()
        step = choice.saved.manifest.step if choice.saved else 0
        assert step >= said and "damaged" not in str(choice.notes), (number, said, choice.notes)
        assert not choice.saved or is_that_of(choice.saved, step), number
        assert _live(folder, step, seed=seed) == 0
        left = [path.name for path in (folder / "checkpoints").iterdir() if not path.name.startswith(("step_", "lat"))]
        last = SmallRun(folder).choose().saved
        assert not left and last is not None and is_that_of(last, step + STEPS), (number, left)
