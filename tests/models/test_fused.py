"""What a GPU computes by fused functions is what the operators of a CPU give."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dino_ds.basics.ranges import rehearsal
from dino_ds.method.dino import SinkhornKnopp
from dino_ds.models import fused as fused_module
from dino_ds.models import prototypes
from dino_ds.models.fused import fuses, uncompiled
from dino_ds.models.prototypes import Comparison, Logits, Prototypes

K, C, IMAGES = 203, 12, 9
OTHERS = {"crops": 2, "exclude_own": True, "others": 0.3}
CASES = {
    "dino": (5, {"crops": 2, "exclude_own": True}),
    "dinov3": (5, OTHERS),
    "two crops": (2, {"crops": 2, "exclude_own": True}),
    "weights": (1, {"weights": torch.rand(IMAGES, generator=torch.Generator().manual_seed(1)), "divisor": 7.0}),
    "all pairs": (3, {"crops": 2}),
}


def _compared(case: str, learned_lengths: bool, free: bool, frozen: bool) -> list[Tensor | None]:
    views, how = CASES[case]
    generator = torch.Generator().manual_seed(0)
    head = Prototypes(C, K, learned_lengths, free)
    head.frozen = frozen
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    rows = torch.randn(views * IMAGES, C, generator=generator, requires_grad=True)
    weight = torch.randn(K, C, generator=generator)
    teacher = Logits(torch.randn(how.get("crops", 1) * IMAGES, C, generator=generator), weight, torch.ones(K))
    shift = torch.randn(K, generator=generator)
    found = head(rows, Comparison(teacher, shift, 0.6, 0.9, **how))
    (3 * found.loss).backward()
    return [found.loss.detach(), found.entropy, rows.grad, *(parameter.grad for parameter in head.parameters())]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "kind, tile", [((True, False, False), 17), ((False, True, False), 1), ((False, False, True), 99)]
)
def test_fused_is_the_same(case: str, kind: tuple[bool, bool, bool], tile: int, monkeypatch: pytest.MonkeyPatch):
    """FP32 sums in another order: some ten roundings of numbers up to 10."""
    expected = _compared(case, *kind)
    monkeypatch.setitem(prototypes._TILE, "fused", tile * 4 * K)
    with rehearsal("cuda"):
        found = _compared(case, *kind)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[2:], expected[2:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [(7, 30), (0, 5), (1,)])
def test_fused_sinkhorn_is_the_same(rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    """Micro-batches of several sizes, also without rows; logits of +-30 / 0.05."""
    generator = torch.Generator().manual_seed(0)
    window = [
        Logits(
            torch.randn(n, C, generator=generator),
            torch.randn(K, C, generator=generator),
            torch.rand(K, generator=generator),
        )
        for n in rows
    ]
    expected = SinkhornKnopp().shift(window, 0.05)
    monkeypatch.setitem(prototypes._TILE, "fused", 11 * 4 * K)
    with rehearsal("cuda"):
        found = SinkhornKnopp().shift(window, 0.05)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-4)


def test_nothing_is_fused_before_it_is_proven_nor_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch):
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    monkeypatch.setattr(fused_module, "TAKEN", set())  # a run of another test may have filled it
    assert not fuses(tensor)
    monkeypatch.setattr(fused_module, "TAKEN", {"fused"})
    with uncompiled():
        assert not fuses(tensor)
    assert fuses(tensor)
