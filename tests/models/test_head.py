"""The head: prototypes of unit length, frozen without a trace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dino_ds.models.head import DinoHead

pytestmark = pytest.mark.numerical


def _head():
    torch.manual_seed(0)
    return DinoHead(width=12, hidden=20, bottleneck=8, prototypes=15, layers=3)


def test_logits_are_cosines():
    head, features = _head(), torch.randn(6, 12)
    expected = F.cosine_similarity(head.mlp(features)[:, None], head.prototypes.weight[None], dim=-1)
    torch.testing.assert_close(head(features), expected)


@pytest.mark.parametrize("block", [4, 15, 16384])
def test_equals_torch_s_weight_norm_with_unit_gain(block, monkeypatch):
    """Forward and gradient of the reference's last layer, whose weight_g is fixed at 1; in blocks or at once."""
    monkeypatch.setattr("dino_ds.models.head._BLOCK", block)
    head, features = _head(), torch.randn(6, 12)
    last = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 15, bias=False))
    with torch.no_grad():
        last.parametrizations.weight.original1.copy_(head.prototypes.weight)
        last.parametrizations.weight.original0.fill_(1)
    ours, theirs = features.clone().requires_grad_(), features.clone().requires_grad_()
    head(ours).sin().sum().backward()
    last(F.normalize(head.mlp(theirs), dim=-1)).sin().sum().backward()
    torch.testing.assert_close(head.prototypes.weight.grad, last.parametrizations.weight.original1.grad)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_frozen_prototypes_pass_gradients_on_and_get_zeros():
    head, features = _head(), torch.randn(6, 12, requires_grad=True)
    head(features).sin().sum().backward()
    expected = features.grad.clone()
    features.grad = None
    head.zero_grad()
    head.prototypes.frozen = True
    head(features).sin().sum().backward()
    torch.testing.assert_close(features.grad, expected)
    assert torch.equal(head.prototypes.weight.grad, torch.zeros_like(head.prototypes.weight))


def test_layers_and_widths():
    for layers in (1, 2, 4):
        head = DinoHead(12, 20, 8, 15, layers)
        assert sum(isinstance(m, torch.nn.Linear) for m in head.mlp) == layers
        assert head(torch.randn(2, 12)).shape == (2, 15)


def test_fp32_under_autocast():
    head = _head()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(torch.randn(2, 12)).dtype == torch.float32
