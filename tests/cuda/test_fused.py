"""Fused functions, compiled on a GPU, give what the operators of a CPU do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from dino_ds.method import centering
from dino_ds.models import blocks, drop_path, prototypes, residual, rope
from dino_ds.models.fused import why_not_fused

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
S, N, HEADS, D = 20, 201, 16, 1024  # a part of the global crops of DINOv3 ViT-L/16, and of its tokens
TOKENS, KEPT, SCALES, PIECE, TABLE = (S * N, D), range(S * N), (S * N, 1), (S, N, HEADS, 64), (2, N - 5, 32)
IN_BLOCKS = [
    (blocks._normed, TOKENS, (D,), (D,), 1e-6, torch.float32),
    (rope.write_rotated, (S, N, 3, HEADS, 2, 32), [PIECE] * 3, TABLE, 2, False),
    (rope.write_rotated, (S, N, 2, HEADS, 2, 32), [PIECE] * 2, TABLE, 1, True),
    (rope.write_rotated, (S, 1, 2, HEADS, 2, 32), [(S, 1, HEADS, 64)] * 2, TABLE, 1, True),
    (residual._sum, TOKENS, TOKENS, (D,), None),
    (residual._sum, TOKENS, TOKENS, (D,), SCALES),
    (residual.sum_kept, TOKENS, TOKENS, (D,), SCALES, KEPT),
    (residual.sum_kept, TOKENS, TOKENS, None, None, KEPT),
    (residual._gradient, TOKENS, (D,), None, None, torch.float32),
    (residual._gradient, TOKENS, None, SCALES, KEPT, torch.float32),
    (residual._gradients, TOKENS, TOKENS, (D,), None, None),
    (residual._gradients, TOKENS, TOKENS, (D,), SCALES, KEPT),
]
CASES += [(drop_path._write_draws, (24, 10, 640), range(640)), (drop_path._scales_of, (12, 2, 6400), 0.0, 0.1)]
CASES += IN_BLOCKS


def _made(argument: Any, make: Callable[..., torch.Tensor]) -> Any:
    """An argument of a case: shapes of tensors, lists of the parts of attention, in memory as its kernels have them,
    ranges that are rows, or what is not a tensor."""
    if isinstance(argument, list):
        return [make(one).transpose(1, 2) for one in argument]
    if isinstance(argument, range):
        return torch.arange(len(argument))
    return make(argument) if isinstance(argument, tuple) else argument


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].function.__name__)
def test_compiled_is_the_same(case):
    """FP32 sums in another order."""
    assert why_not_fused(torch.device("cuda", 0)) == ""
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
