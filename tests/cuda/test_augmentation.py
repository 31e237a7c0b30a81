"""Augmentation of 64 images, 2 + 8 crops, on a GPU that is not there: launches, traffic, waits."""

from __future__ import annotations

import torch

from dino_ds.config.recipe import Recipe
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.photometric import Plan, augment
from tests.fake_cuda import CUDA, fake_cuda

IMAGES = 64


def test_augmentation():
    crops = MultiCrop(**Recipe().crops.model_dump())
    views = [crops.draw(500, 375, image) for image in range(IMAGES)]
    with fake_cuda() as gpu:
        for side, group in ((224, range(2)), (96, range(2, 10))):
            plan = Plan.build([view[crop] for crop in group for view in views], 3)
            rows = torch.empty(plan.rows.shape, dtype=torch.long, device=CUDA)
            values = torch.empty(plan.values.shape, device=CUDA)
            images = torch.empty(len(group) * IMAGES, side, side, 3, dtype=torch.uint8, device=CUDA)
            with gpu.part("augmentation"):
                augment(images, [Plan(plan.crops, rows, values, plan.counts)])
    gpu.check({"augmentation": (488, 13.8)})
