"""Features, k-NN and what else looks at a network, on a GPU that is not there: devices, waits, kernels."""

from __future__ import annotations

import pytest
import torch

from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.evals import knn
from dino_ds.evals.features import raw_pixels
from dino_ds.method.build import build_meta
from dino_ds.models.base import CLS
from dino_ds.weights.load import Backbone
from tests.fake_cuda import CUDA, fake_cuda

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_backbone_s_outputs(dtype: torch.dtype):
    with fake_cuda() as gpu:
        network = gpu.module(build_meta(Recipe(), PerformanceOptions(), {}, [CLS]))
        backbone = Backbone(network.backbone, 224, "here", {})
        images, large = (torch.empty(8, 3, side, side, device=CUDA) for side in (224, 384))
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32), gpu.part("features"):
            assert backbone.features(images).device == CUDA
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            for output in (backbone.attention(images), backbone.patch_tokens(large), backbone.last_tokens(images, 4)):
                assert output.float().isfinite().device == CUDA
    gpu.check({"features": (277, 0.8)})


def test_what_is_made_of_features():
    with fake_cuda() as gpu:
        bank, queries = torch.empty(5000, 384, device=CUDA), torch.empty(1000, 384, device=CUDA)
        knn.nearest(queries, bank, 20)
        knn.rank_database(queries, bank)
        raw_pixels(torch.empty(64, 3, 224, 224, device=CUDA))
    gpu.check({})
