"""The head: prototypes of unit length, frozen without a trace."""

from __future__ import annotations

import pytest
import torch

from dino_ds.models.head import DinoHead
from dino_ds.models.logits import Comparison
from tests.reference import as_logits

pytestmark = pytest.mark.numerical


def _head(learned_lengths=False):
    torch.manual_seed(0)
    return DinoHead(width=12, hidden=20, bottleneck=8, prototypes=15, layers=3, learned_lengths=learned_lengths)


def _comparison():
    """A comparison with a target for each of six rows."""
    return Comparison(as_logits(torch.randn(6, 15)), torch.randn(15), temperature=0.5, student_temp=0.1)


@pytest.mark.parametrize("learned", [False, True])
def test_frozen_prototypes_pass_gradients_on_and_get_zeros(learned):
    head, features, how = _head(learned), torch.randn(6, 12, requires_grad=True), _comparison()
    head(features, how).loss.backward()
    expected = features.grad.clone()
    assert all(p.grad.any() for p in head.prototypes.parameters())
    features.grad = None
    head.zero_grad()
    head.prototypes.frozen = True
    head(features, how).loss.backward()
    torch.testing.assert_close(features.grad, expected)
    for parameter in head.prototypes.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_fp32_under_autocast():
    """Logits, loss and the products in them; but the head knows that they come of a low precision."""
    head, how = _head(), _comparison()
    assert not head(torch.randn(6, 12)).low
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = head(torch.randn(6, 12))
        assert logits.low and {t.dtype for t in logits[:3]} == {torch.float32}
        assert logits.multiply(logits.rows, torch.empty(6, 15)).dtype == logits.sum().dtype == torch.float32
        compared = head(torch.randn(6, 12), how)
        assert compared.loss.dtype == compared.entropy.dtype == torch.float32
