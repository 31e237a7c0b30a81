"""The fake GPU notices what a real one would have to wait for."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from tests.fake_cuda import CUDA, fake_cuda


def test_problems_are_noticed():
    with fake_cuda() as gpu:
        x, host = torch.empty(4, 4, device=CUDA), torch.empty(4, 4)
        with gpu.part("copy"):
            host.to(CUDA)
        with gpu.part("mix"), pytest.raises(RuntimeError):
            x + host
        with gpu.part("read"), pytest.raises(DataDependentOutputException):
            float(x.sum())
        with gpu.part("mask"), pytest.raises(Exception, match="nonzero"):
            x[x > 0]
    assert {problem.split(":")[0] for problem in gpu.problems} == {"copy", "mix", "read", "mask"}
    with pytest.raises(AssertionError, match="copy: _to_copy between host and device"):
        gpu.check({})
