"""What evaluations are given: images that fit together, features computed once, and a way to stop."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch
from PIL import Image

from dino_ds.data.images import UnreadableImage
from dino_ds.errors import DataError
from dino_ds.evals.context import EvalContext, Settings
from dino_ds.evals.features import GaveUp, keep_generators
from tests.ranks import run_on_ranks
from tests.weights.test_weights import _backbone


class _Images:
    def __init__(self, labels, classes, broken=(), count=0):
        self.labels, self.classes, self._broken, self._count = labels, classes, broken, count

    def __len__(self):
        return self._count or len(self.labels)

    def load(self, index):
        if index in self._broken:
            raise UnreadableImage(str(index), "broken")
        return Image.fromarray(np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8))

    def name(self, index):
        return str(index)


def _context(train, test, settings=None, **more):
    settings = settings or Settings(workers=0)
    return EvalContext(_backbone(), settings, torch.device("cpu"), lambda: (train, test), progress=False, **more)


def test_classes_are_matched_by_name():
    """The test images' class 0 is the training images' class 2; images without a label are left out."""
    train = _Images([0, 1, 2, -1, 2], ["a", "b", "c"])
    context = _context(train, _Images([0, 0, -1, 1], ["c", "a"]))
    assert context.train_indices == [0, 1, 2, 4]
    assert context.train.labels.tolist() == [0, 1, 2, 2]
    assert context.test.labels.tolist() == [2, 2, 0] and context.test.classes == 3
    assert context.train is context.train  # computed once


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        (_Images([0], ["a"]), None, "there are no test images"),
        (_Images([0], ["a"]), _Images([0], ["b"]), "1 classes of the test images are not in training: b"),
        (_Images([0, 0], ["a", "b"]), _Images([1], ["a", "b"]), "none of 2 training images is of 1 classes .*: b"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_computed(train, test, words):
    with pytest.raises(DataError, match=words):
        _ = _context(train, test, Settings(workers=-1)).test  # -1 processes: a loader would fail


def test_what_needs_no_labels():
    context = _context(_Images(None, None, count=4), None)
    assert not context.any_images.classes and context.any_images.features.shape == (4, 64)
    with pytest.raises(DataError, match="there are no images"):
        _ = _context(None, None).any_source
    train, other = _Images([0, 0], ["a"]), _Images([0, 0], ["b"])
    context = _context(train, other)
    assert context.any_source is other and context.any_images.labels.tolist() == [0, 0]
    context = _context(_Images([0, 0], ["a", "b"]), _Images([1, 0], ["a", "b"]))
    assert context.any_images.labels.tolist() == [1, 0]  # though b has no training image
    context = _context(train, _Images([0, -1], ["a"]))
    assert context.any_images.features is context.test.features and context.image_counts == (2, 1)


def test_unreadable_images_are_noted_once():
    images = _Images([0, 0, 0], ["a"], broken=(1,))
    context = _context(images, images)
    assert len(context.test.labels) == len(context.train.labels) == 2
    whole = _context(_Images([0, 0, 0], ["a"]), None)
    # Not to the bit: products of two rows and of three may round otherwise.
    torch.testing.assert_close(context.train.features, whole.any_images.features[::2], rtol=0, atol=1e-5)
    assert context.notes == ["left out, unreadable: 1 (broken)"]


def _gives_up(rank):
    images = _Images([0] * 6, ["a"])
    context = _context(images, images, give_up=lambda: torch.distributed.get_rank() == rank)
    with pytest.raises(GaveUp):
        _ = context.train
    return True


def test_all_ranks_give_up_together():
    assert run_on_ranks(_gives_up, 1) == [True, True]


def test_what_is_drawn_inside_is_not_missing_afterwards():
    def draw():
        return random.random(), np.random.random(), float(torch.rand(()))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    wanted = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with contextlib.suppress(OSError), keep_generators(torch.device("cpu")):
        raise OSError(draw())
    assert draw() == wanted
