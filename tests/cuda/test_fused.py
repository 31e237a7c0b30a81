"""Fused functions and augmentation: counted as Inductor makes them; a GPU gives what the operators of a CPU do."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dino_ds.config.crops import all_crops
from dino_ds.config.recipe import Recipe
from dino_ds.data import photometric
from dino_ds.data.batches import LoaderBatch
from dino_ds.data.loader import to_device
from dino_ds.data.multicrop import AugmentationParams, MultiCrop
from dino_ds.data.normalization import IMAGENET
from dino_ds.method import dino
from dino_ds.models import blocks, drop_path, positions, prototypes
from tests.cuda.inductor import code_of, kernels_in, on_an_h200
from tests.fake_cuda import CUDA, fake_cuda, needs_fake_cuda

K, ROWS, IMAGES, C = 131072, 512, 51, 256  # tiles of ViT-L/14: hidden patches, and images with 2 + 8 crops
V, ONE = (K,), (1, ROWS, K)
CASES = [
    (dino._add_exp, V, (ROWS, K), V),
    (dino._add_softmax, V, (ROWS, K), V, V),
    (prototypes._target, ONE, V, V, (ROWS,)),
    (prototypes._compare, ONE, (ROWS, K), V, V, (ROWS,), 1),
    (prototypes._targets, (2, IMAGES, K), V, V, None),
    (prototypes._compare, (2, IMAGES, K), (2, IMAGES, K), V, V, None, 1),
    (prototypes._compare, (8, IMAGES, K), (IMAGES, K), V, V, None, 2),
    (prototypes._turned, (K, C), (K, C), V, ()),
]
S, N, HEADS, D = 20, 201, 16, 1024  # a part of the global crops of DINOv3 ViT-L/16, and of its tokens
TOKENS, KEPT, SCALES, PIECE, TABLE = (S * N, D), range(S * N), (S * N, 1), (S, N, HEADS, 64), (2, N - 5, 32)
IN_BLOCKS = [
    (blocks._normed, TOKENS, (D,), (D,), 1e-6, torch.float32),
    (blocks._summed_and_normed, TOKENS, TOKENS, (D,), (D,), (D,), 1e-6),
    (positions.write_rotated, (S, N, 3, HEADS, 2, 32), [PIECE] * 3, TABLE, 2, False),
    (positions.write_rotated, (S, N, 2, HEADS, 2, 32), [PIECE] * 2, TABLE, 1, True),
    (positions.write_rotated, (S, 1, 2, HEADS, 2, 32), [(S, 1, HEADS, 64)] * 2, TABLE, 1, True),
    (drop_path._sum, TOKENS, TOKENS, (D,), None),
    (drop_path._sum, TOKENS, TOKENS, (D,), SCALES),
    (drop_path.sum_kept, TOKENS, TOKENS, (D,), SCALES, KEPT),
    (drop_path.sum_kept, TOKENS, TOKENS, None, None, KEPT),
    (drop_path._gradient, TOKENS, (D,), None, None, torch.float32),
    (drop_path._gradient, TOKENS, None, SCALES, KEPT, torch.float32),
    (drop_path._gradients, TOKENS, TOKENS, (D,), None, None),
    (drop_path._gradients, TOKENS, TOKENS, (D,), SCALES, KEPT),
]
CASES += [(drop_path._write_draws, (24, 10, 640), range(640)), (drop_path._scales_of, (12, 2, 6400), 0.0, 0.1)]
CASES += IN_BLOCKS


@needs_fake_cuda
@pytest.mark.full
def test_no_more_kernels_and_bytes_than_are_counted():
    """1 %: sums of rows and parts of sums, which are not counted."""
    for (function, *arguments), kernels in zip(CASES, on_an_h200(_kernels), strict=True):
        counted = 0.0
        for name, argument in zip(inspect.signature(function.function).parameters, arguments, strict=True):
            shapes = argument if isinstance(argument, list) else [argument] if isinstance(argument, tuple) else []
            counted += function.passes.get(name, 1) * 4 * sum(math.prod(shape) for shape in shapes)
        assert 1 <= len(kernels) <= function.kernels, kernels
        assert sum(size for _, size in kernels) <= 1.01 * counted, kernels


def _kernels() -> list[list[tuple[str, int]]]:
    """Name and bytes of the kernels of each case."""
    return [_kernels_of(function.function, arguments) for function, *arguments in CASES]


def _made(argument: Any, make: Callable[..., torch.Tensor]) -> Any:
    """An argument of a case: shapes of tensors, lists of the parts of attention, ranges that are rows, or no tensor."""
    if isinstance(argument, list):
        return [make(one).transpose(1, 2) for one in argument]
    if isinstance(argument, range):
        return torch.arange(len(argument))
    return make(argument) if isinstance(argument, tuple) else argument


def _kernels_of(function: Callable[..., Any], arguments: Sequence[Any]) -> list[tuple[str, int]]:
    codes: list[str] = []

    def compile_it(graph: Any, _: Any) -> Callable[..., Any]:
        codes.append(code_of(graph))
        return graph.forward

    how = {"fw_compiler": compile_it, "inference_compiler": compile_it, "keep_inference_input_mutations": True}
    backend = functools.partial(aot_module_simplified, decompositions=select_decomp_table(), **how)
    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad():
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        compiled(*[_made(argument, torch.empty) for argument in arguments])
    (code,) = codes
    return list(kernels_in(code))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].function.__name__)
def test_compiled_is_the_same(case):
    """FP32 sums in another order."""
    function, *arguments = case
    torch.manual_seed(0)
    given = [_made(x, lambda shape: torch.rand([min(n, 4099) for n in shape])) for x in arguments]
    there = tree_map_only(torch.Tensor, torch.Tensor.cuda, given)
    with torch.no_grad():
        expected, found = function.function(*given), function(*there)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, check_device=False)
    for ours, theirs in zip(tree_leaves(there), tree_leaves(given), strict=True):
        if isinstance(ours, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, check_device=False)


BATCH = 64


def batch() -> LoaderBatch:
    crops = MultiCrop(Recipe().groups, Recipe().crops.augment)
    views = [crops.sample(500, 375, image) for image in range(BATCH)]
    groups, plans = {}, {}
    for name, side, group in (("global", 224, range(2)), ("local", 96, range(2, 10))):
        plans[name] = [AugmentationParams.build([view[crop] for crop in group for view in views], 3)]
        groups[name] = torch.empty(len(group), BATCH, side, side, 3, dtype=torch.uint8)
    return LoaderBatch(groups, plans, torch.arange(BATCH), torch.arange(BATCH), 0, [], [], IMAGENET.offset_and_factor())


def test_the_fused_augmentation(monkeypatch):
    """At most 20 launches with the copies, and 3 % of the traffic of a ViT-S step, 43.7 GB at this batch."""
    kernels = pytest.importorskip("dino_ds.data.photometric_triton", reason="needs Triton")

    with fake_cuda() as gpu:

        def launch(kernel, grid, *arguments, **constants):
            tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
            assert all(tensor.device == CUDA and tensor.is_contiguous() for tensor in tensors)
            counts = gpu.parts["augmentation"]
            counts.kernels[kernel.__name__] += 1
            counts.bytes[kernel.__name__] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

        monkeypatch.setattr(kernels, "launch", launch)
        monkeypatch.setattr(photometric, "TAKEN", {"augmentation"})
        with gpu.part("augmentation"):
            views = all_crops(to_device(batch(), CUDA).crops)
    assert [tuple(view.shape) for view in views] == [(BATCH, 3, 224, 224)] * 2 + [(BATCH, 3, 96, 96)] * 8
    copies = [problem for problem in gpu.problems if "_to_copy between host and device at loader.py" in problem]
    gpu.check({"augmentation": (15, 0.78)}, known=tuple(copies))
