"""The training step of a narrow ResNet, 64 images, 2 + 8 crops, on a GPU that is not there: launches and traffic."""

from __future__ import annotations

import pytest
import torch

from dino_ds.config.ds_values import PerformanceOptions
from tests.cuda.test_step import step
from tests.fake_cuda import fake_cuda

pytestmark = pytest.mark.slow

RESNET: dict[str, object] = {"backbone": "resnet18", "arguments": '{"channels": [16, 32, 64, 128]}'}
# At most (launches, GB) of a part, counted with torch 2.15. Of the 20 convolutions and BatchNorms each runs twice, once
# for each size of crops. In bf16 a BatchNorm's weight and bias are cast to FP32, and their gradients back.
CEILINGS = {
    "teacher": (127, 2.4),
    "student": (318, 3.9),
    "loss": (50, 1.2),
    "backward": (524, 5.2),
    "ema": (11, 0.3),
}


def test_step_of_a_resnet():
    with fake_cuda() as gpu:
        step(gpu, RESNET, PerformanceOptions(teacher_copy=True), torch.bfloat16)
    gpu.check(CEILINGS)
