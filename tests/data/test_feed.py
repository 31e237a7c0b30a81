"""The feed: what the loader sends, on the device and augmented."""

from __future__ import annotations

import itertools

import pytest
import torch

from dino_ds.data.batches import augmented_views
from dino_ds.data.feed import Feed
from tests.data.test_loader import BOTH, CROPS, GLOBAL, START, Noise, batches, build_loader


def feed(device: str, augment: str, workers: int = 0) -> Feed:
    where = torch.device(device)
    return Feed(build_loader(Noise(), CROPS, 0, GLOBAL, 4, 0, 1, workers, START, augment=augment, device=where), where)


@BOTH
def test_views_are_those_of_the_batches(augment):
    fed = feed("cpu", augment)
    for views, batch in zip(itertools.islice(fed, 5), batches(5, 4, augment=augment), strict=True):
        assert torch.equal(views.indices, batch.indices)
        assert (views.epoch, views.names, views.bad) == (batch.epoch, batch.names, batch.bad)
        assert all(torch.equal(a, b) for a, b in zip(views.views, augmented_views(batch), strict=True))
    fed.close()


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
@BOTH
def test_a_gpu_is_fed_the_same_views(augment, workers):
    """Also when the step writes over its memory: nothing of the next batch may lie there yet."""
    fed = feed("cuda", augment, workers)
    for views, batch in zip(itertools.islice(fed, 12), batches(12, 4, augment=augment), strict=True):
        assert views.indices.is_cuda and torch.equal(views.indices.cpu(), batch.indices)
        for a, b in zip(views.views, augmented_views(batch), strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=1 / 58)
            a.zero_()
    fed.close()
