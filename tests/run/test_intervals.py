"""When a run saves, fixed intervals and by the clock, and what counts as its time."""

from __future__ import annotations

import time

import pytest

from dino_ds.engine import distributed
from dino_ds.run import saver
from dino_ds.run.metrics import Clock
from dino_ds.run.saver import FIRST_SAVE_AFTER, SAVE_SECONDS, SaveClock
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, losses_of, train_tiny


def _saved_steps(monkeypatch, clock, steps, step_seconds, start=0):
    """The steps that were saved after, among `steps` of so many seconds."""
    now, saved = [100.0], []
    monkeypatch.setattr(saver.time, "monotonic", lambda: now[0])
    for done in range(start + 1, start + steps + 1):
        now[0] += step_seconds
        saved += [done] if clock.due(done) else []
    return saved


def test_a_fixed_interval_is_a_matter_of_the_step_alone(monkeypatch):
    assert _saved_steps(monkeypatch, SaveClock(4, 3), 10, 1.0, start=3) == [4, 8, 12]
    assert _saved_steps(monkeypatch, SaveClock(0, 0), 10, 1.0) == []


@pytest.mark.parametrize("slowest", [2.0, 4.0])
def test_the_first_save_comes_early_and_the_slowest_rank_sets_the_interval(monkeypatch, slowest):
    """Ranks measure other times and must save after the same steps."""
    monkeypatch.setattr(distributed, "gather_objects", lambda mine: [mine, mine * slowest / 2.0])
    every = round(SAVE_SECONDS / slowest)
    saved = _saved_steps(monkeypatch, SaveClock(None, 7), 1000, 2.0, start=7)
    assert saved == [7 + FIRST_SAVE_AFTER, *range(every, 1008, every)]


def test_how_often_a_run_saves_is_no_part_of_what_is_learned(tmp_path):
    images = image_folder(tmp_path / "images")
    for every in ("auto", "4 steps"):
        changes = {"save_every": every, "save_in_background": "false", "length": "8 steps"}
        assert run_on_ranks(train_tiny, images, tmp_path / every, changes=changes) == [None, None]
    assert sorted(p.name for p in (tmp_path / "auto/checkpoints").glob("step_*")) == ["step_00000005", "step_00000008"]
    assert losses_of(tmp_path / "auto") == losses_of(tmp_path / "4 steps")


def test_pauses_do_not_count_for_the_images_per_second(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock(8)
    with clock.paused():
        now[0] += 100
    with clock.waiting():
        now[0] += 1
    now[0] += 3
    clock.step()
    assert clock.read() == {"images_per_second": 2, "data_wait_fraction": 0.25}
