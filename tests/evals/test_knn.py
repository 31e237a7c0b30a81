"""Weighted k-NN against its definition, one query at a time; features over ranks against one process."""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image

import dino_ds.evals.knn as knn_module
from dino_ds.data.images import UnreadableImage
from dino_ds.evals.features import extract_features, raw_pixels, spread_indices
from dino_ds.evals.knn import knn_accuracies, nearest
from tests.ranks import run_on_ranks


def _slow_knn(bank, bank_labels, queries, query_labels, k, temperature):
    correct = 0
    for query, label in zip(queries, query_labels, strict=True):
        ranked = sorted(
            (
                (torch.cosine_similarity(query, row, dim=0).item(), int(y))
                for row, y in zip(bank, bank_labels, strict=False)
            ),
            reverse=True,
        )
        votes: dict[int, float] = {}
        for similarity, y in ranked[:k]:
            votes[y] = votes.get(y, 0.0) + math.exp(similarity / temperature)
        correct += max(votes, key=lambda y: votes[y]) == int(label)
    return 100 * correct / len(queries)


def test_equals_the_definition():
    generator = torch.Generator().manual_seed(0)
    bank, queries = torch.randn(60, 5, generator=generator), torch.randn(30, 5, generator=generator)
    bank_labels = torch.randint(0, 4, (60,), generator=generator)
    query_labels = torch.randint(0, 4, (30,), generator=generator)
    ours = knn_accuracies(bank, bank_labels, queries, query_labels, (1, 7, 60, 500), 0.07)
    for k, accuracy in ours.items():
        assert accuracy == _slow_knn(bank, bank_labels, queries, query_labels, k, 0.07)


def test_blocks_find_the_same_neighbours(monkeypatch):
    """Blocks of 7 x 4 with a ragged end, and fewer rows in a block than neighbours are wanted."""
    generator = torch.Generator().manual_seed(1)
    bank, queries = torch.randn(30, 5, generator=generator), torch.randn(11, 5, generator=generator)
    whole = nearest(queries, bank, 6)
    monkeypatch.setattr(knn_module, "_BANK_ROWS", 4)
    monkeypatch.setattr(knn_module, "_QUERY_ROWS", 7)
    for ours, theirs in zip(nearest(queries, bank, 6), whole, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_lengths_do_not_matter():
    bank, labels = torch.eye(3), torch.arange(3)
    scaled = bank * torch.tensor([[1.0], [50.0], [0.01]])
    assert knn_accuracies(scaled, labels, 7 * bank, labels, [1], 0.07) == {1: 100.0}


def test_spread_indices():
    assert spread_indices(10, 5) == [0, 2, 4, 6, 8]
    assert spread_indices(3, 10) == [0, 1, 2]


class _Colours:
    """Image i is one grey of value i; its label is i % 3."""

    def __init__(self, images):
        self.labels = [i % 3 for i in range(images)]
        self.classes = ["red", "green", "blue"]

    def __len__(self):
        return len(self.labels)

    def load(self, index):
        return Image.new("RGB", (4, 4), (index, index, index))

    def name(self, index):
        return str(index)


class _OneBroken(_Colours):
    def load(self, index):
        if index == 4:
            raise UnreadableImage("4", "broken")
        return super().load(index)


def test_unreadable_images_are_left_out():
    features, labels, bad = extract_features(
        lambda images: images.mean(dim=(2, 3)), _OneBroken(6), range(6), _to_tensor, torch.device("cpu"), workers=0
    )
    assert features[:, 0].tolist() == [0, 1, 2, 3, 5] and labels.tolist() == [0, 1, 2, 0, 2]
    assert bad == ["4 (broken)"]


def _to_tensor(image):
    return torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1)


def _extract():
    source = _Colours(11)
    features, labels, _ = extract_features(
        lambda images: images.mean(dim=(2, 3)), source, range(11), _to_tensor, torch.device("cpu"), workers=0
    )
    return sorted(zip(features[:, 0].tolist(), labels.tolist(), strict=True))


def test_ranks_share_the_work_and_see_all_rows():
    """11 images on 2 ranks: shares of 6 and 5."""
    expected = [(float(i), i % 3) for i in range(11)]
    assert _extract() == expected
    assert run_on_ranks(_extract) == [expected, expected]


def test_raw_pixels_are_the_picture():
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(raw_pixels(images), images.flatten(1))
    assert raw_pixels(torch.randn(2, 3, 64, 64)).shape == (2, 3 * 32 * 32)
