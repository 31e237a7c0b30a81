"""python -m tests.checkpoint.kills FOLDER COUNT SEED: COUNT times, a run of two ranks is killed while it saves.

A rank is a forked process; ranks talk through a pipe. One of them, picked at random, gets SIGKILL at a random point of
what it writes: after any number of bytes of any file, before or after any sync, rename or removal. Then the folder must
be loadable with every checkpoint that was said to be complete, and the run must go on from it. Prints one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from dino_ds.engine import distributed
from tests.checkpoint.small_run import SmallRun, is_that_of

STEPS, SAVE_EVERY = 6, 2
# What a call other than a write weighs, in bytes, when the point of death is drawn.
_CALL_WEIGHT = 2000
_CALLS = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


class Death:
    """Counts what this process does to the disk, and kills it when `budget` is spent. `spent` so far."""

    def __init__(self, budget: float) -> None:
        self.budget, self.spent = budget, 0
        write = os.write

        def counted_write(descriptor: int, data: Any) -> int:
            room = self.budget - self.spent
            if room < len(data):
                write(descriptor, data[: int(room)])
                self.die()
            self.spent += len(data)
            return write(descriptor, data)

        os.write = counted_write
        os.fsync = lambda descriptor: None  # slow, and of no use against the death of a process
        for name in _CALLS:
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.spent += _CALL_WEIGHT // 2
            if self.spent > self.budget:
                self.die()
            result = call(*args, **kwargs)
            self.spent += _CALL_WEIGHT // 2
            if self.spent > self.budget:
                self.die()
            return result

        return counted

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def train_as(rank: int, peer: Connection, folder: Path, start: int, budget: float, seed: int) -> None:
    """One rank's life; what it spent goes to `spent_RANK`, each complete checkpoint to `complete`."""

    def gather(value: Any) -> list[Any]:
        peer.send(value)
        other = peer.recv()
        return [value, other] if rank == 0 else [other, value]

    distributed.rank, distributed.world_size = (lambda: rank), (lambda: 2)
    distributed.gather_objects = gather
    distributed.sum_across_ranks = lambda values: torch.tensor(gather(values.tolist())).sum(0)
    rng = random.Random(seed)
    said = (folder / "complete").open("a")
    death = Death(budget)
    run = SmallRun(folder, keep=2, keep_every=6, background=rng.random() < 0.7)
    if start:
        run.train(start)
        run.checkpoints.tidy(start)
    for _ in range(STEPS):
        if run.train().step % SAVE_EVERY == 0:
            run.save(wait=rng.random() < 0.3)
        time.sleep(0.001)
        for line in run.said:
            said.write(line + "\n")
            said.flush()
        run.said.clear()
    run.save(wait=True)
    (folder / f"spent_{rank}").write_text(str(death.spent))


def run_ranks(folder: Path, start: int, budgets: tuple[float, float], seed: int) -> list[int]:
    """Two processes from `start` on; their exit codes, negative for a signal."""
    ends = multiprocessing.Pipe()
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                ends[1 - rank].close()
                train_as(rank, ends[rank], folder, start, budgets[rank], seed)
                code = 0
            except (EOFError, ConnectionError, BrokenPipeError):
                code = 9  # the other rank is dead
            finally:
                os._exit(code)
        children.append(child)
    for end in ends:
        end.close()
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def newest_complete(folder: Path) -> int:
    """The step of the newest checkpoint that a rank has said to be complete; 0 for none."""
    lines = (folder / "complete").read_text().splitlines()
    words = [line.split() for line in lines if line.startswith("save ")]
    return max((int(word[2][:-1]) for word in words if word[2].endswith(":")), default=0)


def one_death(folder: Path, rng: random.Random, spent: list[int]) -> str:
    """ "" if all is as it should be, else what is not."""
    victim, seed = rng.randrange(2), rng.randrange(2**30)
    budgets = [float("inf")] * 2
    budgets[victim] = rng.uniform(0, spent[victim])
    codes = run_ranks(folder, 0, (budgets[0], budgets[1]), seed)
    if codes[victim] not in (-9, 0) or codes[1 - victim] not in (9, 0):
        return f"exit codes {codes}"
    said = newest_complete(folder)
    run = SmallRun(folder)
    choice = run.choose()
    step = choice.saved.manifest.step if choice.saved else 0
    if step < said:
        return f"step {said} was said to be complete, {step} is found: {choice.notes}"
    if choice.saved and not is_that_of(choice.saved, step):
        return f"step {step} holds other tensors"
    if any("damaged" in note for note in choice.notes):
        return f"torn: {choice.notes}"
    if run_ranks(folder, step, (float("inf"),) * 2, seed) != [0, 0]:
        return "the run does not go on"
    left = [p.name for p in (folder / "checkpoints").iterdir() if p.name.startswith(("writing", "removing", "aside"))]
    last = SmallRun(folder).choose().saved
    if left or last is None or not is_that_of(last, step + STEPS):
        return f"after going on: {left}, {last and last.manifest.step}"
    return ""


def main(folder: Path, count: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    (folder / "whole").mkdir()
    assert run_ranks(folder / "whole", 0, (float("inf"),) * 2, 1) == [0, 0]
    spent = [int((folder / f"whole/spent_{rank}").read_text()) for rank in (0, 1)]
    wrong = []
    for i in range(count):
        place = folder / str(i)
        place.mkdir()
        if problem := one_death(place, rng, spent):
            wrong.append(f"{place}: {problem}")
        else:
            shutil.rmtree(place)
    return {"kills": count, "seed": seed, "bytes_and_calls": spent, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
