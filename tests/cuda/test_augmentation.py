"""A batch of 64 images, 2 + 8 crops, brought to a GPU that is not there and augmented: launches, traffic, waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dino_ds.config.crops import all_crops
from dino_ds.config.recipe import Recipe
from dino_ds.data import photometric
from dino_ds.data.batches import LoaderBatch
from dino_ds.data.loader import to_device
from dino_ds.data.multicrop import AugmentationParams, MultiCrop
from dino_ds.data.normalization import IMAGENET
from tests.fake_cuda import CUDA, fake_cuda

IMAGES = 64


def batch() -> LoaderBatch:
    crops = MultiCrop(Recipe().groups, Recipe().crops.augment)
    views = [crops.sample(500, 375, image) for image in range(IMAGES)]
    groups, plans = {}, {}
    for name, side, group in (("global", 224, range(2)), ("local", 96, range(2, 10))):
        plans[name] = [AugmentationParams.build([view[crop] for crop in group for view in views], 3)]
        groups[name] = torch.empty(len(group), IMAGES, side, side, 3, dtype=torch.uint8)
    return LoaderBatch(groups, plans, torch.arange(IMAGES), 0, [], [], IMAGENET.offset_and_factor())


def test_the_fused_augmentation(monkeypatch):
    """At most 20 launches with the copies, and 3 % of the traffic of a ViT-S step, 43.7 GB at this batch."""
    kernels = pytest.importorskip("dino_ds.data.photometric_triton", reason="needs Triton")

    with fake_cuda() as gpu:

        def launch(kernel, grid, *arguments, **constants):
            tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
            assert all(tensor.device == CUDA and tensor.is_contiguous() for tensor in tensors)
            counts = gpu.parts["augmentation"]
            counts.kernels[kernel.__name__] += 1
            counts.bytes[kernel.__name__] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

        monkeypatch.setattr(kernels, "launch", launch)
        monkeypatch.setattr(photometric, "TAKEN", {"augmentation"})
        with gpu.part("augmentation"):
            views = all_crops(to_device(batch(), CUDA).crops)
    assert [tuple(view.shape) for view in views] == [(IMAGES, 3, 224, 224)] * 2 + [(IMAGES, 3, 96, 96)] * 8
    copies = [problem for problem in gpu.problems if "_to_copy between host and device at loader.py" in problem]
    gpu.check({"augmentation": (14, 0.78)}, known=tuple(copies))
