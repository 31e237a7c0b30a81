"""Ranks that hang, die or lose each other, as real processes: seen in time, said once by the rank to blame, code 6."""

from __future__ import annotations

import json
import os

import pytest

from tests.faults import inject, jobs
from tests.training.harness import image_folder

HANG = {"hang_seconds": "6", "length": "100000 steps"}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"))


def heartbeats(run):
    return [json.loads(path.read_text()) for path in sorted((run / "heartbeats").glob("rank_*.json"))]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (inject.sleep, ["time.sleep", "no progress on rank 1 for "]),
        (inject.hold_gil, ["no progress on rank 1 for ", "hold_gil"]),
        (inject.freeze, ["no progress on rank 1 for ", "stopped by a signal", "T: stopped"]),
    ],
    ids=["sleep", "gil", "sigstop"],
)
def test_a_hang_is_named_with_stacks_and_ended(images, tmp_path, fault, words):
    run = tmp_path / "run"
    job = jobs.start(run, images, fault=inject.at_step(3, (1,), fault), changes=HANG)
    outcome = job.wait(120)
    print(outcome, (run / "log.txt").read_text()[-600:], sep="\n")
    print(os.listdir(run))
    print((run / "hang-2.txt").read_text())
    print(heartbeats(run))
    assert outcome.codes == [6, 6]


def test_a_killed_rank_is_named_by_its_watcher(images, tmp_path):
    run = tmp_path / "run"
    job = jobs.start(run, images, fault=inject.at_step(3, (1,), inject.kill), changes={"length": "100000 steps"})
    outcome = job.wait(60)
    print(outcome, heartbeats(run), (run / "log.txt").read_text()[-600:], sep="\n")
    assert outcome.codes == [6, -9]
