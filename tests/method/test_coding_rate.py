"""The coding rate: against the formula written out, and over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dino_ds.config.crops import EMA
from dino_ds.config.fields import Ramp
from dino_ds.engine import distributed
from dino_ds.method.coding_rate import CodingRateTerm
from dino_ds.method.specs.ours import CodingRateSpec
from tests.ranks import run_on_ranks

IMAGES, WIDTH, CROPS = 12, 8, 4


def _loss(images: slice):
    """The loss of some of the images, and its gradient at the student's outputs (crops, images, width)."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(CROPS, IMAGES, WIDTH, generator=generator)[:, images].clone().requires_grad_()
    teacher = torch.randn(2, IMAGES, WIDTH, generator=generator)[:, images]
    term = CodingRateTerm(CodingRateSpec("rate", Ramp(1.0), WIDTH, EMA), 2)
    (targets,) = term.targets([{EMA: {"rate": teacher.flatten(0, 1)}}], [{}], None)
    loss = term.loss({"rate": student.flatten(0, 1)}, targets, None).loss
    loss.backward()
    return loss.detach(), student.grad, student.detach(), teacher


def test_the_loss_is_the_formula_of_the_paper():
    """Pairs one by one, and the determinant by eigenvalues in FP64; FP32 rounds at 1e-7."""
    loss, _, student, teacher = _loss(slice(None))
    s, t = F.normalize(student.double(), dim=-1), F.normalize(teacher.double(), dim=-1)
    cosines = [(s[v] * t[g]).sum(dim=1).mean() for v in range(CROPS) for g in range(2) if v != g]
    rates = []
    for rows in s[:2]:
        matrix = torch.eye(WIDTH) + WIDTH / (IMAGES * 0.5) * rows.T @ rows
        rates.append(torch.linalg.eigvalsh(matrix).log().sum() / 2 * (IMAGES + WIDTH) / (IMAGES * WIDTH))
    expected = 1 - sum(cosines) / len(cosines) - sum(rates) / 2
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("images", [1, 5, WIDTH, 24])
def test_the_spread_is_0_for_equal_images_and_1_for_those_as_far_apart_as_can_be(images):
    """Orthogonal rows, as many of each, whatever the number of images; one image has nothing to be far from."""
    term = CodingRateTerm(CodingRateSpec("rate", Ramp(1.0), WIDTH, EMA), 2)

    def spread(rows):
        rows = rows.repeat(2, 1)
        (targets,) = term.targets([{EMA: {"rate": rows}}], [{}], None)
        return term.loss({"rate": rows}, targets, None).scalars[term.spread].item()

    directions = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))).Q
    assert spread(directions[:1].expand(images, -1)) == pytest.approx(0, abs=1e-5 if images > 1 else 1)
    if images > 1:
        assert spread(directions.repeat(3, 1)[:images]) == pytest.approx(1, abs=1e-5)


def _on_a_rank():
    share = IMAGES // distributed.world_size()
    first = distributed.rank() * share
    loss, gradient, _, _ = _loss(slice(first, first + share))
    return loss, gradient


def test_two_ranks_equal_one_process():
    """Losses and gradients, meaned over ranks as the engine does; sums in another order round at 1e-7."""
    loss, gradient, _, _ = _loss(slice(None))
    found = run_on_ranks(_on_a_rank)
    torch.testing.assert_close(sum(loss for loss, _ in found) / 2, loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat([rows for _, rows in found], dim=1) / 2, gradient, rtol=0, atol=1e-5)
