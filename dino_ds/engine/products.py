"""FP32 matrix products by oneDNN on AMD's CPUs with AVX-512.

torch uses MKL, whose kernels for AMD use half of the width of AVX-512: on a Zen 5 one thread reaches 110 GFLOP/s with
MKL and 250 with oneDNN, which torch includes too. Their results differ by rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_LEAST = 2**19
"""Multiplications of a product below which the call through Python costs more than oneDNN saves."""

_by_onednn = True


def on_amd() -> bool:
    """Whether this is an AMD CPU with AVX-512, whose products `take_onednn` speeds up."""
    info = Path("/proc/cpuinfo")
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    return wide and info.exists() and "AuthenticAMD" in info.read_text()


@cache
def take_onednn() -> torch.library.Library:
    """Have this process multiply FP32 matrices on the CPU by oneDNN from now on, where the operator exists.

    torch's operators `mm` and `addmm` get another kernel, so that layers, heads and their gradients all use it. The
    kernels stay as long as the returned library exists, which the cache keeps.
    """
    library = torch.library.Library("aten", "IMPL")
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # private: may leave in another version of torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.11 says once that a kernel is replaced
            library.impl("mm", _mm, "CPU", allow_override=True)
            library.impl("addmm", _addmm, "CPU", allow_override=True)
    return library


@contextmanager
def products_of_torch() -> Iterator[None]:
    """Leave products to torch's own choice for a while."""
    global _by_onednn
    before, _by_onednn = _by_onednn, False
    try:
        yield
    finally:
        _by_onednn = before


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if _suits(a, b):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    bias = added.dim() == 1 and added.is_contiguous() and added.dtype == a.dtype and beta == alpha == 1
    if bias and len(added) == b.shape[1] and _suits(a, b):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), added, "none", [], "")
    return torch.addmm(added, a, b, beta=beta, alpha=alpha, out=a.new_empty(a.shape[0], b.shape[1]))


def _suits(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN can multiply `a` and `b`, without strides of 0, and their product is large enough."""
    large = _by_onednn and a.dtype == b.dtype == torch.float32 and a.shape[0] * a.shape[1] * b.shape[1] >= _LEAST
    return large and a.shape[1] == b.shape[0] and (b.is_contiguous() or b.t().is_contiguous())
