"""The kernels that Inductor makes of a function for an H200 that is not there, and the bytes that they move."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo.device_interface as interfaces
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

_H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150 * 2**30,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 * 2**20, uuid="0", is_integrated=0, is_multi_gpu_board=0, clock_rate=1980000,
    memory_clock_rate=3201000, memory_bus_width=6144, gcnArchName="",
)  # fmt: skip
_BELIEVED = {
    "is_available": lambda: True,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: _H200,
    "_lazy_init": lambda: None,
    "_exchange_device": lambda device: 0,
    "_maybe_exchange_device": lambda device: 0,
    "synchronize": lambda *_: None,
    "current_stream": lambda *_: mock.MagicMock(),
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    "get_device_name": lambda device=None: _H200.name,
    "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda *_, **__: None,
    "mem_get_info": lambda *_: (10**11, 10**11),
    "memory_allocated": lambda *_: 0,
}


class _Generated(BaseException):
    """Ends a compilation once there is code."""


class _Driver:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_, **__: 0


def kernels_of(function: Callable[..., Any], *arguments: object) -> list[tuple[str, int]]:
    """Name and bytes of each kernel of `function`, a shape standing for an FP32 tensor. Each load and each store in a
    kernel's text counts as one of all its buffer: a kernel that reads a buffer in two loops reads it twice."""
    graphs: list[str] = []

    def compile_it(module: torch.fx.GraphModule, given: Sequence[object]) -> Callable[..., Any]:
        graphs.append(_code_of(module, given))
        return module.forward

    def backend(module: torch.fx.GraphModule, given: Sequence[object]) -> Callable[..., Any]:
        return aot_module_simplified(
            module,
            given,
            fw_compiler=compile_it,
            inference_compiler=compile_it,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )

    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad():
        tensors = [torch.empty(one) if isinstance(one, tuple) else one for one in arguments]
        torch.compile(function, backend=backend, fullgraph=True)(*tensors)
    (code,) = graphs
    return list(_kernels_in(code))


def _code_of(module: torch.fx.GraphModule, given: Sequence[object]) -> str:
    """Inductor's code for a graph of the CPU, on CUDA. Tensors are of a graph without devices: none is made anew."""
    found: list[str] = []

    def stop(graph: GraphLowering) -> None:
        text = graph.codegen()[0]
        found.append(getattr(text, "value", text))
        raise _Generated

    mode = torch._guards.detect_fake_mode(given)
    with mode:
        there = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda:0")
            if isinstance(one, torch.Tensor)
            else one
            for one in given
        ]
    with (
        _fake_h200(),
        mock.patch.object(GraphLowering, "compile_to_module", stop),
        contextlib.suppress(_Generated),
        torch._guards.tracing(torch._guards.TracingContext(mode)),
    ):
        torch.fx.passes.fake_tensor_prop.FakeTensorProp(module, mode).propagate_dont_convert_inputs(*there)
        compile_fx.compile_fx_inner(
            module, there, cudagraphs=False, static_input_idxs=(), is_backward=False, graph_id=0, is_inference=True
        )
    return found[0]


@contextlib.contextmanager
def _fake_h200() -> Iterator[None]:
    torch._C._ensureCUDADeviceGuardSet()
    cuda, worker = interfaces.CudaInterface, interfaces
    before = driver._active
    driver.set_active(_Driver())
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.multiple("torch.cuda", **_BELIEVED))
            for name in ("get_device_properties", "current_device", "device_count"):
                stack.enter_context(mock.patch.object(cuda, name, staticmethod(_BELIEVED[name])))
            for name in ("exchange_device", "maybe_exchange_device"):
                stack.enter_context(mock.patch.object(cuda, name, staticmethod(_BELIEVED[f"_{name}"])))
            stack.enter_context(mock.patch.dict(worker.caching_worker_device_properties, {"cuda": [_H200]}))
            stack.enter_context(mock.patch.dict(worker.caching_worker_current_devices, {"cuda": 0}))
            stack.enter_context(mock.patch.object(joint_graph, "lazy_init"))
            stack.enter_context(inductor_config.patch(fx_graph_cache=False, compile_threads=1))
            yield
    finally:
        driver._active = before


def _kernels_in(code: str) -> Iterator[tuple[str, int]]:
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
    elements = 1
    for size in re.findall(r"\d+", shape):
        elements *= int(size)
    return elements
