"""When a run saves: fixed intervals, and the one that follows from what a save costs."""

from __future__ import annotations

import math

import pytest

from dino_ds.run import saver
from dino_ds.run.saver import FIRST_SAVE_AFTER, SaveClock, young_interval
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, losses_of, train_tiny


@pytest.fixture
def now(monkeypatch):
    """A clock that is set by hand."""
    value = [100.0]
    monkeypatch.setattr(saver.time, "monotonic", lambda: value[0])
    return value


def _saved_steps(clock, now, steps, step_seconds, stall, others=(), start=0):
    """Run `steps` steps; the steps that were saved after, and the lines that were said."""
    saved, lines = [], []
    for done in range(start + 1, start + steps + 1):
        now[0] += step_seconds
        if clock.due(done):
            saved.append(done)
            now[0] += stall
            lines.append(clock.settle(stall, lambda mine: [mine, *others]))
    return saved, [line for line in lines if line]


def test_a_fixed_interval_is_a_matter_of_the_step_alone(now):
    assert _saved_steps(SaveClock(4, 3, 10, 24), now, 10, 1.0, 1.0, start=3) == ([4, 8, 12], [])
    assert _saved_steps(SaveClock(0, 0, 10, 24), now, 10, 1.0, 1.0) == ([], [])


def test_the_first_save_comes_early_and_its_cost_sets_the_interval(now):
    """10 s a save, a failure every 10000 s: Young's 447 s."""
    saved, (line,) = _saved_steps(SaveClock(None, 0, 10**6, 10000 / 3600), now, 1000, 2.0, 10.0)
    best = math.sqrt(2 * 10 * 10000) / 2
    assert young_interval(10, 10000) / 2 == best
    assert saved == [FIRST_SAVE_AFTER, *range(round(best), 1001, round(best))]
    assert "every 224 steps = 448 s" in line and "10.00 s" in line


@pytest.mark.parametrize(
    ("stall", "epoch_steps", "seconds"),
    [(1e-6, 10**6, 30), (1000.0, 10**6, 3600), (10.0, 100, 200), (10.0, 2, 30)],
    ids=["not below 30 s", "at least every hour", "at least every epoch", "short epochs"],
)
def test_bounds(now, stall, epoch_steps, seconds):
    saved, _ = _saved_steps(SaveClock(None, 7, epoch_steps, 24), now, 4000, 2.0, stall, start=7)
    assert saved[0] == 7 + FIRST_SAVE_AFTER
    assert saved[2] - saved[1] == seconds // 2


def test_the_slowest_rank_sets_it_for_all(now):
    """Ranks measure other times and must save after the same steps."""
    slow, fast = (10.0, 2.0), (0.1, 1.0)
    one, _ = _saved_steps(SaveClock(None, 0, 10**6, 24), now, 3000, slow[1], slow[0], [fast])
    two, _ = _saved_steps(SaveClock(None, 0, 10**6, 24), now, 3000, fast[1], fast[0], [slow])
    assert one == two


def test_a_run_measures_its_first_save_and_says_how_often_it_saves(tmp_path):
    """The same losses as with any other interval: saving is no part of what is learned."""
    images = image_folder(tmp_path / "images")
    for every in ("auto", "4 steps"):
        changes = {"save_every": every, "save_in_background": "false", "length": "8 steps"}
        assert run_on_ranks(train_tiny, images, tmp_path / every, changes=changes) == [None, None]
    said = [line for line in (tmp_path / "auto/log.txt").read_text().splitlines() if "Z saves    " in line]
    assert len(said) == 1 and "a failure is expected every 24 h" in said[0]
    assert sorted(p.name for p in (tmp_path / "auto/checkpoints").glob("step_*")) == ["step_00000005", "step_00000008"]
    assert losses_of(tmp_path / "auto") == losses_of(tmp_path / "4 steps")
