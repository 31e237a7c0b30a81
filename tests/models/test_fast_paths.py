"""Options that make our ViT faster change no results, with learned and rotary positions and hidden patches; features
of all crops are those of each group."""

from __future__ import annotations

import copy
import functools
import itertools
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from dino_ds.basics.ranges import rehearsal
from dino_ds.basics.seeds import sample_keys
from dino_ds.models.base import CLS
from dino_ds.models.drop_path import step_key
from dino_ds.models.fused import fuse_as_in_training, listen_to_kernels
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.vit import VisionTransformer
from tests.sample import sampled

ARCHS = {
    "learned": ViTSpec(8, 32, 4, 2, layer_scale=0.5, registers=3),
    "plain": ViTSpec(8, 32, 4, 2),
    "rotary": ViTSpec(
        8, 32, 4, 2, layer_scale=0.5, registers=2, swiglu=True, mlp_ratio=5.0, norm_eps=1e-5, rope="separate",
        local_cls_norm=True,
    ),
}  # fmt: skip
WAYS = {
    "packed": {"packed": False},
    "last block": {"cls_only_last_block": False},
    "varlen": {"attention": "varlen"},
    "recomputed": {},
    "fused": {},  # as on a GPU, by the operators that torch.compile would make kernels of
}
_DROP = {"drop_path": 0.6, "rope_rescale": 2.0}


def _model(arch, **options):
    """A model in double precision, with weights so large that attention is far from uniform."""
    torch.manual_seed(1)
    vit = VisionTransformer(ARCHS[arch], 32, BackboneOptions(mask_token=True, **_DROP, **options))
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return vit.double()


def _crops(**sizes):
    generator = torch.Generator().manual_seed(2)
    sizes = sizes or {"global": (2, 32), "local": (3, 16)}
    return {n: [torch.randn(5, 3, s, s, generator=generator).double() for _ in range(v)] for n, (v, s) in sizes.items()}


def _masks(share=0.4):
    return {"global": torch.rand(10, 16, generator=torch.Generator().manual_seed(3)) < share}


def _run(vit, patches=("global",)):
    """Features and gradients by name; the step decides on masks, coordinates and which crops skip a block."""
    masks = _masks() if patches else {}
    found = vit(_crops(), sample_keys(0, 3, torch.arange(5)), patches, masks, step_key(0, 3))
    sum((t * torch.linspace(-1, 1, t.numel()).double().view_as(t)).sum() for t in found.values()).backward()
    return {name: t.detach() for name, t in found.items()} | {n: p.grad for n, p in vit.named_parameters()}


@functools.cache
def _usual(arch, depth, patches):
    return _run(_model(arch, stochastic_depth=depth), patches)


def _assert_equal(ours, theirs, close=1e-10):
    """Equality relative to the largest entry: double precision, sums in another order, positions resized in FP32."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        largest = max(float(expected.abs().max()), 1.0)
        assert (ours[name] - expected).abs().max() <= close * largest, name


def _each_sequence(q, k, v, bounds_q, bounds_k, longest_q, longest_k):
    """The arithmetic of varlen's CUDA kernel, sequence by sequence."""
    out = []
    for s in range(len(bounds_k) - 1):
        rows, keys = slice(bounds_q[s], bounds_q[s + 1]), slice(bounds_k[s], bounds_k[s + 1])
        assert bounds_q[s + 1] - bounds_q[s] <= longest_q and bounds_k[s + 1] - bounds_k[s] <= longest_k
        weights = torch.einsum("mhc,nhc->hmn", q[rows], k[keys]) / q.shape[-1] ** 0.5
        out.append(torch.einsum("hmn,nhc->mhc", weights.softmax(-1), v[keys]))
    return torch.cat(out)


@pytest.fixture(autouse=True)
def _small_tensors_are_fused(monkeypatch):
    monkeypatch.setattr("dino_ds.models.fused._LEAST_BYTES", 0)


