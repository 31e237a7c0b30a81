"""Statistics of features on sets of which they are known, and against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dino_ds.evals.knn import feature_statistics

pytestmark = pytest.mark.numerical


def test_collapse_to_a_point():
    found = feature_statistics(torch.ones(50, 8) * torch.arange(1, 51)[:, None])
    assert found["feature_std"] == pytest.approx(0, abs=1e-6)
    assert found["rankme"] == pytest.approx(1, abs=1e-3)
    assert found["uniformity"] == pytest.approx(0, abs=1e-6)


def test_an_even_sphere():
    """Gaussian features in 8 dimensions: deviation 1, 8 directions in use."""
    found = feature_statistics(torch.randn(20000, 8, generator=torch.Generator().manual_seed(0)))
    assert found["feature_std"] == pytest.approx(1, abs=0.02)
    assert found["rankme"] == pytest.approx(8, abs=0.05)


def test_definitions():
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
