"""Classifiers against slow references: k-NN one query at a time, linear probes by scikit-learn and the normal equations
in FP64; statistics against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression

from dino_ds.engine import distributed
from dino_ds.evals import classifiers
from dino_ds.evals.classifiers import feature_statistics, fit_linear, fit_ridge, knn_accuracies, knn_votes, nearest
from dino_ds.evals.features import GaveUp
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.numerical


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


@pytest.mark.parametrize("k", [1, 200])
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


@pytest.mark.parametrize(("bank_rows", "query_rows", "k"), [(4, 7, 6), (100, 64, 3), (65536, 512, 2)])
def test_blocks_and_groups_find_the_same_neighbors(monkeypatch, bank_rows, query_rows, k):
    generator = torch.Generator().manual_seed(1)
    bank, queries = torch.randn(230, 5, generator=generator), torch.randn(75, 5, generator=generator)
    slow = (F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T).sort(dim=1, descending=True)
    monkeypatch.setattr(classifiers, "_BANK_ROWS", bank_rows)
    monkeypatch.setattr(classifiers, "_QUERY_ROWS", query_rows)
    similarity, index = nearest(queries, bank, k)
    torch.testing.assert_close(similarity, slow.values[:, :k])
    assert torch.equal(index, slow.indices[:, :k])


def _problem(images=120, classes=4, width=6, noise=1.0):
    """Overlapping clouds on axes of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (images,), generator=generator)
    centers = 2 * torch.randn(classes, width, generator=generator)
    features = centers[labels] + noise * torch.randn(images, width, generator=generator)
    return features * torch.tensor([1.0, 5.0, 0.1, 1.0, 1.0, 20.0]) + 3, labels


_INDISTINGUISHABLE = 1e-6
"""FP32 rounds a mean of 120 cross-entropies near 1 by about 1.2e-7, and L-BFGS can't tell losses apart that differ by a
few such steps: the loss says whether the optimum is found, and not the weights."""


def _standardised(features):
    x = features.double().numpy()
    return (x - x.mean(0)) / x.std(0)


def _loss(weight, bias, features, labels, strength):
    """What a logistic regression minimises, in FP64."""
    logits = torch.from_numpy(_standardised(features)) @ torch.as_tensor(weight).double().T + torch.as_tensor(bias)
    penalty = 0.5 * strength * torch.as_tensor(weight).double().square().sum()
    return float(F.cross_entropy(logits, labels) + penalty)


def test_images_a_few_at_a_time_give_the_same(monkeypatch):
    """Logits of a million images and a thousand classes are 5 GB."""
    features, labels = _problem()
    whole = fit_linear(features, labels, 4, regularisations=[0.05])
    accuracy = whole.accuracy(features, labels)
    monkeypatch.setattr(classifiers, "_ROWS", 7)
    parts = fit_linear(features, labels, 4, regularisations=[0.05])
    losses = [_loss(probe.weight, probe.bias, features, labels, 0.05) for probe in (whole, parts)]
    assert abs(losses[0] - losses[1]) < _INDISTINGUISHABLE
    assert whole.accuracy(features, labels) == accuracy


@pytest.mark.parametrize("strength", [1.0, 1e-3, 1e-5])
def test_logistic_regression_reaches_the_optimum(strength):
    """That of scikit-learn, whose C is 1 / (images * regularisation), is found in FP64."""
    features, labels = _problem()
    x = _standardised(features)
    theirs = LogisticRegression(C=1 / (len(x) * strength), tol=1e-8, max_iter=5000).fit(x, labels.numpy())
    probe = fit_linear(features, labels, 4, regularisations=[strength])
    optimum = _loss(theirs.coef_, theirs.intercept_, features, labels, strength)
    assert abs(_loss(probe.weight, probe.bias, features, labels, strength) - optimum) < _INDISTINGUISHABLE


def _looks_until_given_up():
    """Rank 1 wants to stop after three looks."""
    asked = []
    with pytest.raises(GaveUp):
        fit_linear(*_problem(), 4, give_up=lambda: asked.append(1) or (distributed.rank() == 1 and len(asked) > 3))
    return len(asked)


def test_a_fit_is_given_up_by_all_ranks_at_the_same_look():
    assert run_on_ranks(_looks_until_given_up) == [4, 4]


def _fits():
    features, labels = _problem(121)
    probes = [fit_linear(features, labels, 4, (0.01, 0.1, 1.0)), fit_ridge(features, labels, 4)]
    return [(p.regularisation, p.weight.numpy(), p.bias.numpy()) for p in probes]


def test_ranks_share_the_sums():
    """Shares of 61 and 60: both ranks have the very same probe, as good as that of one process."""
    both, alone = run_on_ranks(_fits), _fits()
    for first, second, one in zip(*both, alone, strict=True):
        assert first[0] == second[0] == one[0]
        for mine, theirs in zip(first[1:], second[1:], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    (strength, *logistic), (_, *ridge) = both[0]
    losses = [_loss(*fit, *_problem(121), strength) for fit in (logistic, alone[0][1:])]
    assert abs(losses[0] - losses[1]) < _INDISTINGUISHABLE
    for mine, ours in zip(ridge, alone[1][1:], strict=True):  # systems of condition 10, solved in FP32
        np.testing.assert_allclose(mine, ours, rtol=0, atol=1e-5)


def test_ridge_is_the_normal_equations_solution():
    features, labels = _problem()
    probe = fit_ridge(features, labels, 4, regularisation=0.1)
    x = _standardised(features)
    wanted = np.eye(4)[labels.numpy()]
    weight = np.linalg.solve(x.T @ x / len(x) + 0.1 * np.eye(6), x.T @ (wanted - wanted.mean(0)) / len(x)).T
    np.testing.assert_allclose(probe.weight.numpy(), weight, atol=1e-5)
    logits = probe(features).numpy()
    np.testing.assert_allclose(logits, x @ weight.T + wanted.mean(0), atol=1e-4)


def test_regularisation_is_chosen_on_held_out_images():
    """Twice as many images as dimensions, one of which means something: on others, the choice beats none at all."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.arange(2400) % 2
    features = torch.randn(2400, 200, generator=generator)
    features[:, 0] += 2 * labels
    chosen = fit_linear(features[:400], labels[:400], 2)
    free = fit_linear(features[:400], labels[:400], 2, regularisations=[1e-6])
    assert chosen.regularisation > 1e-6
    assert chosen.accuracy(features[400:], labels[400:]) > free.accuracy(features[400:], labels[400:]) + 2


def test_statistics_are_those_of_their_definitions():
    features = torch.randn(30, 5, generator=torch.Generator().manual_seed(1)) * torch.tensor([1, 2, 3, 0.1, 1])
    found = feature_statistics(features)
    assert feature_statistics(F.pad(features, (0, 1)))["rankme"] == pytest.approx(found["rankme"], rel=1e-5)
    singular = np.linalg.svd(features.double().numpy(), compute_uv=False)
    shares = singular / singular.sum() + 1e-7
    assert found["rankme"] == pytest.approx(math.exp(-(shares * np.log(shares)).sum()), rel=1e-5)
    unit = F.normalize(features.double(), dim=-1)
    assert found["feature_std"] == pytest.approx(float(np.std(unit.numpy(), axis=0).mean()) * 5**0.5, rel=1e-5)
    pairs = [math.exp(-2 * float((unit[i] - unit[j]).square().sum())) for i in range(30) for j in range(i)]
    assert found["uniformity"] == pytest.approx(math.log(sum(pairs) / len(pairs)), rel=1e-5)
