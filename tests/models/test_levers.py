"""What makes the network faster changes nothing in its results; batched stochastic depth does what it says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch._dynamo
import torch._inductor
from torch._dynamo.utils import counters

import dino_ds.models.attention as attention
from dino_ds.backbones import BackboneOptions, ViTSpec
from dino_ds.models.base import CLS
from dino_ds.models.drop_path import drop_path_draws, kept_sequences, sample_keys
from dino_ds.models.packing import Packing
from dino_ds.models.vit import VisionTransformer
from tests.reference import by_group

_ARCH = ViTSpec(8, 32, 4, 2)


def _model(arch=_ARCH, **options):
    torch.manual_seed(0)
    return VisionTransformer(arch, 32, BackboneOptions(**options))


def _views(images=5):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(images, 3, size, size, generator=generator) for size in (32, 32, 16, 16, 16)]


def _outputs_and_gradients(model, keys=None):
    out = model(by_group(_views()), keys)[CLS]
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.numerical
@pytest.mark.parametrize("backend", ["math", "flash"])
def test_kernels_of_sdpa_give_the_same(backend):
    """FP32 sums in another order: 1e-5 relative."""
    torch.testing.assert_close(
        _outputs_and_gradients(_model(attention_backend=backend)),
        _outputs_and_gradients(_model(attention="naive")),
        rtol=1e-5,
        atol=2e-5,
    )


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_gradients_of_queries_keys_and_values_are_put_together_exactly(parts):
    """They are only moved: equal to the bit to what autograd makes of slices."""
    groups, heads, width = ((2, 5), (3, 4)), 2, 6
    x = torch.randn(22, parts * heads * width, requires_grad=True)
    theirs = []
    for start, (sequences, tokens) in ((0, groups[0]), (10, groups[1])):
        rows = x[start : start + sequences * tokens].view(sequences, tokens, parts, heads, width)
        theirs += [rows[:, :, part].transpose(1, 2) for part in range(parts)]
    ours = attention._PerSize.apply(x, groups, parts, heads)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    grads = [torch.randn_like(piece) for piece in theirs]
    (a,), (b,) = (torch.autograd.grad(pieces, x, grads) for pieces in (ours, theirs))
    assert torch.equal(a, b)


def test_the_kernel_that_runs_has_a_name():
    def name():
        return attention.chosen_kernel(2, 16, 17, torch.float32, torch.device("cpu"))

    assert name() == "flash"  # torch's CPU flash attention
    with attention._kernel("math"):
        assert name() == "math"


@pytest.mark.parametrize("cls_only", [True, False])
def test_varlen_hands_over_the_right_sequences(monkeypatch, cls_only):
    """The CUDA kernel is replaced by a loop over its sequences: what it is given must mean the same attention."""

    def loop(q, k, v, bounds_q, bounds_k, longest_q, longest_k):
        out = torch.empty_like(q)
        for s in range(len(bounds_k) - 1):
            rows, keys = slice(bounds_q[s], bounds_q[s + 1]), slice(bounds_k[s], bounds_k[s + 1])
            assert bounds_q[s + 1] - bounds_q[s] <= longest_q and bounds_k[s + 1] - bounds_k[s] <= longest_k
            weights = torch.einsum("mhc,nhc->hmn", q[rows], k[keys]) / q.shape[-1] ** 0.5
            out[rows] = torch.einsum("hmn,nhc->mhc", weights.softmax(-1), v[keys])
        return out

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", loop)
    ours = _model(attention="varlen", cls_only_last_block=cls_only)(by_group(_views()))[CLS]
    torch.testing.assert_close(ours, _model()(by_group(_views()))[CLS], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("cls_only, patches", [(True, ()), (True, ("global",)), (False, ())])
@pytest.mark.parametrize("implementation", ["varlen", "sdpa"])
def test_varlen_equals_sdpa_on_a_gpu(implementation, cls_only, patches):
    """And its gradients, with one query of some or all sequences in the last block, where torch may choose cuDNN.

    bf16 has 8 bits: 2 % of the largest feature, 5 % of a gradient's norm.
    """
    arch = dataclasses.replace(_ARCH, width=128)
    results = []
    for kind, dtype in ((implementation, torch.bfloat16), ("naive", torch.float32)):
        model = _model(arch, attention=kind, cls_only_last_block=cls_only).cuda().to(dtype)
        found = model(by_group([view.cuda().to(dtype) for view in _views()]), patches=patches)
        features = torch.cat([feature.flatten() for feature in found.values()]).float()
        (features * torch.linspace(-1, 1, features.numel(), device="cuda").view_as(features)).sum().backward()
        results.append((features.detach(), [block.attn.qkv.weight.grad.float() for block in model.blocks]))
    (ours, gradients), (exact, expected) = results
    assert (ours - exact).abs().max() < 0.02 * exact.abs().max()
    assert all((a - b).norm() < 0.05 * b.norm() for a, b in zip(gradients, expected, strict=True))


class TestBatchedStochasticDepth:
    @pytest.mark.parametrize("packed", [True, False])
    @pytest.mark.parametrize("layer_scale", [None, 0.5])
    @pytest.mark.parametrize("cls_only", [True, False])
    def test_equals_masks_over_all_sequences(self, packed, layer_scale, cls_only, monkeypatch):
        """Skipping the work equals multiplying it by 0, and the kept by sequences / kept ones. FP32: 1e-5."""
        arch = dataclasses.replace(_ARCH, layer_scale=layer_scale)
        keys = sample_keys(0, 0, torch.arange(5))
        options = {"drop_path": 0.6, "packed": packed, "cls_only_last_block": cls_only}
        ours = _outputs_and_gradients(_model(arch, stochastic_depth="batched", **options), keys)

        def masks(draws, rates):
            """(blocks, 2, sequences) scales of the same decisions, for the groups that these sequences form."""
            images, scales = 5, torch.zeros(draws.shape)
            sizes = [2 * images, 3 * images] if packed else [draws.shape[-1]]
            for block in range(len(draws)):
                for branch in range(2):
                    at = 0
                    for size in sizes:
                        kept = max(1, round(size * (1 - block * rates[1] / 3)))
                        order = draws[block, branch, at : at + size].argsort(descending=True)[:kept] + at
                        scales[block, branch, order] = size / kept
                        at += size
            return scales

        monkeypatch.setattr("dino_ds.models.vit.drop_path_scales", masks)
        theirs = _outputs_and_gradients(_model(arch, **options), keys)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)

    def test_computes_an_exact_part_of_each_size(self):
        packing = Packing.of([(8, 17), (24, 5)], torch.device("cpu"))
        draws = drop_path_draws(sample_keys(0, 0, torch.arange(8)), 4, 3)
        kept = kept_sequences(draws, (0.0, 0.5), packing, packing.first_and_last([17, 1]))
        assert [block[0].packing.groups for block in kept] == [
            ((8, 17), (24, 5)),
            ((6, 17), (18, 5)),
            ((4, 17), (12, 5)),
        ]
        assert not torch.equal(kept[1][0].rows, kept[1][1].rows)
        read, last = kept[2]
        large, small = read.rows[: 4 * 17], read.rows[4 * 17 :].view(12, 5)
        assert torch.equal(read.places, torch.cat((large, 8 * 17 + (small[:, 0] - 8 * 17) // 5)))
        assert torch.equal(read.rows[read.selection.rows], torch.cat((large, small[:, 0])))
        assert not torch.equal(read.places, last.places)

    def test_is_not_used_in_evaluation(self):
        batched, crops = _model(drop_path=0.6, stochastic_depth="batched"), by_group(_views())
        torch.testing.assert_close(batched(crops)[CLS], _model()(crops)[CLS])


@pytest.mark.parametrize(
    "mode, theirs",
    [("default", None), ("max-autotune", "max-autotune-no-cudagraphs"), ("reduce-overhead", "reduce-overhead")],
)
def test_blocks_are_compiled_in_torch_s_modes(monkeypatch, mode, theirs):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    _model().compile_segments(mode)
    assert asked == [{"dynamic": False, "backend": "inductor", "mode": theirs}] * 4
    assert theirs is None or torch._inductor.list_mode_options(theirs)


@pytest.mark.slow
def test_twelve_blocks_compile_to_four_programs():
    """Student and teacher, each with a last block of its own; two sizes, growing drop path. No graph breaks."""
    arch = dataclasses.replace(_ARCH, depth=12)
    torch._dynamo.reset()
    counters.clear()
    student, teacher = _model(arch, drop_path=0.3), _model(arch, drop_path=0.3)
    expected = _outputs_and_gradients(_model(arch, drop_path=0.3), sample_keys(0, 0, torch.arange(5)))
    for model in (student, teacher):
        model.compile_segments(backend="aot_eager")
    for _ in range(3):
        with torch.no_grad():
            teacher({"global": _views()[:2]})
        student.zero_grad()
        ours = _outputs_and_gradients(student, sample_keys(0, 0, torch.arange(5)))
    assert counters["stats"]["unique_graphs"] <= 4, counters["stats"]
    assert not counters["graph_break"], counters["graph_break"]
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-5)
