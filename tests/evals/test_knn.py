"""Weighted k-NN against the reference, one query at a time; features over ranks against one process."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from dino_ds.evals import classifiers
from dino_ds.evals.classifiers import knn_accuracies, knn_votes, nearest
from dino_ds.evals.features import Reading, extract_features, keep_generators
from tests.ranks import run_on_ranks


def _reference_knn(bank, bank_labels, queries, query_labels, k, temperature, classes):
    """`knn_classifier` of facebookresearch/dino's eval_knn.py as it computes: one-hot labels of the neighbors times
    exp(similarity / temperature), summed; FP32, one query at a time. Returns top-1 in percent and the votes."""
    bank, queries = F.normalize(bank, dim=1), F.normalize(queries, dim=1)
    correct, votes = 0, []
    for query, label in zip(queries, query_labels, strict=True):
        distances, indices = torch.mm(query[None], bank.T).topk(k, largest=True, sorted=True)
        one_hot = torch.zeros(k, classes).scatter_(1, bank_labels[indices[0]][:, None], 1)
        probabilities = (one_hot * distances[0].div(temperature).exp()[:, None]).sum(dim=0)
        votes.append(probabilities)
        correct += int(probabilities.sort(descending=True).indices[0] == label)
    return 100.0 * correct / len(queries), torch.stack(votes)


@pytest.mark.parametrize("k", [1, 20, 200])
def test_equals_the_reference_protocol(k):
    """As DINO's k-NN counts them: equal to the last decimal; the votes to the rounding of a sum of k FP32 numbers."""
    generator = torch.Generator().manual_seed(k)
    centers = torch.randn(8, 16, generator=generator)
    bank_labels, labels = (torch.randint(0, 8, (n,), generator=generator) for n in (900, 300))
    bank, queries = (centers[y] + 1.5 * torch.randn(len(y), 16, generator=generator) for y in (bank_labels, labels))
    accuracy, votes = _reference_knn(bank, bank_labels, queries, labels, k, 0.07, 8)
    assert 30 < accuracy < 90
    assert knn_accuracies(bank, bank_labels, queries, labels, [k], 0.07) == {k: accuracy}
    similarity, index = nearest(queries, bank, k)
    nearest_vote = (similarity.amax(1, keepdim=True) / 0.07).exp()
    ours = knn_votes(similarity, bank_labels[index], 8, 0.07) * nearest_vote
    torch.testing.assert_close(ours, votes, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("bank_rows", "query_rows", "k"), [(4, 7, 6), (100, 64, 3), (65536, 512, 6), (65536, 512, 2)])
def test_blocks_and_groups_find_the_same_neighbors(monkeypatch, bank_rows, query_rows, k):
    generator = torch.Generator().manual_seed(1)
    bank, queries = torch.randn(230, 5, generator=generator), torch.randn(75, 5, generator=generator)
    slow = (F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T).sort(dim=1, descending=True)
    monkeypatch.setattr(classifiers, "_BANK_ROWS", bank_rows)
    monkeypatch.setattr(classifiers, "_QUERY_ROWS", query_rows)
    similarity, index = nearest(queries, bank, k)
    torch.testing.assert_close(similarity, slow.values[:, :k])
    assert torch.equal(index, slow.indices[:, :k])


def _ranks_knn():
    generator = torch.Generator().manual_seed(0)
    bank, queries = torch.randn(60, 5, generator=generator), torch.randn(31, 5, generator=generator)
    labels = [torch.randint(0, 4, (n,), generator=generator) for n in (60, 31)]
    return knn_accuracies(bank, labels[0], queries, labels[1], (1, 7), 0.07)


def test_ranks_share_the_queries():
    assert run_on_ranks(_ranks_knn) == [_ranks_knn()] * 2


class _Colors:
    """Image i is one gray of value i; its label is i % 3."""

    def __init__(self, images):
        self.labels = [i % 3 for i in range(images)]
        self.classes = ["red", "green", "blue"]

    def __len__(self):
        return len(self.labels)

    def load(self, index):
        return Image.new("RGB", (4, 4), (index, index, index))

    def name(self, index):
        return str(index)


def _extract():
    source = _Colors(11)
    reading = Reading(lambda image: torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1), workers=0)
    means = lambda images: images.mean(dim=(2, 3))  # noqa: E731
    features, labels, _ = extract_features(means, source, range(11), torch.device("cpu"), reading)
    return list(zip(features[:, 0].tolist(), labels.tolist(), strict=True))


def test_ranks_share_the_work_and_see_all_rows_in_order():
    expected = [(float(i), i % 3) for i in range(11)]
    assert _extract() == expected
    assert run_on_ranks(_extract) == [expected, expected]


def test_what_is_drawn_inside_is_not_missing_afterwards():
    def draw():
        return random.random(), np.random.random(), float(torch.rand(()))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    wanted = draw()
    for error in (None, OSError):
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        with contextlib.suppress(OSError), keep_generators(torch.device("cpu")):
            draw()
            if error is not None:
                raise error
        assert draw() == wanted
