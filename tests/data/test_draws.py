"""What an epoch draws from sources with shares, and from balanced groups: exact, even, and arithmetic alone."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dino_ds.data.masks import Draws

SHARES = [Fraction(7, 10), Fraction(3, 10)]


def made(sizes, shares=SHARES):
    """Draws of parts, each given as the sizes of its groups."""
    flat = [size for part in sizes for size in part]
    parts = np.repeat(np.arange(len(sizes)), [sum(part) for part in sizes])
    return Draws(shares, parts, np.repeat(np.arange(len(flat)), flat)), parts, np.repeat(np.arange(len(flat)), flat)


SIZES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.lists(st.integers(1, 20), min_size=4, max_size=4), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_sources_and_groups_get_their_number_of_each_epoch(sizes, weights, epoch, seed):
    """To one image: of each source its share of the epoch, of each group an equal part of its source's."""
    weights = weights[: len(sizes)]
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    draws, parts, groups = made(sizes, shares)
    length = len(parts) - len(parts) % 3 or 1
    order = draws.epoch(seed, epoch, length).numpy()
    assert len(set(order.tolist())) == len(order) == length  # repeats differ, so that their crops do
    of_part = np.bincount(parts[order % len(parts)], minlength=len(sizes))
    assert all(abs(found - share * length) < 1 for found, share in zip(of_part, shares, strict=True))
    of_group, first = np.bincount(groups[order % len(parts)], minlength=groups.max() + 1), 0
    for part, inner in enumerate(sizes):
        own = of_group[first : first + len(inner)]
        assert own.sum() == of_part[part] and own.max() - own.min() <= 1
        first += len(inner)


def test_the_images_of_a_group_are_drawn_equally_often():
    """To one, after any number of epochs: a pass through a group goes on in the next epoch."""
    draws, parts, groups = made([[5, 2], [11]])
    total = np.zeros(len(parts), int)
    for epoch in range(9):
        total += np.bincount(draws.epoch(0, epoch, 17).numpy() % len(parts), minlength=len(parts))
        for group in range(3):
            own = total[groups == group]
            assert own.max() - own.min() <= 1
    assert total.sum() == 9 * 17


def test_an_image_without_a_group_is_never_drawn():
    groups = np.array([0, -1, 0, 1, -1, 1])
    draws = Draws([Fraction(1)], np.zeros(6, np.int64), groups)
    assert set((draws.epoch(1, 2, 6) % 6).tolist()) == {0, 2, 3, 5}
