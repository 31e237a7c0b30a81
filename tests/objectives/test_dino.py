"""The loss against the paper's double loop, and the center's rules."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dino_ds.objectives.dino import DinoTerm, multicrop_cross_entropy, teacher_targets
from dino_ds.objectives.running import RunningMean
from tests.reference import dino_loss, dino_loss_by_pairs

pytestmark = pytest.mark.numerical


def _logits(views, images=3, k=33, dtype=torch.float32):
    torch.manual_seed(views)
    return torch.randn(views, images, k).to(dtype), torch.randn(2 * images, k)


@pytest.mark.parametrize("views", [2, 3, 10])
def test_loss_and_gradient_equal_the_double_loop(views):
    """FP32 against a double-precision loop over all pairs. Logits over the temperature reach 35, which FP32 rounds by
    2e-6: so much of a probability is lost, and twice as much of the largest gradient."""
    student, teacher = _logits(views)
    targets, _ = teacher_targets(teacher, torch.zeros(33), 0.07)
    targets = targets.view(2, 3, 33)
    ours = student.clone().requires_grad_()
    loss = multicrop_cross_entropy(ours.clone(), targets, 0.1)
    (3 * loss).backward()
    theirs = student.double().requires_grad_()
    expected = dino_loss_by_pairs(theirs, targets.double(), 0.1)
    (3 * expected).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0, atol=4e-6 * float(theirs.grad.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arithmetic_is_fp32_for_half_precision_logits(dtype):
    """Half-precision logits are exact inputs: only the gradient is rounded to their dtype."""
    student, teacher = _logits(4, k=4096, dtype=dtype)
    targets, _ = teacher_targets(teacher, torch.zeros(4096), 0.04)
    targets = targets.view(2, 3, 4096)
    loss = multicrop_cross_entropy(student, targets, 0.1)
    assert loss.dtype == torch.float32
    expected = dino_loss_by_pairs(student.double(), targets.double(), 0.1)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-5)


def test_the_gradient_takes_the_place_of_the_logits():
    """Never two copies of (v, b, k); a second backward pass would read overwritten logits and is refused."""
    student, teacher = _logits(6, images=4, k=512)
    targets = teacher_targets(teacher.repeat(4, 16)[:8, :512], torch.zeros(512), 0.07)[0].view(2, 4, 512)
    leaf = student.requires_grad_()
    logits = leaf.clone()
    biggest: list[int] = []

    class _Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
                biggest.append(out.untyped_storage().nbytes() // 4)
            return out

    with _Watch():
        loss = multicrop_cross_entropy(logits, targets, 0.1)
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    assert max(biggest) <= 4 * 512  # one crop at a time
    with pytest.raises(AssertionError, match="overwritten"):
        torch.autograd.grad(loss, logits)


def test_entropy_and_kl():
    """Uniform teacher: ln k. One-hot teacher: 0. Student equal to the teacher: KL = 0."""
    k = 16
    _, uniform = teacher_targets(torch.zeros(4, k), torch.zeros(k), 0.04)
    assert uniform.item() == pytest.approx(math.log(k), rel=1e-6)
    _, certain = teacher_targets(50.0 * torch.eye(k)[:4], torch.zeros(k), 0.04)
    assert certain.item() == pytest.approx(0.0, abs=1e-6)
    same = torch.randn(1, k).repeat(2, 1)
    objective = DinoTerm(k, student_temp=0.1, center_momentum=0.9)
    loss, entropy = dino_loss(objective, same.clone(), same, 0.1)
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

    def test_half_precision_sums_do_not_overflow(self):
        center = RunningMean(1, momentum=0.0)
        for _ in range(3):
            center.gather(torch.full((60000, 1), 2.0, dtype=torch.float16))
        center.commit(center.pending())
        assert center.value.item() == 2.0

    def test_calling_the_objective_does_not_move_it(self):
        objective = DinoTerm(5, 0.1, 0.9)
        dino_loss(objective, torch.randn(6, 5), torch.randn(4, 5), 0.04)
        assert torch.equal(objective.center.value, torch.zeros(5))

    def test_the_objective_takes_it_off_and_gathers_for_the_next(self):
        objective, (students, teachers) = DinoTerm(33, 0.1, 0.9), _logits(3)
        objective.center.load(torch.linspace(-1, 1, 33))
        loss, _ = dino_loss(objective, students.flatten(0, 1), teachers, 0.04)
        targets, _ = teacher_targets(teachers - torch.linspace(-1, 1, 33), torch.zeros(33), 0.04)
        expected = multicrop_cross_entropy(students, targets.view(2, 3, 33), 0.1)
        torch.testing.assert_close(loss, expected)
        pending = objective.center.pending()
        torch.testing.assert_close(pending[:-1], teachers.sum(dim=0))
        assert pending[-1] == 6
        objective.center.load(torch.zeros(33))  # a new window begins
        assert not objective.center.pending().any()
