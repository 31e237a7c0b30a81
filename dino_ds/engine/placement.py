"""Where the weights of a new student go: module by module to the device, under ZeRO 3 at once into the partitions.

No rank holds more of a ZeRO 3 student than its own part and the module that is just being drawn.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dino_ds.config.ds_config import DsConfig
from dino_ds.engine.device import DTYPES, device


class Placement:
    """Called with each module of a student as soon as its own weights (FP32, CPU, equal on all ranks) are drawn.

    Afterwards they are on this process's device in the engine's precision, at stage 3 partitioned over all ranks; its
    buffers are on the device as they are.
    Every rank must call it, with the same modules in the same order.
    """

    def __init__(self, config: DsConfig) -> None:
        self._config = config
        self._device = device()
        self._partition = Partitioner(config.raw)

    def __call__(self, module: nn.Module) -> None:
        own = list(module.parameters(recurse=False))
        for parameter in own:
            parameter.data = parameter.data.to(self._device, DTYPES[self._config.precision])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(self._device))
        if self._config.stage == 3 and own:
            self._partition(own)


class Partitioner:
    """Cuts parameters into ZeRO 3's partitions, as the ds config `raw` says. Every rank must call it alike."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw
        self._partitioned: Any = None  # a parameter that is

    def __call__(self, parameters: list[nn.Parameter]) -> None:
        if self._partitioned is None:
            import deepspeed

            deepspeed.zero.Init(module=nn.ParameterList(parameters), config_dict_or_path=self._raw)
            self._partitioned = parameters[0]
        else:
            # As DeepSpeed adds parameters to those that are partitioned: each new Init would make its groups anew.
            self._partitioned.convert_to_zero_parameters(param_list=parameters)
