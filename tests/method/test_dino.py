"""The loss against the paper's double loop, and the center's rules."""

from __future__ import annotations

import math

import pytest
import torch

from dino_ds.method.dino import dino_loss
from dino_ds.method.objective import RunningMean
from tests.reference import centered, loss_of_term

pytestmark = pytest.mark.numerical


def _logits(views, images=3, k=33):
    torch.manual_seed(views)
    return torch.randn(views, images, k), torch.randn(2 * images, k)


def test_entropy_and_kl():
    """Uniform teacher: ln k. One-hot teacher: 0. Student equal to the teacher: KL = 0."""
    k = 16
    term = centered(k, student_temp=0.1, center_momentum=0.9)
    _, uniform = loss_of_term(term, torch.zeros(4, k), torch.zeros(4, k), 0.04)
    assert uniform.item() == pytest.approx(math.log(k), rel=1e-6)
    _, certain = loss_of_term(term, torch.zeros(4, k), 50.0 * torch.eye(k)[:4], 0.04)
    assert certain.item() == pytest.approx(0.0, abs=1e-6)
    same = torch.randn(1, k).repeat(2, 1)
    loss, entropy = loss_of_term(term, same.clone(), same, 0.1)
    assert (loss - entropy).item() == pytest.approx(0.0, abs=1e-5)


class TestCenter:
    def test_moves_to_the_mean_of_all_micro_batches(self):
        """Equation 4 with the mean over rows of unequal micro-batches; not a mean of means."""
        logits = torch.randn(10, 7)
        center = RunningMean(7, momentum=0.9)
        center.value += 1.0
        for part in (logits[:1], logits[1:7], logits[7:]):
            center.gather(part)
        center.commit(center.pending())
        torch.testing.assert_close(center.value, 0.9 * torch.ones(7) + 0.1 * logits.mean(dim=0))

    def test_gathering_alone_and_dropping_move_nothing(self):
        center = RunningMean(7, momentum=0.9)
        center.gather(torch.randn(3, 7))
        center.drop()
        assert torch.equal(center.value, torch.zeros(7))
        center.gather(torch.ones(2, 7))
        center.commit(center.pending())
        torch.testing.assert_close(center.value, torch.full((7,), 0.1))

    def test_a_step_without_rows_leaves_it(self):
        center = RunningMean(7, momentum=0.9)
        center.load(torch.ones(7))
        center.commit(center.pending())
        assert torch.equal(center.value, torch.ones(7))

    def test_half_precision_sums_do_not_overflow(self):
        center = RunningMean(1, momentum=0.0)
        for _ in range(3):
            center.gather(torch.full((60000, 1), 2.0, dtype=torch.float16))
        center.commit(center.pending())
        assert center.value.item() == 2.0

    def test_the_objective_takes_it_off_and_gathers_for_the_next(self):
        term, (students, teachers) = centered(33, 0.1, 0.9), _logits(3)
        center = term.centering.center
        center.load(torch.linspace(-1, 1, 33))
        loss, _ = loss_of_term(term, students.flatten(0, 1), teachers, 0.04)
        targets = ((teachers - torch.linspace(-1, 1, 33)) / 0.04).softmax(dim=-1)
        torch.testing.assert_close(loss, dino_loss(students, targets.view(2, 3, 33), 0.1))
        pending = center.pending()
        torch.testing.assert_close(pending[:-1], teachers.sum(dim=0))
        assert pending[-1] == 6
        center.load(torch.zeros(33))  # a new window begins
        assert not center.pending().any()
