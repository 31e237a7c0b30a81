"""Inductor's kernels for a block of the student on an H200 that is not there: how many, and what they read and write.

Each test is a process of its own, whose torch and Triton are made to believe in the GPU. Dynamo traces the block on
fake tensors of the host; its graphs are then brought to the GPU, and Inductor's code for them is read and not run.
"""

from __future__ import annotations

import contextlib
import copy
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

from dino_ds.config.ds_values import PerformanceOptions
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.method.networks import build_meta
from dino_ds.models.drop_path import Kept
from dino_ds.models.packing import Packing
from tests.fake_cuda import CUDA
from tests.ranks import run_on_ranks

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150 * 2**30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 * 2**20, gcnArchName="", is_integrated=0, is_multi_gpu_board=0, uuid="0",
)  # fmt: skip


class _Written(BaseException):
    """The code is there."""


def _believe_in_an_h200() -> None:
    import torch._dynamo.device_interface as devices
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import triton
    from triton.backends.compiler import GPUTarget

    torch._C._ensureCUDADeviceGuardSet()
    believed: dict[str, Any] = {
        "is_available": True, "is_bf16_supported": True, "current_device": 0, "device_count": 1, "_lazy_init": None,
        "get_device_capability": (9, 0), "get_device_properties": H200, "get_device_name": H200.name,
        "is_current_stream_capturing": False, "_exchange_device": 0, "_maybe_exchange_device": 0, "synchronize": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None, "memory_allocated": 0,
        "current_stream": mock.MagicMock(), "mem_get_info": (10**11, 10**11),
    }  # fmt: skip
    for name, answer in believed.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    cuda: Any = devices.CudaInterface
    for name, answer in (("current_device", 0), ("device_count", 1), ("get_device_properties", H200)):
        setattr(cuda, name, staticmethod(lambda *_, answer=answer: answer))
    cuda.exchange_device = cuda.maybe_exchange_device = staticmethod(lambda *_: 0)
    driver = mock.MagicMock()
    driver.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    driver.get_active_torch_device.return_value, driver.get_current_device.return_value = CUDA, 0
    triton.runtime.driver.set_active(driver)
    joint_graph.lazy_init = lambda *_, **__: None  # its patterns are traced on the device
    nn.functional.scaled_dot_product_attention = (  # the choice of a kernel asks the driver
        lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
    )


def _kernels(name: str, images: int) -> list[tuple[int, float]]:
    """(kernels, GB) of the forward and of the backward pass of a block, without matrix products and attention."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    _believe_in_an_h200()
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
    return [_count(_code(graph, backward)) for graph, backward in zip(graphs, (False, True), strict=True)]


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


def _code(graph: Any, backward: bool) -> str:
    """What Inductor writes for a graph of the host's tensors, once they are on the GPU."""
    import torch._inductor.config as options
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    graph, found = copy.deepcopy(graph), list[str]()
    before = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = detect_fake_mode(before)
    with mode:
        inputs = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=CUDA) if isinstance(t, Tensor) else t
            for t in before
        ]
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}
    graph.recompile()
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)

    def written(self: Any) -> None:
        found.append(self.codegen()[0].value)
        raise _Written

    plain = options.patch(fx_graph_cache=False, profile_bandwidth=True)
    lowered = mock.patch.object(GraphLowering, "compile_to_module", written)
    with plain, lowered, tracing(TracingContext(mode)), contextlib.suppress(_Written):
        compile_fx_inner(
            graph, inputs, cudagraphs=False, static_input_idxs=(), is_backward=backward, graph_id=0, is_inference=False
        )
    return found[0]


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
    (found,) = run_on_ranks(_kernels, recipe, images, world=1)
    for (kernels, gigabytes), (most, traffic) in zip(found, CEILINGS[recipe, images], strict=True):
        assert 0 < kernels <= most and 0 < gigabytes <= traffic, found
