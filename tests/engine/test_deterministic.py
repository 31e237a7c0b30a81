"""The switch for kernels that add up in the same order in every run."""

from __future__ import annotations

import pytest
import torch

from dino_ds.engine.process import init_distributed
from dino_ds.planning.measure.trial import build_trial, resolve
from tests.costs.cnn import RESNET, cnn_recipe
from tests.planning.measure.tiny import tiny_ds


def _cudnn(**sections: object) -> tuple[bool, bool]:
    recipe = cnn_recipe(RESNET)
    with torch.backends.cudnn.flags(benchmark=False, allow_tf32=True):
        build_trial(*resolve(recipe, tiny_ds(1, **sections), "test.json", 4))
        return torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32


@pytest.mark.slow
def test_convolutions_are_timed_and_in_fp32_exact():
    """Unless kernels have to be the same in every run."""
    init_distributed()
    assert _cudnn() == (True, False)
    assert _cudnn(bf16={"enabled": True}) == (True, True)
    try:
        assert _cudnn(dino_ds={"deterministic": True}) == (False, False)
    finally:
        torch.use_deterministic_algorithms(False)
