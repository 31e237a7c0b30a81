"""Places weights module by module: on the device, and under ZeRO 3 directly in partitions.

Of a partitioned network, a rank never holds more than its own part and the module that is being placed. Every rank must
place the same modules in the same order.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from torch import nn

from dino_ds.config.ds_values import DsConfig
from dino_ds.engine.device import DTYPES, device


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
