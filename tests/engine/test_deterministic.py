"""The switch for kernels that add up in the same order in every run."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from dino_ds.engine.process import init_distributed
from dino_ds.method import build
from tests.costs.cnn import RESNET, cnn_recipe
from tests.engine.harness import ds_config


class _Stop(Exception):
    """Kernels are chosen: nothing more is built."""


def _cudnn(precision: str, **sections: object) -> tuple[bool, bool]:
    stop = mock.patch.object(build, "find_teacher", side_effect=_Stop)
    with torch.backends.cudnn.flags(benchmark=False, allow_tf32=True), stop:
        with pytest.raises(_Stop):
            build.build_step(cnn_recipe(RESNET), ds_config(1, precision, 4, **sections), 10)
        return torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32


@pytest.mark.slow
def test_convolutions_are_timed_and_in_fp32_exact():
    """Unless kernels have to be the same in every run."""
    init_distributed()
    assert _cudnn("fp32") == (True, False)
    assert _cudnn("bf16") == (True, True)
    try:
        assert _cudnn("fp32", dino_ds={"deterministic": True}) == (False, False)
    finally:
        torch.use_deterministic_algorithms(False)
