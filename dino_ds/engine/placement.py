"""Places weights module by module: on the device, and under ZeRO 3 directly in partitions.

Of a partitioned network, a rank never holds more than its own part and the module that is being placed. Every rank must
place the same modules in the same order.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn

from dino_ds.config.ds_values import DsConfig
from dino_ds.engine.device import DTYPES, device
from dino_ds.models.base import is_cast

PERSISTENT_BELOW = 100_000
"""Parameters of up to this many elements, norms and biases, stay whole on every rank: DeepSpeed's default."""


class Placement:
    """Called with each module of a new student as soon as its own weights (FP32, CPU, equal on all ranks) are drawn.

    Afterwards the weights are on this process's device in the engine's precision, at stage 3 partitioned over all
    ranks; the module's buffers are on the device, in their own dtype.
    """

    def __init__(self, config: DsConfig) -> None:
        self._device, self._dtype = device(), DTYPES[config.precision]
        self._partition = _Partitioner(config.raw) if config.stage == 3 else None

    def __call__(self, module: nn.Module) -> None:
        parameters = list(module.parameters(recurse=False))
        for parameter in parameters:
            parameter.data = parameter.data.to(self._device, self._dtype)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(self._device))
        if self._partition is not None and parameters:
            self._partition(parameters)


class InferencePlacement:
    """Called with each module of a network that is never trained, once its own weights are drawn or read.

    Afterwards they are on `device`, in FP32, or in `dtype` where autocast would cast to it: results are the same. kind:
    "whole"; "sharded": the modules of `part` are partitioned over all ranks; "offloaded": the same, in host memory.
    After the last two `finish` must be called.

    DeepSpeed gathers a module's parameters before its forward pass and frees them after it, as TRL does for reference
    models. Its engine would cast all weights to one dtype: we use only the part that partitions and gathers.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, kind: str, part: nn.Module) -> None:
        self._device, self._dtype, self._part, self._modules = device, dtype, part, set(part.modules())
        self._config = _zero3(kind, device)
        self._partition = None if kind == "whole" else _Partitioner(self._config)

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        parameters = list(module.parameters(recurse=False))
        dtype = self._dtype if is_cast(module) else torch.float32
        for parameter in parameters:
            parameter.data = parameter.data.to(self._device, dtype, copy=True)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(self._device, copy=True))
        if self._partition is not None and parameters and module in self._modules:
            self._partition(parameters)

    def finish(self) -> None:
        """Let DeepSpeed gather the weights in each forward pass of `part`; called once all modules are placed."""
        if self._partition is None:
            return
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.utils.timer import NoopTimer

        self._part.requires_grad_(False)
        zero = DeepSpeedZeroConfig(**self._config["zero_optimization"])
        DeepSpeedZeRoOffload(  # its hooks keep it alive
            self._part,
            timers=NoopTimer(),
            ds_config=self._config,
            overlap_comm=bool(zero.overlap_comm),
            prefetch_bucket_size=zero.prefetch_bucket_size,
            max_reuse_distance=zero.max_reuse_distance,
            max_live_parameters=zero.max_live_parameters,
            param_persistence_threshold=PERSISTENT_BELOW,
            offload_param_config=zero.offload_param,
        )
        let_go_of(self._part)


def _zero3(kind: str, device: torch.device) -> dict[str, Any]:
    # Else DeepSpeed replaces torch's linear layer in the whole process, the student's too.
    zero: dict[str, Any] = {"stage": 3, "memory_efficient_linear": False}
    if kind == "offloaded":
        zero["offload_param"] = {"device": "cpu", "pin_memory": device.type == "cuda"}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}


def let_go_of(module: nn.Module) -> None:
    """Let a partitioned `module` be freed with its last user; called once DeepSpeed has made its hooks for it.

    Otherwise a global list of DeepSpeed keeps it, and with it the weights, masters and moments of its engine.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK as stack

    def forget(gone: object) -> None:
        stack[:] = [entry for entry in stack if entry is not gone]

    stack[:] = [weakref.proxy(module, forget) if entry is module else entry for entry in stack]


def release(engine: Any) -> None:
    """Free the memory of a DeepSpeed engine that is no longer needed: autograd nodes and a global cache of DeepSpeed
    would keep its weights and optimizer state."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    engine.destroy()
    for copies in ("bf16_groups_flat", "bf16_partitioned_groups"):  # with graphs back to the weights
        getattr(engine.optimizer, copies, []).clear()
    wrapped = inspect.unwrap(Coordinator._PartitionedParameterCoordinator__params_to_release)
    for cache in inspect.getclosurevars(wrapped).nonlocals.values():
        if hasattr(cache, "cache_clear"):
            cache.cache_clear()


class _Partitioner:
    """Cuts parameters into ZeRO 3's partitions by the ds config `raw`."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw
        self._partitioned: Any = None  # the first parameter that was cut

    def __call__(self, parameters: list[nn.Parameter]) -> None:
        if self._partitioned is None:
            import deepspeed

            deepspeed.zero.Init(module=nn.ParameterList(parameters), config_dict_or_path=self._raw)
            self._partitioned = parameters[0]
        else:
            # The way DeepSpeed itself adds parameters to partitioned ones: each Init would make new process groups.
            self._partitioned.convert_to_zero_parameters(param_list=parameters)
