"""A run that has become slow is told so once, with the likely cause."""

from __future__ import annotations

import time

import pytest

from dino_ds.run import metrics
from dino_ds.run.throughput import LONG, WARMUP, ThroughputMonitor


class _Run:
    """A training run on a fake clock: each window has 10 steps of 8 images."""

    def __init__(self, monkeypatch):
        self.now, self.load = 0.0, 4.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        self.clock, self.watch = metrics.Clock(8), ThroughputMonitor(lambda: self.load)

    def windows(self, count, step_seconds, wait_seconds=0.0):
        """The last window's values, and all that was said."""
        said, values = [], {}
        for _ in range(count):
            for _ in range(10):
                with self.clock.waiting():
                    self.now += wait_seconds
                self.now += step_seconds
                self.clock.step()
            values, text = self.watch.update(**self.clock.read())
            said += [text] if text else []
        return values, said


def test_pauses_do_not_count(monkeypatch):
    run = _Run(monkeypatch)
    with run.clock.paused():
        run.now += 100
    run.now += 4
    run.clock.step()
    assert run.clock.read()["images_per_second"] == 2


@pytest.fixture
def run(monkeypatch):
    run = _Run(monkeypatch)
    assert run.windows(WARMUP, 9.0) == ({}, [])  # slow, and not counted
    values, said = run.windows(20, 0.08, 0.02)
    assert said == []
    assert values["rolling_images_per_second"] == pytest.approx(80)
    assert values["rolling_data_wait_fraction"] == pytest.approx(0.2)
    assert values["throughput_of_best"] == pytest.approx(1)
    return run


def test_the_wait_for_data_is_named(run):
    _, said = run.windows(30, 0.08, 0.1)
    assert len(said) == 1
    assert "of this run's best 80." in said[0]
    assert "the wait for data rose from 20 % to" in said[0]


def test_a_slower_step_is_told_with_the_load_of_the_host(run):
    run.load = 9.0
    _, said = run.windows(30, 0.16, 0.02)
    assert len(said) == 1 and "Each step takes longer; the load of this host is 9.0 on" in said[0]
    assert "it was 4.0: look at other processes" in said[0]


def test_a_short_drop_says_nothing(run):
    assert run.windows(LONG - 1, 0.3)[1] == []
    assert run.windows(20, 0.08, 0.02)[1] == []


def test_one_warning_an_episode_and_one_word_when_it_ends(run):
    for _ in range(2):
        assert len(run.windows(20, 0.2)[1]) == 1
        (back,) = run.windows(20, 0.08, 0.02)[1]
        assert back.startswith("throughput is back")
