"""Inductor's code for an H200 that is not there: read, not run.

Dynamo traces on fake tensors of the host; graphs are then brought to the GPU. All of it is done in a process whose
torch and Triton are made to believe in the GPU.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.fake_cuda import CUDA

_H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150 * 2**30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 * 2**20, gcnArchName="", is_integrated=0, is_multi_gpu_board=0, uuid="0",
)  # fmt: skip


class _Written(BaseException):
    """The code is there."""


def on_an_h200(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns in a process of its own that believes in the GPU."""
    with ProcessPoolExecutor(1, get_context("spawn"), _believe_in_an_h200) as process:
        return process.submit(function, *arguments).result()


def _believe_in_an_h200() -> None:
    import torch._dynamo.device_interface as devices
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import triton
    from triton.backends.compiler import GPUTarget

    torch._C._ensureCUDADeviceGuardSet()
    believed: dict[str, Any] = {
        "is_available": True, "is_bf16_supported": True, "current_device": 0, "device_count": 1, "_lazy_init": None,
        "get_device_capability": (9, 0), "get_device_properties": _H200, "get_device_name": _H200.name,
        "is_current_stream_capturing": False, "_exchange_device": 0, "_maybe_exchange_device": 0, "synchronize": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None, "memory_allocated": 0,
        "current_stream": mock.MagicMock(), "mem_get_info": (10**11, 10**11),
    }  # fmt: skip
    for name, answer in believed.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    cuda: Any = devices.CudaInterface
    for name, answer in (("current_device", 0), ("device_count", 1), ("get_device_properties", _H200)):
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


def code_of(graph: Any) -> str:
    """What Inductor writes for a graph of the host's tensors without gradients, once they are on the GPU."""
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
        how = {"is_backward": False, "graph_id": 0, "is_inference": True}
        compile_fx_inner(graph, inputs, cudagraphs=False, static_input_idxs=(), **how)
    return found[0]


def kernels_in(code: str) -> Iterator[tuple[str, int]]:
    """Name and bytes of each kernel of FP32 buffers.

    Each load and each store in a kernel's text counts as one of all its buffer: a kernel that reads a buffer in two
    loops reads it twice.
    """
    sizes = {name: _elements(shape) for name, shape in re.findall(r"(\w+) = empty_strided_cuda\(\(([^)]*)\)", code)}
    sizes |= {name: _elements(shape) for name, shape in re.findall(r"assert_size_stride\((\w+), \(([^)]*)\)", code)}
    for names, shapes in re.findall(r"assert_size_stride_grouped\(\(([^)]*)\), \((.*?\))\), \(\(", code):
        each = re.findall(r"\(([^)]*)\)", shapes)
        sizes |= dict(zip(re.findall(r"\w+", names), map(_elements, each), strict=True))
    for name, other in re.findall(r"(\w+) = (?:reinterpret_tensor\()?(buf\d+|arg\d+_1)[,;]", code):
        sizes.setdefault(name, sizes[other])
    texts = dict(re.findall(r"async_compile\.triton\('([^']+)', '''(.*?)'''", code, re.S))
    for kernel, given in re.findall(r"^\s+(triton_\w+)\.run\((.*), stream=", code, re.M):
        (names,) = re.findall(rf"def {kernel}\(([^)]*)\)", texts[kernel])
        buffers = dict(zip(names.split(", "), given.split(", "), strict=False))
        yield kernel, sum(4 * sizes[buffers[use]] for use in re.findall(r"tl\.(?:load|store)\((\w+) \+", texts[kernel]))


def _elements(shape: str) -> int:
    return math.prod(int(size) for size in re.findall(r"\d+", shape))
