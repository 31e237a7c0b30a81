"""What an epoch draws from sources with shares, and from balanced groups: exact, even, and arithmetic alone."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dino_ds.data.batches import LoaderOptions
from dino_ds.data.draws import Draws
from dino_ds.data.feed import Position
from dino_ds.data.loader import ResumableSampler

SHARES = [Fraction(7, 10), Fraction(3, 10)]


def made(sizes, shares=SHARES):
    """Draws of parts, each given as the sizes of its groups."""
    flat = [size for part in sizes for size in part]
    parts = np.repeat(np.arange(len(sizes)), [sum(part) for part in sizes])
    return Draws(shares, parts, np.repeat(np.arange(len(flat)), flat)), parts, np.repeat(np.arange(len(flat)), flat)


def keys(draws, images, *, batch=6, micro=6, rank=0, world=1, start=None, count=8):
    """(epoch, index) of the first micro-batches of a rank."""
    options = LoaderOptions(seed=3, global_batch=batch, micro_batch=micro, rank=rank, world_size=world)
    sampler = ResumableSampler(images, options, start or Position(), draws)
    return [list(some) for some in itertools.islice(sampler, count)]


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


def test_epochs_and_seeds_draw_in_other_orders():
    draws, _, _ = made([[10], [10]])
    orders = {tuple(draws.epoch(seed, epoch, 20).tolist()) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


@pytest.mark.parametrize(("micro", "world"), [(6, 1), (3, 2), (2, 1), (1, 3)])
def test_any_ranks_and_accumulation_share_the_same_global_batches(micro, world):
    draws, parts, _ = made([[4, 3], [9]])
    whole = keys(draws, len(parts), count=6)
    steps = 6 // (micro * world)
    by_rank = [keys(draws, len(parts), micro=micro, rank=r, world=world, count=6 * steps) for r in range(world)]
    for number, batch in enumerate(whole):
        rows = [by_rank[rank][number * steps + m] for m in range(steps) for rank in range(world)]
        assert list(itertools.chain.from_iterable(rows)) == batch


def test_a_resume_goes_on_with_the_same_images_also_within_an_epoch():
    draws, parts, _ = made([[4, 3], [9]])
    straight = keys(draws, len(parts), count=6)
    position = Position()
    for done, batch in enumerate(straight):
        assert keys(draws, len(parts), start=position, count=1) == [batch], done
        position = position.advance(6, 12)
