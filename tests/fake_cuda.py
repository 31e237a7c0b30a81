"""CUDA played on a machine without a GPU: runs real code on fake tensors of cuda:0 and counts what a GPU would do.

    with fake_cuda() as gpu:
        network = gpu.module(meta_network, torch.bfloat16)    # a module's parameters are put on the fake GPU
        images = torch.empty(64, 3, 224, 224, device="cuda")  # any tensor made inside is fake: a shape, no values
        with gpu.part("student"):
            loss = network(images).sum()
        with gpu.part("backward"):
            gpu.backward(loss)                                # in place of loss.backward(), which needs a driver
    gpu.check({"student": (192, 9.0), "backward": (587, 25.0)})  # ceilings: (launches, GB) of each part

`check` fails for more launches or bytes than a part's ceiling, and for every problem: tensors of two devices in one
operator, a copy between host and device, a value read by the host, an operator without a CUDA kernel. Launches are an
estimate: operators, weighed by the kernels that they start (`KERNELS`), and fused functions. GB are what operators read
and write, each argument and each result once; matrix products and attention are left out. Lower a ceiling when you get
below it.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dino_ds
from dino_ds.basics.ranges import is_made_once
from dino_ds.models.fused import listen_to_kernels
from scripts.counting import KERNELS

CUDA = torch.device("cuda", 0)

_PACKAGE = f"{Path(dino_ds.__file__).parent}/"

_TOO_OLD = Version(torch.__version__) < Version("2.14")
_WHY = "torch 2.11 can't play or compile for a GPU that is not there; 2.12 and 2.13 were not tried"
needs_fake_cuda = pytest.mark.skipif(_TOO_OLD, reason=_WHY)

_NOT_COUNTED = ("mm", "convolution", "attention", "attn")  # in bytes, as parts of names: these compute
_HOST_READS = (
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount", "repeat_interleave"),
)
_COPIES = ("_to_copy", "copy_", "copy", "_foreach_copy_")


@dataclass
class Counts:
    """Kernels of one part by operator, and the bytes that they read and write."""

    kernels: collections.Counter[str] = field(default_factory=collections.Counter)
    bytes: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def launches(self) -> int:
        return sum(self.kernels.values())

    @property
    def gigabytes(self) -> float:
        return sum(n for name, n in self.bytes.items() if not any(part in name for part in _NOT_COUNTED)) / 1e9

    def __str__(self) -> str:
        most = ", ".join(f"{name} {count}" for name, count in self.kernels.most_common(8))
        traffic = ", ".join(f"{name} {count / 1e9:.2f}" for name, count in self.bytes.most_common(8))
        return f"{self.launches} launches ({most}), {self.gigabytes:.2f} GB (all: {traffic})"


class FakeCuda(TorchDispatchMode):
    """Counts the operators that run on the fake GPU, by part, and notes what a GPU would have to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, Counts] = collections.defaultdict(Counts)
        self.problems: collections.Counter[str] = collections.Counter()
        self._part, self._as_kernels = "other", False

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count operators that run inside for `name`."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    @contextlib.contextmanager
    def as_kernels(self, kernels: int, moved: float) -> Iterator[None]:
        """Count operators that run inside as a fused function, and look for no problems of theirs."""
        counts = self.parts[self._part]
        counts.kernels["fused"] += kernels
        counts.bytes["fused"] += int(moved)
        self._as_kernels = True
        yield
        self._as_kernels = False

    def check(self, ceilings: dict[str, tuple[int, float]], known: tuple[str, ...] = ()) -> None:
        """Fail for any problem but those that begin as `known` ones, and for more than (launches, GB) of a part."""
        problems = [text for text in self.problems.elements() if not text.startswith(known)]
        assert not problems, "\n".join(problems)
        for name, (launches, gigabytes) in ceilings.items():
            counts = self.parts[name]
            assert counts.launches <= launches, f"{name}: more than {launches} launches: {counts}"
            assert counts.gigabytes <= gigabytes, f"{name}: more than {gigabytes} GB: {counts}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = func._schema.name.split("::")[1]
        if func.namespace == "prim" or self._as_kernels or is_made_once():
            return func(*args, **(kwargs or {}))
        self._look(func, name, inputs)
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        ours = [t for t in inputs + outputs if t.device.type == "cuda"]
        if not ours:
            return result
        if name in _COPIES and len({t.device.type for t in inputs + outputs}) > 1:
            self._note(f"{name} between host and device")
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        kernels = 0 if is_view or name.startswith(("empty", "new_empty")) else KERNELS.get(name, 1)
        if name.startswith("_foreach"):  # kernels take about a hundred tensors
            kernels = len(args[0]) // 100 + 1
        if kernels:
            counts = self.parts[self._part]
            counts.kernels[name] += kernels
            counts.bytes[name] += sum(t.numel() * t.element_size() for t in ours)
        return result

    def _look(self, func: Any, name: str, inputs: list[Tensor]) -> None:
        if not any(t.device.type == "cuda" for t in inputs):
            return
        if name in _HOST_READS:
            self._note(f"{name} waits for the device")
        if name not in _COPIES and any(t.device.type != "cuda" and t.dim() for t in inputs):
            self._note(f"{name} mixes devices")
        if name in ("index", "index_put", "index_put_") and any(t.dtype == torch.bool for t in inputs[1:]):
            self._note(f"{name} by a mask waits for the device")
        if torch.version.cuda and not _has_cuda_kernel(func):
            self._note(f"{name} has no CUDA kernel")

    def _note(self, problem: str) -> None:
        stack = traceback.extract_stack()
        frames = [f for f in stack if f.filename.startswith(_PACKAGE) or "/deepspeed/" in f.filename]
        where = f" at {frames[-1].filename.split('/')[-1]}:{frames[-1].lineno}" if frames else ""
        self.problems[f"{self._part}: {problem}{where}"] += 1

    def module(self, meta: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A module on the meta device -> the same one, on the fake GPU: parameters of `dtype`, buffers of their own."""
        for part in meta.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                fake = torch.empty(parameter.shape, device=CUDA, dtype=dtype)
                setattr(part, name, nn.Parameter(fake, requires_grad=parameter.requires_grad))
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, torch.empty(buffer.shape, device=CUDA, dtype=buffer.dtype))
        return meta

    @torch.no_grad()
    def backward(self, loss: Tensor) -> None:
        """loss.backward(), one node at a time from Python; leaves that already have a gradient get a new one."""
        with mock.patch("torch._C._current_graph_task_id", return_value=0):  # that checkpointed blocks recompute once
            self._backward(loss.grad_fn, loss)

    def _backward(self, root: Any, loss: Tensor) -> None:
        waiting, order = _consumers(root), itertools.count()
        given: dict[Any, dict[int, Tensor]] = collections.defaultdict(dict)
        given[root][0] = torch.ones_like(loss)
        ready = [(0, 0, root)]
        while ready:
            node = heapq.heappop(ready)[-1]
            grads = given.pop(node, {})
            if hasattr(node, "variable"):
                node.variable.grad = grads.get(0)
                continue
            arguments = [grads.get(i) for i in range(len(node._input_metadata))]
            results = node(*arguments) if callable(node) else node.apply(*arguments)
            results = results if isinstance(results, tuple) else (results,)
            for (following, place), grad in zip(node.next_functions, results, strict=False):
                if following is None:
                    continue
                if grad is not None:
                    grad = _fitted(grad, following, place)
                    before = given[following].get(place)
                    given[following][place] = grad if before is None else before + grad
                waiting[following] -= 1
                if not waiting[following]:
                    heapq.heappush(ready, (-following._sequence_nr(), next(order), following))


def _consumers(root: Any) -> collections.Counter[Any]:
    """Number of gradients that each node of the graph waits for."""
    waiting: collections.Counter[Any] = collections.Counter()
    seen, stack = {root}, [root]
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None:
                waiting[following] += 1
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
    return waiting


def _fitted(grad: Tensor, node: Any, place: int) -> Tensor:
    """A gradient as `node` takes it for its output number `place`: summed over what was broadcast, in its dtype."""
    expected = node.variable if hasattr(node, "variable") else node._input_metadata[place]
    assert grad.device == expected.device, f"{node.name()}: a gradient on {grad.device} for {expected.device}"
    return grad.sum_to_size(tuple(expected.shape)).to(expected.dtype)


def _has_cuda_kernel(func: Any) -> bool:
    keys = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    name = f"{func._schema.name}.{func._overloadname}".removesuffix(".default")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The attention kernel that torch would choose on a GPU: choosing it asks the driver."""
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (t.to(torch.get_autocast_dtype("cuda")) for t in (q, k, v))
    if q.dtype == torch.float32:
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, torch.is_grad_enabled())[0]
    assert all(t.stride(-1) == 1 for t in (q, k, v)) and q.shape[-1] % 8 == 0, "flash attention would refuse this"
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Make torch believe in one GPU: tensors are fake, and operators on the GPU are counted."""
    if _TOO_OLD:
        pytest.skip(_WHY)
    torch._C._ensureCUDADeviceGuardSet()
    believed = {
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (8, 0),
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
    }
    counter = FakeCuda()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple("torch.cuda", **believed))
        stack.enter_context(mock.patch("torch.backends.cudnn.version", return_value=91000))
        stack.enter_context(mock.patch("torch.nn.functional.scaled_dot_product_attention", _fused_attention))
        # An engine of ZeRO 3 in the same process leaves DeepSpeed's behind, which takes two operators more.
        stack.enter_context(mock.patch("torch.nn.functional.linear", torch._C._nn.linear))
        stack.enter_context(mock.patch("dino_ds.models.fused.rehearsing", return_value=True))
        stack.enter_context(listen_to_kernels(counter.as_kernels))
        # Below 2.15 torch.tensor on the meta device, which BatchNorm counts batches in, makes none that is fake.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(counter)
