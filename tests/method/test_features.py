"""Distillation of features: the loss against a loop, and a teacher's map on another grid."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dino_ds.method.frozen import FeatureTerm
from tests.engine.harness import tiny_schedules

SCHEDULE = tiny_schedules().at(0)


def _loss(student, teacher, feature):
    term = FeatureTerm("out", feature, "regression", teacher.shape[-1])
    (targets,) = term.targets([{"frozen": {feature: teacher}}], [{}], SCHEDULE)
    return term.loss({"out": student}, targets, SCHEDULE).loss


@pytest.mark.parametrize("shape", [(6, 16), (6, 9, 16)])
def test_mean_of_one_less_the_cosine(shape):
    """1e-6: FP32 sums in another order."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(shape, generator=generator) for _ in range(2))
    rows = zip(student.view(-1, 16), teacher.view(-1, 16), strict=True)
    slow = torch.stack([1 - (a @ b) / (a.norm() * b.norm()) for a, b in rows]).mean()
    feature = "cls/global" if len(shape) == 2 else "patches/global"
    torch.testing.assert_close(_loss(student, teacher, feature), slow, rtol=0, atol=1e-6)
    assert float(_loss(teacher * 3, teacher, feature)) == pytest.approx(0, abs=1e-6)
    half = _loss(student.bfloat16(), teacher.bfloat16(), feature)
    assert half.dtype == torch.float32 and float(half) == pytest.approx(float(slow), abs=1e-2)


def test_a_map_of_another_grid_is_resized():
    student, teacher = torch.randn(2, 36, 5), torch.randn(2, 16, 5)
    maps = teacher.transpose(1, 2).unflatten(2, (4, 4))
    wanted = F.interpolate(maps, (6, 6), mode="bicubic", align_corners=False).flatten(2).transpose(1, 2)
    found, expected = (_loss(student, one, "patches/global") for one in (teacher, wanted.contiguous()))
    torch.testing.assert_close(found, expected)
