"""The fused augmentation for GPUs: the same results as torch's operators, interpreted on the CPU; compiled for GPUs."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from dino_ds.config.crops import dino_groups
from dino_ds.data import photometric
from dino_ds.data.multicrop import AugmentationParams, MultiCrop
from dino_ds.data.photometric import augment
from tests.data.test_photometric import NOTHING, crops

triton = pytest.importorskip("triton")


@pytest.fixture(scope="module")
def interpreted():
    """The kernels' module a second time, for Triton's interpreter: its `augment`."""
    import triton.language as tl

    spec = importlib.util.find_spec("dino_ds.data.photometric_triton")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        spec.loader.exec_module(module)

    def augment(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            # tl.sum is a kernel itself, and was not made for the interpreter.
            patch.setattr(tl, "sum", lambda x, axis: tl.reduce(x, axis, tl.standard._sum_combine))
            module.augment(*arguments)

    return augment


def assert_same(kernels, some, views):
    channels = some.shape[3]
    normalize = torch.stack([torch.linspace(-2, 0, channels), torch.linspace(2, 5, channels)])
    params = AugmentationParams.build(views, channels)
    expected = augment(some, [params], normalize)
    out = torch.empty_like(expected)
    kernels(some, params.table, 1 / 255 if some.dtype == torch.uint8 else 1.0, normalize, out)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def drawn(count, seed):
    """Views of all kinds: blurred and not, solarized and not, each with its own jitter."""
    multicrop = MultiCrop(dino_groups(32, (0.4, 1.0), 16, (0.05, 0.4), 1), "dino")
    return [view for i in range(count) for view in multicrop.sample(100, 80, seed + i)]


@pytest.mark.slow
def test_kernels_give_what_torch_s_operators_give(interpreted):
    views = drawn(4, seed=5)
    for is_drawn in ("flip", "gray", "solarize", "blur_radius"):
        assert {bool(getattr(view, is_drawn)) for view in views} == {True, False}
    assert {len(view.jitter) for view in views} == {0, 4}
    assert_same(interpreted, crops(len(views), 24), views)


@pytest.mark.parametrize("shape", [(1, 1), (4, 5), (40, 36)])
@pytest.mark.slow
def test_sizes_below_the_blur_and_above_one_program(interpreted, shape):
    color = (("brightness", 1.3), ("contrast", 0.6))
    views = [replace(NOTHING, jitter=color, blur_radius=2.0, flip=True)]
    some = torch.randint(256, (1, *shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert_same(interpreted, some, views)


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.slow
def test_other_channels_and_float_crops(interpreted, channels):
    views = [replace(view, gray=True) for view in drawn(1, seed=5)]
    assert any(view.blur_radius for view in views) and any(view.jitter for view in views)
    some = torch.rand(len(views), 16, 16, channels, generator=torch.Generator().manual_seed(0))
    assert_same(interpreted, some, views)


@pytest.mark.slow
def test_the_check_on_a_device_passes_what_is_right_and_finds_what_is_wrong(interpreted):
    arguments = (torch.device("cpu"), torch.uint8, (16, 16, 3))
    assert photometric.kernel_difference(interpreted, *arguments) < 1e-5
    assert photometric.kernel_difference(lambda some, table, scale, normalize, out: out.fill_(1), *arguments) > 0.1


# Photographs, and other images.
TARGETS = [(90, "*u8", 3), *((capability, "*u8", 3) for capability in (80, 100, 120)), (90, "*fp32", 5)]


@pytest.mark.full
@pytest.mark.parametrize("capability, crops, channels", TARGETS)
def test_kernels_compile_for_gpus_without_one(tmp_path, monkeypatch, capability, crops, channels):
    """By the compiler that a GPU machine uses, for an A100, an H200, a B200 and workstations; nothing is spilled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from dino_ds.data import photometric_triton as kernels

    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    types = {"crops": crops, **dict.fromkeys(("table", "sums", "out", "source", "target", "normalize"), "*fp32")}
    types |= dict.fromkeys(("pixels", "chunks", "height", "width"), "i32") | {"scale": "fp32"}
    constants = {"CHANNELS": channels, "CHUNKS": 64, "BLOCK": kernels._BLOCK, "DOWN": channels == 3}
    for kernel in (kernels.sum_gray, kernels.color, kernels.blur):
        names = kernel.arg_names
        signature = {name: types.get(name, "constexpr") for name in names}
        values = {(names.index(name),): value for name, value in constants.items() if name in names}
        source = triton.compiler.ASTSource(kernel, signature=signature, constexprs=values)
        compiled = triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": False})
        assert len(compiled.asm["cubin"]) > 1000
        assert f".target sm_{capability}" in compiled.asm["ptx"]
        assert "st.local" not in compiled.asm["ptx"]
