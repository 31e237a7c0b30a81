"""The run folder is removed or renamed while the run is at work: noticed, said, and nothing of it comes back."""

from __future__ import annotations

import os
import shutil
import threading
import time

import pytest

from tests.ranks import run_on_ranks
from tests.training.harness import image_folder, losses_of, train_tiny

_CHANGES = {"length": "100000 steps", "save_every": "3 steps", "log_every": "1"}


def _train_and_lose(root, run, aside):
    """Rank 0 renames the folder to `aside`, or removes it, some steps after the first checkpoint."""
    lost = [0.0]

    def lose():
        while not (run / "checkpoints/latest").exists():
            time.sleep(0.05)
        run.rename(aside) if aside else None
        while run.exists():  # a file that is just being written keeps its folder
            shutil.rmtree(run, ignore_errors=True)
        lost[0] = time.monotonic()

    if os.environ["RANK"] == "0":
        threading.Thread(target=lose, daemon=True).start()
    message = train_tiny(root, run, changes=_CHANGES)
    return message, time.monotonic() - lost[0]


@pytest.mark.parametrize("renamed", [True, False])
def test_a_lost_run_folder_ends_the_run(tmp_path, renamed):
    root, run, aside = image_folder(tmp_path / "images"), tmp_path / "run", tmp_path / "aside"
    (one, seconds), (two, _) = run_on_ranks(_train_and_lose, root, run, aside if renamed else None)
    assert one == two and "run is gone, removed or renamed while the run was at work" in one
    assert seconds < 60 and not run.exists()
    if renamed:
        (aside / "lock").unlink()  # of a process that lives on here, as it serves the next test
        before = losses_of(aside)
        assert run_on_ranks(train_tiny, root, aside, max_steps=before[-1][0] + 1, resume="auto", changes=_CHANGES) == [
            None,
            None,
        ]
        assert [step for step, _ in losses_of(aside)] == list(range(1, before[-1][0] + 2))
