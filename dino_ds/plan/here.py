"""What this process has: the machine that a run is planned for when it starts."""

from __future__ import annotations

import torch

from dino_ds import distributed
from dino_ds.engine.device import device, fp16_supported, memory_gib
from dino_ds.measure.machine import host_memory_gib
from dino_ds.plan.start import Machine


def find_machine() -> Machine:
    """What this rank has."""
    card = torch.cuda.get_device_properties(device()) if device().type == "cuda" else None
    return Machine(
        distributed.world_size(),
        distributed.local_world_size(),
        host_memory_gib()[0],
        card.total_memory / 2**30 if card else None,
        bf16=card is None or card.major >= 8,
        fp16=fp16_supported(),
        libraries=round(memory_gib() * 2**30),
    )
