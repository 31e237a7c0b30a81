"""Writes weights of a student that its optimizer never trains."""

from __future__ import annotations

from typing import Any

import torch

from dino_ds.engine.masters import FrozenWeights


@torch.no_grad()
def write_weights(frozen: FrozenWeights) -> None:
    """Set the weights to their FP32 values, which all ranks have; a collective under ZeRO 3."""
    optimizer: Any = frozen.optimizer
    if not hasattr(optimizer, "fp16_groups"):
        for _, parameter in frozen.parameters:
            parameter.copy_(parameter.fp32_value)
        return
    import deepspeed

    optimizer.checkpoint_event_prologue()
    for _, parameter in frozen.parameters:
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(parameter.fp32_value)
    optimizer.checkpoint_event_epilogue()
