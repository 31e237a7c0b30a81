"""Linear probes against gradient descent and against the normal equations, in FP64 and without tricks."""

from __future__ import annotations

import numpy as np
import torch

from dino_ds.evals.linear import fit_linear, fit_ridge


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


def test_a_class_that_training_lacks_is_never_predicted():
    features, labels = _problem(classes=3)
    probe = fit_linear(features, labels, 5, regularisations=[0.1])
    assert int(probe(features).argmax(dim=1).max()) <= 2