@contextmanager
def _kernels_of_a_gpu():
    """As on a GPU; blocks must take fused functions there."""
    seen = []
    with rehearsal("cuda"), listen_to_kernels(lambda kernels, _: nullcontext(seen.append(kernels))):
        yield
    assert seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "depth", "patches", "way"),
    sampled(
        itertools.product(("learned", "rotary"), ("per_image", "batched"), ((), ("global",)), WAYS),
        lambda cell: (cell[0], (cell[2], cell[3]), (cell[1], cell[3])),
    ),
)
def test_they_change_nothing(arch, depth, patches, way, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", _each_sequence)
    vit = _model(arch, stochastic_depth=depth, **WAYS[way])
    vit.checkpoint_segments(None if way == "recomputed" else 0)
    with _kernels_of_a_gpu() if way == "fused" else nullcontext():
        found = _run(vit, patches)
    usual = _usual(arch, depth, patches)
    _assert_equal(found, usual)
    assert way != "recomputed" or all(torch.equal(found[name], tensor) for name, tensor in usual.items())


@pytest.mark.parametrize("arch", ["learned", "plain"])
def test_batched_stochastic_depth_equals_masks_over_all_sequences(arch, monkeypatch):
    """Skipping the work equals multiplying it by 0, and the kept by sequences / kept ones."""

    def masks(draws, rates):
        """(blocks, 2, sequences) scales of the same decisions, for the two sizes that these sequences have."""
        scales = torch.zeros(draws.shape)
        for block, own in enumerate(draws):
            for branch in range(2):
                for at, size in ((0, 10), (10, 15)):
                    kept = max(1, round(size * (1 - block * rates[1] / 3)))
                    order = own[branch, at : at + size].argsort(descending=True)[:kept] + at
                    scales[block, branch, order] = size / kept
        return scales

    monkeypatch.setattr("dino_ds.models.vit.drop_path_scales", masks)
    _assert_equal(_run(_model(arch, stochastic_depth="batched")), _run(_model(arch)))


@pytest.mark.parametrize("patches", [("global",), ("large",), ("global", "local", "large")])
def test_features_by_name_are_those_of_each_group_alone(patches):
    """This holds where two groups of one size lie side by side, of which one is masked or asked for."""
    crops = _crops(local=(3, 16), large=(1, 32), **{"global": (2, 32)})
    model = _model("learned")
    together = model(crops, None, patches, _masks())
    assert together.keys() == {CLS, *(f"patches/{name}" for name in patches)}
    cls = dict(zip(crops, together[CLS].split([15, 5, 10]), strict=True))
    for name, group in crops.items():
        alone = model({name: group}, None, (name,), {n: m for n, m in _masks().items() if n == name})
        torch.testing.assert_close(cls[name], alone[CLS], rtol=0, atol=1e-10)
        if name in patches:
            torch.testing.assert_close(together[f"patches/{name}"], alone[f"patches/{name}"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("masks", [{}, _masks(share=0.0)], ids=["no masks", "nothing hidden"])
def test_the_mask_token_always_has_a_gradient(masks):
    """Exactly zero where nothing is hidden: weight decay reaches it, and no ZeRO stage repeats an old one."""
    model = _model("plain")
    found = model(_crops(), sample_keys(0, 0, torch.arange(5)), ("global",), masks)
    sum(t.square().sum() for t in found.values()).backward()
    assert torch.equal(model.mask_token.grad, torch.zeros(1, 32).double())


def test_blocks_are_fused_in_training_alone():
    """Features may be of any number of images; a teacher, a copy of a named network, sees those of training."""
    model, seen = _model("rotary"), []
    fuse_as_in_training(named := nn.Sequential(model))
    with rehearsal("cuda"), listen_to_kernels(lambda *_: nullcontext(seen.append(1))), torch.no_grad():
        plain = model(_crops())[CLS]
        assert not seen
        fused = copy.deepcopy(named)(_crops())[CLS]
    assert len(seen) >= 4 and (fused - plain).abs().max() <= 1e-10 * plain.abs().max()


def test_frozen_scales_are_fused_too():
    found = []
    for context in (nullcontext(), _kernels_of_a_gpu()):
        model = _model("rotary", stochastic_depth="batched")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("gamma" not in name and "patch_embed" not in name)
        with context:
            found.append({n: grad for n, grad in _run(model).items() if grad is not None})
    _assert_equal(*found)
