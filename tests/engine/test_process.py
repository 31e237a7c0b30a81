"""Devices, threads, output and kernels of the processes that train."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch

from dino_ds.engine import distributed
from dino_ds.engine.process import _join, _quiet_deepspeed, init_distributed
from dino_ds.errors import ConfigError
from dino_ds.method import build
from tests.engine.harness import ds_config
from tests.planning.measure.tiny import RESNET, cnn_recipe


def test_a_rank_without_a_gpu_of_its_own_is_told(monkeypatch):
    """It happens under `srun --gpus-per-task=1`, or with more processes than GPUs; torch says "invalid device"."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(get_accelerator(), "device_name", lambda: "cuda")
    monkeypatch.setattr(get_accelerator(), "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigError, match="process 1 of this machine") as raised:
        _join(timedelta(minutes=1))
    assert raised.value.said_by_me


def test_deepspeed_warns_elsewhere_than_on_standard_output(capsys):
    from deepspeed.utils import logger

    _quiet_deepspeed()
    logger.warning("pytorch allocator cache flushes")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("ranks", "threads"), [("1", 11), ("3", 4), ("64", 1)])
def test_ranks_with_gpus_share_the_cores_of_their_host(monkeypatch, ranks, threads):
    """An offloaded optimizer steps there; each rank with threads for all cores would be slower than one alone."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator, found = get_accelerator(), []
    for name, value in (("device_name", "cuda"), ("device_count", 64), ("set_device", None)):
        monkeypatch.setattr(accelerator, name, lambda *_, value=value: value)
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **_: None)
    monkeypatch.setattr(distributed, "usable_cores", lambda: [*range(12)])
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    for name, value in (("LOCAL_RANK", "0"), ("LOCAL_SIZE", ranks)):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _join(timedelta(minutes=1))
    assert (found or [11]) == [threads]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    _join(timedelta(minutes=1))
    assert len(found) <= 1


class _Stop(Exception):
    """Kernels are chosen: nothing more is built."""


def _cudnn(precision: str, **sections: object) -> tuple[bool, bool]:
    stop = mock.patch.object(build.frozen, "find_teacher", side_effect=_Stop)
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
