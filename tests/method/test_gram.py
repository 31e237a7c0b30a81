"""The Gram term against the recorded numbers of facebookresearch/dinov3.

FP32 on both sides, sums in another order: the loss to 2e-6 of itself, gradients to 2e-6 of their largest.

Not built: options that no recipe of its authors uses, similarities of a whole batch or without the negative ones.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dino_ds.method import gram
from dino_ds.method.gram import GramTerm, gram_loss, tiled_gram_loss
from dino_ds.models.base import resized_patches
from tests.reference_v2 import golden_v2

pytestmark = pytest.mark.numerical

PIECES = [1, 5 * 16 * 4, 20 * 16 * 4, 2**20]
"""Bytes of the similarities made at a time: of 1, 5 and 20 patches (an image has 16), and all."""


def _close(ours, theirs, part=2e-6):
    theirs = theirs.detach().view_as(ours)
    torch.testing.assert_close(ours.detach(), theirs, rtol=0, atol=part * float(theirs.abs().max()))


def _term(student, teacher):
    """Loss and gradient of the term for the patches of two images."""
    term = GramTerm("gram", "gram")
    schedule = SimpleNamespace(weights={"gram": 1.0})
    (targets,) = term.targets([{"gram": {"patches/gram": teacher}}], [{}], schedule)
    student = student.clone().requires_grad_()
    loss, scalars = term.loss({"patches/global": student}, targets, schedule)
    assert not scalars
    (3 * loss).backward()
    return loss, student.grad / 3


@pytest.mark.parametrize("piece", PIECES)
def test_loss_and_gradient_are_the_reference_s(monkeypatch, piece):
    monkeypatch.setitem(gram._PIECE, "cpu", piece)
    recorded = golden_v2("gram")
    loss, grad = _term(recorded["student"], recorded["teacher_high"])
    _close(loss, recorded["recipe.loss"])
    _close(grad, recorded["recipe.grad"])


def test_the_formula_is_the_reference_s():
    recorded = golden_v2("gram")
    student = recorded["student"].clone().requires_grad_()
    loss = gram_loss(student, recorded["teacher.bicubic"].view(len(student), -1, student.shape[-1]))
    loss.backward()
    _close(loss, recorded["recipe.loss"])
    _close(student.grad, recorded["recipe.grad"])


def test_the_map_is_resized_as_the_reference_s():
    """Bicubic without antialias; of the same grid it stays as it is."""
    recorded = golden_v2("gram")
    _close(resized_patches(recorded["teacher_high"], 16), recorded["teacher.bicubic"])
    same = recorded["student"].bfloat16()
    assert resized_patches(same, 16) is same


def test_of_another_width_and_many_images_in_pieces(monkeypatch):
    """Against the plain form, differentiated by torch; patches of bf16 are compared in FP32."""
    monkeypatch.setitem(gram._PIECE, "cpu", 3 * 25 * 25 * 4)
    torch.manual_seed(0)
    student, teacher = torch.randn(7, 25, 12).bfloat16().requires_grad_(), torch.randn(7, 25, 20).bfloat16()
    loss = tiled_gram_loss(student, teacher)
    loss.backward()
    plain = student.detach().float().requires_grad_()
    expected = gram_loss(plain, teacher)
    expected.backward()
    _close(loss, expected)
    _close(student.grad.float(), plain.grad, part=4e-3)  # rounded to bf16


def test_images_add_up():
    torch.manual_seed(0)
    student, teacher = torch.randn(4, 16, 8), torch.randn(4, 16, 8)
    loss, grad = _term(student, teacher)
    parts = [_term(student[i : i + 2], teacher[i : i + 2]) for i in (0, 2)]
    assert abs((sum(part for part, _ in parts) / 2 - loss).item()) < 1e-7
    assert torch.allclose(torch.cat([part for _, part in parts]) / 2, grad, atol=1e-8)


def test_nothing_is_computed_while_the_weight_is_0():
    """The teacher has made no pass then; every parameter gets its gradient, of 0."""
    term, schedule = GramTerm("gram", "gram"), SimpleNamespace(weights={"gram": 0.0})
    student = torch.randn(4, 16, 8, requires_grad=True)
    (targets,) = term.targets([{}], [{}], schedule)
    loss, _ = term.loss({"patches/global": student}, targets, schedule)
    loss.backward()
    assert loss == 0 and student.grad is not None and not student.grad.any()
