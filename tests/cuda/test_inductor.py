"""Inductor's kernels for a block of the student on an H200: how many, and what they read and write."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn

from dino_ds.config.ds_values import PerformanceOptions
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.method.networks import build_meta
from dino_ds.models.drop_path import Kept
from dino_ds.models.packing import Packing
from tests.cuda.inductor import code_of, on_an_h200


def _kernels(name: str, images: int) -> list[tuple[int, float]]:
    """(kernels, GB) of the forward and of the backward pass of a block, without matrix products and attention."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    graphs: list[Any] = []

    def split(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.extend(min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options))
        return graphs[-2:]

    def as_it_is(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    def backend(graph: Any, inputs: Any) -> Any:
        decompositions = select_decomp_table()
        return aot_module_simplified(
            graph, inputs, as_it_is, as_it_is, decompositions=decompositions, partition_fn=split
        )

    with FakeTensorMode():
        block, inputs = _block(load_recipe(name, {"data.source": "photos"}), images)
        torch.compile(block.forward, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    return [_count(code_of(graph, backward)) for graph, backward in zip(graphs, (False, True), strict=True)]


def _block(recipe: Recipe, images: int) -> tuple[nn.Module, list[Any]]:
    """The student's first block in bf16, and its inputs: tokens of all crops, kept sequences, tables of rotations."""
    network = build_meta(recipe, PerformanceOptions(), {}, ["cls"])
    block, spec = network.backbone.blocks[0].train(), recipe.model.spec()
    for module in block.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=torch.bfloat16)))
    patches = [(group.size // spec.patch_size) ** 2 for group in recipe.groups if group.student]
    counts = [group.count * images for group in recipe.groups if group.student]
    packing = _packing(counts, [1 + spec.registers + n for n in patches])
    tokens = sum(sequences * n for sequences, n in packing.groups)
    x = torch.empty(tokens, spec.width, dtype=torch.bfloat16, requires_grad=True)
    tables = [torch.empty(2, n, spec.width // spec.heads // 2) for n in patches] if spec.rope else []
    branches = None
    if recipe.model.stochastic_depth == "batched":
        kept = [max(1, round(count * (1 - recipe.model.drop_path))) for count in counts]
        own = _packing(kept, [n for _, n in packing.groups])
        rows = torch.empty(sum(sequences * n for sequences, n in own.groups), dtype=torch.long)
        branches = [Kept(rows.clone(), own, None, rows.clone(), torch.empty(len(rows), 1)) for _ in range(2)]
    return block, [x, packing, branches, None, tables]


def _packing(sequences: list[int], tokens: list[int]) -> Packing:
    bounds = torch.empty(sum(sequences) + 1, dtype=torch.int32)
    return Packing(tuple(zip(sequences, tokens, strict=True)), bounds)


def _count(code: str) -> tuple[int, float]:
    sizes = dict(re.findall(r"async_compile\.triton\('([^']+)'.*?kernel_num_gb': ([\d.e-]+)", code, re.DOTALL))
    calls = re.findall(r"^\s+(triton_\w+)\.run\(", code, re.MULTILINE)
    return len(calls), sum(float(sizes[name]) for name in calls)


# At most (kernels, GB), forward and backward, counted with torch 2.15. Batched depth also adds rows by one operator of
# torch's for each branch, which is not among them.
CEILINGS = {
    ("vits16", 256): [(5, 2.6), (16, 4.8)],
    ("dinov2_vitl14", 64): [(6, 1.3), (24, 3.5)],
    ("dinov3_vitl16", 32): [(10, 1.5), (27, 2.0)],
}


@pytest.mark.full
@pytest.mark.skipif(Version(torch.__version__) < Version("2.15"), reason="other versions of Inductor fuse otherwise")
@pytest.mark.parametrize(("recipe", "images"), CEILINGS)
def test_kernels_of_a_block(recipe, images):
    found = on_an_h200(_kernels, recipe, images)
    for (kernels, gigabytes), (most, traffic) in zip(found, CEILINGS[recipe, images], strict=True):
        assert 0 < kernels <= most and 0 < gigabytes <= traffic, found
