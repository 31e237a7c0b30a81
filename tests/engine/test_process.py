"""Into the process group: what is said where there is no place for a rank."""

from __future__ import annotations

from datetime import timedelta

import pytest

from dino_ds.engine.process import _join, _quiet_deepspeed
from dino_ds.errors import ConfigError


def test_a_rank_without_a_gpu_of_its_own_is_told(monkeypatch):
    """As under `srun --gpus-per-task=1`, or with more processes than GPUs; torch would say "invalid device ordinal"."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(get_accelerator(), "device_name", lambda: "cuda")
    monkeypatch.setattr(get_accelerator(), "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigError, match="process 1 of this machine") as raised:
        _join(timedelta(minutes=1))
    assert raised.value.said_by_me


def test_deepspeed_warns_elsewhere_than_on_standard_output(capsys):
    """ZeRO 3 warns in a step whenever a GPU's memory gets tight."""
    from deepspeed.utils import logger

    _quiet_deepspeed()
    logger.warning("pytorch allocator cache flushes")
    assert capsys.readouterr().out == ""
