"""Rehearsals count fused functions as Inductor makes them; on a GPU they give what the operators of a CPU do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

from dino_ds.method import centering
from dino_ds.models import prototypes
from dino_ds.models.fused import why_not_fused
from tests.cuda.inductor import code_of, kernels_in, on_an_h200

K, ROWS, IMAGES, C = 131072, 512, 51, 256  # tiles of ViT-L/14: hidden patches, and images with 2 + 8 crops
V, ONE = (K,), (1, ROWS, K)
CASES = [
    (centering._add_exp, V, (ROWS, K), V),
    (centering._add_softmax, V, (ROWS, K), V, V),
    (prototypes._target, ONE, V, V, (ROWS,)),
    (prototypes._compare, ONE, (ROWS, K), V, V, (ROWS,), 1),
    (prototypes._targets, (2, IMAGES, K), V, V, None),
    (prototypes._compare, (2, IMAGES, K), (2, IMAGES, K), V, V, None, 1),
    (prototypes._compare, (8, IMAGES, K), (IMAGES, K), V, V, None, 2),
    (prototypes._turned, (K, C), (K, C), V, ()),
]


@pytest.mark.slow
def test_no_more_kernels_and_bytes_than_are_counted():
    """1 %: sums of rows, which are not counted."""
    for (function, *arguments), kernels in zip(CASES, on_an_h200(_kernels), strict=True):
        given = zip(inspect.signature(function.function).parameters, arguments, strict=True)
        counted = sum(function.passes.get(name, 1) * 4 * math.prod(x) for name, x in given if isinstance(x, tuple))
        assert 1 <= len(kernels) <= function.kernels, kernels
        assert sum(size for _, size in kernels) <= 1.01 * counted, kernels


def _kernels() -> list[list[tuple[str, int]]]:
    """Name and bytes of the kernels of each case."""
    return [_kernels_of(function.function, arguments) for function, *arguments in CASES]


def _kernels_of(function: Callable[..., Any], arguments: Sequence[Any]) -> list[tuple[str, int]]:
    codes: list[str] = []

    def compile_it(graph: Any, _: Any) -> Callable[..., Any]:
        codes.append(code_of(graph, backward=False, inference=True))
        return graph.forward

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        return aot_module_simplified(
            graph,
            inputs,
            fw_compiler=compile_it,
            inference_compiler=compile_it,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )

    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad():
        tensors = [torch.empty(one) if isinstance(one, tuple) else one for one in arguments]
        torch.compile(function, backend=backend, fullgraph=True)(*tensors)
    (code,) = codes
    return list(kernels_in(code))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].function.__name__)
def test_compiled_is_the_same(case):
    """FP32 sums in another order."""
    assert why_not_fused(torch.device("cuda", 0)) == ""
    function, *arguments = case
    torch.manual_seed(0)
    given = [torch.rand([min(n, 4099) for n in x]) if isinstance(x, tuple) else x for x in arguments]
    there = [x.cuda() if isinstance(x, torch.Tensor) else x for x in given]
    with torch.no_grad():
        expected, found = function.function(*given), function(*there)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, check_device=False)
    torch.testing.assert_close(there, given, rtol=1e-4, atol=1e-5, check_device=False)
