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


def test_launches_and_bytes():
    with fake_cuda() as gpu:
        weight = gpu.module(torch.nn.Linear(8, 8, device="meta"), torch.bfloat16).weight
        with gpu.part("forward"):
            loss = (torch.empty(1000, 8, device=CUDA).to(torch.bfloat16) @ weight).sum()
        with gpu.part("backward"):
            gpu.backward(loss)
    assert weight.grad.shape == (8, 8) and weight.grad.device == CUDA
    assert gpu.parts["forward"].kernels == {"_to_copy": 1, "mm": 1, "sum": 1}
    assert gpu.parts["forward"].gigabytes == pytest.approx((8000 * 6 + 8000 * 2 + 2) / 1e9)
    with pytest.raises(AssertionError, match="forward: more than 2 launches"):
        gpu.check({"forward": (2, 1.0)})
