"""The head: prototypes of unit length, frozen without a trace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dino_ds.models import prototypes
from dino_ds.models import prototypes as factored
from dino_ds.models.prototypes import Comparison, DinoHead
from tests.reference import as_logits, product

pytestmark = pytest.mark.numerical


def _head(learned_lengths=False):
    torch.manual_seed(0)
    return DinoHead(width=12, hidden=20, bottleneck=8, prototypes=15, layers=3, learned_lengths=learned_lengths)


def _comparison():
    """A comparison with a target for each of six rows."""
    return Comparison(as_logits(torch.randn(6, 15)), torch.randn(15), temperature=0.5, student_temp=0.1)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("block", [4, 15, 16384])
def test_equals_torch_s_weight_norm(block, learned, monkeypatch):
    """Loss and gradient of the reference's last layer, whose weight_g is fixed at 1 or learned; in blocks or at once.
    The logits multiplied out are the same, and differentiable as well."""
    monkeypatch.setitem(prototypes._BLOCK, "cpu", block)
    monkeypatch.setattr(factored, "_CPU_BLOCK", block)
    head, features, how = _head(learned), torch.randn(6, 12), _comparison()
    last = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 15, bias=False))
    lengths, directions = last.parametrizations.weight.original0, last.parametrizations.weight.original1
    with torch.no_grad():
        directions.copy_(head.prototypes.weight)
        lengths.uniform_(0.5, 2) if learned else lengths.fill_(1)
        if learned:
            head.prototypes.lengths.copy_(lengths)
    ours, theirs = features.clone().requires_grad_(), features.clone().requires_grad_()
    logits = last(F.normalize(head.mlp(theirs), dim=-1))
    torch.testing.assert_close(product(head(features)), logits)
    targets = (how.teacher.rows / how.temperature + how.shift).softmax(dim=-1)
    expected = F.cross_entropy(logits / how.student_temp, targets)
    wanted = torch.autograd.grad(expected, [theirs, directions, *([lengths] if learned else [])])
    loss = head(ours, how).loss
    found = torch.autograd.grad(loss, [ours, *head.prototypes.parameters()])
    torch.testing.assert_close(loss, expected)
    for mine, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, reference)


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
