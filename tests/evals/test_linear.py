"""Linear probes against gradient descent and against the normal equations, in FP64 and without tricks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dino_ds import distributed
from dino_ds.evals import linear as linear_module
from dino_ds.evals.linear import fit_linear, fit_ridge
from dino_ds.evals.protocols.patch_probe import fit_patch_probe
from dino_ds.evals.subject import GaveUp
from tests.ranks import run_on_ranks


def _problem(images=120, classes=4, width=6, noise=1.0):
    """Overlapping clouds on axes of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (images,), generator=generator)
    centers = 2 * torch.randn(classes, width, generator=generator)
    features = centers[labels] + noise * torch.randn(images, width, generator=generator)
    return features * torch.tensor([1.0, 5.0, 0.1, 1.0, 1.0, 20.0]) + 3, labels


def _gradient_descent(features, labels, classes, strength, steps=4000, rate=0.5):
    x = features.double().numpy()
    x = (x - x.mean(0)) / x.std(0)
    weight, bias, wanted = np.zeros((classes, x.shape[1])), np.zeros(classes), np.eye(classes)[labels.numpy()]
    for _ in range(steps):
        logits = x @ weight.T + bias
        probabilities = np.exp(logits - logits.max(1, keepdims=True))
        error = (probabilities / probabilities.sum(1, keepdims=True) - wanted) / len(x)
        weight -= rate * (error.T @ x + strength * weight)
        bias -= rate * error.sum(0)
    return weight, bias


def test_logistic_regression_reaches_the_optimum():
    """The optimum is unique but for a constant in the biases; both stop near it: 1e-3."""
    features, labels = _problem()
    probe = fit_linear(features, labels, 4, regularisations=[0.05])
    weight, bias = _gradient_descent(features, labels, 4, 0.05)
    np.testing.assert_allclose(probe.weight.numpy(), weight, atol=1e-3)
    np.testing.assert_allclose(probe.bias.numpy() - probe.bias.numpy().mean(), bias - bias.mean(), atol=1e-3)


def test_images_a_few_at_a_time_give_the_same(monkeypatch):
    """Logits of a million images and a thousand classes are 5 GB. The last bits differ: 1e-4."""
    features, labels = _problem()
    whole = fit_linear(features, labels, 4, regularisations=[0.05])
    monkeypatch.setattr(linear_module, "_ROWS", 7)
    parts = fit_linear(features, labels, 4, regularisations=[0.05])
    torch.testing.assert_close(parts.weight, whole.weight, rtol=1e-4, atol=1e-4)
    assert parts.accuracy(features, labels) == whole.accuracy(features, labels)


@pytest.mark.parametrize("strength", [1.0, 0.05, 1e-3, 1e-5])
def test_logistic_regression_equals_scikit_learn_s(strength):
    """Its C is 1 / (images * regularisation). Both stop near the same optimum; the weaker the regularisation the
    flatter it is: 1e-3 of the logits' size, and the same decisions."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    features, labels = _problem()
    x = features.double().numpy()
    x = (x - x.mean(0)) / x.std(0)
    theirs = linear_model.LogisticRegression(C=1 / (len(x) * strength), tol=1e-8, max_iter=5000).fit(x, labels.numpy())
    probe = fit_linear(features, labels, 4, regularisations=[strength])
    logits, expected = probe(features).double().numpy(), theirs.decision_function(x)
    logits, expected = (values - values.mean(1, keepdims=True) for values in (logits, expected))
    np.testing.assert_allclose(logits, expected, atol=2e-3 * np.abs(expected).max())
    assert (logits.argmax(1) == theirs.predict(x)).mean() == 1


def _given_up(fit):
    """Rank 1 wants to stop after three looks; how many each rank has taken, and whether it has raised."""
    asked = []

    def give_up():
        asked.append(True)
        return distributed.rank() == 1 and len(asked) > 3

    try:
        fit(give_up)
    except GaveUp:
        return len(asked), True
    return len(asked), False


def _fit_linear(give_up):
    fit_linear(*_problem(), 4, give_up=give_up)


def _fit_patches(give_up):
    tokens, labels = _problem()
    fit_patch_probe([tokens], [torch.nn.functional.one_hot(labels, 4).float()], give_up=give_up)


@pytest.mark.parametrize("fit", [_fit_linear, _fit_patches])
def test_a_fit_is_given_up_by_all_ranks_at_the_same_look(fit):
    assert run_on_ranks(_given_up, fit) == [(4, True)] * 2


def test_one_image_is_fitted_too():
    """Nothing is left to choose a regularisation on: its class is found nevertheless."""
    features, labels = _problem(1)
    assert fit_linear(features, labels, 4).accuracy(features, labels) == 100


def _fits(images, strengths):
    features, labels = _problem(images)
    probes = [fit_linear(features, labels, 4, strengths), fit_ridge(features, labels, 4)]
    return [(p.regularisation, p.weight.numpy(), p.bias.numpy()) for p in probes]


@pytest.mark.parametrize(("images", "strengths"), [(121, (0.01, 0.1, 1.0)), (31, (0.1,))])
def test_ranks_share_the_sums(images, strengths):
    """Shares of 61 and 60, and of 16 and 15. Both ranks have the same probe, and it is that of one process but for the
    rounding of the sums, 1e-3."""
    both, alone = run_on_ranks(_fits, images, strengths), _fits(images, strengths)
    for first, second, one in zip(*both, alone, strict=True):
        assert first[0] == second[0] == one[0]
        for mine, theirs, ours in zip(first[1:], second[1:], one[1:], strict=True):
            np.testing.assert_array_equal(mine, theirs)
            np.testing.assert_allclose(mine, ours, rtol=1e-3, atol=1e-3)


def test_ridge_is_the_normal_equations_solution():
    features, labels = _problem()
    probe = fit_ridge(features, labels, 4, regularisation=0.1)
    x = features.double().numpy()
    x = (x - x.mean(0)) / x.std(0)
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


def test_the_seed_says_which_images_are_held_out():
    """Of twenty noisy images other tenths choose otherwise."""
    features, labels = _problem(20, noise=3.0)
    chosen = [fit_linear(features, labels, 4, (0.01, 1.0), seed).regularisation for seed in range(8)]
    assert len(set(chosen)) == 2
    assert chosen[0] == fit_linear(features, labels, 4, (0.01, 1.0)).regularisation


def test_a_class_that_training_lacks_is_never_predicted():
    features, labels = _problem(classes=3)
    probe = fit_linear(features, labels, 5, regularisations=[0.1])
    assert int(probe(features).argmax(dim=1).max()) <= 2
