"""Matrix products by oneDNN on a CPU: the same as torch's own, whatever their operands look like."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dino_ds.engine import muon

pytestmark = pytest.mark.numerical


@pytest.fixture(autouse=True)
def _onednn() -> Iterator[None]:
    """oneDNN multiplies in this test, on any make of CPU."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no such operator")
    library = muon.take_onednn.__wrapped__()
    yield
    library._destroy()


def _drawn(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


OPERANDS = {
    "rows": (_drawn(96, 80), _drawn(80, 72)),
    "transposed": (_drawn(80, 96).t(), _drawn(72, 80).t()),
    "columns left out": (_drawn(96, 100)[:, :80], _drawn(80, 90)[:, 9:81]),
    "strides of 0": (_drawn(1, 80).expand(96, 80), _drawn(80, 1).expand(80, 72)),
    "one row": (_drawn(1, 800), _drawn(800, 720)),
    "no row": (_drawn(0, 800), _drawn(800, 720)),
    "small": (_drawn(3, 4), _drawn(4, 5)),
    "double": (_drawn(96, 80).double(), _drawn(80, 72).double()),
    "bf16": (_drawn(96, 80).bfloat16(), _drawn(80, 72).bfloat16()),
}


@pytest.mark.parametrize("operands", OPERANDS)
def test_products_equal_those_of_float64(operands, monkeypatch):
    """Rounding: FP32 sums of 800 products of normal numbers are off by less than 2e-5 of the largest."""
    monkeypatch.setattr(muon, "_LEAST", 1000)
    a, b = OPERANDS[operands]
    bound = 1e-2 if a.dtype == torch.bfloat16 else 2e-5
    bias, square = _drawn(b.shape[1]).to(a.dtype), _drawn(a.shape[0], b.shape[1]).to(a.dtype)
    expected = a.double() @ b.double()
    for found, wanted in (
        (a @ b, expected),
        (torch.addmm(bias, a, b), bias.double() + expected),
        (torch.addmm(square, a, b), square.double() + expected),
        (torch.addmm(bias, a, b, beta=0.5, alpha=2), 0.5 * bias.double() + 2 * expected),
        (torch.addmm(bias[:1], a, b), bias[:1].double() + expected),
    ):
        assert found.dtype == a.dtype and found.shape == wanted.shape
        torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound * float(b.double().norm()))


def test_it_is_taken_on_amd_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for vendor, taken in (("AuthenticAMD", True), ("GenuineIntel", False)):
        (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
        monkeypatch.setattr(muon, "Path", lambda _: tmp_path / "cpuinfo")
        assert muon.on_amd() is taken
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(muon, "Path", lambda _: tmp_path / "missing")
    assert not muon.on_amd()
