"""A network that is never trained, placed module by module: whole on every rank, or in DeepSpeed's ZeRO 3 partitions.

For inference DeepSpeed gathers a module's parameters before its forward pass and frees them after it, as TRL has it of
reference models. Its engine would bring all weights to one dtype: we take the part of it that partitions and gathers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dino_ds.engine.placement import Partitioner
from dino_ds.models.base import is_cast

PERSISTENT_BELOW = 100_000
"""Parameters of so many elements, norms and biases, stay whole on every rank, as by DeepSpeed's default."""


class InferencePlacement:
    """Called with each module of a network once its own weights (FP32, CPU, equal on all ranks) are there.

    Afterwards they are on `device`, the matrices that autocast casts to `dtype` in it: results are the same. kind:
    "whole"; "sharded": the modules of `part` are partitioned over all ranks, "offloaded": in their host memory; then
    `finish` must follow. Every rank must call it, with the same modules in the same order.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, kind: str, part: nn.Module) -> None:
        self._device, self._dtype, self._part, self._modules = device, dtype, part, set(part.modules())
        self._config = _zero3(kind, device)
        self._partition = None if kind == "whole" else Partitioner(self._config)

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        own = list(module.parameters(recurse=False))
        dtype = self._dtype if is_cast(module) else torch.float32
        for parameter in own:
            parameter.data = parameter.data.to(self._device, dtype, copy=True)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(self._device, copy=True))
        if self._partition is not None and own and module in self._modules:
            self._partition(own)

    def finish(self) -> None:
        """When all modules are placed: from here on DeepSpeed gathers what a forward pass of `part` needs."""
        if self._partition is None:
            return
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.utils.timer import NoopTimer

        self._part.requires_grad_(False)
        zero = DeepSpeedZeroConfig(**self._config["zero_optimization"])
        DeepSpeedZeRoOffload(  # its hooks hold it
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


def _zero3(kind: str, device: torch.device) -> dict[str, Any]:
    # Else DeepSpeed replaces torch's linear layer in the whole process, the student's too.
    zero: dict[str, Any] = {"stage": 3, "memory_efficient_linear": False}
    if kind == "offloaded":
        zero["offload_param"] = {"device": "cpu", "pin_memory": device.type == "cuda"}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
