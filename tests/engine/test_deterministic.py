"""The switch for kernels that add up in the same order in every run."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from dino_ds.engine.device import use_deterministic_kernels
from dino_ds.engine.process import init_distributed
from dino_ds.planning.measure.trial import build_trial, resolve
from tests.costs.cnn import RESNET, cnn_recipe
from tests.engine.harness import build_step, ds_config, run_windows
from tests.planning.measure.tiny import tiny_ds
from tests.ranks import run_on_ranks


def _losses(deterministic: bool) -> tuple[list[float], bool, str | None]:
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with mock.patch.dict(os.environ):
        try:
            if deterministic:
                use_deterministic_kernels()
            losses = run_windows(build_step(ds_config(1, "bf16", 8, accumulation=2)), 0, 2)
            return losses, torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = filled


def test_the_switch_changes_nothing_on_a_cpu():
    """Only a GPU shows which operators of CUDA torch refuses under it."""
    ((losses, off, _),) = run_on_ranks(_losses, False, world=1)
    ((same, on, workspace),) = run_on_ranks(_losses, True, world=1)
    assert same == losses
    assert (off, on, workspace) == (False, True, ":4096:8")


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
