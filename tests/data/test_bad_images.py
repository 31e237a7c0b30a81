"""When unreadable images stop a run: early where the data is rubbish, not by chance where it is as good as allowed."""

from __future__ import annotations

import numpy as np
import pytest

from dino_ds.run.image_reports import allowed_bad_images


def stopped_at(bad: np.ndarray, fraction: float, batch: int) -> int | None:
    """Images drawn when the run stops, looking after every batch; bad is (n,) in the order drawn."""
    found = np.cumsum(bad)
    for drawn in range(batch, len(bad) + 1, batch):
        if found[drawn - 1] > allowed_bad_images(fraction, drawn, len(bad)):
            return drawn
    return None


def draw(images: int, rate: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.arange(images) < round(rate * images))


def test_the_whole_data_set_is_held_to_the_fraction_exactly():
    assert allowed_bad_images(0.01, 1000, 1000) == allowed_bad_images(0.01, 5000, 1000) == 10
    assert allowed_bad_images(0.01, 20, 20) == 1
    assert allowed_bad_images(1.0, 20, 20) == 20
    assert [allowed_bad_images(0.0, drawn, 1000) for drawn in (1, 500, 1000)] == [0, 0, 0]


def test_one_bad_file_stops_nothing_that_allows_any():
    assert min(allowed_bad_images(1e-4, drawn, 10**9) for drawn in (1, 8, 64, 512)) >= 1


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.1])
def test_data_within_the_limit_is_not_stopped_by_chance(fraction):
    """At the limit itself, where chance is worst: fewer than 1 in 100 runs."""
    stops = sum(stopped_at(draw(20_000, fraction, seed), fraction, 64) is not None for seed in range(200))
    assert stops <= 2


@pytest.mark.parametrize(("rate", "latest"), [(1.0, 64), (0.5, 64), (0.1, 512), (0.02, 6000)])
def test_rubbish_is_noticed_early(rate, latest):
    found = [stopped_at(draw(20_000, rate, seed), 0.01, 64) for seed in range(20)]
    assert all(drawn is not None and drawn <= latest for drawn in found), found
